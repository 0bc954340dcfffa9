"""Thousands of calls: nothing grows, and the same inputs give the same bits in every mode."""

from __future__ import annotations

import contextlib
import gc
import hashlib
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import gemmlink
from gemmlink.groups import TorchGroup
from tests.conftest import Ranks
from tests.recovery import MODES, K, N, named, own_group, prepared
from tests.refs import a_of, assert_equal, b_of, gathered, whole

CALLS = 3000
#: Memory that may come and go, in bytes; a leak of 1 KiB a call is more.
SLACK = 2 << 20

#: What may not grow: a number for each name.
Held = dict[str, float]


def _held(group: TorchGroup, path: str) -> Held:
    gc.collect()
    with open("/proc/self/statm") as file:
        resident = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return {
        "resident": resident,
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": threading.active_count(),
        "tasks": len(os.listdir("/proc/self/task")),
        "names": len(named([os.getpid()])),
        "mappings": _mappings(),
        "store keys": group.store.num_keys(),
        "store bytes": os.path.getsize(path),
    }


def _mappings() -> int:
    with open("/proc/self/maps") as file:
        return sum("/dev/shm/" in line for line in file)


def _assert_same(before: Held, after: Held, slack: int, what: str) -> None:
    grown = {name: after[name] - before[name] for name in before}
    # A call that stalls on a busy machine leaves a text in the store, in one place for all calls.
    allowed = {"resident": slack, "store keys": 2, "store bytes": 10 * CALLS}
    bad = {name: by for name, by in grown.items() if by > allowed.get(name, 0)}
    assert not bad, f"{what}: grown by {bad}, from {before}"


@contextlib.contextmanager
def _object_form(group: TorchGroup, mode: str) -> Iterator[Callable[[int], None]]:
    b, want = b_of(0, N, K), gathered(0, [8, 8], b_of(0, N, K))
    a = a_of(group.rank, 0, 8, K)

    with prepared(mode, group=group) as op:

        def call(number: int) -> None:
            got = op(a, b)
            if number % 100 == 0:
                assert_equal(got, want, f"{mode}, call {number}")

        yield call


@contextlib.contextmanager
def _function_form(group: TorchGroup, mode: str) -> Iterator[Callable[[int], None]]:
    b = b_of(0, N, K)
    sizes = [(64, 1), (0, 64), (7, 33), (64, 64), (1, 0)]
    inputs = [a_of(group.rank, 0, rows[group.rank], K) for rows in sizes]
    wants = [gathered(0, rows, b) for rows in sizes]

    def call(number: int) -> None:
        at = number % len(sizes)
        got = gemmlink.gemm_all_gather(inputs[at], b, group=group, epilogue=mode)
        if number % 100 < len(sizes):
            assert_equal(got, wants[at], f"{mode}, call {number}")

    yield call
    gemmlink.clear_cache(group)


Form = Callable[[TorchGroup, str], AbstractContextManager[Callable[[int], None]]]


def _many(rank: int, path: str, mode: str, form: Form) -> None:
    group = own_group(path, rank, 2)
    with form(group, mode) as call:
        for number in range(300):
            call(number)
        dist.barrier()  # the store is quiet: no rank prepares any more
        before = _held(group, path)
        dist.barrier()
        for number in range(CALLS):
            call(number)
        dist.barrier()
        after = _held(group, path)
        dist.barrier()
    _assert_same(before, after, SLACK, mode)


@pytest.mark.parametrize("mode", MODES)
def test_many_calls_of_an_operation_leave_nothing(ranks: Ranks, tmp_path: Path, mode: str) -> None:
    ranks(2).run(_many, str(tmp_path / "store"), mode, _object_form)


@pytest.mark.parametrize("mode", ["fused-push", "split-pull", "fused-lanes"])
def test_many_calls_of_the_function_form_leave_nothing(
    ranks: Ranks, tmp_path: Path, mode: str
) -> None:
    """With another M in every call, also none."""
    ranks(2).run(_many, str(tmp_path / "store"), mode, _function_form)


def _come_and_go(rank: int, path: str) -> None:
    group = own_group(path, rank, 2)
    choices: list[dict[str, Any]] = [{}, {"result": "view"}, {"buffers": 2}, {"lanes": 2}]

    def round_of(count: int) -> None:
        for number in range(count):
            mode = MODES[number % len(MODES)]
            with prepared(mode, group=group, **choices[number % len(choices)]) as op:
                op(a_of(rank, 0, 8, K), b_of(0, N, K))
        group.all_gather(b"", key=f"round of {count}", timeout_s=30)

    round_of(len(MODES) * 2)
    _all_lanes_have_ended()
    before = _held(group, path)
    round_of(50)
    _all_lanes_have_ended()
    after = _held(group, path)
    for held in (before, after):
        del held["store bytes"], held["store keys"]  # set-up does talk through the store
    _assert_same(before, after, 2 * SLACK, "50 operations")
    assert after["mappings"] == after["names"] == 0


def _all_lanes_have_ended() -> None:
    for thread in threading.enumerate():
        if thread.name.startswith("lane"):
            thread.join(10)


def test_operations_that_come_and_go_leave_nothing(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2).run(_come_and_go, str(tmp_path / "store"))


def _hash(rank: int, mode: str, calls: int) -> str:
    """Of all results of ``calls`` calls with inputs that round, every one different."""
    found = hashlib.sha256()
    noise = whole(7, 64, 33) / 7 + whole(8, 64, 33) / 11
    b = whole(9, 17, 33) / 3
    with gemmlink.GemmAllGather(17, 33, 16, epilogue=mode, chunks=3) as op:
        for call in range(calls):
            rows = 1 + (call + 5 * rank) % 16
            first = (call * 7 + rank) % 48
            a = noise[first : first + rows] * (1 + call / 13)
            found.update(op(a, b).numpy().tobytes())
    return found.hexdigest()


def test_every_mode_gives_the_same_bits_every_time(ranks: Ranks) -> None:
    """At equal chunks each mode multiplies the same blocks, and what travels arrives as it is."""
    modes = [*MODES, "collective", MODES[0]]
    seen = {(mode, at): ranks(2).run(_hash, mode, 1000) for at, mode in enumerate(modes)}
    assert len({digest for digests in seen.values() for digest in digests}) == 1, seen


def test_the_bits_depend_on_the_inputs(ranks: Ranks) -> None:
    """So that equal hashes say something."""
    few, more = ranks(2).run(_hash, MODES[0], 3), ranks(2).run(_hash, MODES[0], 4)
    assert set(few).isdisjoint(more)
    assert torch.get_default_dtype() == torch.float32
