"""O-15 to O-27: values that are easily lost, and sizes past 31 bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import gemmlink
from gemmlink.backends.eager import Eager
from gemmlink.spec.problem import Problem, chunk_rows
from gemmlink.spec.window import WindowLayout, inbox
from tests.cases.kit import (
    BF16,
    DTYPES,
    F32,
    MODES,
    bits,
    each_epilogue,
    each_mode,
    eye,
    failing,
    gather,
    good_call,
    in_garbage,
    stacked,
)
from tests.conftest import Ranks
from tests.refs import assert_equal, whole

E4M3FN, E4M3FNUZ = torch.float8_e4m3fn, torch.float8_e4m3fnuz


def _one_nan(rank: int, mode: str) -> None:
    for dtype in DTYPES:
        for holder in (0, 1, 2):
            a = torch.ones(4, 8, dtype=dtype)
            if rank == holder:
                a[2] = float("nan")
            got = gather(a, torch.ones(5, 8, dtype=dtype), mode)
            want = torch.full((12, 5), 8.0, dtype=dtype)
            nan = got.isnan()
            assert nan[4 * holder + 2].all(), f"{mode} {dtype}: the NaN of rank {holder} is gone"
            assert int(nan.sum()) == 5, f"{mode} {dtype}: the NaN of rank {holder} spread"
            assert_equal(got[~nan], want[~nan], f"{mode} {dtype}")


@each_epilogue
def test_o_15_a_nan_counts_whichever_rank_holds_it(ranks: Ranks, mode: str) -> None:
    """ml-explore/mlx#4072: dropped where rank 0 held it, kept where rank 1 did."""
    ranks(3).run(_one_nan, mode)


def _garbage(rank: int, mode: str) -> None:
    for dtype in DTYPES:
        for fill in (float("nan"), float("inf")):
            blocks = [whole(1 + peer, 17, 17, dtype) for peer in range(2)]
            b = whole(0, 9, 17, dtype)
            got = gather(in_garbage(blocks[rank], fill), in_garbage(b, fill), mode)
            assert_equal(got, stacked(blocks, b, dtype), f"{mode} {dtype} among {fill}")


@each_epilogue
def test_o_16_garbage_beside_a_matrix_stays_there(ranks: Ranks, mode: str) -> None:
    """ROCm/iris#296: loads past the edge had no value to put in; 0 times NaN is NaN."""
    ranks(2).run(_garbage, mode)


