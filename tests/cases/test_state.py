"""O-28 to O-36: what one call leaves for the next, in windows that are used again."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import gemmlink
from gemmlink.backends.eager import Eager
from gemmlink.transport.shm import SharedMemory, ShmSession, ShmWindow
from tests.cases.kit import (
    BF16,
    F32,
    HEARD_S,
    LIMIT,
    each_epilogue,
    each_mode,
    eye,
    failing,
    gather,
    good_call,
    tagged,
)
from tests.conftest import Ranks
from tests.refs import assert_equal


def _changing_shapes(rank: int, mode: str, calls: int) -> None:
    shared = random.Random(0)
    for call in range(calls):
        rows = [shared.choice((1, 3, 16, 17, 64, 128)) for _ in range(4)]
        if call % 2:
            rows = [rows[0]] * 4
        n = shared.choice((8, 24, 96))
        blocks = [tagged(call + 7 * peer, m, n) for peer, m in enumerate(rows)]
        got = gemmlink.gemm_all_gather(blocks[rank], eye(n), epilogue=mode)
        assert_equal(got, torch.cat(blocks), f"{mode}, call {call}: rows {rows}, N {n}")


@each_epilogue
def test_o_28_shapes_change_from_call_to_call(ranks: Ranks, mode: str) -> None:
    """vllm-project/vllm#25892, ROCm/aiter#1191, sgl-project/sglang#11609: flags met data; hang."""
    ranks(4).run(_changing_shapes, mode, 300, timeout_s=120)


def _more_chunks(rank: int, mode: str) -> None:
    blocks = [tagged(peer, 128, 128) for peer in range(2)]
    want = torch.cat(blocks)
    for chunks in ("2", "8", "64", "2"):  # the function form: windows of the size that each needs
        with mock.patch.dict(os.environ, GEMMLINK_CHUNKS=chunks):
            assert_equal(gather(blocks[rank], eye(128), mode), want, f"{mode}, {chunks} chunks")
    ops = [
        gemmlink.GemmAllGather(128, 128, 128, BF16, epilogue=mode, chunks=chunks).prepare()
        for chunks in (2, 64)
    ]
    for call in range(6):
        assert_equal(ops[call % 2](blocks[rank], eye(128)), want, f"{mode}, call {call}")
    for op in ops:
        op.close()


@each_mode
def test_o_29_more_chunks_than_the_call_before(ranks: Ranks, mode: str) -> None:
    """ROCm/iris#463: flags for few large tiles, then more tiles: neighbours were written over.

    Here each number of chunks has a window of its own; that words and slots lie apart in it is
    tests/none/test_window.py.
    """
    ranks(2).run(_more_chunks, mode)


def _too_large(rank: int, mode: str) -> str:
    n, rows = 4096, 256
    blocks = [tagged(peer, rows, 8) for peer in range(2)]
    b = torch.zeros(n, 8, dtype=BF16)
    b[:8] = eye(8)
    want = torch.zeros(2 * rows, n, dtype=BF16)
    want[:, :8] = torch.cat(blocks)
    few = torch.cat([block[:4] for block in blocks]) @ b.T
    assert_equal(gather(blocks[rank][:4], b, mode), few, f"{mode}, a small window")
    assert_equal(gather(blocks[rank], b, mode), want, f"{mode}, grown")
    assert_equal(gather(blocks[rank][:4], b, mode), few, f"{mode}, small again")
    with gemmlink.GemmAllGather(n, 8, 64, BF16, epilogue=mode) as op:
        error, seconds = failing(lambda: op(blocks[rank], b))
        assert isinstance(error, gemmlink.InvalidArgument), repr(error)
        assert seconds < HEARD_S
        assert_equal(op(blocks[rank][:4], b), few, f"{mode}, after a refusal")
        return str(error)


@each_epilogue
def test_o_30_more_rows_than_a_window_holds(ranks: Ranks, mode: str) -> None:
    """sgl-project/sglang#24548, vllm-project/vllm#55344: a copy failed with sizes of its own.

    The function form makes a larger window; a prepared operation says what it has room for.
    """
    for text in ranks(2).run(_too_large, mode, env=LIMIT):
        assert "max_m=64 on every rank; got M=256 on some rank" in text


