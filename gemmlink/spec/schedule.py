"""Schedules: the frozen data by which an epilogue says how finished tiles travel.

A schedule holds one program per actor of one rank. A program is a list of actions, executed in
order. Actors of one rank are ordered against each other only by ``Join`` and by local words;
different ranks only by words. The same data is interpreted by the host (``core.interpret``), read
by device backends and printed by ``explain``.

Vocabulary

- *actors*: ``producer`` (multiplies), ``mover`` (copies), ``lane[p,i]`` (an ordered queue of copies
  to rank p, run by a copy engine), ``host`` (calls a library collective), ``consumer`` (waits and
  delivers the result).
- *region*: the rows of one chunk of one source's product; it lies in the slot of that source.
- *word*: a 64-bit cell in every rank's window with a single writer, which only grows. ``Set``
  writes the epoch (the number of the call), ``Wait`` is satisfied by the epoch or anything later.
- *scope*: who must see the stores that precede an action: this device, or the whole system.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Final, Literal

from gemmlink.spec.operations import Phase

Scope = Literal["device", "system"]

#: Destination of a ``Store`` that stays private to the rank (no window needed).
LOCAL: Final = -1


@dataclass(frozen=True)
class Word:
    """Name of a word in every rank's window.

    ``source`` is the one rank that writes it. Kinds:

    - ``free``: the source has finished reading its results.
    - ``arrive``: chunk ``chunk`` of the source is there, or may be loaded.
    - ``read``: the source has finished loading from this rank's slot.
    - ``chunk``: chunk ``chunk`` is complete in the own slot; written and read on the same rank.
    """

    kind: str
    source: int
    chunk: int = 0

    def __str__(self) -> str:
        if self.kind in ("arrive", "chunk"):
            return f"{self.kind}[{self.source},chunk {self.chunk}]"
        return f"{self.kind}[{self.source}]"


@dataclass(frozen=True)
class Region:
    """Rows of chunk ``chunk`` of the product of rank ``source``, all columns of the route."""

    source: int
    chunk: int

    def __str__(self) -> str:
        return f"rank {self.source} chunk {self.chunk}"


@dataclass(frozen=True)
class Compute:
    """Multiply the rows of one chunk. The first ``Store`` of that chunk says where they go."""

    chunk: int

    def __str__(self) -> str:
        return f"compute chunk {self.chunk}"


@dataclass(frozen=True)
class Store:
    """Put a computed region into the window of rank ``to`` (``LOCAL``: a private buffer)."""

    region: Region
    to: int
    scope: Scope = "system"

    def __str__(self) -> str:
        place = "a private buffer" if self.to == LOCAL else f"window {self.to}"
        return f"store {self.region} -> {place} ({self.scope})"


@dataclass(frozen=True)
class Load:
    """Read a region from the window of rank ``window``, as the source of the stores that follow."""

    region: Region
    window: int

    def __str__(self) -> str:
        return f"load {self.region} from window {self.window}"


@dataclass(frozen=True)
class Copy:
    """In a lane: copy a region from the own window to the same place in rank ``to``'s window."""

    region: Region
    to: int

    def __str__(self) -> str:
        return f"copy {self.region} -> window {self.to}"


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
    there already; then ``window`` is the own rank.
    """

    region: Region
    window: int

    def __str__(self) -> str:
        return f"deliver {self.region} from window {self.window} to the result"


Action = Compute | Store | Load | Copy | Set | Wait | Join | Collective | Deliver


@dataclass(frozen=True)
class Plan:
    """What an epilogue may know when it writes a schedule; only ``rank`` differs between ranks.

    ``view``: the result is a view of the own window, read until the rank enters its next call;
    otherwise it is copied out within the call. ``buffers``: 1, or 2 slots used in turn.
    ``send_complete``: the call ends only when the own slot is no longer read by anybody.
    ``common``: the slots of all windows are one memory, so that what is in one is in all; only with
    ``view``, and only for epilogues that say so.
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
    """What one rank does in one call of one phase: a program per actor."""

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
            isinstance(action, Set | Wait | Load | Copy | Deliver)
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
