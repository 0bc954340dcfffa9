"""What is run: an operation, how it travels, the M of every rank in every call - lowered.

A case is the same for all seeds; only the interleaving differs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from gemmlink.spec import operations
from gemmlink.spec.contracts import Epilogue
from gemmlink.spec.lower import Grid, lower
from gemmlink.spec.lowered import Counter, Lowered
from gemmlink.spec.operations import Operation
from gemmlink.spec.schedule import Plan, Schedule, Word, chain

#: What a mutant does: a rank's lowered schedule in, another one out.
Change = Callable[[Lowered], Lowered]


@dataclass(frozen=True)
class Start:
    """What is there before the first call: zero, as in a new window, where nothing is told.

    ``words``: of each, the rank at which it lies. ``counters``: of each, the rank that counts.
    """

    words: Mapping[tuple[Word, int], int] = field(default_factory=dict)
    counters: Mapping[tuple[int, Counter], int] = field(default_factory=dict)


@dataclass(frozen=True)
class Case:
    """``lowered[r]`` is what rank r does in each call; ``rows[n][r]`` its M in the nth.

    ``shapes``: what ranks do in calls of further shapes, which take turns with ``lowered``.
    ``numbers[r]``: the numbers that rank r gives to the calls, 0 to one that it refuses and in
    which it does nothing; where nothing is told they are 1, 2, 3.
    """

    name: str
    lowered: tuple[Lowered, ...]
    rows: tuple[tuple[int, ...], ...]
    start: Start = field(default_factory=Start)
    shapes: tuple[tuple[Lowered, ...], ...] = ()
    numbers: tuple[tuple[int, ...], ...] = ()

    @property
    def world(self) -> int:
        """How many ranks there are."""
        return len(self.lowered)

    @property
    def capacity(self) -> int:
        """The largest M."""
        return max(max(call) for call in self.rows)

    def number(self, rank: int, call: int) -> int:
        """What ``rank`` writes into words in its ``call``th call."""
        return self.numbers[rank][call - 1] if self.numbers else call

    def doing(self, rank: int, call: int) -> Lowered:
        """What ``rank`` does in its ``call``th call."""
        shapes = (self.lowered, *self.shapes)
        return shapes[(call - 1) % len(shapes)][rank]

    def changed(self, name: str, change: Change) -> Case:
        """The same with something done otherwise on all ranks."""
        return replace(
            self,
            name=f"{self.name}: {name}",
            lowered=tuple(map(change, self.lowered)),
            shapes=tuple(tuple(map(change, shape)) for shape in self.shapes),
        )


@dataclass(frozen=True)
class Request:
    """From which a case is built.

    ``epilogues``: one, or one for each phase. ``plan``: further fields of ``Plan``. ``options``:
    further arguments of the operation. ``n`` columns: so few that a tile is a column or two.
    """

    operation: str
    epilogues: tuple[Epilogue, ...]
    fused: bool
    rows: tuple[tuple[int, ...], ...]
    plan: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    n: int = 2
    chunks: int = 1
    grid: Grid = field(default_factory=Grid)
    entry: bool = False

    @property
    def world(self) -> int:
        """How many ranks there are."""
        return len(self.rows[0])

    def made(self) -> Operation:
        """The operation."""
        made: Operation = getattr(operations, self.operation)(self.world, self.n, **self.options)
        return made

    def name(self) -> str:
        """What it is, in a line."""
        form = "fused" if self.fused else "split"
        mode = "+".join(epilogue.name for epilogue in self.epilogues)
        extra = {**self.options, **self.plan}
        told = "".join(f" {key}={value}" for key, value in extra.items() if value)
        entry = " entry" if self.entry else ""
        return f"{self.operation} {form}-{mode} chunks={self.chunks}{told}{entry} rows={self.rows}"


def build(request: Request) -> Case:
    """Schedules for all ranks, lowered."""
    operation = request.made()
    made = []
    for rank in range(request.world):
        schedule = schedule_of(request, operation, rank)
        made.append(lower(operation, schedule, request.grid, request.entry))
    return Case(request.name(), tuple(made), request.rows)


def schedule_of(request: Request, operation: Operation, rank: int) -> Schedule:
    """All phases of one rank's schedule; later ones in the first form of their epilogue."""
    phases = operation.phases
    plan = Plan(
        rank,
        request.world,
        request.chunks,
        request.fused,
        phases=len(phases),
        **request.plan,
    )
    schedules = []
    for number, phase in enumerate(phases):
        epilogue = request.epilogues[min(number, len(request.epilogues) - 1)]
        fused = request.fused if number == 0 else epilogue.forms()[0]
        schedules.append(epilogue.schedule(phase, replace(plan, phase=number, fused=fused)))
    return chain(schedules)


def rows_of(pattern: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    """Rows as a case holds them."""
    return tuple(tuple(call) for call in pattern)
