"""Pull: a rank announces finished chunks of its own memory, and whoever needs them loads them.

The producer publishes its own memory (system scope: others read it), chunk by chunk when fused, as
a whole when split. A result that is copied out is loaded from the peers' windows straight into its
place, and a sum adds up what lies there; a result that is a view is loaded into the own window -
or, where the slots of all windows are one memory, is there already, and nothing moves at all.

The gate stands before the own memory, because that is what the peers may still be reading. For the
same reason a call is send-complete only when every peer has said (``read``) that it has loaded.
"""

from __future__ import annotations

from gemmlink.epilogues import common
from gemmlink.spec.contracts import INTERFACE, Needs
from gemmlink.spec.operations import Phase
from gemmlink.spec.schedule import (
    Action,
    Area,
    Deliver,
    Join,
    Load,
    Plan,
    Program,
    Region,
    Schedule,
    Scope,
    Set,
    Store,
    Wait,
    Word,
)


class Pull:
    """Loads from all sources, released by ``arrive[source, chunk]``."""

    name = "pull"
    interface = INTERFACE
    needs = Needs(window=True, common=True)
    complete = True
    phases: tuple[str, ...] = ("gather", "scatter")

    def forms(self) -> tuple[bool, ...]:
        """Split and fused."""
        return (False, True)

    def schedule(self, phase: Phase, plan: Plan) -> Schedule:
        """See the module's docstring."""
        # A sum of the mover's is sent by the next phase. What stays here is computed last, behind
        # all that the mover waits for.
        scope: Scope = "device" if plan.is_last else "system"
        consumer: list[Action] = [Join("mover", scope), Join("producer")]
        consumer += [*_read_by_all(plan), *common.leave(plan)]
        programs = (
            Program("producer", tuple(_producer(phase, plan))),
            Program("mover", tuple(_mover(phase, plan))),
            Program("consumer", tuple(consumer)),
        )
        return Schedule(phase, plan, programs)


def _producer(phase: Phase, plan: Plan) -> list[Action]:
    actions = common.enter(plan)
    turns = common.in_turn(phase, plan)
    if not plan.fused:
        actions += common.keep_all(phase, plan)
    for chunk, part in turns:
        if plan.fused:
            actions += common.keep(phase, plan, chunk, part)
        actions += common.announce(phase, plan, chunk, part)
    if plan.fused:
        actions += common.rest(phase, plan)
    return actions


def _mover(phase: Phase, plan: Plan) -> list[Action]:
    def place(source: int) -> tuple[int, Area]:
        if source == plan.rank:
            return plan.rank, common.home(phase, plan, plan.rank)
        return source, "inbox" if phase.name == "gather" else "outbox"

    def show(region: Region) -> list[Action]:
        window, area = place(region.source)
        moves = window != plan.rank and not plan.common
        load: list[Action] = [Load(region, window, area), Store(region, to=plan.rank)]
        return [*(load if moves else []), Deliver(region, plan.rank)]

    return common.receive(phase, plan, place, show if plan.view else None)


def _read_by_all(plan: Plan) -> list[Action]:
    if not plan.send_complete or not plan.is_last:
        return []
    said: list[Action] = [Set(Word("read", plan.rank), at=peer) for peer in plan.peers]
    return [*said, *(Wait(Word("read", peer)) for peer in plan.peers)]
