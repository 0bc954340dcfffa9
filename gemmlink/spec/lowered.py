"""Lowered schedules: the same as ``schedule``, told by what blocks of a kernel and queues do.

A schedule says "store this chunk there, then set that word". On a device a chunk is made of tiles,
tiles are made by blocks that know nothing of each other, and a store is nowhere for sure until
whoever made it has published it. ``lower`` spells that out; here is what it spells it in. This is
the one form that the adversarial executor runs and that proofs are made about.

Vocabulary, beyond that of ``schedule``

- *tile*: some columns of a region, handled by one block from making to storing.
- *block*: an independent strand of one kernel. It consists of several *waves*, each of which does a
  part of a tile; one of them, the leader, does what is done once a block (fences, words).
- *registers*: what a block has fetched or made last, and puts somewhere.
- *private* areas belong to one rank and have no window: ``product`` (what a rank keeps of its own
  product) and ``result`` (what the caller gets) are fresh in every call, ``scratch`` is not.

What orders memory, and nothing else does:

- ``Retire``, by all waves of a block: their stores so far have left the waves.
- ``Barrier``: the leader may speak for all waves. What has not retired is not covered.
- ``Release(scope)``, by the leader: the block's *own* covered loads and stores are done, as far as
  that scope. It says nothing for other blocks, whatever they told this one.
- ``Elect`` and every word carry on what their writer knows; ``Acquire(scope)`` after a ``Wait``
  takes it over. A fence or word of narrower scope than the distance orders nothing.
- ``Join``: the end of a kernel is a release, and a join an acquire, of *device* scope.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from gemmlink.spec.operations import Operation
from gemmlink.spec.problem import chunk_rows
from gemmlink.spec.schedule import (
    LOCAL,
    Area,
    Collective,
    Copy,
    Join,
    Region,
    Schedule,
    Scope,
    Wait,
    Word,
)

#: Where a tile may lie: an area of a window, or of the rank's private memory (then at ``LOCAL``).
Place = Area | Literal["product", "scratch", "result"]

#: ``block``: of a kernel. ``queue``: what a copy engine works off. ``host``: a thread of the host.
Kind = Literal["block", "queue", "host"]


@dataclass(frozen=True)
class Tile:
    """Columns ``index`` of ``of`` stripes of a region, cut as ``problem.chunk_rows`` cuts rows."""

    region: Region
    index: int
    of: int

    def cols(self, width: int) -> tuple[int, int]:
        """First and one-past-last column within a region of ``width`` columns."""
        return chunk_rows(width, self.of, self.index)

    def __str__(self) -> str:
        return f"{self.region} tile {self.index}"


@dataclass(frozen=True)
class Make:
    """Multiply a tile of the own product into the registers."""

    tile: Tile

    def __str__(self) -> str:
        return f"make {self.tile}"


@dataclass(frozen=True)
class Fetch:
    """Load a tile into the registers, from ``area`` of rank ``at``'s window or private memory."""

    tile: Tile
    at: int
    area: Place

    def __str__(self) -> str:
        return f"fetch {self.tile} from {_where(self.at, self.area)}"


@dataclass(frozen=True)
class Add:
    """Load a tile of every source, ``places[r]`` for rank r, and add them up in that order."""

    tile: Tile
    places: tuple[tuple[int, Area], ...]

    def __str__(self) -> str:
        terms = " + ".join(_where(*place) for place in self.places)
        return f"add {self.tile} of {terms}"


@dataclass(frozen=True)
class Convert:
    """Turn the registers into the dtype of the wire (``encode``), or back (``decode``)."""

    tile: Tile
    way: Literal["encode", "decode"]

    def __str__(self) -> str:
        return f"{self.way} {self.tile}"


@dataclass(frozen=True)
class Put:
    """Store the registers into ``area`` of rank ``at``'s window or of private memory."""

    tile: Tile
    at: int
    area: Place

    def __str__(self) -> str:
        return f"put {self.tile} -> {_where(self.at, self.area)}"


@dataclass(frozen=True)
class Show:
    """The caller, not gemmlink, reads a tile of what the call gave him.

    ``writes``: and writes to it afterwards, as he may to a view after a call that was complete on
    the sending side, too. To publish that as far as the system is his business.
    """

    tile: Tile
    at: int
    area: Place
    writes: bool = False

    def __str__(self) -> str:
        then = ", then written to" if self.writes else ""
        return f"show {self.tile} in {_where(self.at, self.area)}{then}"


