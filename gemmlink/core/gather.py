"""Whether the blocks of a small result are copied out together, once all are there.

Asking torch for a slice and a copy of each block takes longer than moving a few kilobytes; one
``torch.cat`` of all blocks asks once. A large result is copied block by block instead, so that the
first are done while the last are still awaited.
"""

from __future__ import annotations

from gemmlink.core.flatten import Placed
from gemmlink.spec.problem import Problem
from gemmlink.spec.schedule import Deliver, Plan, Wait

#: Largest result, in bytes, of which copying costs less than asking for the copies.
_SMALL = 1 << 16


def last_of_together(placed: tuple[Placed, ...], plan: Plan, problem: Problem) -> Deliver | None:
    """The delivery with which all blocks are copied out, or None: each is by itself."""
    if plan.view or plan.world * problem.slot_bytes > _SMALL:
        return None
    actions = [item.action for item in placed]
    at = [i for i, action in enumerate(actions) if isinstance(action, Deliver)]
    between = actions[at[0] : at[-1] + 1] if at else []
    delivers = [action for action in between if isinstance(action, Deliver)]
    # A block that is copied late must still be there: nobody may have been told that it is not
    # needed any more, and nothing stored over it.
    waits_only = all(isinstance(action, Deliver | Wait) for action in between)
    whole = plan.chunks == 1 and sorted(d.region.source for d in delivers) == list(
        range(plan.world)
    )
    return delivers[-1] if waits_only and whole else None
