"""The whole product on one page: two ranks, one call, the exact answer."""

from __future__ import annotations

import torch

import gemmlink
from tests.conftest import Ranks


def _multiply_and_gather(rank: int) -> list[list[float]]:
    a = torch.tensor([[1.0, 2.0], [3.0, 4.0]]) + 10 * rank
    b = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
    return gemmlink.gemm_all_gather(a, b).tolist()


def test_every_rank_gets_the_products_of_all_ranks(ranks: Ranks) -> None:
    want = [[1, 2, 3], [3, 4, 7], [11, 12, 23], [13, 14, 27]]
    assert ranks(2).run(_multiply_and_gather) == [want, want]


def test_one_process_needs_no_launcher() -> None:
    c = gemmlink.gemm_all_gather(torch.ones(2, 3), torch.ones(4, 3), group=gemmlink.SELF)
    assert c.tolist() == [[3.0] * 4] * 2
