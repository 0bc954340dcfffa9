"""Numbers for all places that calls use: elements of areas, of private memory, fields of records.

Where a tile lies is told by ``spec.places``, from the M that the ranks have in a call; two calls
meet in a cell exactly where the real ones would meet.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from gemmlink.spec.lowered import Lowered, Place, Tile
from gemmlink.spec.places import Places
from gemmlink.spec.schedule import LOCAL, Area

#: Areas of private memory that are new in every call.
_FRESH = ("product", "result")


class Cells:
    """The cells of one run. ``lowered`` is any rank's: all have the same areas."""

    def __init__(self, lowered: Lowered, capacity: int) -> None:
        plan = lowered.schedule.plan
        self.keys: list[tuple[Any, ...]] = []
        self._numbers: dict[tuple[Any, ...], int] = {}
        self._plan = plan
        self._capacity = capacity
        self._phases = lowered.operation.phases
        self._places = [Places(phase, plan.world, plan.chunks, capacity) for phase in self._phases]

    def cell(self, *key: Any) -> int:
        """The number of a place."""
        number = self._numbers.get(key)
        if number is None:
            number = self._numbers[key] = len(self.keys)
            self.keys.append(key)
        return number

    def private(self) -> list[bool]:
        """For each cell, whether it is in private memory."""
        return [key[0] == LOCAL for key in self.keys]

    def name(self, cell: int) -> str:
        """A cell in words."""
        owner, detail, area, row, col = self.keys[cell]
        if area == "record":
            return f"record {row} of rank {col} in window {owner}"
        if owner == LOCAL:
            return f"row {row} col {col} of rank {detail[0]}'s private {area}"
        slots, phase = detail
        extra = f" {slots}" if self._plan.buffers > 1 else ""
        extra += f" of phase {phase}" if phase else ""
        return f"row {row} col {col} of the {area}{extra} in window {owner}"

    def record(self, owner: int, source: int, call: int) -> int:
        """The entry record of ``source`` in ``owner``'s window: two take turns."""
        return self.cell(owner, (), "record", call % 2, source)

    def elements(self, tile: Tile, rows: Sequence[int]) -> list[tuple[int, int]]:
        """Row and column, in the source's product, of all elements of a tile."""
        region = tile.region
        first, last = self._places[region.phase].product_rows(region, rows[region.source])
        origin, end = self._phases[region.phase].routes[region.part].cols
        low, high = tile.cols(end - origin)
        return [(row, origin + col) for row in range(first, last) for col in range(low, high)]

    def find(
        self, tile: Tile, at: int, area: Place, rank: int, call: int, rows: Sequence[int]
    ) -> list[int]:
        """The cells of a tile in ``area`` of window ``at`` or of ``rank``'s private memory."""
        region = tile.region
        places = self._places[region.phase]
        m = rows[region.source]
        first, last = places.product_rows(region, m)
        origin, end = self._phases[region.phase].routes[region.part].cols
        low, high = tile.cols(end - origin)
        base: tuple[Any, ...]
        if at == LOCAL:
            start = first
            if area == "result":
                start = places.result_row(region, m, list(accumulate(rows, initial=0)))
            elif area == "product":
                low, high = low + origin, high + origin
            base = (LOCAL, (rank, call if area in _FRESH else 0), area)
        else:
            start = places.first_row(region, _shared(area), m, self._slots(rows))
            owner = 0 if self._plan.common else at
            base = (owner, (call % self._plan.buffers, region.phase), area)
        return [
            self.cell(*base, start + row, col)
            for row in range(last - first)
            for col in range(low, high)
        ]

    def _slots(self, rows: Sequence[int]) -> list[int]:
        """First rows of the blocks of an inbox: packed where it is shown as it lies."""
        if self._plan.view:
            return list(accumulate(rows, initial=0))
        return [rank * self._capacity for rank in range(self._plan.world)]


def _shared(area: Place) -> Area:
    if area == "product" or area == "scratch" or area == "result":
        raise ValueError(f"no window has an area {area!r}")
    return area