class Patterns(Eager):
    """Writes bits that arithmetic would change: signed zeros, NaNs with a payload, denormals."""

    name = "patterns"
    words = torch.tensor([-(1 << 31), 0, 0x7FC12345, -0x3EDCBB, 1, -(1 << 31) + 1, 0x7F800000])

    def multiply(self, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
        first = a[:, 0].long()
        out.view(torch.int32).copy_(self.rows(first, out.shape[1]))

    @classmethod
    def rows(cls, first: torch.Tensor, n: int) -> torch.Tensor:
        """Row i begins with the pattern numbered ``first[i]``."""
        at = first.view(-1, 1) + torch.arange(n)
        return cls.words[at % len(cls.words)].to(torch.int32)


def _signed_zeros(rank: int, mode: str) -> list[list[int]]:
    """The product may give -0.0 or 0.0; each rank's own is what all others must have too."""
    one, b = torch.tensor([[-0.0], [1.0]]), torch.ones(2, 1)
    got = [gather(one.to(dtype), b.to(dtype), mode) for dtype in DTYPES]
    with gemmlink.GemmAllGather(5, 1, 8, epilogue=mode, backend=Patterns(), chunks=2) as op:
        moved = op(torch.arange(7.0).view(7, 1) + rank, torch.ones(5, 1)).view(torch.int32)
        want = torch.cat([Patterns.rows(torch.arange(7) + peer, 5) for peer in (0, 1)])
        assert torch.equal(moved, want), f"{mode}: bits were changed on the way"
    return [bits(each).flatten().tolist() for each in got]


@each_mode
def test_o_19_signed_zeros_travel_unchanged(ranks: Ranks, mode: str) -> None:
    """pytorch/pytorch#195851, numpy/numpy#21218: a sum that starts from +0 loses the sign."""
    one, other = ranks(2).run(_signed_zeros, mode)
    assert one == other


def _far_rows(rank: int) -> None:
    """Most of this memory is never touched, and so never taken."""
    base = torch.empty((1 << 31) + 4096, dtype=BF16)
    a = base.as_strided((2, 8), (1 << 31, 1))
    a.copy_(torch.arange(16).view(2, 8) + 16 * rank)
    out = base.as_strided((4, 8), (1 << 29, 1), 2048)
    want = torch.arange(32).view(4, 8).to(BF16)
    for mode in MODES:
        assert_equal(gemmlink.gemm_all_gather(a, eye(8), epilogue=mode), want, mode)
        got = gemmlink.gemm_all_gather(a, eye(8), epilogue=mode, out=out)
        assert_equal(got, want, f"{mode}, out with far rows")


def test_o_20_rows_further_apart_than_31_bits_can_say(ranks: Ranks) -> None:
    """ROCm/triton#944, triton-lang/triton#5022: offsets were multiplied in 32 bits."""
    ranks(2).run(_far_rows)


def test_o_22_a_plan_past_32_bits() -> None:
    """facebookresearch/maskrcnn-benchmark#796, pytorch/gloo#334: a size or offset overflowed."""
    problem = Problem(30_000, 8, 40_000, BF16, BF16, torch.device("cpu"))
    layout = WindowLayout(3, 1, inbox(3, problem.slot_bytes))
    starts = [layout.area(0, "inbox") + rank * problem.slot_bytes for rank in range(3)]
    offsets = [(start - layout.data) // BF16.itemsize for start in starts]
    assert offsets == [0, 1_200_000_000, 2_400_000_000]
    assert layout.nbytes - layout.data == 7_200_000_000
    huge = Problem(1, 1, 1 << 31, F32, F32, torch.device("cpu"))
    layout = WindowLayout(2, 64, inbox(2, huge.slot_bytes), buffers=2)
    assert layout.area(0, "inbox", 1) - layout.area(0, "inbox", 0) == 1 << 34
    chunks = [chunk_rows(1 << 31, 64, chunk) for chunk in range(64)]
    assert chunks[0][0] == 0
    assert chunks[-1][1] == 1 << 31
    assert all(0 <= first < last for first, last in chunks)


def _many_rows_of_nothing(rank: int, mode: str) -> None:
    rows = [1 << 31, 1]
    a, b = torch.empty(rows[rank], 0), torch.empty(0, 0)
    for known in (None, rows):
        got = gemmlink.gemm_all_gather(a, b, epilogue=mode, rows=known)
        assert got.shape == ((1 << 31) + 1, 0), f"{mode}: {got.shape}"


@each_mode
def test_o_22_sizes_past_32_bits_are_exchanged(ranks: Ranks, mode: str) -> None:
    """NVIDIA/TensorRT-LLM#12174, pytorch/pytorch#91030: and in the exchange of sizes.

    Rows without columns take no memory, so ranks can really have so many.
    """
    ranks(2).run(_many_rows_of_nothing, mode)


def _fp8(rank: int, mode: str, dtypes: list[tuple[torch.dtype, torch.dtype]], out: Any) -> str:
    dtype_a, dtype_b = dtypes[rank]
    ones = torch.full((4, 8), 0x38, dtype=torch.uint8)  # 1.0 in one flavour, 0.5 in the other
    a, b = ones.view(dtype_a), ones.view(dtype_b)
    if out is not None:
        a, b = ones.to(BF16), ones.to(BF16)
    error, _ = failing(lambda: gemmlink.gemm_all_gather(a, b, epilogue=mode, out_dtype=out))
    good_call(rank, 2, 1, mode)
    return f"{type(error).__name__} {error}"


@pytest.mark.parametrize(
    ("dtypes", "parts"),
    [
        ([(E4M3FN, E4M3FN)] * 2, ("float8_e4m3fn",)),
        ([(E4M3FNUZ, E4M3FNUZ)] * 2, ("float8_e4m3fnuz",)),
        ([(E4M3FN, E4M3FNUZ)] * 2, ("float8_e4m3fn",)),
        ([(E4M3FN, E4M3FN), (E4M3FNUZ, E4M3FNUZ)], ("float8_e4m3fn",)),
        ([(F32, F32), (E4M3FN, E4M3FN)], ("float32", "float8_e4m3fn")),
    ],
    ids=["fn", "fnuz", "a fn, b fnuz", "ranks differ", "one rank"],
)
def test_o_23_no_flavour_of_fp8_is_taken_for_another(
    ranks: Ranks, dtypes: list[tuple[torch.dtype, torch.dtype]], parts: tuple[str, ...]
) -> None:
    """vllm-project/vllm#7210, uccl-project/uccl#804, ROCm/aiter#3807: off by two, or garbage.

    None is served yet: each is refused by its name, on every rank.
    """
    for text in ranks(2).run(_fp8, "split-pull", dtypes, None):
        assert text.startswith("InvalidArgument"), text
        assert all(part in text for part in parts), text


def test_o_24_an_fp8_result_is_refused(ranks: Ranks) -> None:
    """pytorch/pytorch#152706, #126556: bytes of fp8 were summed. None is served yet."""
    for text in ranks(2).run(_fp8, "split-pull", [(BF16, BF16)] * 2, E4M3FN):
        assert text.startswith("InvalidArgument out_dtype must be float32 or the dtype"), text
        assert "float8_e4m3fn for bfloat16" in text