def _retry(rank: int, mode: str, function: bool) -> None:
    op = gemmlink.GemmAllGather(8, 8, 4, epilogue=mode).prepare()
    call: Callable[..., torch.Tensor] = (
        (lambda a, b: gemmlink.gemm_all_gather(a, b, epilogue=mode)) if function else op
    )
    b = eye(8, F32)
    for number in (1, 3):
        blocks = [tagged(number + 10 * peer, 4, 8, F32) for peer in range(2)]
        assert_equal(call(blocks[rank], b), torch.cat(blocks), f"{mode}, call {number}")
        bad = blocks[rank] if rank == 0 else torch.ones(4, 9)
        error, seconds = failing(lambda bad=bad: call(bad, b))  # type: ignore[misc]
        assert isinstance(error, gemmlink.InvalidArgument), repr(error)
        assert "(4, 9)" in str(error), str(error)
        assert seconds < HEARD_S, f"heard after {seconds} s"
    good_call(rank, 2, 50, mode)
    op.close()


@pytest.mark.parametrize("function", [False, True], ids=["object", "function"])
@each_mode
def test_o_31_a_call_after_one_that_a_rank_refused(ranks: Ranks, mode: str, function: bool) -> None:
    """MoonshotAI/checkpoint-engine#106, ray-project/ray#62651: what the first use left let the
    second pass at once, with old numbers."""
    ranks(2).run(_retry, mode, function, env=LIMIT)


def _thousand(rank: int, mode: str, calls: int) -> None:
    clock = random.Random(rank)
    reused = torch.empty(3 * 2, 8, dtype=BF16)
    kept = []
    with gemmlink.GemmAllGather(8, 8, 2, BF16, epilogue=mode) as op:
        for call in range(calls):
            time.sleep(clock.random() * 0.002)
            blocks = [tagged(call + peer, 2, 8) for peer in range(3)]
            if call % 4 == 0:
                op(blocks[rank], eye(8), out=reused)
                assert_equal(reused, torch.cat(blocks), f"{mode}, out in call {call}")
            else:
                kept.append((call, op(blocks[rank], eye(8))))
    for call, got in kept:
        want = torch.cat([tagged(call + peer, 2, 8) for peer in range(3)])
        assert_equal(got, want, f"{mode}, kept from call {call}")


@each_epilogue
def test_o_32_a_thousand_calls_at_uneven_speed(ranks: Ranks, mode: str) -> None:
    """ROCm/mori#93, #80, #342: a fast rank wrote over what a slow one was still copying."""
    ranks(3).run(_thousand, mode, 1000, timeout_s=60)


