"""Epilogues that break what is promised of scatters, sums, later phases and wire dtypes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from gemmlink.epilogues import common
from gemmlink.epilogues.collective import LibraryCollective
from gemmlink.epilogues.lanes import Lanes
from gemmlink.epilogues.pull import Pull
from gemmlink.epilogues.push import Push
from gemmlink.errors import Unsupported
from gemmlink.spec.operations import Phase
from gemmlink.spec.schedule import (
    LOCAL,
    Action,
    Collective,
    Compute,
    Copy,
    Encode,
    Join,
    Load,
    Plan,
    Schedule,
    Set,
    Store,
    Sum,
    Wait,
    Word,
)


def _mapped(schedule: Schedule, change: Any) -> Schedule:
    """``change(action)`` in place of each action: other ones, as a list."""
    programs = tuple(
        replace(program, actions=tuple(new for old in program.actions for new in change(old)))
        for program in schedule.programs
    )
    return replace(schedule, programs=programs)


class _Push(Push):
    name = "broken"

    def schedule(self, phase: Phase, plan: Plan) -> Schedule:
        made = super().schedule(phase, plan)
        return _mapped(made, lambda action: self.change(action, phase, plan))

    def change(self, action: Action, phase: Phase, plan: Plan) -> list[Action]:
        raise NotImplementedError


class WrongPart(_Push):
    """Stores each peer's part at the peer behind it."""

    def change(self, action: Action, phase: Phase, plan: Plan) -> list[Action]:
        if isinstance(action, Store) and action.to in plan.peers and phase.name == "scatter":
            return [replace(action, to=(action.to + 1) % plan.world)]
        return [action]


class WrongBox(_Push):
    """Stores into the peers' outboxes."""

    def change(self, action: Action, phase: Phase, plan: Plan) -> list[Action]:
        if isinstance(action, Store) and action.to in plan.peers and phase.name == "scatter":
            return [replace(action, area="outbox")]
        return [action]


class WrongLoad(_Push):
    """Sends the part of another peer as that of this one."""

    def change(self, action: Action, phase: Phase, plan: Plan) -> list[Action]:
        if isinstance(action, Load) and phase.name == "scatter" and plan.peers:
            other = (action.region.part + 1) % plan.world
            return [replace(action, region=replace(action.region, part=other))]
        return [action]


class SkipsASource(_Push):
    """Leaves the last rank out of its sums."""

    def change(self, action: Action, phase: Phase, plan: Plan) -> list[Action]:
        return [replace(action, places=action.places[:-1])] if isinstance(action, Sum) else [action]


class SumsTwice(_Push):
    """Sums every chunk again."""

    def change(self, action: Action, phase: Phase, plan: Plan) -> list[Action]:
        return [action, action] if isinstance(action, Sum) else [action]


class SumsElsewhere(_Push):
    """Takes the own term of a sum for that of rank 0."""

    def change(self, action: Action, phase: Phase, plan: Plan) -> list[Action]:
        if isinstance(action, Sum):
            return [replace(action, places=((plan.rank, "outbox"), *action.places[1:]))]
        return [action]


class EarlySum(_Push):
    """Sums before the last source's chunk has arrived."""

    def change(self, action: Action, phase: Phase, plan: Plan) -> list[Action]:
        late = isinstance(action, Wait) and action.word.source == plan.everyone[-1]
        return [] if late and phase.sums and action.word.kind == "arrive" else [action]  # type: ignore[union-attr]


class NoTail(_Push):
    """Neither computes nor stores what stays."""

    def change(self, action: Action, phase: Phase, plan: Plan) -> list[Action]:
        part = action.part if isinstance(action, Compute) else None
        part = action.region.part if isinstance(action, Store) else part
        return [] if part in phase.kept() else [action]


class TailAtHome(_Push):
    """Puts what stays into its window."""

    def change(self, action: Action, phase: Phase, plan: Plan) -> list[Action]:
        if isinstance(action, Store) and action.region.part in phase.kept():
            return [replace(action, to=plan.rank, area="outbox")]
        return [action]


class KeepsNothing(Push):
    """Forgets that the product is to be kept."""

    name = "broken"

    def schedule(self, phase: Phase, plan: Plan) -> Schedule:
        return replace(super().schedule(phase, replace(plan, keep=False)), plan=plan)


class Raw(_Push):
    """Sends everything as it is, whatever the wire dtype."""

    def change(self, action: Action, phase: Phase, plan: Plan) -> list[Action]:
        if isinstance(action, Encode) and phase.source == "sum":
            return [Load(action.region, plan.rank)]
        return [] if isinstance(action, Encode) else [action]


