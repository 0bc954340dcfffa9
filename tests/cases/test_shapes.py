"""O-01 to O-09: sizes that do not fit tiles, packs, ranks or each other."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

import gemmlink
from gemmlink.backends.eager import Eager
from tests.cases.kit import (
    BF16,
    DTYPES,
    F32,
    MODES,
    each_epilogue,
    each_mode,
    eye,
    gather,
    guarded,
    in_garbage,
    stacked,
    tagged,
)
from tests.conftest import Ranks
from tests.refs import assert_equal, whole

ROOT = Path(__file__).parents[2]


def _odd_shapes(rank: int, mode: str) -> None:
    for m, n, k in [(33, 65, 17), (64, 63, 32), (65, 64, 31), (1, 127, 32), (127, 1, 32)]:
        for dtype in DTYPES:
            _surrounded(rank, mode, m, n, k, dtype)
    _surrounded(rank, mode, 1000, 999, 1001, F32)


def _surrounded(rank: int, mode: str, m: int, n: int, k: int, dtype: torch.dtype) -> None:
    blocks = [whole(1 + peer, m, k, dtype) for peer in range(2)]
    b = whole(0, n, k, dtype)
    out, check = guarded(2 * m, n, dtype)
    got = gather(in_garbage(blocks[rank]), in_garbage(b), mode, out=out)
    check()
    assert_equal(got, stacked(blocks, b, dtype), f"{mode} {(m, n, k)} {dtype}")


@each_epilogue
def test_o_01_odd_shapes_around_a_tile(ranks: Ranks, mode: str) -> None:
    """triton-lang/triton#630: right at 1000 x 1000 x 1000, wrong once N and K left the tile.

    The memory around both inputs is NaN, so that a read past an edge shows.
    """
    ranks(2).run(_odd_shapes, mode)


def _tile_rows(rank: int, mode: str) -> None:
    for g in (1, 7, 8, 9, 10, 12, 13, 16, 20):
        size = 16 * g
        blocks = [whole(g + 100 * peer, size, 32, BF16) for peer in range(2)]
        b = whole(-g, size, 32, BF16)
        got, want = gather(blocks[rank], b, mode), stacked(blocks, b, BF16)
        bad = [row // 16 for row in range(0, 2 * size, 16) if not got[row:].equal(want[row:])]
        assert not bad, f"{mode} g={g}: wrong from tile row {bad[-1]} on"


@each_epilogue
def test_o_02_tile_rows_that_a_group_does_not_divide(ranks: Ranks, mode: str) -> None:
    """ROCm/FlyDSL#979: tile rows taken in groups of eight; of nine, all after the eighth wrong.

    Here a product is cut into chunks, three of them, which few of the sizes divide by.
    """
    ranks(2).run(_tile_rows, mode, env={"GEMMLINK_CHUNKS": "3"})


def _odd_slices(rank: int, mode: str) -> None:
    for k in (64, 128, 192, 320, 576, 704):
        blocks = [whole(k + peer, 64, k).clamp(-1, 1) for peer in range(2)]
        b = whole(-k, 64, k).clamp(-1, 1)
        assert_equal(gather(blocks[rank], b, mode), stacked(blocks, b, F32), f"{mode} K={k}")
        for dtype in DTYPES:  # the way of 16 bits cuts K by itself
            few = [whole(k + peer, 3, k, dtype).clamp(0, 1) for peer in range(2)]
            got = gather(few[rank], b.to(dtype), mode, out_dtype=F32)
            assert_equal(got, stacked(few, b, F32), f"{mode} K={k} {dtype}")


@each_epilogue
def test_o_03_an_odd_number_of_slices_of_k(ranks: Ranks, mode: str) -> None:
    """HazyResearch/HipKittens#65, deepseek-ai/DeepGEMM#93: K passed the check and not the loop."""
    ranks(2).run(_odd_slices, mode)