class Nested(Eager):
    """A backend that makes another call in the middle of the one that it serves."""

    name = "nested"

    def __init__(self, inner: Callable[[], Any]) -> None:
        self.inner = inner
        self.found: list[torch.Tensor | gemmlink.GemmlinkError] = []

    def last(self) -> torch.Tensor:
        """What the last call inside returned."""
        assert isinstance(self.found[-1], torch.Tensor), repr(self.found[-1])
        return self.found[-1]

    def multiply(self, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
        try:
            self.found.append(self.inner())
        except gemmlink.GemmlinkError as error:
            self.found.append(error)
        super().multiply(a, b, out)


def _two_in_flight(rank: int, mode: str) -> None:
    blocks = [tagged(peer, 4, 8) for peer in range(2)]
    others = [tagged(9 + peer, 4, 8) for peer in range(2)]
    one, two = torch.cat(blocks), torch.cat(others)
    with gemmlink.GemmAllGather(8, 8, 4, BF16, epilogue=mode) as inner:
        backend = Nested(lambda: inner(others[rank], eye(8)))
        with gemmlink.GemmAllGather(8, 8, 4, BF16, epilogue=mode, backend=backend) as op:
            for call in range(3):
                assert_equal(op(blocks[rank], eye(8)), one, f"{mode}, around, call {call}")
                assert_equal(backend.last(), two, f"{mode}, inside, call {call}")
            backend.inner = lambda: op(others[rank], eye(8))
            assert_equal(op(blocks[rank], eye(8)), one, f"{mode}, around itself")
            assert isinstance(backend.found[-1], gemmlink.Overlap), repr(backend.found[-1])
            backend.inner = lambda: gemmlink.gemm_all_gather(others[rank], eye(8), epilogue=mode)
            assert_equal(op(blocks[rank], eye(8)), one, f"{mode}, around the function form")
            assert_equal(backend.last(), two, f"{mode}, the function form inside")
        backend.inner = lambda: gemmlink.gemm_all_gather(others[rank], eye(8), epilogue=mode)
        got = gemmlink.gemm_all_gather(blocks[rank], eye(8), epilogue=mode, backend=backend)
        assert_equal(got, one, f"{mode}, function form around")
        assert isinstance(backend.found[-1], gemmlink.Overlap), repr(backend.found[-1])
    good_call(rank, 2, 30, mode)


@each_mode
def test_o_33_a_call_begun_in_the_middle_of_another(ranks: Ranks, mode: str) -> None:
    """deepseek-ai/DeepEP#513: each call cleared what the next was to wait for.

    Two operations are right; one operation twice, or the function form twice, is an ``Overlap``.
    """
    ranks(2).run(_two_in_flight, mode, env=LIMIT)


def _hidden_collective(rank: int) -> str:
    op = gemmlink.GemmAllGather(8, 8, 4, epilogue="split-pull", timeout_s=0.2)
    if rank == 0:
        dist.barrier()
    error, seconds = failing(op.prepare)
    if rank == 1:
        dist.barrier()
    assert seconds < 20
    op.close()
    good_call(rank, 2, 1, "split-pull")
    with gemmlink.GemmAllGather(8, 8, 4, BF16, epilogue="split-pull") as again:
        blocks = [tagged(peer, 4, 8) for peer in range(2)]
        assert_equal(again(blocks[rank], eye(8)), torch.cat(blocks), "prepared in order")
    return f"{type(error).__name__} {error}"


def test_o_34_ranks_prepare_in_another_order_than_their_barrier(ranks: Ranks) -> None:
    """pytorch/pytorch#195501: set-up hid in an allocation, and the wrong call was blamed.

    Preparing is documented as collective; out of order it ends in time and says what was awaited.
    """
    for rank, text in enumerate(ranks(2).run(_hidden_collective)):
        assert text.startswith("PeerTimeout every rank must come to all_gather"), text
        assert f"nothing from ranks [{1 - rank}]" in text


def _unequal_windows(rank: int, mode: str, limits: Sequence[int]) -> str:
    with gemmlink.GemmAllGather(8, 8, limits[rank], BF16, epilogue=mode) as op:
        assert op.capacity == max(limits)
        for m in (min(limits), max(limits)):
            blocks = [tagged(peer, m, 8) for peer in range(3)]
            assert_equal(op(blocks[rank], eye(8)), torch.cat(blocks), f"{mode}, M={m}")
        error, _ = failing(lambda: op(tagged(rank, max(limits) + (rank == 1), 8), eye(8)))
        assert isinstance(error, gemmlink.InvalidArgument), repr(error)
        assert_equal(op(blocks[rank], eye(8)), torch.cat(blocks), f"{mode}, after a refusal")
        return str(error)


@pytest.mark.parametrize("limits", [(64, 128, 192), (192, 128, 64), (64, 65, 64)], ids=str)
@each_epilogue
def test_o_35_windows_of_unequal_size(ranks: Ranks, mode: str, limits: Sequence[int]) -> None:
    """ROCm/rocm-systems#10968, NVIDIA/nccl#1828: addresses of peers were computed from the own
    size. Here the largest is agreed on, and one row more is refused everywhere."""
    for text in ranks(3).run(_unequal_windows, mode, limits, env=LIMIT):
        assert f"max_m={max(limits)} on every rank; got M={max(limits) + 1}" in text


class Hollow(SharedMemory):
    """A transport that reports success and has no address of rank 0 for rank 1."""

    name = "hollow"

    def __init__(self, nothing: int | None) -> None:
        self.nothing = nothing

    def open(self, group: Any, *, key: str, timeout_s: float) -> ShmSession:
        session = super().open(group, key=key, timeout_s=timeout_s)
        real = session.window

        def window(nbytes: int, common_from: int | None = None) -> ShmWindow:
            made = real(nbytes, common_from)
            if group.rank == 1:
                made.addresses = [self.nothing, *made.addresses[1:]]
            return made

        session.window = window  # type: ignore[method-assign]
        return session


def _hollow(rank: int, nothing: int | None) -> str:
    op = gemmlink.GemmAllGather(8, 8, 4, transport=Hollow(nothing), epilogue="split-pull")
    error, _ = failing(op.prepare)
    good_call(rank, 2, 1, "split-pull")
    return f"{type(error).__name__} {error}"


@pytest.mark.parametrize("nothing", [None, 0])
def test_o_36_a_registration_that_succeeds_with_nothing(ranks: Ranks, nothing: int | None) -> None:
    """NVIDIA/nccl#1963, meta-pytorch/torchcomms#4036, ROCm/rocm-systems#7807: a null window, and a
    crash much later."""
    for text in ranks(2).run(_hollow, nothing):
        assert text.startswith("Unavailable"), text
        assert "transport 'hollow' must give an address for every peer's window" in text
        assert f"{nothing!r} for rank 0" in text
