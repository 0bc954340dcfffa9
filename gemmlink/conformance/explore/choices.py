"""Of all that could be next what must be tried: the rest may as well wait.

Most actions concern nobody else, or concern others in the same way at any time, and are taken at
once. Loads and stores are among them: see ``memory``. What is left are pairs of actions that may
not change places:

- additions to one counter: who is last is elected, and knows what the others knew;
- the arrival of a word against waits that need not wait for it, and against other values of it;
- values of a word that different strands set, if they may fall;
- what a queue without order does against the copies that it has on their way.

A set of actions is tried, and nothing else, if nothing that may not change places with one of them
can happen before one of them has (``ahead``). Whatever a run does that is left out then, it does in
another order in a run that is not; and as every action gets something done, so that no run comes
back to where it was, none is put off for ever.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from gemmlink.conformance.adversary.tasks import Delivery, Flight, Task, Turn
from gemmlink.conformance.explore.ahead import Ahead, Concern
from gemmlink.conformance.explore.walker import Walker


@dataclass
class _Group:
    """Turns that may not change places with each other, by what they change and look at."""

    turns: list[Turn]
    changes: set[Concern] = field(default_factory=set)
    looks: set[Concern] = field(default_factory=set)

    def meets(self, other: _Group) -> bool:
        """Whether something in both may not change places."""
        return not (
            self.changes.isdisjoint(other.changes)
            and self.changes.isdisjoint(other.looks)
            and self.looks.isdisjoint(other.changes)
        )

    def join(self, other: _Group) -> None:
        """Take over what is in the other one."""
        self.turns += other.turns
        self.changes |= other.changes
        self.looks |= other.looks


def settle(walker: Walker) -> list[Turn]:
    """Do all that need not be tried in other orders; what must be, or nothing at the end.

    Raises ``Fault``.
    """
    while True:
        if _at_once(walker):
            continue
        groups = _groups(walker)
        if not groups:
            return []
        chosen = _closed(walker, groups)
        if len(chosen) > 1:
            return chosen
        walker.do(chosen[0])


def _at_once(walker: Walker) -> bool:
    """Do what concerns nobody else; whether there was anything."""
    went = False
    for turn in list(walker.ready):
        if isinstance(turn, Task):
            while turn in walker.ready and walker.enabled(turn) and _is_own(walker, turn):
                walker.do(turn)
                went = True
        elif isinstance(turn, Delivery) and turn.written.value < walker.words[turn.word].value:
            walker.do(turn)  # overtaken, of no interest
    return went


def _is_own(walker: Walker, task: Task) -> bool:
    """Whether what a strand does next may change places with all that others do."""
    name, argument = walker.next_op(task)
    if name == "copy" and 0 < task.pc < len(task.code.ops) - 1:
        return True  # one more on its way, which the others need not notice
    if not task.code.strand.in_order and _flies(walker, task.agent.number):
        return False
    if name == "announce":
        word, _, _, by, _ = argument
        return word not in walker.outline.contended or (by is not None and by not in task.elected)
    return name != "elect" and name != "wait"


def _flies(walker: Walker, queue: int) -> bool:
    flights = (turn for turn in walker.ready if isinstance(turn, Flight))
    return any(flight.task.agent.number == queue for flight in flights)


def _groups(walker: Walker) -> list[_Group]:
    """All that could be next, in groups that do not concern each other."""
    groups: list[_Group] = []
    for turn in walker.ready:
        if not walker.enabled(turn):
            continue
        group = _alone(walker, turn)
        others = []
        for other in groups:
            if group.meets(other):
                group.join(other)
            else:
                others.append(other)
        groups = [*others, group]
    return groups


def _alone(walker: Walker, turn: Turn) -> _Group:
    group = _Group([turn])
    if isinstance(turn, Delivery):
        group.changes.add(("word", turn.word))
    elif isinstance(turn, Flight):
        group.looks.add(("queue", turn.task.agent.number))
    elif isinstance(turn, Task):
        name, argument = walker.next_op(turn)
        if name == "elect":
            group.changes.add(("counter", argument[0]))
        elif name == "wait":
            group.looks.add(("word", argument[0]))
        elif name == "announce" and argument[0] in walker.outline.contended:
            group.changes.add(("setters", argument[0]))
        if not turn.code.strand.in_order:
            group.changes.add(("queue", turn.agent.number))
    return group


def _closed(walker: Walker, groups: Sequence[_Group]) -> list[Turn]:
    """The turns of a group, or of several, before which nothing can happen that concerns them."""
    for group in sorted(groups, key=_size):
        if _is_closed(walker, group):
            return group.turns
    return _smaller(walker, groups)


def _size(group: _Group) -> tuple[int, int]:
    return len(group.turns), min(turn.rank for turn in group.turns)


def _is_closed(walker: Walker, group: _Group) -> bool:
    ahead = Ahead(walker, {id(turn) for turn in group.turns})
    return not ahead.meets(group.changes, group.looks)


def _smaller(walker: Walker, groups: Sequence[_Group]) -> list[Turn]:
    """Of all groups together, which nothing can precede, as few as will do."""
    kept = list(groups)
    for group in sorted(groups, key=_size, reverse=True):
        fewer = [other for other in kept if other is not group]
        if fewer and _is_closed(walker, _together(fewer)):
            kept = fewer
    return _together(kept).turns


def _together(groups: Sequence[_Group]) -> _Group:
    whole = _Group([])
    for group in groups:
        whole.join(group)
    return whole


def every(walker: Walker) -> Iterator[tuple[int, int]]:
    """All that could be next, without a thought: indices of turns, and of copies in a flight."""
    for index, turn in enumerate(walker.ready):
        if walker.enabled(turn):
            left = len(turn.left) if isinstance(turn, Flight) else 0
            for which in range(max(1, left)):
                yield index, which
