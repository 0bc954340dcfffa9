"""Seeded problems that every rank can rebuild as a whole, and their references in float64.

Two kinds of values:

- ``integers``: whole numbers from -2 to 2 in the first ``EXACT_K`` columns of K, zeros in the
  others; where ranks' products are added, in so many fewer that the whole sum has no more terms.
  Every sum is a whole number of at most ``4 * EXACT_K`` = 128, which bfloat16, float16 and float32
  hold exactly, in whatever order it is added up: a right result is *equal*, at any K.
- ``normal``: standard normal numbers, rounded to the dtype of the inputs before the reference is
  computed from them; results are compared by relative L2 error.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from gemmlink.spec import operations
from gemmlink.spec.operations import Operation, band_rows

EXACT_K = 32

#: Rows of b that are widened to float64 at a time; keeps the scratch at a few tens of MB.
_BLOCK_ROWS = 512
_UNIT_32 = torch.finfo(torch.float32).eps / 2

Kind = Literal["integers", "normal"]


@dataclass(frozen=True)
class Case:
    """One problem: ``rows[r]`` is the M of rank r. Equal fields give equal tensors.

    ``operation`` and ``extent`` as in ``spec.operations``; where products are added, all M are
    equal and each rank has a b of its own.
    """

    rows: tuple[int, ...]
    n: int
    k: int
    dtype: torch.dtype
    out_dtype: torch.dtype
    kind: Kind = "integers"
    seed: int = 0
    operation: str = "all_gather"
    extent: int | None = None

    def a(self, rank: int) -> torch.Tensor:
        """The a of ``rank``, ``(rows[rank], k)``."""
        return self._values(self.rows[rank], rank + 1)

    def b(self, rank: int = 0) -> torch.Tensor:
        """The b of ``rank``, ``(n, k)``; the same for all ranks where nothing is added."""
        return self._values(self.n, -rank if self._adds else 0)

    def block(self, rank: int) -> torch.Tensor:
        """The exact product of ``rank``, ``(rows[rank], n)`` in float64."""
        return self._product(self.a(rank), self.b(rank))

    def reference(self, rank: int = 0) -> torch.Tensor:
        """What ``rank`` must get, in float64. In an all-gather and an all-reduce all get that."""
        return self.assembled([self.block(source) for source in range(len(self.rows))], rank)

    def assembled(self, blocks: Sequence[torch.Tensor], rank: int = 0) -> torch.Tensor:
        """``reference`` from every rank's ``block``, for who has them already."""
        operation = self.phases()
        if self._adds:
            total = torch.stack(list(blocks)).sum(0)
            if not operation.phases[-1].sums:
                return total
            first, last = band_rows(self.rows[rank], len(self.rows), rank)
            return total[first:last]
        phase = operation.phases[0]
        low, high = phase.routes[phase.part_for(rank)].cols
        return torch.cat(list(blocks))[:, low:high]

    def phases(self) -> Operation:
        """The operation as phases."""
        options = {"extent": self.extent} if self.operation == "all_to_all" else {}
        made: Operation = getattr(operations, self.operation)(len(self.rows), self.n, **options)
        return made

    @property
    def _adds(self) -> bool:
        return self.operation in ("reduce_scatter", "all_reduce")

    @property
    def _exact_columns(self) -> int:
        """Columns of K that are not zero: so few that even a sum over all ranks is exact."""
        return min(self.k, EXACT_K // (len(self.rows) if self._adds else 1))

    def _product(self, a: torch.Tensor, all_of_b: torch.Tensor) -> torch.Tensor:
        columns = self._exact_columns if self.kind == "integers" else self.k
        wide, b = a[:, :columns].double(), all_of_b[:, :columns]
        product = torch.empty(a.shape[0], self.n, dtype=torch.float64)
        for first in range(0, self.n, _BLOCK_ROWS):
            last = min(self.n, first + _BLOCK_ROWS)
            product[:, first:last] = wide @ b[first:last].double().T
        return product

    def _values(self, rows: int, stream: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(self.seed * 1009 + stream)
        if self.kind == "normal":
            return torch.randn(rows, self.k, generator=generator).to(self.dtype)
        values = torch.zeros(rows, self.k, dtype=self.dtype)
        head = torch.randint(-2, 3, (rows, self._exact_columns), generator=generator)
        values[:, : head.shape[1]] = head.to(self.dtype)
        return values


def relative_l2(result: torch.Tensor, reference: torch.Tensor) -> float:
    """``|result - reference| / |reference|`` in float64; the numerator alone if that is 0.

    Not a number when the result holds a NaN, as one that was never written does in our checks.
    """
    scale = float(torch.linalg.vector_norm(reference))
    error = float(torch.linalg.vector_norm(result.double() - reference))
    return error / scale if scale else error


def limit_l2(
    k: int, out_dtype: torch.dtype, elements: int, terms: int = 1, cancel: float = 1.0
) -> float:
    """Largest relative L2 error of a right result of ``elements`` values, from dtype and K.

    Adding K products in float32 (unit roundoff u = 2**-24) one after the other errs by about
    ``0.4 * sqrt(K) * u`` relative to the sum; five times that is ``2 * sqrt(K) * u``, 1.0e-5 at
    K = 7168. A narrower result is rounded once more. That errs by at most its own unit roundoff
    (eps / 2) in each element, and by 0.43 of it in the mean over many: 0.75 of it is the limit
    then (2.9e-3 for bfloat16, 3.7e-4 for float16), low enough that garbage in a few places shows.

    ``terms``: so many ranks' products P_r were added, each rounded to ``out_dtype`` before it
    travelled, in float32, and the sum S rounded once. All errors of the products are relative to
    the P_r, which may be larger than S: ``cancel`` is ``sqrt(sum |P_r|**2) / |S|``, 1 for
    independent ones in the mean, more where they cancel. Adding errs as above, by
    ``2 * sqrt(terms) * u`` besides. The roundings of the products and of the sum are independent,
    so over many elements their squares add up: ``0.75 * hypot(cancel, 1)`` of the narrow unit
    roundoff, 1.06 of it for independent products. Over few each may be at its worst, and
    ``sum |P_r| <= sqrt(terms) * sqrt(sum |P_r|**2)``: ``sqrt(terms) * cancel + 1`` of it. Sums
    that round in between, too, as libraries' reductions do, may err by more.
    """
    depth = math.sqrt(max(k, 16)) + (math.sqrt(terms) if terms > 1 else 0.0)
    limit = 2 * depth * _UNIT_32 * (cancel if terms > 1 else 1.0)
    if out_dtype != torch.float32:
        limit += _roundings(elements, terms, cancel) * torch.finfo(out_dtype).eps / 2
    return limit


def cancellation(products: Sequence[torch.Tensor], total: torch.Tensor) -> float:
    """``cancel`` as ``limit_l2`` takes it, from the exact products and their sum; 1 for zeros."""
    scale = float(torch.linalg.vector_norm(total))
    norms = [float(torch.linalg.vector_norm(product)) for product in products]
    return math.hypot(*norms) / scale if scale else 1.0


def _roundings(elements: int, terms: int, cancel: float) -> float:
    """How many units in the last place all roundings of a result may come to, in the L2 norm."""
    many = elements >= 256
    if terms == 1:
        return 0.75 if many else 1.0
    return 0.75 * math.hypot(cancel, 1) if many else math.sqrt(terms) * cancel + 1
