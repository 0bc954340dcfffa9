"""Schedules: the frozen data by which an epilogue says how finished tiles travel.

A schedule holds one program per actor of one rank. A program is a list of actions, executed in
order. Actors of one rank are ordered against each other only by ``Join`` and by local words;
different ranks only by words. The same data is interpreted by the host (``core.interpret``), read
by device backends and printed by ``explain``.

Vocabulary

- *actors*: ``producer`` (multiplies), ``mover`` (copies), ``lane[p,i]`` (an ordered queue of copies
  to rank p, run by a copy engine), ``host`` (calls a library collective), ``consumer`` (waits and
  delivers the result).
- *part*: the rectangle of a source's product that takes one route (``spec.operations``).
- *region*: the rows of one chunk of one part; ``spec.places`` tells where it lies in a window.
- *word*: a 64-bit cell in every rank's window with a single writer, which only grows. ``Set``
  writes the epoch (the number of the call), ``Wait`` is satisfied by the epoch or anything later.
- *scope*: who must see the stores that precede an action: this device, or the whole system.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final, Literal

from gemmlink.spec.operations import Phase

Scope = Literal["device", "system"]

#: Where in a window a region lies; see ``spec.places``.
Area = Literal["inbox", "outbox", "sum"]

#: Destination of a ``Store`` that stays private to the rank (no window needed).
LOCAL: Final = -1


@dataclass(frozen=True)
class Word:
    """Name of a word in every rank's window.

    ``source`` is the one rank that writes it. Kinds:

    - ``free``: the source has finished reading its results.
    - ``arrive``: chunk ``chunk`` of what the source sends here is there, or may be loaded.
    - ``read``: the source has finished loading what this rank had for it.
    - ``chunk``: chunk ``chunk`` of part ``part`` is complete where this rank keeps what it sends;
      written and read on the same rank.

    ``arrive`` and ``chunk`` exist once for each phase.
    """

    kind: str
    source: int
    chunk: int = 0
    part: int = 0
    phase: int = 0

    def __str__(self) -> str:
        if self.kind in ("arrive", "chunk"):
            place = _place(self.source, self.chunk, self.part, self.phase)
            return f"{self.kind}[{place}]"
        return f"{self.kind}[{self.source}]"


def _place(source: int, chunk: int, part: int, phase: int, between: str = ",") -> str:
    text = f"{source}{between}chunk {chunk}"
    if part:
        text += f"{between}part {part}"
    return text + (f"{between}phase {phase}" if phase else "")


@dataclass(frozen=True)
class Region:
    """Rows of chunk ``chunk`` of part ``part`` of rank ``source``'s product, in one phase."""

    source: int
    chunk: int
    part: int = 0
    phase: int = 0

    def __str__(self) -> str:
        return f"rank {_place(self.source, self.chunk, self.part, self.phase, ' ')}"


@dataclass(frozen=True)
class Compute:
    """Multiply one chunk of one part. The first ``Store`` behind it says where it goes."""

    chunk: int
    part: int = 0

    def __str__(self) -> str:
        return f"compute chunk {self.chunk}{f' part {self.part}' if self.part else ''}"


@dataclass(frozen=True)
class Store:
    """Put a computed region into the window of rank ``to`` (``LOCAL``: a private buffer)."""

    region: Region
    to: int
    scope: Scope = "system"
    area: Area = "inbox"

    def __str__(self) -> str:
        place = "a private buffer" if self.to == LOCAL else _in_window(self.to, self.area)
        return f"store {self.region} -> {place} ({self.scope})"


@dataclass(frozen=True)
class Load:
    """Read a region from the window of rank ``window``, as the source of the stores that follow."""

    region: Region
    window: int
    area: Area = "inbox"

    def __str__(self) -> str:
        return f"load {self.region} from {_in_window(self.window, self.area)}"


@dataclass(frozen=True)
class Copy:
    """In a lane: copy a region from ``area`` of the own window to rank ``to``'s inbox."""

    region: Region
    to: int
    area: Area = "inbox"

    def __str__(self) -> str:
        start = f" from the {self.area}" if self.area != "inbox" else ""
        return f"copy {self.region}{start} -> window {self.to}"


@dataclass(frozen=True)
class Set:
    """Write ``epoch - lag`` into ``word`` of rank ``at``, after earlier stores of this actor."""

    word: Word
    at: int
    scope: Scope = "system"
    lag: int = 0

    def __str__(self) -> str:
        value = f"n-{self.lag}" if self.lag else "n"
        return f"set {self.word} = {value} at rank {self.at} ({self.scope})"


@dataclass(frozen=True)
class Wait:
    """Wait until the own ``word`` is at least ``epoch - lag``; acquires what it announces."""

    word: Word
    lag: int = 0

    def __str__(self) -> str:
        return f"wait {self.word} >= {f'n-{self.lag}' if self.lag else 'n'}"


@dataclass(frozen=True)
class Join:
    """Wait until ``actor`` of this rank has ended (a kernel or stream boundary).

    Joining a lane means that it has drained: its sources may be overwritten, its copies are there.
    """

    actor: str
    scope: Scope = "device"

    def __str__(self) -> str:
        return f"join {self.actor} ({self.scope})"


@dataclass(frozen=True)
class Collective:
    """Call the library collective ``name`` on the private buffers of all ranks."""

    name: str

    def __str__(self) -> str:
        return f"library collective {self.name}"


