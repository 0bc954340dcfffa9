"""The whole product on one page: ranks, one call, a part of one's own, the exact answer."""

from __future__ import annotations

import os

import torch

import gemmlink
from tests.conftest import Ranks

#: What every one of two ranks must get: the products of rank 0, then those of rank 1.
WANT = [[1, 2, 3], [3, 4, 7], [11, 12, 23], [13, 14, 27]]


def _operands(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    a = torch.tensor([[1.0, 2.0], [3.0, 4.0]]) + 10 * rank
    return a, torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])


def _multiply_and_gather(rank: int) -> list[list[float]]:
    return gemmlink.gemm_all_gather(*_operands(rank)).tolist()


def test_every_rank_gets_the_products_of_all_ranks(ranks: Ranks) -> None:
    assert ranks(2).run(_multiply_and_gather) == [WANT, WANT]


def test_one_process_needs_no_launcher() -> None:
    c = gemmlink.gemm_all_gather(torch.ones(2, 3), torch.ones(4, 3), group=gemmlink.SELF)
    assert c.tolist() == [[3.0] * 4] * 2


class Counting:
    """A backend of one's own: torch multiplies, and products are counted."""

    name = "counting"
    interface = 1
    products = 0

    def supports(self, problem: object) -> str | None:
        return None

    def multiply(self, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
        self.products += 1
        torch.mm(a, b.T, out=out)


def _choose(rank: int) -> list[int]:
    mine = Counting()
    gemmlink.register(mine)
    counts = []
    try:
        for words in ({"backend": "counting", "epilogue": "fused-push", "chunks": 2}, {}):
            with gemmlink.GemmAllGather(n=3, k=2, max_m=2, **words) as op:  # type: ignore[arg-type]
                assert op(*_operands(rank)).tolist() == WANT, op.explain()
            counts.append(mine.products)
            os.environ["GEMMLINK_BACKEND"] = "counting"  # for the second time
    finally:
        gemmlink.unregister("counting")
    return counts


def test_a_part_is_registered_and_chosen_by_argument_or_by_variable(ranks: Ranks) -> None:
    """Two chunks are two products; the split form, chosen by itself, has one."""
    assert ranks(2).run(_choose) == [[2, 3], [2, 3]]
