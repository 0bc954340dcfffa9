"""Finds the tensors that a region is: in a window, in the private buffer, on the wire.

``spec.places`` says which rows; here they become views of real memory. Making a view costs more
than using it, so whoever looks for a region gets a function that remembers what it has made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import torch

from gemmlink.core import wire
from gemmlink.errors import InvalidArgument
from gemmlink.spec.contracts import Window
from gemmlink.spec.operations import Operation
from gemmlink.spec.places import Places, sums_into
from gemmlink.spec.problem import Problem
from gemmlink.spec.schedule import (
    LOCAL,
    Area,
    Copy,
    Deliver,
    Load,
    Plan,
    Region,
    Schedule,
    Store,
    Sum,
)
from gemmlink.spec.window import AreaBytes, WindowLayout

#: Views of a window that a step keeps: calls of few sizes make few.
_PLACES = 64

#: A region: its first and last row in its source's product, and these rows where they lie.
Place = tuple[int, int, torch.Tensor]


class Rows(Protocol):
    """What decides where the regions of one call lie."""

    epoch: int
    #: Rows of the own ``a``.
    m: int
    #: First row of each source's block, in an inbox that takes whole blocks.
    firsts: Sequence[int]

    def rows_of(self, source: int) -> int:
        """M of ``source`` in this call."""

    def local(self) -> torch.Tensor:
        """The private buffer, ``(M, width of Memory.local_cols)``."""


class Memory:
    """The windows and buffers of one operation on one rank."""

    def __init__(
        self,
        operation: Operation,
        schedule: Schedule,
        problem: Problem,
        layout: WindowLayout,
        window: Window | None,
    ) -> None:
        plan = self.plan = schedule.plan
        self.problem = problem
        self.layout = layout
        self.phases = operation.phases
        self.places = places_of(operation, plan, problem)
        #: Phase and area that sums are left in, or None; see ``spec.places.sums_into``.
        self.sums_into = sums_into(operation, plan)
        #: Columns of the product that the private buffer has room for.
        self.local_cols = _local_cols(operation, schedule)
        self._window = window
        self._grids: dict[tuple[int, int, Area, int], torch.Tensor] = {}
        self._scratch: torch.Tensor | None = None

    def release(self) -> None:
        """Let go of the window and all views of it."""
        self._grids.clear()
        self._window = self._scratch = None

    def window(self) -> Window:
        """The window, which a schedule that needs none does not have."""
        if self._window is None:
            raise InvalidArgument(
                "an epilogue whose schedule uses peers' memory must say needs.window",
                "a schedule with stores, words or deliveries and no window",
            )
        return self._window

    def grid(self, owner: int, phase: int, area: Area, epoch: int) -> torch.Tensor:
        """An area of ``owner``'s window as call ``epoch`` uses it, a row of the grid for each row.

        Of the result's dtype; where a wire dtype is used, bytes as in ``core.wire``.
        """
        key = (owner, phase, area, epoch % self.layout.buffers)
        if key not in self._grids:
            height, row_bytes, dtype = area_rows(self.places[phase], area, self.problem)
            first = self.layout.area(phase, area, epoch)
            raw = self.window().tensor(owner)[first : first + height * row_bytes]
            # A view of another dtype that is made under inference_mode is read-only outside it.
            with torch.inference_mode(False):
                shape = (height, row_bytes // dtype.itemsize)
                self._grids[key] = raw.view(dtype).view(shape)
        return self._grids[key]

    def find(self, owner: int, area: Area, region: Region) -> Callable[[Rows], Place]:
        """What finds ``region`` in ``area`` of ``owner``'s window."""
        if owner == LOCAL:
            return self._find_local(region)
        self.window()
        self.layout.area(region.phase, area)  # a KeyError now rather than in a call
        places, buffers, source = self.places[region.phase], self.layout.buffers, region.source
        known: dict[tuple[int, int, int], Place] = {}

        def find(call: Rows) -> Place:
            rows = call.m if source == self.plan.rank else call.rows_of(source)
            key = (call.epoch % buffers, call.firsts[source], rows)
            place = known.get(key)
            if place is None:
                if len(known) >= _PLACES:
                    known.clear()
                first, last = places.product_rows(region, rows)
                at = places.first_row(region, area, rows, call.firsts)
                grid = self.grid(owner, region.phase, area, call.epoch)
                place = known[key] = (first, last, grid[at : at + last - first])
            return place

        return find

    def offset(self, area: Area, region: Region) -> Callable[[Rows], tuple[int, int]]:
        """What finds the offset in any window, and the bytes, of a region in an area."""
        places = self.places[region.phase]
        _, row_bytes, _ = area_rows(places, area, self.problem)

        def find(call: Rows) -> tuple[int, int]:
            rows = call.m if region.source == self.plan.rank else call.rows_of(region.source)
            first, last = places.product_rows(region, rows)
            at = places.first_row(region, area, rows, call.firsts)
            start = self.layout.area(region.phase, area, call.epoch) + at * row_bytes
            return start, (last - first) * row_bytes

        return find

    def scratch(self) -> torch.Tensor:
        """Room for rows that are encoded before they travel, ``(capacity, n)``; kept."""
        if self._scratch is None:
            problem = self.problem
            shape = (problem.capacity, problem.n)
            self._scratch = torch.empty(shape, dtype=problem.out_dtype, device=problem.device)
        return self._scratch

    def cols(self, region: Region) -> tuple[int, int]:
        """The columns of a region."""
        return self.phases[region.phase].routes[region.part].cols

    def _find_local(self, region: Region) -> Callable[[Rows], Place]:
        places, origin = self.places[region.phase], self.local_cols[0]
        low, high = (col - origin for col in self.cols(region))

        def find(call: Rows) -> Place:
            first, last = places.product_rows(region, call.m)
            return first, last, call.local()[first:last, low:high]

        return find


