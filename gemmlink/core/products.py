"""Finds in a flat schedule what is one product: computed or summed, encoded, put somewhere first.

Neighbouring regions that are computed one after the other, with nothing in between and into
neighbouring rows of one place, can be one product: the fewer, the less is packed and widened twice.
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


def group(
    placed: Sequence[Placed], chunks: int, phases: Sequence[Phase] | None
) -> list[Placed | Product]:
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
    return found if phases is None else _merged(found, chunks, phases)


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


def _is_copied(found: Sequence[Placed | Product], index: int) -> bool:
    """Whether a store behind this product puts its rows, and those only, somewhere else, too."""
    follower = found[index + 1] if index + 1 < len(found) else None
    return isinstance(follower, Placed) and isinstance(follower.action, Store)


def _continues(one: Product, two: Product, chunks: int, phases: Sequence[Phase]) -> bool:
    """Whether ``two``'s rows begin where ``one``'s end, in the product and in one place."""
    a, b = one.store, two.store
    plain = one.computed and two.computed and not one.encoded and not two.encoded
    if not plain or (a.to, a.area, one.placed.actor) != (b.to, b.area, two.placed.actor):
        return False
    end, begin = one.end, b.region
    if (end.source, end.phase) != (begin.source, begin.phase):
        return False
    if end.part == begin.part:
        return begin.chunk == end.chunk + 1
    routes = phases[end.phase].routes
    bands = routes[end.part].band, routes[begin.part].band
    follows = end.chunk == chunks - 1 and begin.chunk == 0 and begin.part == end.part + 1
    return follows and None not in bands and (a.to == LOCAL or a.area == "outbox")