class NonEmpty(Eager):
    """A backend that cannot multiply nothing, as many kernels cannot."""

    name = "non-empty"

    def multiply(self, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
        assert out.numel(), "asked to multiply nothing"
        super().multiply(a, b, out)


def _zero_rows(rank: int, mode: str) -> None:
    backend = NonEmpty()
    for rows in ([0, 0, 0], [0, 4, 2], [2, 0, 0]):
        blocks = [tagged(peer, m, 8) for peer, m in enumerate(rows)]
        for known in (None, rows):
            got = gather(blocks[rank], eye(8), mode, rows=known, backend=backend)
            assert_equal(got, torch.cat(blocks), f"{mode} rows {rows}")


@each_mode
def test_o_04_ranks_without_rows(ranks: Ranks, mode: str) -> None:
    """pytorch/pytorch#85234 died of SIGFPE, deepseek-ai/DeepEP#374 asserted: nothing to gather."""
    ranks(3).run(_zero_rows, mode)


def _less_than_ranks(rank: int, world: int, modes: Sequence[str]) -> None:
    for mode in modes:
        for n in (1, 2, 4, 7, 8):
            blocks = [whole(peer, 1, 8, BF16) for peer in range(world)]
            b = whole(-n, n, 8, BF16)
            got = gather(blocks[rank], b, mode)
            assert_equal(got, stacked(blocks, b, BF16), f"{mode} N={n} on {world} ranks")


@pytest.mark.parametrize(("world", "modes"), [(4, MODES), (7, ("split-pull", "collective"))])
def test_o_05_less_data_than_ranks(ranks: Ranks, world: int, modes: Sequence[str]) -> None:
    """flashinfer-ai/flashinfer#4393: a share of zero packs, which nobody announced, was awaited."""
    ranks(world).run(_less_than_ranks, world, modes)


ALONE = """
import os, torch, gemmlink

def sockets():
    links = (f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd"))
    return [link for link in links if os.path.exists(link) and "socket:" in os.readlink(link)]

def children():
    with open(f"/proc/self/task/{os.getpid()}/children") as file:
        return file.read()

before = sockets(), children()  # a shell may have left some open
a, b = torch.arange(40.0).view(5, 8), torch.arange(48.0).view(6, 8)
for mode in MODES:
    first = gemmlink.gemm_all_gather(a, b, epilogue=mode)
    assert torch.equal(first, a @ b.T), mode
    first.fill_(99)
    second = gemmlink.gemm_all_gather(a, b, epilogue=mode)
    assert torch.equal(second, a @ b.T), mode
    assert first.eq(99).all(), mode
assert a.equal(torch.arange(40.0).view(5, 8)) and b.equal(torch.arange(48.0).view(6, 8))
assert (sockets(), children()) == before
assert not [name for name in os.listdir("/dev/shm") if f"gemmlink-{os.getpid()}-" in name]
"""


def test_o_07_one_process_without_a_launcher() -> None:
    """vllm-project/vllm#2674 warned of it; NVIDIA/Megatron-LM#5337 returned the caller's own A."""
    launcher = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", f"MODES = {(*MODES, 'auto')}\n{ALONE}"],
        cwd=ROOT,
        env={name: value for name, value in os.environ.items() if name not in launcher},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stderr, done.stdout) == (0, "", "")


def _different_m(rank: int, mode: str) -> None:
    rows = [5, 2, 7]
    blocks = [tagged(peer, m, 12) for peer, m in enumerate(rows)]
    got = gather(blocks[rank], eye(12), mode)
    for source, (first, last) in enumerate([(0, 5), (5, 7), (7, 14)]):
        assert_equal(got[first:last], blocks[source], f"{mode}, block of rank {source}")
    assert got.shape == (14, 12)


@each_mode
def test_o_08_another_m_on_each_rank(ranks: Ranks, mode: str) -> None:
    """pytorch/xla#8660, pytorch/pytorch#156627: hung, or was refused, depending on the library."""
    ranks(3).run(_different_m, mode)


def _different_limits(rank: int, mode: str) -> int:
    blocks = [tagged(peer, 32, 8) for peer in range(2)]
    with gemmlink.GemmAllGather(8, 8, (64, 128)[rank], BF16, epilogue=mode) as op:
        assert_equal(op(blocks[rank], eye(8)), torch.cat(blocks), mode)
        return op.capacity


@each_mode
def test_o_09_another_limit_of_rows_on_each_rank(ranks: Ranks, mode: str) -> None:
    """deepseek-ai/DeepEP#208: stuck for good. Here the largest limit is agreed on."""
    assert ranks(2).run(_different_limits, mode) == [128, 128]
