"""Push: whoever has a finished tile stores it into the windows that need it, and sets a word there.

Fused, the producer itself stores each chunk to its receivers as soon as it is computed. Split, it
only fills its own memory, and a mover sends each chunk afterwards.

Nobody reads a rank's own memory but that rank, so a call is send-complete as soon as it ends.
"""

from __future__ import annotations

from gemmlink.epilogues import common
from gemmlink.spec.contracts import INTERFACE, Needs
from gemmlink.spec.operations import Phase
from gemmlink.spec.schedule import (
    Action,
    Area,
    Join,
    Load,
    Plan,
    Program,
    Schedule,
    Scope,
    Store,
)


class Push:
    """Stores to all receivers, announced by ``arrive[source, chunk]`` at each of them."""

    name = "push"
    interface = INTERFACE
    needs = Needs(window=True)
    complete = True
    phases: tuple[str, ...] = ("gather", "scatter")

    def forms(self) -> tuple[bool, ...]:
        """Split and fused."""
        return (False, True)

    def schedule(self, phase: Phase, plan: Plan) -> Schedule:
        """See the module's docstring."""
        senders = _fused(phase, plan) if plan.fused else _split(phase, plan)

        def place(source: int) -> tuple[int, Area]:
            kept = source == plan.rank and not plan.fused
            return plan.rank, common.home(phase, plan, plan.rank) if kept else "inbox"

        consumer = [*common.receive(phase, plan, place), Join(senders[-1].actor)]
        consumer += common.leave(plan)
        return Schedule(phase, plan, (*senders, Program("consumer", tuple(consumer))))


def _fused(phase: Phase, plan: Plan) -> tuple[Program, ...]:
    actions = common.enter(plan)
    for chunk, part in common.in_turn(phase, plan):
        region = common.own(plan, chunk, part)
        to = common.receivers(phase, plan, part)
        if common.made_in_place(phase):
            actions.append(Load(region, plan.rank))
            to.remove(plan.rank)
        actions += common.make(phase, plan, chunk, part)
        actions += [Store(region, to=rank) for rank in to]
        actions += common.announce(phase, plan, chunk, part)
    return (Program("producer", (*actions, *common.rest(phase, plan))),)


def _split(phase: Phase, plan: Plan) -> tuple[Program, ...]:
    producer = [*common.enter(plan), *common.keep_all(phase, plan)]
    # Blocks of a view are packed, and so are the bands of a sum: when M changes, a peer's comes to
    # lie where the own one was. Own stores must be everywhere by then, or they might come later.
    packed = plan.view or phase.source == "sum"
    scope: Scope = "system" if packed else "device"
    mover: list[Action] = [Join("producer", scope)]
    for chunk, part in common.in_turn(phase, plan):
        region = common.own(plan, chunk, part)
        away = [rank for rank in common.receivers(phase, plan, part) if rank != plan.rank]
        if away:
            mover.append(Load(region, plan.rank, common.home(phase, plan, part)))
            mover += [Store(region, to=peer) for peer in away]
        mover += common.announce(phase, plan, chunk, part)
    return (Program("producer", tuple(producer)), Program("mover", tuple(mover)))
