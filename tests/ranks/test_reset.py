"""``reset``: what it makes good, what it waits for, and when it can be had."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch

import gemmlink
from gemmlink.core import launch as launch_module
from gemmlink.errors import InvalidArgument, Overlap, PeerLost, PeerTimeout, Poisoned
from gemmlink.transport import shm
from gemmlink.transport.cpu_lanes import CpuLane
from tests.conftest import Ranks
from tests.recovery import (
    HEARD_S,
    MODES,
    WORLD,
    M,
    Planned,
    attempt,
    before,
    call_limit,
    exact,
    fail,
    fail_when_others_have_ended,
    failing,
    poisoned,
    prepared,
    steps,
    synchronised,
)

each_mode = pytest.mark.parametrize("mode", MODES)
LANES = [mode for mode in MODES if mode.endswith("lanes")]


# Ranks that got differently far.


def _one_ahead(rank: int, mode: str, choices: dict[str, Any]) -> None:
    """Rank 0 begins a call alone and announces data in it; rank 1 comes, rank 2 does not."""
    with prepared(mode, **choices) as op:
        exact(op, 0, "all")
        if rank == 0:
            with call_limit(op, 0.2):
                assert isinstance(attempt(op, 1, "alone"), PeerTimeout)
        synchronised()
        if rank == 1:
            assert isinstance(attempt(op, 2, "which rank 0 failed in"), PeerLost)
        assert synchronised(op.launch.epoch) == [2, 2, 1]
        op.reset()
        assert synchronised(op.launch.epoch) == [2] * WORLD
        for call in (3, 4, 5):
            exact(op, call, "after the reset")


@each_mode
@pytest.mark.parametrize(
    "choices", [{}, {"result": "view"}, {"buffers": 2, "completion": "receive_and_send"}]
)
def test_a_reset_goes_on_behind_the_rank_that_got_farthest(
    ranks: Ranks, mode: str, choices: dict[str, Any]
) -> None:
    """What that rank announced in a call of its own must not pass for the next call's."""
    ranks(WORLD).run(_one_ahead, mode, choices)


def _three_ways(rank: int, mode: str) -> None:
    with prepared(mode) as op:
        exact(op, 0, "all")
        if rank == 1:  # fails in a call that the others complete
            with before(op, steps(op)[-1], fail_when_others_have_ended):
                assert isinstance(attempt(op, 1, "last step"), Planned)
        else:
            exact(op, 1, "completed")
            synchronised()
        synchronised()
        if rank == 0:  # and this one has begun another, which rank 2 never does
            with mock.patch.object(op.launch, "refuse_if_unusable"):
                assert isinstance(attempt(op, 2, "the next"), Poisoned)
        assert synchronised(op.launch.epoch) == [3, 2, 2]
        op.reset()
        for call in (3, 4):
            exact(op, call, "after the reset")


@each_mode
def test_one_rank_completed_one_failed_and_one_went_on(ranks: Ranks, mode: str) -> None:
    ranks(WORLD).run(_three_ways, mode)


def _healthy(rank: int, mode: str) -> None:
    with prepared(mode) as op:
        op.reset()
        for call in (0, 1, 2):
            exact(op, call, "between resets")
            op.reset()
            op.reset()
        exact(op, 3, "at last")
        op.check()


@each_mode
def test_a_reset_may_come_at_any_time_and_twice(ranks: Ranks, mode: str) -> None:
    ranks(WORLD).run(_healthy, mode)


# What is still under way.


class SlowLane(CpuLane):
    """A lane 0 that takes ``delay_s`` between reading what it copies and writing it."""

    delay_s = 0.0

    def _copy(self, target: torch.Tensor, source: torch.Tensor) -> None:  # type: ignore[override]
        read = source.clone()
        if self._name.startswith("lane 0"):
            time.sleep(SlowLane.delay_s)
        target.copy_(read)


@contextlib.contextmanager
def _slow_lanes(mode: str, **choices: Any) -> Iterator[gemmlink.GemmAllGather]:
    """An operation with two such lanes to each peer; lane 0 carries chunk 0."""
    with (
        mock.patch.object(shm, "CpuLane", SlowLane),
        mock.patch.object(SlowLane, "delay_s", 0.0),
        prepared(mode, lanes=2, **choices) as op,
    ):
        yield op


def _fail_while_copying(rank: int, op: gemmlink.GemmAllGather, call: int, delay_s: float) -> None:
    """Rank 1 fails when everything is posted and lane 0 under way. Twice the rows of ``exact``."""
    SlowLane.delay_s = delay_s if rank == 1 else 0.0
    rows = [2 * M] * WORLD
    if rank == 1:
        posted = max(i for i, s in enumerate(op.launch.program.steps) if "lane" in s.placed.actor)
        with before(op, ("step", posted + 1), fail):
            assert isinstance(failing(lambda: exact(op, call, "", rows)), Planned)
    else:
        assert isinstance(failing(lambda: exact(op, call, "", rows)), PeerLost)


def _late_copy(rank: int, mode: str, result: str) -> None:
    # A failed call waits for its lanes itself, but not for ever: here, not at all.
    with (
        mock.patch.object(launch_module, "_QUIESCE_S", 0.0),
        _slow_lanes(mode, result=result) as op,
    ):
        for call in (0, 2, 4):
            exact(op, call, "before")
            _fail_while_copying(rank, op, call, 0.3)
            op.reset()
            exact(op, call + 1, "after a failed call whose copy of chunk 0 covers chunk 1")