class FreesAfterTheFirst(Push):
    """Says that it has finished reading when it has summed, and gathers then."""

    name = "broken"

    def schedule(self, phase: Phase, plan: Plan) -> Schedule:
        if plan.phases == 1:
            return super().schedule(phase, plan)
        if plan.phase == 0:
            return replace(super().schedule(phase, replace(plan, phases=1)), plan=plan)
        made = super().schedule(phase, plan)
        said = [Set(Word("free", plan.rank), at=peer) for peer in plan.peers]
        return _mapped(made, lambda action: [] if action in said else [action])


class ReadsAfterTheLast(Pull):
    """Says that it has loaded everything before it has loaded what is gathered."""

    name = "broken"

    def schedule(self, phase: Phase, plan: Plan) -> Schedule:
        if plan.phases == 1 or not plan.send_complete:
            return super().schedule(phase, plan)
        alone = replace(plan, send_complete=plan.phase == 0, phases=1 if plan.phase == 0 else 2)
        made = replace(super().schedule(phase, alone), plan=plan)
        left = common.leave(alone) if plan.phase == 0 else []
        return _mapped(made, lambda action: [] if action in left else [action])


class OldWords(_Push):
    """Announces what it gathers by the words of the phase before."""

    def change(self, action: Action, phase: Phase, plan: Plan) -> list[Action]:
        if isinstance(action, Set | Wait) and action.word.kind == "arrive":
            return [replace(action, word=replace(action.word, phase=0))]
        return [action]


class OneChunkWord(Lanes):
    """Has one word for the same chunk of all parts."""

    name = "broken"

    def schedule(self, phase: Phase, plan: Plan) -> Schedule:
        def change(action: Action) -> list[Action]:
            if isinstance(action, Set | Wait) and action.word.kind == "chunk":
                return [replace(action, word=replace(action.word, part=0))]
            return [action]

        return _mapped(super().schedule(phase, plan), change)


class EarlyLane(Lanes):
    """Copies what it gathers as soon as the lane is free, whether it has been summed or not."""

    name = "broken"

    def schedule(self, phase: Phase, plan: Plan) -> Schedule:
        made = super().schedule(phase, plan)
        if phase.source != "sum":
            return made
        programs = tuple(
            program
            if program.lane is None
            else replace(
                program, actions=tuple(a for a in program.actions if isinstance(a, Copy | Set))
            )
            for program in made.programs
        )
        return replace(made, programs=programs)


class WrongCall(LibraryCollective):
    """Gathers where it should scatter."""

    name = "broken"

    def schedule(self, phase: Phase, plan: Plan) -> Schedule:
        return _mapped(
            super().schedule(phase, plan),
            lambda action: [Collective("all_gather") if isinstance(action, Collective) else action],
        )


class HastyCall(LibraryCollective):
    """Calls the library before its product is there."""

    name = "broken"

    def schedule(self, phase: Phase, plan: Plan) -> Schedule:
        return _mapped(
            super().schedule(phase, plan),
            lambda action: [] if action == Join("producer") else [action],
        )


class LosesASum(LibraryCollective):
    """Keeps nothing of what the library is to scatter."""

    name = "broken"

    def schedule(self, phase: Phase, plan: Plan) -> Schedule:
        def change(action: Action) -> list[Action]:
            last = isinstance(action, Store) and action.to == LOCAL
            last = last and action.region.chunk == plan.chunks - 1  # type: ignore[union-attr]
            compute = isinstance(action, Compute) and action.chunk == plan.chunks - 1
            return [] if last or compute else [action]

        return _mapped(super().schedule(phase, plan), change)


class Boundless(Push):
    """Says that it serves a kind of phase that there is not."""

    name = "broken"
    phases = ("gather", "sort")


class Reluctant(Push):
    """Says that it serves scatters and refuses them."""

    name = "broken"

    def schedule(self, phase: Phase, plan: Plan) -> Schedule:
        if phase.name == "scatter":
            raise Unsupported("'broken' gathers", "a scatter")
        return super().schedule(phase, plan)


class Gatherer(Push):
    """Right: serves gathers only, alone and behind another one's sums."""

    name = "gatherer"
    phases = ("gather",)


class Scatterer(Pull):
    """Right: serves scatters only, alone and before another one's gather."""

    name = "scatterer"
    phases = ("scatter",)