def places_of(operation: Operation, plan: Plan, problem: Problem) -> list[Places]:
    """The places of each phase."""
    return [Places(phase, plan.world, plan.chunks, problem.capacity) for phase in operation.phases]


def area_rows(places: Places, area: Area, problem: Problem) -> tuple[int, int, torch.dtype]:
    """Rows of an area, bytes of each, and the dtype of its elements."""
    width, height = places.width, places.height(area)
    if places.phase.wire is not None:
        return height, wire.row_bytes(width), torch.uint8
    return height, width * problem.out_dtype.itemsize, problem.out_dtype


def areas_used(
    operation: Operation, schedules: Sequence[Schedule], problem: Problem
) -> tuple[AreaBytes, ...]:
    """The areas that these schedules, one of each rank, use."""
    plan = schedules[0].plan
    places = places_of(operation, plan, problem)
    used = sorted({place for schedule in schedules for place in _touched(operation, schedule)})
    areas = []
    for phase, area in used:
        height, row_bytes, _ = area_rows(places[phase], area, problem)
        areas.append(AreaBytes(phase, area, height * row_bytes))
    return tuple(areas)


def _touched(operation: Operation, schedule: Schedule) -> Iterator[tuple[int, Area]]:
    for action in schedule.actions():
        if isinstance(action, Load | Deliver | Copy) or (
            isinstance(action, Store) and action.to != LOCAL
        ):
            yield action.region.phase, action.area
        if isinstance(action, Copy):
            yield action.region.phase, "inbox"
        if isinstance(action, Sum):
            for _, area in action.places:
                yield action.region.phase, area
            target = sums_into(operation, schedule.plan)
            if target is not None:
                yield target


def _local_cols(operation: Operation, schedule: Schedule) -> tuple[int, int]:
    """The columns that this schedule stores in the private buffer, or none."""
    stored = [
        operation.phases[action.region.phase].routes[action.region.part].cols
        for action in schedule.actions()
        if isinstance(action, Store) and action.to == LOCAL
    ]
    return (min(low for low, _ in stored), max(high for _, high in stored)) if stored else (0, 0)
