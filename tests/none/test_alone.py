"""One process, no launcher: every mode through ``gemmlink.SELF``."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

import gemmlink
from gemmlink.backends.eager import Eager
from tests.refs import MODES, assert_equal, product, whole

ROOT = Path(__file__).parents[2]
ANY_MODE = (*MODES, "auto")
N, K, M = 6, 8, 5

each_mode = pytest.mark.parametrize("mode", ANY_MODE)


@each_mode
@pytest.mark.parametrize("m", [0, 1, 5])
def test_exact_in_both_forms(mode: str, m: int) -> None:
    a, b = whole(1, m, K), whole(2, N, K)
    want = product(a, b, torch.float32)
    got = gemmlink.gemm_all_gather(a, b, group=gemmlink.SELF, epilogue=mode, rows=[m])
    assert_equal(got, want, mode)
    with gemmlink.GemmAllGather(N, K, M, group=gemmlink.SELF, epilogue=mode) as op:
        assert_equal(op(a, b), want, mode)


@each_mode
def test_a_result_is_the_callers_own(mode: str) -> None:
    """What is written into one result shows neither in the inputs nor in the next result."""
    a, b = whole(1, M, K), whole(2, N, K)
    want = product(a, b, torch.float32)
    with gemmlink.GemmAllGather(N, K, M, group=gemmlink.SELF, epilogue=mode) as op:
        first = op(a, b)
        first.fill_(99)
        second = op(a, b)
        assert_equal(second, want, f"{mode} after the first result was overwritten")
        assert bool((first == 99).all()), "the second call wrote into the first result"
    assert torch.equal(a, whole(1, M, K))
    assert torch.equal(b, whole(2, N, K))
    assert_equal(second, want, f"{mode} after close")


@each_mode
def test_an_identity_does_not_alias_its_input(mode: str) -> None:
    a = whole(1, K, K)
    got = gemmlink.gemm_all_gather(a, torch.eye(K), group=gemmlink.SELF, epilogue=mode)
    assert got.untyped_storage().data_ptr() != a.untyped_storage().data_ptr()


def test_a_plain_process_says_and_leaves_nothing(tmp_path: Path) -> None:
    """No warning, no name in /dev/shm, no child, no file, from a folder that is the user's."""
    script = """
import multiprocessing, os, torch, gemmlink
a, b = torch.ones(5, 8), torch.ones(6, 8)
for mode in ("fused-push", "split-pull", "fused-lanes", "collective", "auto"):
    got = gemmlink.gemm_all_gather(a, b, group=gemmlink.SELF, epilogue=mode)
    assert got.tolist() == [[8.0] * 6] * 5, mode
got = gemmlink.gemm_all_gather(a, b)
assert got.tolist() == [[8.0] * 6] * 5
assert not [n for n in os.listdir("/dev/shm") if n.startswith(f"gemmlink-{os.getpid()}-")]
assert not multiprocessing.active_children()
"""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", script],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "HOME": "/nonexistent"},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr, done.stdout) == (0, "", "")
    assert list(tmp_path.iterdir()) == []


class Slow(Eager):
    """Multiplies when it is told to."""

    name = "slow"

    def __init__(self) -> None:
        self.entered = threading.Event()
        self.go_on = threading.Event()

    def multiply(self, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
        self.entered.set()
        assert self.go_on.wait(10), "nobody said to go on"
        super().multiply(a, b, out)


@pytest.mark.parametrize("function", [False, True], ids=["object", "function"])
@each_mode
def test_a_second_call_at_the_same_time_is_refused(mode: str, function: bool) -> None:
    """And disturbs neither the first nor the one after it."""
    backend, a, b = Slow(), whole(1, M, K), whole(2, N, K)
    results = []
    with gemmlink.GemmAllGather(N, K, M, group=gemmlink.SELF, epilogue=mode, backend=backend) as op:

        def call() -> torch.Tensor:
            if not function:
                return op(a, b)
            return gemmlink.gemm_all_gather(
                a, b, group=gemmlink.SELF, epilogue=mode, backend=backend
            )

        first = threading.Thread(target=lambda: results.append(call()))
        first.start()
        assert backend.entered.wait(10)
        with pytest.raises(gemmlink.Overlap, match="a call from another thread"):
            call()
        backend.go_on.set()
        first.join()
        results.append(call())
    for got in results:
        assert_equal(got, product(a, b, torch.float32), mode)
    assert len(results) == 2


@each_mode
def test_a_failed_call_poisons_and_the_function_form_starts_afresh(mode: str) -> None:
    class Failing(Eager):
        name = "failing"
        fail = True

        def multiply(self, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
            if self.fail:
                raise ArithmeticError("the product failed")
            super().multiply(a, b, out)

    backend, a, b = Failing(), whole(1, M, K), whole(2, N, K)
    with gemmlink.GemmAllGather(N, K, M, group=gemmlink.SELF, epilogue=mode, backend=backend) as op:
        with pytest.raises(ArithmeticError):
            op(a, b)
        with pytest.raises(gemmlink.Poisoned, match="ArithmeticError: the product failed"):
            op(a, b)
        with pytest.raises(gemmlink.Poisoned):
            op.check()
    with pytest.raises(ArithmeticError):
        gemmlink.gemm_all_gather(a, b, group=gemmlink.SELF, epilogue=mode, backend=backend)
    backend.fail = False
    got = gemmlink.gemm_all_gather(a, b, group=gemmlink.SELF, epilogue=mode, backend=backend)
    assert_equal(got, product(a, b, torch.float32), mode)


def test_the_cache_of_the_function_form_is_bounded() -> None:
    """Operations beyond the bound are closed, the one not used for longest first."""
    from gemmlink import calls as memory

    gemmlink.clear_cache(gemmlink.SELF)
    for n in range(1, 2 * memory.CACHE_SIZE):
        a, b = whole(1, 2, K), whole(2, n, K)
        got = gemmlink.gemm_all_gather(a, b, group=gemmlink.SELF, epilogue="push")
        assert_equal(got, product(a, b, torch.float32), f"n={n}")
    calls = memory.calls_of(gemmlink.SELF)
    assert len(calls._ops) == memory.CACHE_SIZE
    gemmlink.clear_cache(gemmlink.SELF)
    assert not calls._ops
