"""Ranks may be threads, forked or spawned processes, or a launcher's: the answer is the same."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import gemmlink
from tests.ranks.scripts.exact import function_form, interleaved, object_form
from tests.refs import WINDOW_MODES, a_of, assert_equal, b_of, gathered, whole

_ROOT = Path(__file__).parents[2]
_SCRIPT = "tests.ranks.scripts.exact"
N, K, M = 10, 8, 4

each_mode = pytest.mark.parametrize("mode", WINDOW_MODES)


@pytest.fixture(autouse=True)
def _limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that waits in vain is an error soon."""
    monkeypatch.setenv("GEMMLINK_TIMEOUT_S", "20")


def _on_threads(world: int, job: Callable[..., Any], *arguments: Any) -> list[Any]:
    """``job(group, *arguments)`` on a thread for each rank; values in rank order."""
    groups = gemmlink.thread_groups(world)
    with ThreadPoolExecutor(world) as pool:
        futures = [pool.submit(job, group, *arguments) for group in groups]
    for group in groups:
        gemmlink.clear_cache(group)
    return [future.result() for future in futures]


def _failing(bad: Callable[[], Any]) -> Exception:
    try:
        value = bad()
    except Exception as error:
        return error
    raise AssertionError(f"returned {value!r} where an error was due")


def _good_call(group: gemmlink.ThreadGroup, call: int) -> None:
    b = b_of(call, N, K)
    got = gemmlink.gemm_all_gather(a_of(group.rank, call, M, K), b, group=group)
    assert_equal(got, gathered(call, [M] * group.world, b), f"the good call {call}")


# Threads.


@pytest.mark.parametrize("world", [1, 2, 3])
@each_mode
def test_threads_are_exact_in_both_forms(mode: str, world: int) -> None:
    """Rows ragged and not given grow beyond what windows have room for, and shrink again."""

    def job(group: gemmlink.ThreadGroup) -> None:
        function_form(group, group.rank, group.world, (mode,))
        object_form(group, group.rank, group.world, (mode,))

    _on_threads(world, job)


def test_operations_and_groups_of_threads_may_take_turns() -> None:
    second = gemmlink.thread_groups(3)

    def job(group: gemmlink.ThreadGroup) -> None:
        interleaved([group, second[group.rank]], group.rank, 3, WINDOW_MODES)

    _on_threads(3, job)


def test_a_thread_may_be_another_rank_in_another_group() -> None:
    turned = gemmlink.thread_groups(2)

    def job(group: gemmlink.ThreadGroup) -> None:
        for call in range(20):
            _good_call(group, call)
            _good_call(turned[1 - group.rank], 100 + call)

    _on_threads(2, job)


def test_threads_have_windows_of_their_own() -> None:
    """Each rank's view lies elsewhere; one that is written to is no other rank's."""

    def job(group: gemmlink.ThreadGroup) -> int:
        b = b_of(0, N, K)
        with gemmlink.GemmAllGather(
            N,
            K,
            M,
            group=group,
            epilogue="pull",
            result="view",
            completion="receive_and_send",
        ) as op:
            first = op(a_of(group.rank, 0, M, K), b)
            if group.rank == 0:
                first.zero_()
            group.all_gather(b"", key="written", timeout_s=20)
            if group.rank == 1:
                assert_equal(first, gathered(0, [M, M], b), "rank 0 wrote to its view")
            return first.data_ptr()

    assert len(set(_on_threads(2, job))) == 2


def test_collective_is_not_for_threads_and_auto_pulls() -> None:
    def job(group: gemmlink.ThreadGroup) -> str:
        with gemmlink.GemmAllGather(N, K, M, group=group) as op:
            assert op.launch.parts.epilogue.name == "pull"
        made = gemmlink.GemmAllGather(N, K, M, group=group, epilogue="collective")
        error = _failing(made.prepare)
        assert isinstance(error, gemmlink.Unavailable), repr(error)
        _good_call(group, 1)
        return str(error)

    for text in _on_threads(2, job):
        assert "'collective' needs a torch.distributed group; got ThreadGroup" in text


