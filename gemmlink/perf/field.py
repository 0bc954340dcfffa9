"""What all contestants of a bench share: the problem as one rank sees it, its inputs, the truth.

A contestant takes inputs, runs once per call, and says what it must hold afterwards. It writes into
memory that is its own from the start: no call allocates a result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple, Protocol

import torch

from gemmlink.conformance.problems import Case, Kind, cancellation, limit_l2
from gemmlink.spec import operations
from gemmlink.spec.contracts import Group
from gemmlink.spec.operations import Operation, Phase, band_rows
from gemmlink.spec.problem import Problem

Role = Literal["mode", "unfused", "gemm", "move"]

#: Tensors, and what each must hold in float64.
Held = Sequence[tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True)
class Label:
    """What a row says about who was measured. ``chunks`` is 0 where nothing is cut."""

    mode: str
    epilogue: str
    fused: bool
    transport: str
    backend: str
    chunks: int
    complete: bool
    result: str = "copy"


class Inputs(NamedTuple):
    """What a contestant gets. ``product`` ``(M, n)`` and ``band`` are ready, in the output's dtype.

    ``band``: the own band of rows of the sum, where one is gathered; else no rows.
    """

    a: torch.Tensor
    b: torch.Tensor
    product: torch.Tensor
    band: torch.Tensor


class Contestant(Protocol):
    """See the module's docstring."""

    role: Role
    label: Label

    def load(self, inputs: Inputs) -> None:
        """Take the inputs of the next runs."""

    def run(self) -> None:
        """One call. This is what is timed."""

    def poison(self) -> None:
        """Fill what the next run must write with NaN."""

    def held(self, truth: Truth) -> Held:
        """What was written, beside what it must be."""

    def close(self) -> None:
        """Give everything back."""


@dataclass(frozen=True)
class Field:
    """The problem of one run on one rank: every rank has ``problem.capacity`` rows."""

    group: Group
    problem: Problem
    name: str = "all_gather"
    extent: int | None = None

    @cached_property
    def operation(self) -> Operation:
        """The operation as phases."""
        return phases_of(self.name, self.group.world, self.problem.n, self.extent)

    @property
    def width(self) -> int:
        """Columns of the result."""
        return self.operation.phases[-1].routes[0].width

    @property
    def stays(self) -> int:
        """Columns of the product that no peer gets."""
        return sum(self.routes[part].width for part in self.operation.phases[0].kept())

    @property
    def routes(self) -> Sequence[operations.Route]:
        """Where the parts of the product go."""
        return self.operation.phases[0].routes

    @property
    def rows(self) -> int:
        """Rows of the result."""
        if self.operation.phases[-1].sums:
            return self.band_of(self.group.rank)
        whole = self.operation.phases[-1].source == "sum"
        return self.problem.capacity * (1 if whole else self.group.world)

    def band_of(self, rank: int) -> int:
        """Rows of a rank's band."""
        first, last = self.band(rank)
        return last - first

    def band(self, rank: int) -> tuple[int, int]:
        """First and one-past-last row of a rank's band."""
        return band_rows(self.problem.capacity, self.group.world, rank)

    def empty(self, *shape: int) -> torch.Tensor:
        """Room in the output's dtype."""
        return torch.empty(*shape, dtype=self.problem.out_dtype)

    def part(self, tensor: torch.Tensor, part: int) -> torch.Tensor:
        """The rectangle of a product that a route of the first phase takes."""
        route = self.routes[part]
        first, last = (0, len(tensor)) if route.band is None else self.band(route.band)
        return tensor[first:last, slice(*route.cols)]

    def case(self, kind: Kind, seed: int) -> Case:
        """A problem that every rank can rebuild."""
        p, rows = self.problem, (self.problem.capacity,) * self.group.world
        extent = self.extent if self.name == "all_to_all" else None
        return Case(rows, p.n, p.k, p.dtype, p.out_dtype, kind, seed, self.name, extent)

    def inputs(self, case: Case, truth: Truth | None = None) -> Inputs:
        """The own inputs. Without the truth the band is some numbers: moving takes as long."""
        rank = self.group.rank
        block = case.block(rank) if truth is None else truth.block
        product = block.to(case.out_dtype)
        band = product[:0]
        if len(self.operation.phases) > 1:
            total = product if truth is None else truth.result.to(case.out_dtype)
            band = total[slice(*self.band(rank))]
        return Inputs(case.a(rank), case.b(rank), product, band)


def phases_of(name: str, world: int, n: int, extent: int | None = None) -> Operation:
    """The operation of that name. Only an all-to-all has an extent."""
    options = {"extent": extent} if name == "all_to_all" else {}
    made: Operation = getattr(operations, name)(world, n, **options)
    return made


class Truth:
    """What one rank must hold, in float64."""

    def __init__(self, field: Field, case: Case) -> None:
        self._field = field
        self._case = case
        self._blocks = [case.block(source) for source in range(field.group.world)]
        #: What this rank must get.
        self.result = case.assembled(self._blocks, field.group.rank)

    @property
    def block(self) -> torch.Tensor:
        """The own product."""
        return self._blocks[self._field.group.rank]

    @property
    def stays(self) -> torch.Tensor:
        """The columns of the own product that stay."""
        return self.block[:, self._field.problem.n - self._field.stays :]

    def arrived(self, phase: Phase) -> list[torch.Tensor]:
        """For each source what comes from it in a phase, unsummed."""
        field = self._field
        if phase.source == "sum":
            return [self.result[slice(*field.band(source))] for source in range(field.group.world)]
        part = phase.part_for(field.group.rank)
        return [field.part(block, part) for block in self._blocks]

    def limit(self, role: Role, elements: int) -> float:
        """The largest relative L2 error of what a contestant of that role holds."""
        case, sums = self._case, self._field.operation.phases[0].sums
        if role == "gemm" or not sums:
            return limit_l2(case.k, case.out_dtype, elements)
        return limit_l2(case.k, case.out_dtype, elements, len(self._blocks), self._cancel)

    @cached_property
    def _cancel(self) -> float:
        phases = self._field.operation.phases
        summed = self._blocks if len(phases) > 1 else self.arrived(phases[0])
        return cancellation(summed, self.result)
