"""Lanes go on after the rank that fed them has left the call, which is no sign of giving up."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist

import gemmlink
from gemmlink.transport.cpu_lanes import CpuLane
from gemmlink.transport.shm import SharedMemory
from tests.conftest import Ranks
from tests.refs import a_of, assert_equal, b_of, gathered

N, K, M = 6, 16, 5
#: Longer than the library waits for a word before it looks for a reason.
SLOW_S = 0.2


def _slow_copies(rank: int, mode: str, result: str) -> bool:
    """Rank 0's lanes take their time, so rank 0 is in its next call while they still copy."""
    copy = CpuLane._copy

    def late(target: torch.Tensor, source: torch.Tensor) -> None:
        time.sleep(SLOW_S)
        copy(target, source)

    if rank == 0:
        CpuLane._copy = staticmethod(late)  # type: ignore[method-assign]
    try:
        with gemmlink.GemmAllGather(
            N, K, M, transport=SharedMemory(), epilogue=mode, result=result, chunks=2
        ) as op:
            for call in range(4):
                b = b_of(call, N, K)
                out = op(a_of(rank, call, M, K), b)
                assert_equal(out, gathered(call, [M] * dist.get_world_size(), b), f"call {call}")
    finally:
        CpuLane._copy = staticmethod(copy)  # type: ignore[method-assign]
    return True


@pytest.mark.parametrize("result", ["copy", "view"])
@pytest.mark.parametrize("mode", ["split-lanes", "fused-lanes"])
def test_a_slow_lane_is_waited_for(ranks: Ranks, mode: str, result: str) -> None:
    """Rank 0 has all it needs and goes on; the others still get what its lanes carry."""
    assert ranks(2).run(_slow_copies, mode, result) == [True, True]