@pytest.mark.parametrize("cached", [False, True], ids=["first call", "later call"])
def test_threads_that_pass_different_things_all_hear_both(cached: bool) -> None:
    def job(group: gemmlink.ThreadGroup) -> str:
        if cached:
            _good_call(group, 1)
        a, n = a_of(group.rank, 2, M, K), N + (group.rank == 1)
        error = _failing(lambda: gemmlink.gemm_all_gather(a, whole(1, n, K), group=group))
        assert isinstance(error, gemmlink.InvalidArgument), repr(error)
        _good_call(group, 3)
        return str(error)

    for text in _on_threads(3, job):
        assert f"{N} on rank" in text, text
        assert f"{N + 1} on rank 1" in text, text


def test_operations_of_threads_made_differently_are_refused_when_prepared() -> None:
    def job(group: gemmlink.ThreadGroup) -> str:
        given: dict[str, Any] = {"buffers": 1 + (group.rank == 2), "epilogue": "push"}
        error = _failing(gemmlink.GemmAllGather(N, K, M, group=group, **given).prepare)
        assert isinstance(error, gemmlink.InvalidArgument), repr(error)
        _good_call(group, 1)
        return str(error)

    for text in _on_threads(3, job):
        assert "buffers must be equal on all ranks" in text
        assert "1 on rank 0 and 2 on rank 2" in text


@each_mode
def test_one_refusing_thread_is_heard_by_all(mode: str) -> None:
    def job(group: gemmlink.ThreadGroup) -> str:
        with gemmlink.GemmAllGather(N, K, M, group=group, epilogue=mode) as op:
            b = b_of(0, N, K)
            a: Any = a_of(group.rank, 0, M, K) if group.rank != 1 else [0.0]
            error = _failing(lambda: op(a, b))
            assert isinstance(error, gemmlink.InvalidArgument), repr(error)
            got = op(a_of(group.rank, 1, M, K), b)
            assert_equal(got, gathered(1, [M] * 3, b), f"{mode} after a refusal")
        return str(error)

    for rank, text in enumerate(_on_threads(3, job)):
        assert "got list" in text, text
        assert ("rank 1 refused" in text) == (rank != 1), text


def test_a_thread_that_does_not_come_is_named() -> None:
    def job(group: gemmlink.ThreadGroup) -> str:
        if group.rank == 1:
            return "rank 1"
        error = _failing(gemmlink.GemmAllGather(N, K, M, group=group, timeout_s=0.05).prepare)
        assert isinstance(error, gemmlink.PeerTimeout), repr(error)
        assert error.peer == 1
        return str(error)

    for text in _on_threads(3, job):
        assert "rank 1" in text or "nothing from ranks [1]" in text


@pytest.mark.parametrize("world", [0, -1])
def test_a_world_of_threads_has_at_least_one(world: int) -> None:
    with pytest.raises(gemmlink.InvalidArgument, match=f"world must be at least 1; got {world}"):
        gemmlink.thread_groups(world)


def test_a_thread_of_a_world_of_one_is_alone() -> None:
    (group,) = gemmlink.thread_groups(1)
    got = gemmlink.gemm_all_gather(torch.ones(2, 3), torch.ones(4, 3), group=group)
    assert_equal(got, torch.full((2, 4), 3.0), "alone")
    gemmlink.clear_cache(group)


# Processes.


def _program(tmp_path: Path, *command: str) -> None:
    done = subprocess.run(
        [sys.executable, *command, str(tmp_path)],
        cwd=_ROOT,
        env={
            **os.environ,
            "PYTHONPATH": str(_ROOT),
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": "1",
        },
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(done.stdout.splitlines()) == ["rank 0: right", "rank 1: right"], done.stdout


@pytest.mark.parametrize("style", ["fork", "multiprocessing-fork", "spawn"])
def test_processes_are_exact_however_they_were_started(tmp_path: Path, style: str) -> None:
    """Every mode in both forms, operations and groups in turn; the parent has used them alone."""
    _program(tmp_path, "-m", _SCRIPT, style)


def test_under_torchrun_it_is_exact(tmp_path: Path) -> None:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    _program(tmp_path, *launcher, "-m", _SCRIPT, "torchrun")
