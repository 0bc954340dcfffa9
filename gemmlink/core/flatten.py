"""Puts the programs of one rank in an order that one thread can execute.

Actors run in the order in which the schedule lists them; a ``Join`` must name one that has ended by
then. Lanes are queues that the same thread feeds: a lane's action is placed right behind the
action that makes it ready (the local word it waits for, or the end of the actor it joins), and what
is executed there is only the posting. Joining a lane drains it.
"""

from __future__ import annotations

from dataclasses import dataclass

from gemmlink.errors import InvalidArgument
from gemmlink.spec.schedule import Action, Join, Program, Schedule, Set, Wait, Word


@dataclass(frozen=True)
class Placed:
    """An action and the actor whose it is."""

    actor: str
    action: Action


def flatten(schedule: Schedule) -> tuple[Placed, ...]:
    """All actions of the schedule in execution order.

    Raises ``InvalidArgument`` for an actor that joins one which has not ended, or a lane that waits
    for something which nobody on this rank does.
    """
    flat = _Flattening(schedule)
    flat.feed_lanes()
    for program in schedule.programs:
        if program.lane is None:
            flat.run(program)
    flat.refuse_stuck_lanes()
    return tuple(flat.placed)


class _Flattening:
    def __init__(self, schedule: Schedule) -> None:
        self.placed: list[Placed] = []
        self._rank = schedule.plan.rank
        self._lanes = {p.actor: list(p.actions) for p in schedule.programs if p.lane is not None}
        self._ended: set[str] = set()
        self._raised: set[Word] = set()

    def run(self, program: Program) -> None:
        """Place the actions of an actor that is not a lane."""
        for action in program.actions:
            if isinstance(action, Join) and not self._has_ended(action.actor):
                raise InvalidArgument(
                    "a schedule must list an actor after those that it joins",
                    f"{program.actor} joins {action.actor}",
                )
            self.placed.append(Placed(program.actor, action))
            if isinstance(action, Set) and action.at == self._rank:
                self._raised.add(action.word)
                self.feed_lanes()
        self._ended.add(program.actor)
        self.feed_lanes()

    def refuse_stuck_lanes(self) -> None:
        """Raise if a lane has actions left that can never be posted."""
        for actor, left in self._lanes.items():
            if left:
                raise InvalidArgument(
                    "a lane waits only for words and actors of its own rank",
                    f"{actor} at '{left[0]}'",
                )

    def feed_lanes(self) -> None:
        """Place what lanes are ready for; the end of one lane may make another ready."""
        # A list, not a generator: every lane gets its turn before the next round.
        while any([self._feed(actor, left) for actor, left in self._lanes.items()]):  # noqa: C419
            pass

    def _feed(self, actor: str, left: list[Action]) -> bool:
        fed = False
        while left and self._is_ready(left[0]):
            fed, action = True, left.pop(0)
            if not isinstance(action, Wait | Join):
                self.placed.append(Placed(actor, action))
        return fed

    def _is_ready(self, action: Action) -> bool:
        if isinstance(action, Wait):
            return action.word in self._raised and action.lag == 0
        return not isinstance(action, Join) or self._has_ended(action.actor)

    def _has_ended(self, actor: str) -> bool:
        return not self._lanes[actor] if actor in self._lanes else actor in self._ended