@pytest.mark.parametrize("mode", LANES)
@pytest.mark.parametrize("result", ["copy", "view"])
def test_a_late_copy_never_shows_after_a_reset(ranks: Ranks, mode: str, result: str) -> None:
    ranks(WORLD).run(_late_copy, mode, result)


def _stuck_lane(rank: int) -> None:
    with mock.patch.object(launch_module, "_QUIESCE_S", 0.0), _slow_lanes("fused-lanes") as op:
        exact(op, 0, "before")
        _fail_while_copying(rank, op, 1, 2.5)
        error = failing(lambda: op.reset(timeout_s=0.1))
        assert isinstance(error, PeerTimeout), repr(error)
        if rank == 1:
            assert "lane 0 to rank" in str(error)
        else:
            assert "nothing from ranks [1]" in str(error)
            assert error.peer == 1
        poisoned(op, "a reset that did not end")
        SlowLane.delay_s = 0.0
        op.reset()
        exact(op, 2, "after the second attempt")


def test_a_reset_waits_for_lanes_within_its_limit(ranks: Ranks) -> None:
    ranks(WORLD).run(_stuck_lane)


# Attempts that fail.


def _alone(op: gemmlink.GemmAllGather, absent: list[int]) -> None:
    started = time.monotonic()
    error = failing(lambda: op.reset(timeout_s=0.3))
    assert time.monotonic() - started < HEARD_S
    assert isinstance(error, PeerTimeout), repr(error)
    assert f"nothing from ranks {absent}" in str(error)
    assert error.peer == (absent[0] if len(absent) == 1 else -1)
    poisoned(op, "a reset that did not end")


def _attempts(rank: int, mode: str, failed: bool) -> None:
    """Ranks 0 and 1 try without rank 2, then rank 2 without them, then all."""
    with prepared(mode) as op:
        exact(op, 0, "before")
        if failed and rank == 1:
            with before(op, steps(op)[2], fail):
                attempt(op, 1, "a failure")
        elif failed:
            failing(lambda: exact(op, 1, "a failure"))
        if rank < 2:
            _alone(op, [2])
        synchronised()
        if rank == 2:
            _alone(op, [0, 1])
        synchronised()
        for call in (2, 4):
            op.reset()
            exact(op, call, "after the last attempt")
            exact(op, call + 1, "and again")


@pytest.mark.parametrize(
    ("mode", "failed"),
    [("fused-push", True), ("split-lanes", True), ("fused-push", False), ("fused-pull", False)],
)
def test_a_reset_may_be_tried_again(ranks: Ranks, mode: str, failed: bool) -> None:
    """Whoever came in whatever attempt; in between the operation is not to be used."""
    ranks(WORLD).run(_attempts, mode, failed)


def _closed(rank: int) -> list[str]:
    unprepared = gemmlink.GemmAllGather(1, 1, 1, epilogue="push")
    errors = [failing(unprepared.reset)]
    op = prepared("fused-push")
    op.close()
    errors.append(failing(op.reset))
    assert all(isinstance(error, InvalidArgument) for error in errors), errors
    return [str(error) for error in errors]


def test_only_an_open_operation_can_be_reset(ranks: Ranks) -> None:
    unprepared, closed = ranks(WORLD).run(_closed)[0]
    assert "must be prepared" in unprepared
    assert "a use after close()" in closed


# From two threads.


def _beside(run: Callable[[], Any]) -> tuple[threading.Thread, list[Exception]]:
    errors: list[Exception] = []

    def work() -> None:
        try:
            run()
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    return thread, errors


def _reset_beside_a_call(rank: int, mode: str) -> None:
    reached, go = threading.Event(), threading.Event()

    def stop() -> None:
        reached.set()
        go.wait(HEARD_S)

    with prepared(mode) as op:
        with before(op, steps(op)[2], stop):
            thread, errors = _beside(lambda: exact(op, 0, "a call beside a reset"))
            assert reached.wait(HEARD_S)
            error = failing(lambda: op.reset(timeout_s=0.1))
            go.set()
            thread.join()
        assert isinstance(error, Overlap), repr(error)
        assert errors == []
        op.reset()
        exact(op, 1, "after both")


def _call_beside_a_reset(rank: int, mode: str) -> None:
    with prepared(mode) as op:
        if rank == 0:
            thread, errors = _beside(op.reset)
            while not op.launch._busy.locked():
                time.sleep(0.001)
            error = failing(lambda: exact(op, 0, "a call beside a reset"))
            assert isinstance(error, Overlap), repr(error)
            synchronised()
            thread.join()
            assert errors == []
        else:
            synchronised()
            op.reset()
        exact(op, 1, "after both")


@pytest.mark.parametrize("mode", ["fused-pull", "split-lanes"])
@pytest.mark.parametrize("run", [_reset_beside_a_call, _call_beside_a_reset])
def test_a_call_and_a_reset_do_not_overlap(
    ranks: Ranks, mode: str, run: Callable[[int, str], None]
) -> None:
    ranks(WORLD).run(run, mode)