@dataclass(frozen=True)
class Retire:
    """All waves of the block: wait until the own stores so far have left."""

    def __str__(self) -> str:
        return "retire"


@dataclass(frozen=True)
class Barrier:
    """The waves of the block wait for each other."""

    def __str__(self) -> str:
        return "barrier"


@dataclass(frozen=True)
class Release:
    """The leader: make what is covered of this block's loads and stores done, as far as scope."""

    scope: Scope

    def __str__(self) -> str:
        return f"release ({self.scope})"


@dataclass(frozen=True)
class Acquire:
    """The block: see what the words that it has waited for announce, as far as ``scope``."""

    scope: Scope

    def __str__(self) -> str:
        return f"acquire ({self.scope})"


@dataclass(frozen=True)
class Counter:
    """A counter in a rank's own memory that the blocks of ``actor`` add to; it never falls."""

    actor: str
    index: int

    def __str__(self) -> str:
        return f"{self.actor}.{self.index}"


@dataclass(frozen=True)
class Elect:
    """Add 1 to a counter; whoever makes it a multiple of ``of`` is elected.

    The addition is acquire and release at device scope: who is elected knows what those before it
    knew. It publishes no store.
    """

    counter: Counter
    of: int

    def __str__(self) -> str:
        return f"elect by {self.counter}, the last of {self.of}"


@dataclass(frozen=True)
class Announce:
    """Write ``epoch - lag`` into ``word`` of rank ``at``, if elected by ``by`` (None: always)."""

    word: Word
    at: int
    scope: Scope
    lag: int = 0
    by: Counter | None = None

    def __str__(self) -> str:
        value = f"n-{self.lag}" if self.lag else "n"
        who = f"if elected by {self.by}, " if self.by is not None else ""
        return f"{who}set {self.word} = {value} at rank {self.at} ({self.scope})"


@dataclass(frozen=True)
class Post:
    """Write the entry record of the call (its number and the own M) at every peer."""

    def __str__(self) -> str:
        return "post the entry record at every peer"


@dataclass(frozen=True)
class Look:
    """Read the M of ``source`` in its entry record."""

    source: int

    def __str__(self) -> str:
        return f"look up M of rank {self.source}"


Action = (
    Make
    | Fetch
    | Add
    | Convert
    | Put
    | Show
    | Retire
    | Barrier
    | Release
    | Acquire
    | Elect
    | Announce
    | Post
    | Look
    | Wait
    | Join
    | Copy
    | Collective
)


def _where(at: int, area: Place) -> str:
    if at == LOCAL:
        return f"the private {area}"
    return f"window {at}" if area == "inbox" else f"{area} of window {at}"


@dataclass(frozen=True)
class Strand:
    """What one block, queue or host thread does in a call, in order.

    ``lane``: (peer, index) of a queue. A queue outlives the call: strands with the same lane, of
    later phases and later calls, continue it. ``in_order``: it does one thing after the other;
    otherwise its copies are made whenever it pleases, and only a join of it tells that they are.
    """

    actor: str
    index: int
    kind: Kind
    actions: tuple[Action, ...]
    lane: tuple[int, int] | None = None
    in_order: bool = True

    @property
    def name(self) -> str:
        """The actor, with a number where it is a block of a kernel."""
        return f"{self.actor}#{self.index}" if self.kind == "block" else self.actor


@dataclass(frozen=True)
class Lowered:
    """What one rank does in one call, told by strands.

    The strands of call n + 1, queues apart, begin when those of call n have ended, as if they had
    joined them. The last one, ``reader``, is the caller, who looks at what the call gave; where
    that is a view of the window he does so at any time until the next call begins.
    """

    operation: Operation
    schedule: Schedule
    strands: tuple[Strand, ...]

    @property
    def rank(self) -> int:
        """Whose it is."""
        return self.schedule.plan.rank

    def actions(self) -> Iterator[Action]:
        """All actions, strand by strand."""
        for strand in self.strands:
            yield from strand.actions

    def render(self) -> str:
        """As text, one action a line."""
        lines = []
        for strand in self.strands:
            lines.append(f"{strand.name}:")
            lines.extend(f"  {action}" for action in strand.actions)
        return "\n".join(lines)

    def digest(self) -> str:
        """Sixteen hex digits that change whenever an action changes."""
        return hashlib.sha256(self.render().encode()).hexdigest()[:16]
