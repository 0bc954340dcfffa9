"""Finds in a flat schedule what is one product: computed or summed, encoded, put somewhere first.

Neighbouring regions that are computed one after the other, with nothing in between and into
neighbouring rows of one place, can be one product: the fewer, the less is packed and widened twice.
Neighbouring columns of the same rows can be one, too, wherever they go: a copy of the result costs
less than a pass over A.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from gemmlink.core.flatten import Placed
from gemmlink.errors import InvalidArgument
from gemmlink.spec.operations import Phase
from gemmlink.spec.schedule import LOCAL, Compute, Encode, Region, Store


@dataclass(frozen=True)
class Product:
    """``store`` says where its first region goes. ``last`` is its last region, if there are more.

    ``computed``: by a multiplication, not by sums of the phase before. ``encoded``: for the wire.
    """

    placed: Placed
    store: Store
    computed: bool
    encoded: bool
    last: Region | None = None

    @property
    def end(self) -> Region:
        """Its last region."""
        return self.last or self.store.region


@dataclass(frozen=True)
class Columns:
    """Products of the same rows and of neighbouring columns, in their order."""

    products: tuple[Product, ...]

    @property
    def placed(self) -> Placed:
        """Where the last of them stands in the schedule."""
        return self.products[-1].placed


def group(
    placed: Sequence[Placed], chunks: int, phases: Sequence[Phase] | None
) -> list[Placed | Product | Columns]:
    """The schedule with its products found; with ``phases``, neighbouring ones are merged.

    Raises ``InvalidArgument`` for a ``Compute`` or ``Encode`` that no store follows.
    """
    found: list[Placed | Product] = []
    making: list[Placed] = []
    for item in placed:
        if isinstance(item.action, Compute | Encode):
            making.append(item)
        elif making:
            found.append(_product(making, item))
            making = []
        else:
            found.append(item)
    if making:
        raise _unstored(making)
    return list(found) if phases is None else _side_by_side(_merged(found, chunks, phases), phases)


def _product(making: Sequence[Placed], item: Placed) -> Product:
    kinds = [type(each.action) for each in making]
    if not isinstance(item.action, Store) or kinds not in ([Compute], [Encode], [Compute, Encode]):
        raise _unstored(making)
    return Product(item, item.action, Compute in kinds, Encode in kinds)


def _unstored(making: Sequence[Placed]) -> InvalidArgument:
    return InvalidArgument(
        "a schedule must store each region right after making it",
        f"'{making[0].action}' without a store",
    )


def _merged(
    found: Sequence[Placed | Product], chunks: int, phases: Sequence[Phase]
) -> list[Placed | Product]:
    merged: list[Placed | Product] = []
    for index, item in enumerate(found):
        last = merged[-1] if merged else None
        if (
            isinstance(item, Product)
            and isinstance(last, Product)
            and not _is_copied(found, index)
            and _continues(last, item, chunks, phases)
        ):
            merged[-1] = replace(last, placed=item.placed, last=item.end)
        else:
            merged.append(item)
    return merged


def _side_by_side(
    found: Sequence[Placed | Product], phases: Sequence[Phase]
) -> list[Placed | Product | Columns]:
    joined: list[Placed | Product | Columns] = []
    for index, item in enumerate(found):
        if isinstance(item, Product) and joined and not _is_copied(found, index):
            last = joined[-1]
            before = last.products if isinstance(last, Columns) else (last,)
            if isinstance(before[-1], Product) and _is_beside(before[-1], item, phases):
                joined[-1] = Columns((*before, item))
                continue
        joined.append(item)
    return joined


def _is_beside(one: Product, two: Product, phases: Sequence[Phase]) -> bool:
    """Whether ``two`` has the rows of ``one`` and the columns behind it."""
    a, b = one.store.region, two.store.region
    if not _is_plain(one, two) or (a.source, a.phase) != (b.source, b.phase):
        return False
    if (a.chunk, one.end.chunk) != (b.chunk, two.end.chunk) or one.placed.actor != two.placed.actor:
        return False
    routes = phases[a.phase].routes
    left, right = routes[a.part], routes[b.part]
    return (left.band, right.band) == (None, None) and left.cols[1] == right.cols[0]


def _is_plain(one: Product, two: Product) -> bool:
    return one.computed and two.computed and not one.encoded and not two.encoded


def _is_copied(found: Sequence[Placed | Product], index: int) -> bool:
    """Whether a store behind this product puts its rows, and those only, somewhere else, too."""
    follower = found[index + 1] if index + 1 < len(found) else None
    return isinstance(follower, Placed) and isinstance(follower.action, Store)


def _continues(one: Product, two: Product, chunks: int, phases: Sequence[Phase]) -> bool:
    """Whether ``two``'s rows begin where ``one``'s end, in the product and in one place."""
    a, b = one.store, two.store
    if not _is_plain(one, two) or (a.to, a.area, one.placed.actor) != (
        b.to,
        b.area,
        two.placed.actor,
    ):
        return False
    end, begin = one.end, b.region
    if (end.source, end.phase) != (begin.source, begin.phase):
        return False
    if phases[end.phase].name == "gather":
        return False  # chunks that were asked for: at equal ones all modes give the same bits
    if end.part == begin.part:
        return begin.chunk == end.chunk + 1
    routes = phases[end.phase].routes
    bands = routes[end.part].band, routes[begin.part].band
    follows = end.chunk == chunks - 1 and begin.chunk == 0 and begin.part == end.part + 1
    return follows and None not in bands and (a.to == LOCAL or a.area == "outbox")
