"""Epilogues that break one clause each: built-in ones with something changed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import count
from typing import Any

from gemmlink.epilogues.lanes import Lanes
from gemmlink.epilogues.pull import Pull
from gemmlink.epilogues.push import Push
from gemmlink.spec.contracts import Needs
from gemmlink.spec.operations import Phase
from gemmlink.spec.schedule import Action, Deliver, Plan, Schedule, Set, Store, Wait, Word

_Edit = Callable[[Plan, str, list[Action]], list[Action]]


def _edited(schedule: Schedule, edit: _Edit) -> Schedule:
    programs = tuple(
        replace(program, actions=tuple(edit(schedule.plan, program.actor, list(program.actions))))
        for program in schedule.programs
    )
    return replace(schedule, programs=programs)


def _without(unwanted: Callable[[Plan, Any], bool]) -> _Edit:
    return lambda plan, actor, actions: [a for a in actions if not unwanted(plan, a)]


def _is(action: Any, kind: type, word: str) -> bool:
    return isinstance(action, kind) and getattr(action, "word").kind == word  # noqa: B009


class _Push(Push):
    name = "broken"

    def schedule(self, phase: Phase, plan: Plan) -> Schedule:
        return _edited(super().schedule(phase, plan), self.edit)

    def edit(self, plan: Plan, actor: str, actions: list[Action]) -> list[Action]:
        raise NotImplementedError


class NoGate(_Push):
    """Stores without having waited for ``free``."""

    def edit(self, plan: Plan, actor: str, actions: list[Action]) -> list[Action]:
        return _without(lambda plan, a: _is(a, Wait, "free"))(plan, actor, actions)


class LateGate(_Push):
    """Stores to the own slot before the gate."""

    def edit(self, plan: Plan, actor: str, actions: list[Action]) -> list[Action]:
        gate = [a for a in actions if _is(a, Wait, "free")]
        rest = [a for a in actions if not _is(a, Wait, "free")]
        stores = [i for i, a in enumerate(rest) if isinstance(a, Store) and a.to == plan.rank]
        at = stores[0] + 1 if stores else 0
        return [*rest[:at], *gate, *rest[at:]]


class NoFree(_Push):
    """Never says that it has finished reading."""

    def edit(self, plan: Plan, actor: str, actions: list[Action]) -> list[Action]:
        return _without(lambda plan, a: _is(a, Set, "free"))(plan, actor, actions)


class EarlyFree(_Push):
    """Says that it has finished reading before it has."""

    def edit(self, plan: Plan, actor: str, actions: list[Action]) -> list[Action]:
        if actor != "consumer":
            return actions
        said = [a for a in actions if _is(a, Set, "free")]
        return [*said, *(a for a in actions if not _is(a, Set, "free"))]


class Nearsighted(_Push):
    """Tells peers of what it has stored there with a word that is for its own device.

    On a host all scopes are one; on devices the data may come after the word.
    """

    def edit(self, plan: Plan, actor: str, actions: list[Action]) -> list[Action]:
        return [
            replace(a, scope="device") if isinstance(a, Set) and a.word.kind == "arrive" else a
            for a in actions
        ]


class MissingSet(_Push):
    """Does not announce one chunk to one peer."""

    def edit(self, plan: Plan, actor: str, actions: list[Action]) -> list[Action]:
        silent = [Set(Word("arrive", plan.rank, 1), at=peer) for peer in plan.peers[:1]]
        return [a for a in actions if a not in silent]


class DoubleSet(_Push):
    """Announces a chunk twice."""

    def edit(self, plan: Plan, actor: str, actions: list[Action]) -> list[Action]:
        again = [a for a in actions if a == Set(Word("arrive", plan.rank, 0), at=plan.rank)]
        return [*actions, *again]


class DeliversTwice(_Push):
    """Delivers one region twice."""

    def edit(self, plan: Plan, actor: str, actions: list[Action]) -> list[Action]:
        first = [i for i, a in enumerate(actions) if isinstance(a, Deliver)][:1]
        for at in first:
            actions.insert(at, actions[at])
        return actions


class DeliversLess(_Push):
    """Leaves out the last region."""

    def edit(self, plan: Plan, actor: str, actions: list[Action]) -> list[Action]:
        delivered = [a for a in actions if isinstance(a, Deliver)]
        return [a for a in actions if a not in delivered[-1:]]


class Hasty(_Push):
    """Delivers without having waited."""

    def edit(self, plan: Plan, actor: str, actions: list[Action]) -> list[Action]:
        return _without(lambda plan, a: _is(a, Wait, "arrive"))(plan, actor, actions)


class Unplaced(_Push):
    """Uses a kind of word that windows do not have."""

    def edit(self, plan: Plan, actor: str, actions: list[Action]) -> list[Action]:
        return [*actions, Set(Word("mine", plan.rank), at=plan.rank)]


class Polite(_Push):
    """Waits for the others' views to end before it ends its own."""

    def edit(self, plan: Plan, actor: str, actions: list[Action]) -> list[Action]:
        if not plan.view or not plan.peers or plan.buffers > 1 or actor != "producer":
            return actions
        said = [a for a in actions if _is(a, Set, "free")]
        waited = [a for a in actions if _is(a, Wait, "free")]
        return [*waited, *said, *(a for a in actions if a not in said and a not in waited)]


class Moody(_Push):
    """Another schedule each time."""

    _calls = count()

    def edit(self, plan: Plan, actor: str, actions: list[Action]) -> list[Action]:
        return actions if next(self._calls) % 3 else [*actions, *actions[-1:]]


class Boastful(Push):
    """Says that it needs lanes."""

    name = "broken"
    needs = Needs(window=True, lanes=True)


class Forgetful(Pull):
    """Pulls, but a call does not wait until the peers have pulled."""

    name = "broken"

    def schedule(self, phase: Phase, plan: Plan) -> Schedule:
        made = super().schedule(phase, replace(plan, send_complete=False))
        return replace(made, plan=plan)


class Overtaking(Lanes):
    """Relies on the order of a lane that promises none."""

    name = "broken"

    def schedule(self, phase: Phase, plan: Plan) -> Schedule:
        made = super().schedule(phase, replace(plan, lane_order="in_order"))
        return replace(made, plan=plan)
