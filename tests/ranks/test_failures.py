"""Ranks that come late, fail or die: the others hear of it in time, and go on right."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import gemmlink
from gemmlink.backends.eager import Eager
from gemmlink.errors import PeerTimeout, Poisoned
from gemmlink.groups import TorchGroup
from tests.conftest import Ranks
from tests.pool import Failure
from tests.refs import FEW_MODES, MODES, a_of, assert_equal, b_of, gathered

N, K, M = 10, 8, 4
#: Limit of a call in these tests, in seconds. No rank may take longer to hear of a mistake.
LIMIT_S = 20.0

each_mode = pytest.mark.parametrize("mode", MODES)
each_epilogue = pytest.mark.parametrize("mode", FEW_MODES)


def _good_call(rank: int, call: int, mode: str, group: Any = None) -> None:
    """A call with new inputs, exactly right."""
    b = b_of(call, N, K)
    world = dist.get_world_size()
    got = gemmlink.gemm_all_gather(a_of(rank, call, M, K), b, epilogue=mode, group=group)
    assert_equal(got, gathered(call, [M] * world, b), f"{mode}, the good call {call}")


def _failing(bad: Callable[[], Any]) -> Exception:
    try:
        value = bad()
    except Exception as error:
        return error
    raise AssertionError(f"returned {value!r} where an error was due")


def _late(rank: int, mode: str, lateness_s: float) -> None:
    _good_call(rank, 1, mode)
    if rank == 2:
        time.sleep(lateness_s)
    try:
        _good_call(rank, 2, mode)
    finally:
        _good_call(rank, 3, mode)


@each_epilogue
def test_a_rank_within_the_limit_is_waited_for(ranks: Ranks, mode: str) -> None:
    ranks(3).run(_late, mode, 0.5, env={"GEMMLINK_TIMEOUT_S": "3"})


@each_epilogue
def test_a_rank_beyond_the_limit_fails_the_call_everywhere(ranks: Ranks, mode: str) -> None:
    """The late rank hears of it too, and the next call of the function form works."""
    outcomes = ranks(3).outcomes(_late, mode, 3.0, env={"GEMMLINK_TIMEOUT_S": "1"})
    for outcome in outcomes[:2]:
        assert outcome.error.type in ("PeerTimeout", "PeerLost"), outcome.error.trace
    assert "PeerTimeout" in {outcome.error.type for outcome in outcomes[:2]}
    late = outcomes[2].error
    assert late.type in ("PeerTimeout", "PeerLost", "Poisoned"), late.trace


@pytest.mark.parametrize("mode", [mode for mode in FEW_MODES if mode != "collective"])
def test_a_timeout_names_peer_word_epoch_and_values(ranks: Ranks, mode: str) -> None:
    outcomes = ranks(3).outcomes(_late, mode, 3.0, env={"GEMMLINK_TIMEOUT_S": "1"})
    failures = [o.error for o in outcomes[:2] if o.error.type == "PeerTimeout"]
    assert failures, [o.error.text for o in outcomes]
    for failure in failures:
        seen = failure.attributes
        assert (seen["peer"], seen["epoch"], seen["wanted"]) == (2, 2, 2), failure.text
        assert seen["seen"] == 1
        assert seen["operation"] == "all_gather"
        assert "[2" in seen["word"]
        assert f"rank 2 must set {seen['word']} to 2 within 1 s; got 1" in failure.text


class Failing(Eager):
    """A backend that fails in its third product, on rank 1."""

    name = "failing"

    def __init__(self, rank: int) -> None:
        self._left = 2 if rank == 1 else 1 << 30

    def multiply(self, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
        self._left -= 1
        if self._left < 0:
            raise ArithmeticError("the product failed")
        super().multiply(a, b, out)


def _failing_backend(rank: int, mode: str) -> str:
    backend = Failing(rank)
    with gemmlink.GemmAllGather(N, K, M, epilogue=mode, backend=backend, chunks=1) as op:
        b = b_of(0, N, K)
        for _ in (1, 2):
            assert_equal(op(a_of(rank, 0, M, K), b), gathered(0, [M] * 3, b), mode)
        try:
            op(a_of(rank, 0, M, K), b)
        finally:
            again = _failing(lambda: op(a_of(rank, 0, M, K), b))
            assert isinstance(again, Poisoned), f"a call after a failure: {again!r}"
            assert isinstance(_failing(op.check), Poisoned)
            _good_call(rank, 3, mode)
    return "a result"


@each_mode
def test_a_failure_in_the_middle_of_a_call_is_heard_by_all(ranks: Ranks, mode: str) -> None:
    started = time.monotonic()
    outcomes = ranks(3).outcomes(_failing_backend, mode)
    assert time.monotonic() - started < LIMIT_S
    assert outcomes[1].error.type == "ArithmeticError"
    for outcome in (outcomes[0], outcomes[2]):
        assert outcome.error.type == "PeerLost", outcome.error.trace
        assert "rank 1" in outcome.error.text
        assert outcome.error.attributes["peer"] == 1


def _failing_function(rank: int, mode: str) -> None:
    backend = Failing(rank)
    for call in (0, 1, 2, 3):
        try:
            b = b_of(call, N, K)
            a = a_of(rank, call, M, K)
            gemmlink.gemm_all_gather(a, b, epilogue=mode, backend=backend)
        except (ArithmeticError, PeerTimeout, Poisoned):
            assert call == 2, f"call {call} failed"
            backend._left = 1 << 30
        else:
            assert call != 2, "rank 1 failed and this rank has a result"
    _good_call(rank, 4, mode)


@each_mode
def test_the_function_form_recovers_from_a_failed_backend(ranks: Ranks, mode: str) -> None:
    ranks(3).run(_failing_function, mode, env={"GEMMLINK_CHUNKS": "1"})


def _missing(rank: int) -> Failure | None:
    group = dist.new_group([0, 1, 2])
    try:
        if rank < 2:
            gemmlink.GemmAllGather(N, K, M, group=group, timeout_s=0.3).prepare()
    finally:
        dist.barrier()
        dist.destroy_process_group(group)
    return None


def test_a_rank_that_does_not_come_to_prepare_is_named(ranks: Ranks) -> None:
    outcomes = ranks(3).outcomes(_missing)
    for outcome in outcomes[:2]:
        assert outcome.error.type == "PeerTimeout", outcome.error.trace
        assert "nothing from ranks [2]" in outcome.error.text
        assert outcome.error.attributes["peer"] == 2


def _killed(rank: int, mode: str) -> None:
    for call in range(1000):
        if rank == 1 and call == 20:
            os.kill(os.getpid(), signal.SIGKILL)
        _good_call(rank, call, mode)


@each_mode
def test_a_killed_rank_ends_the_call_of_the_others_in_time(ranks: Ranks, mode: str) -> None:
    pool = ranks(3)
    outcomes = pool.outcomes(_killed, mode, env={"GEMMLINK_TIMEOUT_S": "2"})
    pool.kill()
    assert outcomes[1].error.text == "died with exit code -9"
    for outcome in (outcomes[0], outcomes[2]):
        assert outcome.error.type in ("PeerTimeout", "PeerLost"), outcome.error.trace
        assert outcome.seconds < 2 + 5


def _destroyed_group(rank: int) -> str:
    group = dist.new_group([0, 1])
    gemmlink.gemm_all_gather(a_of(rank, 0, M, K), b_of(0, N, K), group=group)
    gemmlink.clear_cache(group)
    dist.barrier()
    dist.destroy_process_group(group)
    other = dist.new_group([0, 1])
    got = gemmlink.gemm_all_gather(a_of(rank, 1, M, K), b_of(1, N, K), group=other)
    assert_equal(got, gathered(1, [M, M], b_of(1, N, K)), "a group made after another went away")
    gemmlink.clear_cache(other)
    dist.barrier()
    dist.destroy_process_group(other)
    return "right"


def test_a_group_may_follow_a_destroyed_one(ranks: Ranks) -> None:
    assert ranks(2).run(_destroyed_group) == ["right"] * 2


def _two_lives(rank: int) -> list[bytes]:
    """A group that is wrapped anew over the store of before, as after a restart by a launcher."""
    process_group = dist.new_group([0, 1])
    TorchGroup(process_group).all_gather(b"old", key="k", timeout_s=10)
    dist.barrier()
    if rank == 1:
        time.sleep(0.3)
    found = TorchGroup(process_group).all_gather(b"new", key="k", timeout_s=10)
    dist.barrier()
    dist.destroy_process_group(process_group)
    return found


def test_what_an_earlier_life_left_in_the_store_is_not_read(ranks: Ranks) -> None:
    assert ranks(2).run(_two_lives) == [[b"new", b"new"]] * 2


def _not_a_member(rank: int) -> str:
    group = dist.new_group([0])
    try:
        with mock.patch.dict(os.environ):
            gemmlink.gemm_all_gather(a_of(0, 0, M, K), b_of(0, N, K), group=group)
    except gemmlink.InvalidArgument as error:
        return str(error)
    finally:
        dist.barrier()
    return "a result"


def test_a_rank_outside_the_group_is_told_so(ranks: Ranks) -> None:
    member, outsider = ranks(2).run(_not_a_member)
    assert member == "a result"
    assert "this rank must belong to the group" in outsider
