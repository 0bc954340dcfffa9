"""Where a region lies: which rows of its source's product, and which rows of an area of a window.

Every window has, for each phase, up to three *areas*. Each is a matrix of packed rows:

| area | holds | used by |
|---|---|---|
| ``inbox`` | what arrives here, a slot for each source | all phases |
| ``outbox`` | what this rank sends, a slot for each peer | scatters whose parts are fetched |
| ``sum`` | the summed band | a scatter whose sum is shown as a view |

In a gather the own slot of the inbox is also where the source keeps what it sends. These functions
are pure: the same arithmetic is used to lay out a window, to move bytes and to prove (in the tests)
that every needed element has exactly one writer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gemmlink.spec.operations import Operation, Phase, band_rows
from gemmlink.spec.problem import chunk_rows
from gemmlink.spec.schedule import Area, Plan, Region


@dataclass(frozen=True)
class Places:
    """The areas of one phase for ``world`` ranks, ``chunks`` chunks and M up to ``capacity``."""

    phase: Phase
    world: int
    chunks: int
    capacity: int

    @property
    def width(self) -> int:
        """Columns of every area, in elements."""
        return self.phase.routes[0].width

    def height(self, area: Area) -> int:
        """Rows of an area."""
        if area == "sum":
            return self._band_capacity
        if self.phase.source == "sum" or (area == "outbox" and self.phase.sums):
            return self.capacity
        return self.world * (self._band_capacity if self.phase.sums else self.capacity)

    def product_rows(self, region: Region, rows: int) -> tuple[int, int]:
        """The rows of a region within its source's product of ``rows`` rows, half open.

        For what was summed they are rows of the whole sum, of which the source owns one band.
        """
        band = self._band_of(region)
        low, high = (0, rows) if band is None else band_rows(rows, self.world, band)
        first, last = chunk_rows(high - low, self.chunks, region.chunk)
        return low + first, low + last

    def first_row(self, region: Region, area: Area, rows: int, firsts: Sequence[int]) -> int:
        """Where in ``area`` the first row of a region lies.

        ``rows`` is the source's M; ``firsts[r]`` is where rank r's block of a result begins among
        the rows of an inbox that takes whole blocks.
        """
        first, _ = self.product_rows(region, rows)
        if area == "sum":
            return first - self._band_start(region, rows)
        if self.phase.source == "sum":
            return first
        if self.phase.sums:
            if area == "outbox":
                return first
            return region.source * self._band_capacity + first - self._band_start(region, rows)
        if area == "outbox":
            return region.part * self.capacity + first
        return firsts[region.source] + first

    def result_row(self, region: Region, rows: int, starts: Sequence[int]) -> int:
        """Where in the result the first row of a region lies; ``starts[r]`` begins rank r's block.

        Of a scatter that sums, the result is the own band.
        """
        first, _ = self.product_rows(region, rows)
        if self.phase.source == "sum":
            return first
        if self.phase.sums:
            return first - self._band_start(region, rows)
        return starts[region.source] + first

    @property
    def _band_capacity(self) -> int:
        return -(-self.capacity // self.world)

    def _band_of(self, region: Region) -> int | None:
        if self.phase.source == "sum":
            return region.source
        return self.phase.routes[region.part].band

    def _band_start(self, region: Region, rows: int) -> int:
        band = self._band_of(region)
        return 0 if band is None else band_rows(rows, self.world, band)[0]


def result_shape(
    operation: Operation, rank: int, world: int, rows: Sequence[int]
) -> tuple[int, int]:
    """Shape of what ``rank`` gets when ``rows[r]`` is rank r's M."""
    phase = operation.phases[-1]
    width = phase.routes[0].width
    if phase.sums:
        first, last = band_rows(rows[rank], world, rank)
        return last - first, width
    return (rows[rank] if phase.source == "sum" else sum(rows)), width


def sums_into(operation: Operation, plan: Plan) -> tuple[int, Area] | None:
    """The phase and area of the own window that sums are left in; None for another place.

    Where the next phase sends them as they are, its own slot; else the result, or for a wire dtype
    the scratch rows.
    """
    if len(operation.phases) == 1:
        return (0, "sum") if plan.view else None
    return None if operation.phases[1].wire is not None else (1, "inbox")
