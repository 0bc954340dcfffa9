"""The operations that exchange or add, for tests on ranks: inputs, references, one exact call.

Whole numbers, as in ``tests.refs``: with K of at most 16 even the sum over four ranks is at most
256, which all dtypes hold. References are float64, from the definitions alone, with no
communication. Where products are added, each rank has a b of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

import gemmlink
from tests.refs import a_of, assert_equal, b_of
from tests.simulator import band

NAMES = ("all_to_all", "reduce_scatter", "all_reduce")
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
PAIRS = ((F32, F32), (BF16, BF16), (BF16, F32), (F16, F16))
K = 16
NAN = float("nan")

OBJECTS: dict[str, Callable[..., Any]] = {
    "all_gather": gemmlink.GemmAllGather,
    "all_to_all": gemmlink.GemmAllToAll,
    "reduce_scatter": gemmlink.GemmReduceScatter,
    "all_reduce": gemmlink.GemmAllReduce,
}
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "all_gather": gemmlink.gemm_all_gather,
    "all_to_all": gemmlink.gemm_all_to_all,
    "reduce_scatter": gemmlink.gemm_reduce_scatter,
    "all_reduce": gemmlink.gemm_all_reduce,
}


@dataclass(frozen=True)
class Asked:
    """One problem: every rank's M, and what is asked of it; ``call`` chooses the numbers."""

    name: str
    rows: tuple[int, ...]
    n: int
    call: int
    extent: int | None = None
    dtype: torch.dtype = F32
    out_dtype: torch.dtype = F32
    k: int = K

    @property
    def world(self) -> int:
        return len(self.rows)

    @property
    def adds(self) -> bool:
        return self.name in ("reduce_scatter", "all_reduce")

    def a(self, rank: int) -> torch.Tensor:
        """That rank's a."""
        return a_of(rank, self.call, self.rows[rank], self.k, self.dtype)

    def b(self, rank: int) -> torch.Tensor:
        """That rank's b."""
        return b_of(1000 * rank + self.call if self.adds else self.call, self.n, self.k, self.dtype)

    def product(self, rank: int) -> torch.Tensor:
        """That rank's whole product."""
        return (self.a(rank).double() @ self.b(rank).double().T).to(self.out_dtype)

    def shard(self, rank: int) -> slice:
        """The columns of every product that ``rank`` gets in an all-to-all."""
        width = self.travelling // self.world
        return slice(rank * width, (rank + 1) * width)

    @property
    def travelling(self) -> int:
        """The columns of a product that leave their rank in an all-to-all."""
        return self.n if self.extent is None else self.extent

    def want(self, rank: int) -> torch.Tensor:
        """The result of ``rank``."""
        products = [self.product(source) for source in range(self.world)]
        if self.name == "all_gather":
            return torch.cat(products)
        if self.name == "all_to_all":
            return torch.cat([product[:, self.shard(rank)] for product in products])
        total = torch.stack([product.double() for product in products]).sum(0).to(self.out_dtype)
        mine = band(self.rows[rank], self.world, rank)
        return total if self.name == "all_reduce" else total[mine.start : mine.stop]


def check(got: Any, asked: Asked, rank: int, what: str) -> torch.Tensor:
    """All parts of a result are exact; returns the one that the peers had a share in."""
    what = f"{what}: rank {rank} of {asked}"
    if not isinstance(got, gemmlink.AllToAllResult):
        assert_equal(got, asked.want(rank), what)
        return torch.as_tensor(got)
    assert_equal(got.received, asked.want(rank), f"received, {what}")
    product = asked.product(rank)
    assert_equal(got.local, product[:, asked.travelling :], f"local, {what}")
    if got.product is not None:
        assert_equal(got.product, product, f"product, {what}")
        if got.local.numel():
            ours = got.product.untyped_storage().data_ptr()
            assert got.local.untyped_storage().data_ptr() == ours, "local is a view of it"
    return got.received


def strided(asked: Asked, rank: int) -> tuple[torch.Tensor, Callable[[], None]]:
    """An out full of NaN whose rows and columns lie apart, and a check of what lies between."""
    rows, cols = asked.want(rank).shape
    big = torch.full((2 * rows + 1, 3 * cols + 2), 99.0, dtype=asked.out_dtype)
    out = big[1::2, 1:-1:3] if rows and cols else big[:rows, :cols]
    out.fill_(NAN)

    def intact() -> None:
        beside = int((big == 99).sum()) - int((out == 99).sum())
        assert beside == big.numel() - out.numel(), f"{asked.name} wrote beside its out"

    return out, intact


def call(op: Any, asked: Asked, rank: int, what: str, **rest: Any) -> torch.Tensor:
    """One exact call of an object form; see ``check``."""
    return check(op(asked.a(rank), asked.b(rank), **rest), asked, rank, what)