@dataclass(frozen=True)
class Deliver:
    """Make a region of rank ``window``'s window part of the result of the call.

    A result that is copied out gets its rows here. A result that is a view of the own window lies
    there already; then ``window`` is the own rank and ``area`` the inbox.
    """

    region: Region
    window: int
    area: Area = "inbox"

    def __str__(self) -> str:
        return f"deliver {self.region} from {_in_window(self.window, self.area)} to the result"


@dataclass(frozen=True)
class Sum:
    """Add up one chunk of the own band: what every source has for this rank, in source order.

    ``region`` is the own one, and ``places[r]`` the window and area where rank r's lies. Sums are
    float32, rounded once. They are part of the result, or what the next phase sends.
    """

    region: Region
    places: tuple[tuple[int, Area], ...]

    def of(self, source: int) -> Region:
        """The region of ``source`` that is added."""
        return replace(self.region, source=source)

    def __str__(self) -> str:
        terms = " + ".join(_in_window(*place) for place in self.places)
        return f"sum {self.region} of {terms}"


@dataclass(frozen=True)
class Encode:
    """Turn the chunk just computed or summed into the dtype of the wire, for the stores behind."""

    region: Region

    def __str__(self) -> str:
        return f"encode {self.region} for the wire"


Action = Compute | Encode | Store | Load | Copy | Set | Wait | Join | Collective | Deliver | Sum


def _in_window(window: int, area: Area) -> str:
    return f"window {window}" if area == "inbox" else f"{area} of window {window}"


@dataclass(frozen=True)
class Plan:
    """What an epilogue may know when it writes a schedule; only ``rank`` differs between ranks.

    ``view``: the result is a view of the own window, read until the rank enters its next call;
    otherwise it is copied out within the call. ``buffers``: 1, or 2 slots used in turn.
    ``send_complete``: the call ends only when the own slot is no longer read by anybody.
    ``common``: the slots of all windows are one memory, so that what is in one is in all; only with
    ``view``, and only for epilogues that say so.
    ``keep``: the whole product is kept in the private buffer, too, and not only what stays.
    ``phase``, ``phases``: which phase of how many this is.
    ``lanes``: lanes per peer. ``lane_order``: ``in_order`` (a word set in a lane follows the copies
    before it) or ``after_drain`` (only a drained lane's copies are known to be there).
    """

    rank: int
    world: int
    chunks: int
    fused: bool
    view: bool = False
    buffers: int = 1
    send_complete: bool = False
    common: bool = False
    lanes: int = 1
    lane_order: str = "in_order"
    keep: bool = False
    phase: int = 0
    phases: int = 1

    @property
    def is_last(self) -> bool:
        """Whether no phase follows this one."""
        return self.phase == self.phases - 1

    @cached_property
    def peers(self) -> tuple[int, ...]:
        """The other ranks, starting behind this one, so that ranks do not all send to rank 0."""
        return tuple((self.rank + i) % self.world for i in range(1, self.world))

    @cached_property
    def everyone(self) -> tuple[int, ...]:
        """This rank, then ``peers``."""
        return (self.rank, *self.peers)


@dataclass(frozen=True)
class Program:
    """The actions of one actor, in order. ``lane`` is (peer, index) if the actor is a lane."""

    actor: str
    actions: tuple[Action, ...]
    lane: tuple[int, int] | None = None


@dataclass(frozen=True)
class Schedule:
    """What one rank does in one call: a program per actor.

    ``phase`` and ``plan`` are those for which an epilogue made it; of a chain, the first ones.
    """

    phase: Phase
    plan: Plan
    programs: tuple[Program, ...]

    def actions(self) -> Iterator[Action]:
        """All actions, actor by actor."""
        for program in self.programs:
            yield from program.actions

    def uses_window(self) -> bool:
        """Whether any action needs peer memory or words."""
        return any(
            isinstance(action, Set | Wait | Load | Copy | Deliver | Sum)
            or (isinstance(action, Store) and action.to != LOCAL)
            for action in self.actions()
        )

    def render(self) -> str:
        """The schedule as text, one action a line."""
        lines = []
        for program in self.programs:
            lines.append(f"{program.actor}:")
            lines.extend(f"  {action}" for action in program.actions)
        return "\n".join(lines)

    def digest(self) -> str:
        """Sixteen hex digits that change whenever an action changes."""
        return hashlib.sha256(self.render().encode()).hexdigest()[:16]


def chain(schedules: Sequence[Schedule]) -> Schedule:
    """One schedule for the phases of an operation, each of which begins when the last has ended.

    Actors of later phases get the number of their phase as a suffix. A lane is the same queue in
    all phases.

    What a phase leaves behind is for peers and copy engines, too: it may be sent as it lies, and in
    a later call, when M is another, a peer may store where it lies now. Hence the scope of the
    joins between phases.
    """
    programs = list(schedules[0].programs)
    for number, schedule in enumerate(schedules[1:], start=1):
        before = programs[-1].actor
        for program in schedule.programs:
            actions = [_joined_in(number, action) for action in program.actions]
            if program.lane is None:
                actions.insert(0, Join(before, scope="system"))
            programs.append(
                replace(program, actor=f"{program.actor}/{number}", actions=tuple(actions))
            )
    return replace(schedules[0], programs=tuple(programs))


def _joined_in(number: int, action: Action) -> Action:
    return replace(action, actor=f"{action.actor}/{number}") if isinstance(action, Join) else action
