"""Drawings of schedules: who tells whom, as a Mermaid sequence diagram and as a table of words.

A diagram shows one order of events of many: the actors of all ranks take turns, each goes on until
it has set words or must wait.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from gemmlink.spec.schedule import (
    LOCAL,
    Action,
    Collective,
    Copy,
    Deliver,
    Encode,
    Join,
    Load,
    Program,
    Region,
    Schedule,
    Set,
    Store,
    Sum,
    Wait,
    Word,
)


def diagram(schedules: Sequence[Schedule]) -> str:
    """A sequence diagram of one call: a box for each rank, an arrow for each word that is set."""
    drawn = _Diagram(schedules)
    return "\n".join(["sequenceDiagram", *(f"    {line}" for line in drawn.lines())])


@dataclass
class _Actor:
    rank: int
    number: int
    program: Program
    #: How many of its actions have been drawn.
    done: int = 0
    #: Lines of a note that is still open.
    note: list[str] = field(default_factory=list)

    @property
    def id(self) -> str:
        """What it is called in the text of the diagram."""
        return f"r{self.rank}a{self.number}"

    @property
    def next(self) -> Action | None:
        """What it does next, None at its end."""
        actions = self.program.actions
        return actions[self.done] if self.done < len(actions) else None


class _Diagram:
    def __init__(self, schedules: Sequence[Schedule]) -> None:
        self._actors = [
            _Actor(rank, number, program)
            for rank, schedule in enumerate(schedules)
            for number, program in enumerate(schedule.programs)
        ]
        self._world = len(schedules)
        self._set: set[tuple[Word, int]] = set()
        self._lines: list[str] = []

    def lines(self) -> list[str]:
        """Participants, then what happens. Raises ``AssertionError`` if ranks wait in a circle."""
        found = [*self._participants()]
        while any(actor.next is not None for actor in self._actors):
            before = sum(actor.done for actor in self._actors)
            # All producers, then all lanes, and so on: as they would run at the same time.
            for actor in sorted(self._actors, key=lambda each: (each.number, each.rank)):
                self._turn(actor)
            after = sum(actor.done for actor in self._actors)
            assert after > before, "ranks wait in a circle"
        return found + self._lines

    def _participants(self) -> Iterator[str]:
        for rank in range(self._world):
            yield f"box transparent rank {rank}"
            for actor in self._of(rank):
                yield f"participant {actor.id} as {actor.program.actor}"
            yield "end"

    def _of(self, rank: int) -> list[_Actor]:
        return [actor for actor in self._actors if actor.rank == rank]

    def _turn(self, actor: _Actor) -> None:
        said = False
        while (action := actor.next) is not None:
            if isinstance(action, Set):
                self._close(actor)
                self._arrows(actor, action)
                said = True
            elif said or not self._may(actor, action):
                break
            else:
                self._do(actor, action)
            actor.done += 1
        self._close(actor)

    def _may(self, actor: _Actor, action: Action) -> bool:
        if isinstance(action, Wait):
            return action.lag > 0 or (action.word, actor.rank) in self._set
        if isinstance(action, Join):
            return self._named(actor.rank, action.actor).next is None
        if isinstance(action, Collective):
            same = (self._named(rank, actor.program.actor) for rank in range(self._world))
            return all(other.done >= actor.done for other in same)  # all have come to it
        return True

    def _named(self, rank: int, name: str) -> _Actor:
        return next(actor for actor in self._of(rank) if actor.program.actor == name)

    def _do(self, actor: _Actor, action: Action) -> None:
        if isinstance(action, Join):
            self._close(actor)
            self._lines.append(f"{self._named(actor.rank, action.actor).id}-->>{actor.id}: ended")
        elif isinstance(action, Wait):
            if action.lag:
                actor.note.append(f"gate: {action}")
        else:
            actor.note.append(_told(action))

    def _close(self, actor: _Actor) -> None:
        if actor.note:
            text = "<br/>".join(text for text, _ in groupby(actor.note))
            self._lines.append(f"Note over {actor.id}: {text}")
            actor.note = []

    def _arrows(self, actor: _Actor, action: Set) -> None:
        self._set.add((action.word, action.at))
        for reader in self._of(action.at):
            for wait in reader.program.actions:
                if isinstance(wait, Wait) and wait.word == action.word:
                    text = f"{action.word} = {f'n-{action.lag}' if action.lag else 'n'}"
                    text += ", for call n+1" if wait.lag > action.lag else ""
                    self._lines.append(f"{actor.id}->>{reader.id}: {text}")


def _told(action: Action) -> str:
    """What is done with data, shorter than a schedule tells it."""
    if isinstance(action, Store):
        return f"store it in {_place(action.to, action.area)}"
    if isinstance(action, Load):
        return f"load {_region(action.region)} from {_place(action.window, action.area)}"
    if isinstance(action, Copy):
        return f"copy {_region(action.region)} to window {action.to}"
    if isinstance(action, Deliver):
        return f"deliver {_region(action.region)} from {_place(action.window, action.area)}"
    if isinstance(action, Sum):
        return f"sum chunk {action.region.chunk} of all ranks"
    if isinstance(action, Encode):
        return "encode it for the wire"
    return str(action)


def _place(window: int, area: str) -> str:
    if window == LOCAL:
        return "a private buffer"
    return f"window {window}" if area == "inbox" else f"the {area} of window {window}"


def _region(region: Region) -> str:
    return f"chunk {region.chunk} of rank {region.source}"


# Words.


@dataclass(frozen=True)
class WordRow:
    """A kind of word in one phase: its name with s for its source, and who does what with it."""

    name: str
    written: str
    read: str
    meaning: str


def words(schedules: Sequence[Schedule]) -> list[WordRow]:
    """The words of a call, in the order in which rank 0 comes to them."""
    kinds: dict[tuple[str, int], None] = {}
    for action in schedules[0].actions():
        if isinstance(action, Set | Wait):
            kinds.setdefault((action.word.kind, action.word.phase))
    return [_row(schedules, kind, phase) for kind, phase in kinds]


#: Where a word is set, and whose word an actor waits for: at the own rank, at peers, or at both.
_AT = {(True,): "at s", (False,): "at each peer", (False, True): "at every rank"}
_OF = {(True,): "s", (False,): "each peer", (False, True): "every rank"}


def _row(schedules: Sequence[Schedule], kind: str, phase: int) -> WordRow:
    written: dict[str, set[bool]] = {}
    read: dict[str, set[bool]] = {}
    parts: set[int] = set()
    for rank, actor, action in _uses(schedules, kind, phase):
        parts.add(action.word.part)
        if isinstance(action, Set):
            written.setdefault(actor, set()).add(action.at == rank)
        else:
            read.setdefault(actor, set()).add(action.word.source == rank)
    return WordRow(
        _name(kind, phase, bool(parts - {0})),
        "; ".join(f"{actor} of s, {_AT[tuple(sorted(at))]}" for actor, at in written.items()),
        "; ".join(f"{actor} of {_OF[tuple(sorted(at))]}" for actor, at in read.items()),
        _meaning(schedules, kind, phase),
    )


def _uses(
    schedules: Sequence[Schedule], kind: str, phase: int
) -> Iterator[tuple[int, str, Set | Wait]]:
    """Rank and actor of everything that is done with words of a kind."""
    for rank, schedule in enumerate(schedules):
        for program in schedule.programs:
            actor = re.sub(r"\[\d+,\d+\]", "", program.actor)  # all lanes are alike
            for action in program.actions:
                if not isinstance(action, Set | Wait):
                    continue
                if (action.word.kind, action.word.phase) == (kind, phase):
                    yield rank, actor, action


def _name(kind: str, phase: int, parts: bool) -> str:
    if kind not in ("arrive", "chunk"):
        return f"{kind}[s]"
    return f"{kind}[s,chunk c{',part p' if parts else ''}{f',phase {phase}' if phase else ''}]"


def _meaning(schedules: Sequence[Schedule], kind: str, phase: int) -> str:
    if kind == "arrive" and _is_fetched(schedules[0], phase):
        return "chunk c of what s has for the reader may be loaded from the window of s"
    return {
        "arrive": "chunk c of what s sends to the reader is in the reader's window",
        "free": "s has finished reading its result: its window may be written to again",
        "read": "s has finished loading from the reader's window",
        "chunk": "chunk c is complete in the window of s, and a lane may copy it",
    }.get(kind, "")


def _is_fetched(schedule: Schedule, phase: int) -> bool:
    """Whether what peers have for this rank is read in their windows."""
    rank = schedule.plan.rank
    for action in schedule.actions():
        if isinstance(action, Load | Deliver) and action.region.phase == phase:
            if action.window != rank:
                return True
        elif isinstance(action, Sum) and action.region.phase == phase:
            return any(window != rank for window, _ in action.places)
    return False
