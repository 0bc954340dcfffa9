"""Push: whoever has a finished tile stores it into every rank's window, then sets a word there.

Fused, the producer itself stores each chunk to all ranks as soon as it is computed. Split, it only
fills its own slot, and a mover sends each chunk afterwards.

Nobody reads a rank's own slot but that rank, so a call is send-complete as soon as it ends.
"""

from __future__ import annotations

from gemmlink.epilogues.common import announce, deliver_own_window, enter, leave
from gemmlink.spec.contracts import INTERFACE, Needs
from gemmlink.spec.operations import Phase
from gemmlink.spec.schedule import (
    Action,
    Compute,
    Join,
    Load,
    Plan,
    Program,
    Region,
    Schedule,
    Store,
)


class Push:
    """Stores to all peers, announced by ``arrive[source, chunk]`` at each of them."""

    name = "push"
    interface = INTERFACE
    needs = Needs(window=True)
    complete = True

    def forms(self) -> tuple[bool, ...]:
        """Split and fused."""
        return (False, True)

    def schedule(self, phase: Phase, plan: Plan) -> Schedule:
        """See the module's docstring."""
        senders = _fused(plan) if plan.fused else _split(plan)
        consumer = [*deliver_own_window(plan), Join(senders[-1].actor), *leave(plan)]
        return Schedule(phase, plan, (*senders, Program("consumer", tuple(consumer))))


def _fused(plan: Plan) -> tuple[Program, ...]:
    actions = enter(plan)
    for chunk in range(plan.chunks):
        region = Region(plan.rank, chunk)
        actions.append(Compute(chunk))
        actions.extend(Store(region, to=rank) for rank in plan.everyone)
        actions.extend(announce(plan, chunk))
    return (Program("producer", tuple(actions)),)


def _split(plan: Plan) -> tuple[Program, ...]:
    producer = enter(plan)
    mover: list[Action] = [Join("producer")]
    for chunk in range(plan.chunks):
        region = Region(plan.rank, chunk)
        producer += [Compute(chunk), Store(region, to=plan.rank, scope="device")]
        mover.append(Load(region, window=plan.rank))
        mover.extend(Store(region, to=peer) for peer in plan.peers)
        mover.extend(announce(plan, chunk))
    return (Program("producer", tuple(producer)), Program("mover", tuple(mover)))
