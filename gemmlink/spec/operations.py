"""Operations as data: phases, and in each phase the routes that a rank's product takes.

An operation is what a user asks for (``all_to_all``); a route says which rectangle of the product
goes to which peers. How the bytes travel along a route is the epilogue's business; where they lie
in a window is told by ``spec.places``.

| operation | phases |
|---|---|
| all_gather | gather: the whole product to everybody |
| all_to_all | scatter: a column shard to each peer; the columns behind the extent stay |
| reduce_scatter | scatter: a band of rows to each peer, summed there |
| all_reduce | the same, then gather: the summed band to everybody |
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from gemmlink.errors import InvalidArgument

Kind = Literal["gather", "scatter"]


def band_rows(rows: int, world: int, band: int) -> tuple[int, int]:
    """First and one-past-last row of ``band`` when ``rows`` rows are dealt to ``world`` ranks.

    With ``q, r = divmod(rows, world)``, the first r bands have q + 1 rows, the others q.

    >>> [band_rows(7, 3, band) for band in range(3)]
    [(0, 3), (3, 5), (5, 7)]
    """
    quotient, rest = divmod(rows, world)
    first = band * quotient + min(band, rest)
    return first, first + quotient + (band < rest)


@dataclass(frozen=True)
class Route:
    """A rectangle of the source's product, and the peers that need it.

    ``cols`` is the half-open range of columns. ``band``: of the rows only that band (see
    ``band_rows``), or all of them. A route without peers stays with its source.
    """

    cols: tuple[int, int]
    peers: tuple[int, ...]
    band: int | None = None

    @property
    def width(self) -> int:
        """Columns, and the pitch of its rows wherever they lie packed."""
        return self.cols[1] - self.cols[0]


@dataclass(frozen=True)
class Phase:
    """One exchange: every rank's ``source`` travels along ``routes``.

    ``name``: ``"gather"`` sends one rectangle to everybody, ``"scatter"`` another one to each rank
    (route j to rank j). ``source`` is what travels: ``"product"``, the rank's own C, or ``"sum"``,
    what the phase before has summed. ``sums``: a receiver adds up what it gets, in the order of the
    sources, in float32; otherwise every block is a part of the result. ``wire``: the dtype in which
    it travels, where that is another than the result's; see ``core.wire``.
    """

    name: Kind
    source: Literal["product", "sum"]
    routes: tuple[Route, ...]
    sums: bool = False
    wire: torch.dtype | None = None

    def part_for(self, peer: int) -> int:
        """The index of the route that leads to ``peer``."""
        return peer if self.name == "scatter" else 0

    def sent(self) -> range:
        """Indices of the routes that lead to somebody."""
        return range(sum(1 for route in self.routes if route.peers))

    def kept(self) -> range:
        """Indices of the routes that lead to nobody. They come last."""
        return range(len(self.sent()), len(self.routes))


@dataclass(frozen=True)
class Operation:
    """A named list of phases, the same on every rank.

    ``ragged``: ranks may have different M; otherwise they add up equal shapes.
    """

    name: str
    phases: tuple[Phase, ...]
    ragged: bool = True


def all_gather(world: int, n: int, wire: torch.dtype | None = None) -> Operation:
    """Every rank gets the blocks of all ranks, stacked by rows in group-rank order.

    One phase with one route: all columns, to everybody (the own slot included).
    """
    route = Route((0, n), tuple(range(world)))
    return Operation("all_gather", (Phase("gather", "product", (route,), wire=wire),))


def all_to_all(world: int, n: int, extent: int | None = None) -> Operation:
    """Rank j gets columns ``[j * s, (j + 1) * s)`` of every product, with ``s = extent / world``.

    Blocks are stacked by rows in group-rank order. Columns from ``extent`` (default: n) on stay.
    Raises ``InvalidArgument`` if the extent cannot be dealt out evenly.
    """
    extent = checked_extent(world, n, extent)
    shard = extent // world
    routes = [Route((j * shard, (j + 1) * shard), (j,)) for j in range(world)]
    if extent < n:
        routes.append(Route((extent, n), ()))
    return Operation("all_to_all", (Phase("scatter", "product", tuple(routes)),))


def reduce_scatter(world: int, n: int) -> Operation:
    """Rank i gets band i (see ``band_rows``) of the sum of all products."""
    return Operation("reduce_scatter", (_scattered_sum(world, n),), ragged=False)


def all_reduce(world: int, n: int, wire: torch.dtype | None = None) -> Operation:
    """Every rank gets the sum of all products: bands are summed as above, then gathered."""
    gather = Phase("gather", "sum", (Route((0, n), tuple(range(world))),), wire=wire)
    return Operation("all_reduce", (_scattered_sum(world, n), gather), ragged=False)


def _scattered_sum(world: int, n: int) -> Phase:
    routes = tuple(Route((0, n), (peer,), band=peer) for peer in range(world))
    return Phase("scatter", "product", routes, sums=True)


def checked_extent(world: int, n: int, extent: int | None) -> int:
    """The extent, n if it is None; raises ``InvalidArgument`` that names the nearest legal ones."""
    if extent is None:
        extent = n
    if type(extent) is not int or not 0 <= extent <= n:
        raise InvalidArgument(f"extent must be a whole number from 0 to N={n}", repr(extent))
    if extent % world:
        below = extent - extent % world
        near = [str(value) for value in (below, below + world) if value <= n]
        raise InvalidArgument(
            f"extent must be a multiple of the world, {world}",
            f"extent={extent}",
            f"The nearest legal values are {' and '.join(near)}."
            if len(near) > 1
            else f"The nearest legal value is {near[0]}.",
        )
    return extent
