"""O-10 to O-14: tensors that do not lie in memory as they seem to."""

from __future__ import annotations

import pytest
import torch

import gemmlink
from tests.cases.kit import (
    BF16,
    F32,
    each_epilogue,
    each_mode,
    eye,
    gather,
    stacked,
    tagged,
)
from tests.conftest import Ranks
from tests.refs import assert_equal, whole


def _strided(rank: int, mode: str) -> None:
    b = whole(0, 10, 8)
    for blocks in (
        [whole(1 + peer, 6, 16)[:, ::2] for peer in range(2)],
        [whole(1 + peer, 12, 8)[::2] for peer in range(2)],
    ):
        base = torch.full((12, 20), 99.0)
        got = gather(blocks[rank], b, mode, out=base[:, ::2])
        assert_equal(got, stacked(blocks, b, F32), f"{mode}, A with strides {blocks[0].stride()}")
        assert base[:, 1::2].eq(99).all(), f"{mode} wrote between the columns of out"


@each_mode
def test_o_10_every_second_row_or_column(ranks: Ranks, mode: str) -> None:
    """pytorch/pytorch#192920, #128066, #159548, #141816: what lay at the pointer was moved."""
    ranks(2).run(_strided, mode)


def _transposed(rank: int, mode: str) -> None:
    m, n, k = 17, 24, 32
    blocks = [whole(1 + peer, k, m) for peer in range(2)]
    turned_b = whole(9, k, n).t()
    for a in (blocks[rank].t(), blocks[rank].t().contiguous()):
        for b in (turned_b, turned_b.contiguous()):
            got = gather(a, b, mode)
            want = stacked([block.t() for block in blocks], b, F32)
            assert_equal(got, want, f"{mode}, strides {a.stride()} and {b.stride()}")


@each_mode
def test_o_11_transposed_operands(ranks: Ranks, mode: str) -> None:
    """KnowingNothing/MatmulTutorial#16, tracel-ai/burn#4256: a kernel for the other order of B."""
    ranks(2).run(_transposed, mode)


def _sliced(rank: int, mode: str, dtype: torch.dtype) -> None:
    """A, and out too, are blocks inside one tensor; A also a block inside a window."""
    w = torch.full((3, 16, 8), 77.0, dtype=dtype)
    w[1] = tagged(rank, 16, 8, dtype)
    want = torch.cat([tagged(peer, 16, 8, dtype)[:8] for peer in range(2)])
    got = gather(w[1][:8], eye(8, dtype), mode, out=w[2])
    assert_equal(got, want, f"{mode} {dtype}, out of one tensor")
    assert w[0].eq(77).all(), f"{mode} wrote into another block"
    with gemmlink.GemmAllGather(8, 8, 8, dtype, epilogue="pull", result="view") as op:
        view = op(w[1][8:], eye(8, dtype))
        got = gather(view[8:], eye(8, dtype), mode)
        want = tagged(1, 16, 8, dtype)[8:].repeat(2, 1)
        assert_equal(got, want, f"{mode} {dtype}, out of a window")


@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
@each_mode
def test_o_12_slices_of_one_tensor_and_of_a_window(
    ranks: Ranks, mode: str, dtype: torch.dtype
) -> None:
    """pytorch/pytorch#161309, #160825, #137569: a slice was taken for the start of its memory."""
    ranks(2).run(_sliced, mode, dtype)


def _broadcast(rank: int, mode: str) -> None:
    b = whole(0, 5, 16)
    for name, rows, cols in (("one element", 1, 1), ("one row", 1, 16), ("one column", 8, 1)):
        blocks = [whole(3 + peer, rows, cols).expand(8, 16) for peer in range(2)]
        want = stacked(blocks, b, F32)
        assert_equal(gather(blocks[rank], b, mode), want, f"{mode}, {name}")
        turned = gather(blocks[rank], blocks[0], mode)
        assert_equal(turned, stacked(blocks, blocks[0], F32), f"{mode}, B of {name}")


@each_mode
def test_o_13_broadcast_operands(ranks: Ranks, mode: str) -> None:
    """ROCm/TransformerEngine#623, flagos-ai/FlagGems#2616: strides of zero were not looked at."""
    ranks(2).run(_broadcast, mode)


def _misaligned(value: torch.Tensor, by: int) -> torch.Tensor:
    """A copy of ``value`` that begins ``by`` elements into its memory, with NaN before it."""
    flat = torch.full((by + value.numel() + 1,), float("nan"), dtype=value.dtype)
    return flat[by : by + value.numel()].view(value.shape).copy_(value)


def _unaligned(rank: int, mode: str) -> None:
    for k in (31, 32, 33):
        for by in (1, 2, 3):
            blocks = [whole(10 * k + peer, 16, k, BF16) for peer in range(2)]
            b = whole(-k, 9, k, BF16)
            out = _misaligned(torch.empty(32, 9, dtype=BF16), by)
            got = gather(_misaligned(blocks[rank], by), _misaligned(b, by), mode, out=out)
            assert_equal(got, stacked(blocks, b, BF16), f"{mode}, K={k}, off by {by} elements")


@each_epilogue
def test_o_14_pointers_that_are_not_aligned(ranks: Ranks, mode: str) -> None:
    """triton-lang/triton#1330, #1320: vector loads and stores took 16 bytes for granted."""
    ranks(2).run(_unaligned, mode)
