"""Pull: a rank announces finished chunks of its own slot, and every peer loads them from there.

The producer publishes its own slot (system scope: others read it), chunk by chunk when fused, as a
whole when split. A result that is copied out is loaded from the peers' windows straight into its
place; a result that is a view is loaded into the own window - or, where the slots of all windows
are one memory, is there already, and nothing moves at all.

The gate stands before the own slot, because that is what the peers may still be reading. For the
same reason a call is send-complete only when every peer has said (``read``) that it has loaded.
"""

from __future__ import annotations

from gemmlink.epilogues.common import announce, arrived, enter, leave
from gemmlink.spec.contracts import INTERFACE, Needs
from gemmlink.spec.operations import Phase
from gemmlink.spec.schedule import (
    Action,
    Compute,
    Deliver,
    Join,
    Load,
    Plan,
    Program,
    Region,
    Schedule,
    Set,
    Store,
    Wait,
    Word,
)


class Pull:
    """Loads from all peers, released by ``arrive[source, chunk]``."""

    name = "pull"
    interface = INTERFACE
    needs = Needs(window=True, common=True)
    complete = True

    def forms(self) -> tuple[bool, ...]:
        """Split and fused."""
        return (False, True)

    def schedule(self, phase: Phase, plan: Plan) -> Schedule:
        """See the module's docstring."""
        consumer = [Join("mover"), *_read_by_all(plan), *leave(plan)]
        programs = (
            Program("producer", tuple(_producer(plan))),
            Program("mover", tuple(_mover(plan))),
            Program("consumer", tuple(consumer)),
        )
        return Schedule(phase, plan, programs)


def _producer(plan: Plan) -> list[Action]:
    actions = enter(plan)
    for chunk in range(plan.chunks):
        actions += [Compute(chunk), Store(Region(plan.rank, chunk), to=plan.rank)]
        if plan.fused:
            actions += announce(plan, chunk)
    if not plan.fused:
        for chunk in range(plan.chunks):
            actions += announce(plan, chunk)
    return actions


def _mover(plan: Plan) -> list[Action]:
    actions: list[Action] = []
    for source in plan.everyone:
        for chunk in range(plan.chunks):
            region = Region(source, chunk)
            actions.append(arrived(source, chunk))
            if plan.view and source != plan.rank and not plan.common:
                actions += [Load(region, window=source), Store(region, to=plan.rank)]
            actions.append(Deliver(region, plan.rank if plan.view else source))
    return actions


def _read_by_all(plan: Plan) -> list[Action]:
    if not plan.send_complete:
        return []
    said: list[Action] = [Set(Word("read", plan.rank), at=peer) for peer in plan.peers]
    return [*said, *(Wait(Word("read", peer)) for peer in plan.peers)]
