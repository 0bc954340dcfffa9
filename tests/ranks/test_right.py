"""Every mode gives the exact answer: worlds, dtypes, rows, strides, groups, many calls."""

from __future__ import annotations

import gc
import hashlib
import os
import random
import time

import pytest
import torch
import torch.distributed as dist

import gemmlink
from tests.conftest import Ranks
from tests.refs import (
    FEW_MODES,
    MODES,
    a_of,
    assert_equal,
    b_of,
    gathered,
    product,
    relative_error,
    whole,
)

ANY_MODE = (*MODES, "auto")
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
#: Pairs of input and output dtype that every mode serves.
PAIRS = ((F32, F32), (BF16, BF16), (BF16, F32), (F16, F16), (F16, F32))
N, K = 35, 33

each_mode = pytest.mark.parametrize("mode", ANY_MODE)


def _each_dtype_and_rows(rank: int, world: int, mode: str) -> None:
    ragged = [5, 0, 7, 2, 13][:world]
    call = 0
    for dtype, out_dtype in PAIRS:
        for rows, known in (
            ([0] * world, False),
            ([1] * world, True),
            ([13] * world, False),
            (ragged, False),
            (ragged, True),
        ):
            call += 1
            b = b_of(call, N, K, dtype)
            got = gemmlink.gemm_all_gather(
                a_of(rank, call, rows[rank], K, dtype),
                b,
                out_dtype=out_dtype,
                epilogue=mode,
                rows=rows if known else None,
            )
            what = f"{mode} {dtype}->{out_dtype} rows {rows} known {known}"
            assert_equal(got, gathered(call, rows, b, out_dtype), what)


@pytest.mark.parametrize(
    ("world", "mode"),
    [
        *((world, mode) for world in (2, 3) for mode in ANY_MODE),
        *((world, mode) for world in (1, 5) for mode in (*FEW_MODES, "auto")),
        (4, "auto"),
    ],
)
def test_exact_for_every_world_dtype_and_number_of_rows(
    ranks: Ranks, world: int, mode: str
) -> None:
    ranks(world).run(_each_dtype_and_rows, world, mode, timeout_s=60)


def _sizes(rank: int, mode: str) -> None:
    for call, (m, n, k) in enumerate(
        [(33, 65, 17), (64, 63, 32), (65, 64, 31), (1, 127, 32), (127, 1, 32), (3, 5, 1), (4, 0, 8)]
    ):
        b = b_of(call, n, k)
        got = gemmlink.gemm_all_gather(a_of(rank, call, m, k), b, epilogue=mode)
        assert_equal(got, gathered(call, [m, m], b), f"{mode} {(m, n, k)}")


@each_mode
def test_exact_for_odd_sizes(ranks: Ranks, mode: str) -> None:
    ranks(2).run(_sizes, mode)


def _no_inner_dimension(rank: int, mode: str) -> None:
    for dtype, out_dtype in PAIRS:
        for poison in (float("nan"), 7.0):
            out = torch.full((8, 6), poison, dtype=out_dtype)
            a, b = torch.empty(4, 0, dtype=dtype), torch.empty(6, 0, dtype=dtype)
            gemmlink.gemm_all_gather(a, b, out=out, out_dtype=out_dtype, epilogue=mode)
            assert_equal(out, torch.zeros(8, 6, dtype=out_dtype), f"{mode} K=0")
            assert not out.signbit().any(), f"{mode}: K=0 gives -0.0"


@each_mode
def test_a_product_over_nothing_is_positive_zero(ranks: Ranks, mode: str) -> None:
    ranks(2).run(_no_inner_dimension, mode)


