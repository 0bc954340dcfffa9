"""Operations as data: phases, and in each phase the routes that a rank's product takes.

An operation is what a user asks for (``all_gather``); a route says which columns of the product go
to which peers. How the bytes travel along a route is the epilogue's business.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Route:
    """A rectangle of the source's product and the peers that need it.

    All rows of the product take part. ``cols`` is the half-open range of columns. In every peer's
    window the rectangle lands in the slot of its source, rows packed (``pitch`` elements apart).
    """

    cols: tuple[int, int]
    peers: tuple[int, ...]
    pitch: int


@dataclass(frozen=True)
class Phase:
    """One exchange: every rank's ``source`` travels along ``routes``.

    ``source`` names what travels: ``"product"`` is the rank's own C.
    """

    name: str
    source: str
    routes: tuple[Route, ...]


@dataclass(frozen=True)
class Operation:
    """A named list of phases, the same on every rank."""

    name: str
    phases: tuple[Phase, ...]


def all_gather(world: int, n: int) -> Operation:
    """Every rank gets the blocks of all ranks, stacked by rows in group-rank order.

    One phase with one route: all columns, to everybody (the own slot included).
    """
    route = Route(cols=(0, n), peers=tuple(range(world)), pitch=n)
    return Operation("all_gather", (Phase("gather", "product", (route,)),))
