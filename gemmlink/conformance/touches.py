"""What memory the actions of a schedule read and write, in the windows and beside them.

Beside the areas of the windows (``spec.places``) a rank has memory of its own, which is judged like
the others:

| area | holds |
|---|---|
| ``local`` | the private buffer: what stays, what is kept, what a library collective sends |
| ``scratch`` | sums that the next phase encodes for the wire |
| ``band`` | sums of a library collective, which the next one sends |
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from gemmlink.spec.operations import Operation
from gemmlink.spec.places import sums_into
from gemmlink.spec.schedule import (
    LOCAL,
    Action,
    Collective,
    Compute,
    Copy,
    Deliver,
    Encode,
    Load,
    Program,
    Region,
    Schedule,
    Store,
    Sum,
)

#: Areas that are not part of a window.
PRIVATE = ("local", "scratch", "band")


@dataclass(frozen=True)
class Touch:
    """An action reads or writes a region where it lies in ``area`` of rank ``owner``."""

    owner: int
    area: str
    region: Region
    writes: bool


#: An action and what it touches.
Touching = tuple[Action, tuple[Touch, ...]]


def of_programs(operation: Operation, schedule: Schedule) -> list[list[Touching]]:
    """Every program of a chained schedule, in order."""
    reader = _Reader(operation, schedule)
    return [list(reader.program(program)) for program in schedule.programs]


def shown(operation: Operation, schedule: Schedule) -> list[Touch]:
    """What a result that is a view lets its user read, until the next call begins."""
    reader = _Reader(operation, schedule)
    found = []
    for action in schedule.actions():
        if isinstance(action, Deliver):
            found.append(reader.touch(action.window, action.area, action.region))
        elif isinstance(action, Sum) and len(operation.phases) == 1:
            found += reader.summed(action, writes=False)
    return found


class _Reader:
    """Reads the programs of one rank in the order in which they are listed."""

    def __init__(self, operation: Operation, schedule: Schedule) -> None:
        self._phases = operation.phases
        self._plan = schedule.plan
        self._into = sums_into(operation, schedule.plan)
        self._collectives = 0
        self._origin: Touch | None = None
        self._computed = False

    def program(self, program: Program) -> Iterator[Touching]:
        """Its actions."""
        self._origin, self._computed = None, False
        for action in program.actions:
            yield action, tuple(self._of(action))

    def touch(self, owner: int, area: str, region: Region, writes: bool = False) -> Touch:
        """Where the slots of all windows are one memory, that of rank 0 stands for it."""
        if owner == LOCAL:
            return Touch(self._plan.rank, "local", region, writes)
        common = self._plan.common and area not in PRIVATE
        return Touch(0 if common else owner, area, region, writes)

    def summed(self, sum_: Sum, writes: bool = True) -> list[Touch]:
        """Where a sum is put: nowhere that is judged if it is the caller's own memory."""
        rank, region = self._plan.rank, sum_.region
        if self._into is not None:
            phase, area = self._into
            part = 0 if phase > region.phase else region.part
            place = replace(region, phase=phase, part=part)
            return [self.touch(rank, area, place, writes)]
        if len(self._phases) > region.phase + 1:
            place = replace(region, phase=region.phase + 1, part=0)
            return [self.touch(rank, "scratch", place, writes)]
        return []

    def _of(self, action: Action) -> list[Touch]:
        rank = self._plan.rank
        if isinstance(action, Compute):
            self._origin, self._computed = None, True
        elif isinstance(action, Encode):
            summed, self._origin = not self._computed, None
            return [self.touch(rank, "scratch", action.region)] if summed else []
        elif isinstance(action, Load):
            self._computed = False
            self._origin = self.touch(action.window, action.area, action.region)
            return [self._origin]
        elif isinstance(action, Store):
            return self._stored(action)
        elif isinstance(action, Copy):
            read = self.touch(rank, action.area, action.region)
            return [read, self.touch(action.to, "inbox", action.region, writes=True)]
        elif isinstance(action, Deliver) and not self._plan.view:
            return [self.touch(action.window, action.area, action.region)]
        elif isinstance(action, Sum):
            terms = enumerate(action.places)
            return [
                *(self.touch(where, area, action.of(source)) for source, (where, area) in terms),
                *self.summed(action),
            ]
        elif isinstance(action, Collective):
            return self._collective()
        return []

    def _stored(self, action: Store) -> list[Touch]:
        written = self.touch(action.to, action.area, action.region, writes=True)
        if self._origin is None:  # what was made lies where it was stored first
            self._origin = replace(written, writes=False)
            return [written]
        return [self._origin, written]

    def _collective(self) -> list[Touch]:
        """The first one serves the first phase, and so on."""
        number, rank = self._collectives, self._plan.rank
        self._collectives += 1
        if number >= len(self._phases):
            return []
        phase = self._phases[number]
        if phase.source == "sum":
            return [self.touch(rank, "band", Region(rank, 0, 0, number))]
        found = [
            self.touch(LOCAL, "local", Region(rank, chunk, part, number))
            for part in phase.sent()
            for chunk in range(self._plan.chunks)
        ]
        if phase.sums and number + 1 < len(self._phases):
            found.append(self.touch(rank, "band", Region(rank, 0, 0, number + 1), writes=True))
        return found
