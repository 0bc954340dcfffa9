"""Results copied out or seen in the window, slots in turn, sends completed: exact in every mode."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import gemmlink
from gemmlink.core.interpret import CallState, Step
from gemmlink.spec.schedule import Deliver, Load
from gemmlink.transport.cpu_lanes import CpuLane
from tests.conftest import Ranks
from tests.refs import WINDOW_MODES, a_of, assert_equal, b_of, gathered
from tests.result_cases import Case, K, M, N

NAN = float("nan")

each_mode = pytest.mark.parametrize("mode", WINDOW_MODES)


def _cases(mode: str) -> Iterator[Case]:
    lanes = (1, 2) if mode.endswith("lanes") else (1,)
    for case in product(("copy", "view"), (1, 2), ("receive", "receive_and_send"), (1, 3), lanes):
        yield Case(mode, *case)


def _view(mode: str, **rest: Any) -> gemmlink.GemmAllGather:
    return gemmlink.GemmAllGather(N, K, M, epilogue=mode, result="view", **rest)


def _failing(bad: Callable[[], Any]) -> Exception:
    try:
        value = bad()
    except Exception as error:
        return error
    raise AssertionError(f"returned {value!r} where an error was due")


def _every_case(rank: int, mode: str) -> int:
    world, cases = dist.get_world_size(), list(_cases(mode))
    ragged = [3, 0, 5][:world]
    for case in cases:
        kept = []
        view = case.result == "view"
        with case.op() as op:
            for call, (rows, known) in enumerate(
                [
                    ([M] * world, False),
                    (ragged, True),
                    ([2] * world, False),
                    ([0] * world, False),
                    (ragged[::-1], view),
                    ([M - 1] * world, True),
                ]
            ):
                b = b_of(call, N, K)
                a = a_of(rank, call, rows[rank], K)
                got = op(a, b, rows=rows if known else None)
                assert_equal(got, gathered(call, rows, b), f"{case}, rows {rows}, call {call}")
                kept.append((call, rows, b, got))
        for call, rows, b, got in kept[-1:] if view else kept:
            assert_equal(got, gathered(call, rows, b), f"{case}, call {call} after close")
    return len(cases)


@pytest.mark.parametrize("world", [1, 2, 3])
@each_mode
def test_exact_in_every_case(ranks: Ranks, mode: str, world: int) -> None:
    """Ragged rows, given or not; no rows; fewer rows than the window has room for."""
    count = 32 if mode.endswith("lanes") else 16
    assert ranks(world).run(_every_case, mode, timeout_s=90) == [count] * world


def _large_and_small(rank: int, mode: str) -> None:
    """Blocks of a small result are copied together, those of a large one as they come."""
    world = dist.get_world_size()
    for n in (64, 4096):
        with gemmlink.GemmAllGather(n, K, M, epilogue=mode) as op:
            for call, rows in enumerate(([M] * world, [M, 0], [1] * world, [0] * world)):
                b = b_of(call, n, K)
                around = torch.full((sum(rows) + 2, n + 3), NAN)
                out = around[1:-1, 2 : 2 + n]
                got = op(a_of(rank, call, rows[rank], K), b, out=out)
                assert got is out
                assert_equal(out, gathered(call, rows, b), f"N {n}, rows {rows}")
                beside = around.numel() - out.numel()
                assert int(around.isnan().sum()) == beside, "wrote beside the result"
                fresh = op(a_of(rank, call, rows[rank], K), b)
                assert_equal(fresh, gathered(call, rows, b), f"N {n}, rows {rows}, no out")


@pytest.mark.parametrize("mode", ["split-push", "split-pull", "split-lanes"])
def test_blocks_come_to_their_places_in_a_strided_out(ranks: Ranks, mode: str) -> None:
    ranks(2).run(_large_and_small, mode, timeout_s=60)


# Views.


def _places(rank: int, mode: str, buffers: int) -> None:
    with _view(mode, buffers=buffers) as op, _view(mode, buffers=buffers) as other:
        window = op.launch.window
        assert window is not None, "a view without a window"
        own = window.tensor(rank)
        for call in (1, 2, 3, 4):
            b = b_of(call, N, K)
            got = op(a_of(rank, call, M, K), b)
            assert_equal(got, gathered(call, [M] * 3, b), f"call {call}")
            assert got.data_ptr() == own.data_ptr() + op.launch.layout.area(0, "inbox", call)
            assert got.untyped_storage().data_ptr() == own.untyped_storage().data_ptr()
            assert got.is_contiguous()
            away = other(a_of(rank, call, M, K), b)
            assert away.untyped_storage().data_ptr() != own.untyped_storage().data_ptr()


@pytest.mark.parametrize("buffers", [1, 2])
@each_mode
def test_a_view_lies_in_the_own_window(ranks: Ranks, mode: str, buffers: int) -> None:
    ranks(3).run(_places, mode, buffers)


def _copies(rank: int, mode: str) -> None:
    with gemmlink.GemmAllGather(N, K, M, epilogue=mode, buffers=2) as op:
        window = op.launch.window
        assert window is not None, "a mode without a window"
        stores = {
            window.tensor(peer).untyped_storage().data_ptr()
            for peer in range(len(window.addresses))
        }
        got = op(a_of(rank, 0, M, K), b_of(0, N, K))
        assert got.untyped_storage().data_ptr() not in stores


@each_mode
def test_a_copy_lies_in_nobodys_window(ranks: Ranks, mode: str) -> None:
    ranks(2).run(_copies, mode)


def _looks_late(rank: int, mode: str, buffers: int) -> None:
    """Each rank looks at its view for the last time right before its next call."""
    clock = random.Random(rank)
    with _view(mode, buffers=buffers, chunks=2) as op:
        b = b_of(0, N, K)
        for call in range(80):
            got = op(a_of(rank, call, M, K), b)
            if clock.random() < 0.4:
                time.sleep(clock.random() * 0.006)
            assert_equal(got, gathered(call, [M] * 3, b), f"call {call} before the next")


@pytest.mark.parametrize("buffers", [1, 2])
@each_mode
def test_a_view_is_valid_until_the_next_call(ranks: Ranks, mode: str, buffers: int) -> None:
    """However far ahead the peers would like to be."""
    ranks(3).run(_looks_late, mode, buffers)


def _writes(rank: int, mode: str, buffers: int) -> list[str]:
    seen = []
    with _view(mode, buffers=buffers) as op:
        for call in range(0, 12, 3):
            b = b_of(call, N, K)
            got = op(a_of(rank, call, M, K), b)
            assert_equal(got, gathered(call, [M] * 3, b), f"before call {call} is written to")
            dist.barrier()  # where slots are common, the others look at the same memory
            if rank == 1:
                got[0].zero_()
            error = _failing(lambda: op(a_of(rank, call, M, K), b))  # noqa: B023
            assert isinstance(error, gemmlink.InvalidArgument), repr(error)
            seen.append(str(error))
            for later in (call + 1, call + 2):
                got = op(a_of(rank, later, M, K), b)
                assert_equal(got, gathered(later, [M] * 3, b), f"call {later}, after a refusal")
    return seen


@pytest.mark.parametrize("buffers", [1, 2])
@each_mode
def test_writing_to_a_view_is_found_out_in_the_next_call(
    ranks: Ranks, mode: str, buffers: int
) -> None:
    for rank, texts in enumerate(ranks(3).run(_writes, mode, buffers)):
        for text in texts:
            assert "a view of the window is for reading" in text
            assert "the result of call" in text
            assert ("rank 1 refused" in text) == (rank != 1), text


def _refused(rank: int, mode: str, buffers: int) -> list[str]:
    """Rank 1 refuses every third call, in which its peers have written into their windows."""
    seen = []
    with _view(mode, buffers=buffers) as op:
        for call in range(9):
            b = b_of(call, N, K)
            a: Any = a_of(rank, call, M, K)
            if call % 3 == 1:
                bad: Any = None if rank == 1 else a
                seen.append(str(_failing(lambda: op(bad, b))))  # noqa: B023
            else:
                assert_equal(op(a, b), gathered(call, [M] * 2, b), f"call {call}")
    return seen


@pytest.mark.parametrize("buffers", [1, 2])
@each_mode
def test_what_a_refused_call_wrote_is_not_taken_for_the_users(
    ranks: Ranks, mode: str, buffers: int
) -> None:
    for texts in ranks(2).run(_refused, mode, buffers):
        assert all("got NoneType" in text for text in texts), texts


def _unequal(rank: int, mode: str, rows: list[int]) -> str:
    with _view(mode) as op:
        b = b_of(0, N, K)
        error = _failing(lambda: op(a_of(rank, 0, rows[rank], K), b))
        for call in (1, 2):
            got = op(a_of(rank, call, rows[rank], K), b, rows=rows)
            assert_equal(got, gathered(call, rows, b), f"call {call}, after a refusal")
    return f"{type(error).__name__} {error}"


@pytest.mark.parametrize("rows", [[4, 4, 5], [5, 4, 4], [4, 5, 4], [0, 0, 1], [1, 2, 3]], ids=str)
@each_mode
def test_a_view_of_unequal_blocks_needs_to_know_them(
    ranks: Ranks, mode: str, rows: list[int]
) -> None:
    """Blocks lie behind each other, so a rank must know how long the ones before its own are.

    That some ranks alone could tell where the blocks lie is no use to the others.
    """
    for text in ranks(3).run(_unequal, mode, rows):
        assert text.startswith("InvalidArgument"), text
        assert f"the ranks' M are {rows}" in text or "refused" in text, text
        assert "needs M equal on all ranks, or rows=" in text, text


def _out_for_a_view(rank: int, everybody: bool) -> str:
    with _view("fused-push") as op:
        b = b_of(0, N, K)
        out = torch.full((2 * M, N), NAN) if everybody or rank == 1 else None
        error = _failing(lambda: op(a_of(rank, 0, M, K), b, out=out))
        assert isinstance(error, gemmlink.InvalidArgument), repr(error)
        assert out is None or out.isnan().all(), "out was written to"
        assert_equal(op(a_of(rank, 1, M, K), b), gathered(1, [M] * 2, b), "after a refusal")
    return str(error)


@pytest.mark.parametrize("everybody", [True, False])
def test_a_view_has_no_out(ranks: Ranks, everybody: bool) -> None:
    for text in ranks(2).run(_out_for_a_view, everybody):
        assert "out is for result='copy'; got out with result='view'" in text


def _prepared(rank: int, given: dict[str, Any]) -> None:
    gemmlink.GemmAllGather(N, K, M, **given).prepare()


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"epilogue": "collective", "result": "view"}, "a view shows the own window; got epilogue"),
        ({"epilogue": "lanes+pull"}, "'lanes+pull' for all_gather, which has 1"),
    ],
    ids=["view of a collective", "two phases"],
)
def test_what_cannot_be_served_is_said_on_every_rank(
    ranks: Ranks, given: dict[str, Any], text: str
) -> None:
    for outcome in ranks(2).outcomes(_prepared, given):
        assert outcome.error.type == "Unsupported", outcome.error.trace
        assert text in outcome.error.text


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"result": "window"}, "result must be 'copy' or 'view'; got 'window'"),
        ({"completion": "send"}, "completion must be 'receive' or 'receive_and_send'; got 'send'"),
        ({"buffers": 3}, "buffers must be 1 or 2; got 3"),
        ({"lanes": 17, "epilogue": "lanes"}, "lanes must be from 1 to 16; got 17"),
    ],
    ids=["result", "completion", "buffers", "lanes"],
)
def test_a_choice_that_does_not_exist_is_refused(
    ranks: Ranks, given: dict[str, Any], text: str
) -> None:
    for outcome in ranks(2).outcomes(_prepared, given):
        assert outcome.error.type == "InvalidArgument", outcome.error.trace
        assert text in outcome.error.text


@pytest.mark.parametrize("name", ["result", "completion", "buffers", "lanes"])
def test_ranks_that_choose_differently_are_refused(ranks: Ranks, name: str) -> None:
    for outcome in ranks(2).outcomes(_other_choice, name):
        assert outcome.error.type == "InvalidArgument", outcome.error.trace
        assert f"{name} must be equal on all ranks" in outcome.error.text


def _other_choice(rank: int, name: str) -> None:
    other = {"result": "view", "completion": "receive_and_send", "buffers": 2, "lanes": 2}
    given: dict[str, Any] = {name: other[name]} if rank == 1 else {}
    gemmlink.GemmAllGather(N, K, M, epilogue="lanes", **given).prepare()


# Sends that are complete.


def _slow_steps(op: gemmlink.GemmAllGather, clock: random.Random, share: float) -> None:
    """Let this rank take its time before it reads what a peer offers."""

    def slow(run: Callable[[CallState], None]) -> Callable[[CallState], None]:
        def step(call: CallState) -> None:
            if clock.random() < share:
                time.sleep(clock.random() * 0.006)
            run(call)

        return step

    steps: list[Step] = op.launch.program.steps
    for step in steps:
        if isinstance(step.placed.action, Load | Deliver):
            step.run = slow(step.run)


def _slow_copy(target: torch.Tensor, source: torch.Tensor) -> None:
    if random.random() < 0.2:
        time.sleep(random.random() * 0.006)
    target.copy_(source)


def _overwrites(rank: int, mode: str, buffers: int) -> None:
    """In turn, one rank writes over its view at once while the others look at theirs later."""
    clock = random.Random(rank)
    with (
        mock.patch.object(CpuLane, "_copy", staticmethod(_slow_copy)),
        _view(mode, completion="receive_and_send", chunks=3, lanes=2, buffers=buffers) as op,
    ):
        _slow_steps(op, clock, 0.2)
        b = b_of(0, N, K)
        for call in range(100):
            got = op(a_of(rank, call, M, K), b)
            if call % 3 == rank:
                got.fill_(NAN)
            else:
                time.sleep(clock.random() * 0.002)
                assert_equal(got, gathered(call, [M] * 3, b), f"call {call}")


@pytest.mark.parametrize("buffers", [1, 2])
@each_mode
def test_after_a_complete_send_a_view_may_be_written_to(
    ranks: Ranks, mode: str, buffers: int
) -> None:
    """Neither a slow peer that pulls nor a slow lane still reads what lies under it."""
    ranks(3).run(_overwrites, mode, buffers, timeout_s=60)


# Two sets of slots.


def _ahead(rank: int, mode: str, result: str) -> None:
    clock = random.Random(rank)
    with gemmlink.GemmAllGather(N, K, M, epilogue=mode, result=result, buffers=2, chunks=2) as op:
        _slow_steps(op, clock, 0.03)
        b = b_of(0, N, K)
        for call in range(300):
            if rank == call // 50 % 3 and clock.random() < 0.5:
                time.sleep(clock.random() * 0.003)  # the others get ahead of this rank
            got = op(a_of(rank, call, M, K), b)
            assert_equal(got, gathered(call, [M] * 3, b), f"call {call}")


@pytest.mark.parametrize("result", ["copy", "view"])
@each_mode
def test_a_rank_may_run_ahead_with_two_buffers(ranks: Ranks, mode: str, result: str) -> None:
    ranks(3).run(_ahead, mode, result, timeout_s=60)