def _long_sums(rank: int, mode: str) -> float:
    def rows_of(seed: int, rows: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(rows, 7168, generator=generator).to(BF16)

    b = rows_of(100, 256)
    got = gemmlink.gemm_all_gather(rows_of(rank, 16), b, out_dtype=F32, epilogue=mode)
    want = torch.cat([rows_of(0, 16), rows_of(1, 16)]).double() @ b.double().T
    return relative_error(got, want)


@each_mode
def test_long_sums_of_bfloat16_keep_float32_accuracy(ranks: Ranks, mode: str) -> None:
    assert max(ranks(2).run(_long_sums, mode)) < 1e-5


def _same_bits(rank: int, mode: str) -> str:
    generator = torch.Generator().manual_seed(rank)
    a, b = torch.randn(33, 65, generator=generator), torch.ones(17, 65) / 3
    got = gemmlink.gemm_all_gather(a, b, epilogue=mode)
    return hashlib.sha256(got.numpy().tobytes()).hexdigest()


@each_mode
def test_all_ranks_hold_the_same_bits(ranks: Ranks, mode: str) -> None:
    assert len(set(ranks(3).run(_same_bits, mode))) == 1


def _one_op_many_calls(rank: int, mode: str) -> None:
    kept = []
    with gemmlink.GemmAllGather(N, K, 13, epilogue=mode) as op:
        for call, rows in enumerate([[13, 13], [0, 4], [5, 0], [0, 0], [1, 13], [13, 1]]):
            b = b_of(call, N, K)
            out = torch.full((sum(rows), N), float("nan")) if call % 2 else None
            got = op(a_of(rank, call, rows[rank], K), b, out=out)
            assert out is None or got is out, "a call returns the tensor passed as out"
            kept.append((call, rows, b, got))
    for call, rows, b, got in kept:  # after close: results are the caller's own memory
        assert_equal(got, gathered(call, rows, b), f"{mode} call {call}")


@each_mode
def test_inputs_and_rows_may_change_in_every_call(ranks: Ranks, mode: str) -> None:
    ranks(2).run(_one_op_many_calls, mode)


def _strided_out(rank: int, mode: str) -> None:
    rows = [5, 3]
    b = b_of(0, N, K)
    want = gathered(0, rows, b)
    sliced = torch.full((2 * 8 + 1, 2 * N + 3), float("nan"))
    turned = torch.full((N + 2, 8 + 4), float("nan"))
    for base, out in ((sliced, sliced[1::2, 2 : 2 + 2 * N : 2]), (turned, turned[1:-1, 2:-2].T)):
        gemmlink.gemm_all_gather(a_of(rank, 0, rows[rank], K), b, out=out, epilogue=mode)
        assert_equal(out, want, f"{mode} strides {out.stride()}")
        assert int(base.isnan().sum()) == base.numel() - out.numel(), "wrote beside out"


@each_mode
def test_a_strided_out_is_filled_and_nothing_beside_it(ranks: Ranks, mode: str) -> None:
    ranks(2).run(_strided_out, mode)


def _strided_inputs(rank: int, mode: str) -> None:
    m, want_b = 6, b_of(0, N, K)
    want_a = a_of(rank, 0, m, K)
    hole_a = torch.full((2 * m, 3 * K), float("nan"))
    hole_b = torch.full((K + 2, N + 2), float("nan"))
    a, b = hole_a[::2, 1 : 1 + 2 * K : 2], hole_b[1:-1, 1:-1].T
    a.copy_(want_a)
    b.copy_(want_b)
    before = hole_a.clone(), hole_b.clone()
    got = gemmlink.gemm_all_gather(a, b, epilogue=mode)
    assert_equal(got, gathered(0, [m, m], want_b), f"{mode} with strided inputs")
    for base, copy in zip((hole_a, hole_b), before, strict=True):
        assert torch.equal(base.nan_to_num(9.0), copy.nan_to_num(9.0)), "an input was changed"
    row = want_a[:1].expand(4, K)
    got = gemmlink.gemm_all_gather(row, want_b, epilogue=mode)
    want = torch.cat([product(a_of(r, 0, m, K)[:1].expand(4, K), want_b, F32) for r in (0, 1)])
    assert_equal(got, want, f"{mode} with an expanded row")


@each_mode
def test_strided_inputs_are_read_right_and_left_alone(ranks: Ranks, mode: str) -> None:
    """Neighbours of the inputs are NaN, so that a read past an edge shows."""
    ranks(2).run(_strided_inputs, mode)


def _uneven_speed(rank: int, mode: str, calls: int) -> None:
    clock = random.Random(rank)
    b = b_of(0, N, K)
    reused = torch.empty(3 * 4, N)
    kept = []
    for call in range(calls):
        time.sleep(clock.random() * 0.002)
        a = a_of(rank, call, 4, K)
        kept.append(gemmlink.gemm_all_gather(a, b, epilogue=mode))
        time.sleep(clock.random() * 0.002)
        gemmlink.gemm_all_gather(-a, b, epilogue=mode, out=reused)
        assert_equal(reused, -gathered(call, [4] * 3, b) + 0.0, f"{mode} reused out, call {call}")
    for call, got in enumerate(kept):
        assert_equal(got, gathered(call, [4] * 3, b), f"{mode} kept result, call {call}")


@pytest.mark.parametrize("mode", MODES)
def test_two_hundred_calls_at_uneven_speed(ranks: Ranks, mode: str) -> None:
    """A fast rank that overwrites what a slow one still reads would show here."""
    ranks(3).run(_uneven_speed, mode, 100, timeout_s=60)


def _subgroup(rank: int, mode: str) -> None:
    group = dist.new_group([1, 2])
    if rank > 0:
        for call, rows in enumerate([[2, 3], [0, 1], [4, 4]]):
            b = b_of(call, N, K)
            a = a_of(rank - 1, call, rows[rank - 1], K)
            got = gemmlink.gemm_all_gather(a, b, group=group, epilogue=mode)
            assert_equal(got, gathered(call, rows, b), f"{mode} in a subgroup")
        gemmlink.clear_cache(group)
    dist.barrier()
    dist.destroy_process_group(group)


@each_mode
def test_a_subgroup_without_rank_0_needs_nobody_else(ranks: Ranks, mode: str) -> None:
    ranks(3).run(_subgroup, mode)


def _unsorted(rank: int, mode: str) -> None:
    group = dist.new_group([2, 0, 1])
    order = dist.get_process_group_ranks(group)
    b = b_of(0, N, K)
    got = gemmlink.gemm_all_gather(a_of(rank, 0, 2 + rank, K), b, group=group, epilogue=mode)
    want = torch.cat([product(a_of(r, 0, 2 + r, K), b, F32) for r in order])
    assert_equal(got, want, f"{mode} over ranks {order}")
    assert dist.get_group_rank(group, rank) == order.index(rank)
    dist.barrier()
    dist.destroy_process_group(group)


@each_mode
def test_blocks_come_in_group_rank_order(ranks: Ranks, mode: str) -> None:
    ranks(3).run(_unsorted, mode)


def _overlapping(rank: int, mode: str) -> None:
    clock = random.Random(rank)
    groups = [(members, dist.new_group(members)) for members in ([0, 1], [1, 2], [0, 1, 2])]
    for call in range(60):
        members, group = groups[call % 3]
        if rank in members:
            time.sleep(clock.random() * 0.001)
            b = b_of(call, N, K)
            mine = members.index(rank)
            got = gemmlink.gemm_all_gather(a_of(mine, call, 3, K), b, group=group, epilogue=mode)
            assert_equal(got, gathered(call, [3] * len(members), b), f"{mode} call {call}")
    dist.barrier()
    for _, group in reversed(groups):
        if group is not dist.GroupMember.NON_GROUP_MEMBER:
            dist.destroy_process_group(group)


@pytest.mark.parametrize("mode", MODES)
def test_overlapping_groups_do_not_disturb_each_other(ranks: Ranks, mode: str) -> None:
    ranks(3).run(_overlapping, mode)


def _interleaved(rank: int, modes: tuple[str, str]) -> None:
    with (
        gemmlink.GemmAllGather(N, K, 4, epilogue=modes[0]) as one,
        gemmlink.GemmAllGather(N + 2, K, 9, dtype=BF16, epilogue=modes[1]) as two,
    ):
        for call in range(30):
            b, c = b_of(call, N, K), b_of(1000 + call, N + 2, K, BF16)
            first = one(a_of(rank, call, 4, K), b)
            second = two(a_of(rank, 1000 + call, 9, K, BF16), c)
            assert_equal(first, gathered(call, [4, 4], b), f"first op, call {call}")
            assert_equal(second, gathered(1000 + call, [9, 9], c), f"second op, call {call}")


@pytest.mark.parametrize(
    ("first", "second"),
    [(first, second) for first in MODES for second in (first, "fused-push", "collective")],
)
def test_two_operations_may_take_turns(ranks: Ranks, first: str, second: str) -> None:
    ranks(2).run(_interleaved, (first, second))


def _growing(rank: int, mode: str) -> None:
    for call, m in enumerate([1, 5, 64, 700, 3, 0, 701, 2]):
        b = b_of(call, N, K, BF16)
        rows = [m, m // 2]
        got = gemmlink.gemm_all_gather(a_of(rank, call, rows[rank], K, BF16), b, epilogue=mode)
        assert_equal(got, gathered(call, rows, b), f"{mode} M={m}")


@each_mode
def test_rows_may_grow_and_shrink_between_calls(ranks: Ranks, mode: str) -> None:
    """Only rank 0 outgrows the window; all ranks must agree to enlarge it."""
    ranks(2).run(_growing, mode)


def _own_limits(rank: int, mode: str) -> int:
    with gemmlink.GemmAllGather(N, K, 3 + 4 * rank, epilogue=mode) as op:
        b = b_of(0, N, K)
        got = op(a_of(rank, 0, 7, K), b)
        assert_equal(got, gathered(0, [7, 7], b), f"{mode} M above the own max_m")
        return op.capacity


@each_mode
def test_the_largest_max_m_of_all_ranks_counts(ranks: Ranks, mode: str) -> None:
    assert ranks(2).run(_own_limits, mode) == [7, 7]


def _chunks(rank: int, mode: str) -> None:
    for chunks in (1, 2, 3, 7, 13, 64):
        with gemmlink.GemmAllGather(N, K, 13, epilogue=mode, chunks=chunks) as op:
            assert op.launch.parts.chunks == chunks, f"{op.launch.parts.chunks} chunks"
            for call, rows in enumerate([[13, 12], [0, 13], [1, 2]]):
                b = b_of(call, N, K)
                got = op(a_of(rank, call, rows[rank], K), b)
                assert_equal(got, gathered(call, rows, b), f"{mode} chunks {chunks} rows {rows}")


@pytest.mark.parametrize("mode", MODES)
def test_any_number_of_chunks_even_more_than_rows(ranks: Ranks, mode: str) -> None:
    ranks(2).run(_chunks, mode)


@each_mode
def test_debug_checks_change_no_result(ranks: Ranks, mode: str) -> None:
    ranks(2).run(_growing, mode, env={"GEMMLINK_DEBUG": "1"})


def _under_inference(rank: int, mode: str) -> None:
    b = b_of(0, N, K)
    want = gathered(0, [3, 3], b)
    with torch.inference_mode():
        assert_equal(gemmlink.gemm_all_gather(a_of(rank, 0, 3, K), b, epilogue=mode), want, "first")
    with torch.no_grad():
        leaf = a_of(rank, 0, 3, K).requires_grad_()
        assert_equal(gemmlink.gemm_all_gather(leaf, b, epilogue=mode), want, "no_grad")
    last = gemmlink.gemm_all_gather(a_of(rank, 0, 3, K), b, epilogue=mode)
    assert_equal(last.add_(1), want + 1, "an ordinary tensor")


@each_mode
def test_prepared_under_inference_mode_it_works_outside_too(ranks: Ranks, mode: str) -> None:
    ranks(2).run(_under_inference, mode)


def _open_files() -> int:
    gc.collect()  # of what tests before this one have left
    return len(os.listdir("/proc/self/fd"))


def _descriptors(rank: int, mode: str) -> tuple[list[int], list[int]]:
    def use(count: int) -> int:
        for call in range(count):
            gemmlink.gemm_all_gather(whole(call, 3, K), b_of(0, N, K), epilogue=mode)
        return _open_files()

    def reopen(count: int) -> int:
        for _ in range(count):
            gemmlink.clear_cache()
            use(1)
        return _open_files()

    return [use(5), use(100)], [reopen(3), reopen(12)]


@pytest.mark.parametrize("mode", MODES)
def test_neither_calls_nor_set_ups_use_up_file_descriptors(ranks: Ranks, mode: str) -> None:
    for calls, set_ups in ranks(2).run(_descriptors, mode):
        assert calls[0] >= calls[1], f"open files grew from {calls[0]} to {calls[1]} in 100 calls"
        # Of a context that has gone, gloo may keep the listening socket until the next comes: seen
        # to be there or not, and never two, over 60 set-ups.
        spare = 1 if mode == "collective" else 0
        assert set_ups[1] - set_ups[0] <= spare, f"open files grew {set_ups} in 12 set-ups"
