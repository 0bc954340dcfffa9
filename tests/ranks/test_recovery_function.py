"""The function form recovers by itself: whatever happened, the next call is right on all ranks."""

from __future__ import annotations

import time

import pytest
import torch

import gemmlink
from gemmlink import calls, groups
from gemmlink.backends.eager import Eager
from gemmlink.errors import PeerLost, PeerTimeout, Poisoned
from tests.conftest import Ranks
from tests.recovery import (
    MODES,
    WORLD,
    K,
    N,
    Planned,
    before,
    fail_when_others_have_ended,
    steps,
    synchronised,
)
from tests.refs import a_of, assert_equal, b_of, gathered

each_mode = pytest.mark.parametrize("mode", [*MODES, "collective"])
ROWS = (4, 3, 6)


class Failing(Eager):
    """A backend that raises, when it is told to, in the last product of the call."""

    name = "failing"
    left = -1

    def multiply(self, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
        self.left -= a.shape[0]
        if self.left == 0:
            raise Planned("the product failed")
        super().multiply(a, b, out)


def _call(rank: int, call: int, mode: str, backend: Eager) -> None:
    b = b_of(call, N, K)
    got = gemmlink.gemm_all_gather(
        a_of(rank, call, ROWS[rank], K), b, epilogue=mode, backend=backend
    )
    assert_equal(got, gathered(call, ROWS, b), f"{mode}, rank {rank}, call {call}")


def _attempt(rank: int, call: int, mode: str, backend: Eager) -> Exception | None:
    try:
        _call(rank, call, mode, backend)
    except AssertionError:
        raise
    except Exception as error:
        return error
    return None


def _exceptions(rank: int, mode: str) -> None:
    backend = Failing()
    for call, culprits in enumerate([(), (1,), (), (2,), (2,), (), (0,), (1,), (0, 2), (), ()]):
        backend.left = ROWS[rank] if rank in culprits else -1
        error = _attempt(rank, call, mode, backend)
        if isinstance(error, Planned):
            assert rank in culprits
        elif culprits and culprits != (rank,):  # of two, the second may hear of the first in time
            assert isinstance(error, PeerLost), f"{mode}, call {call}: {error!r}"
            assert set(culprits) - {rank} >= {error.peer} or error.peer < 0, str(error)
        else:
            assert error is None, f"{mode}, call {call}: {error!r}"


@each_mode
def test_the_call_after_an_exception_is_right(ranks: Ranks, mode: str) -> None:
    """Also after two and three failures in a row, in one rank or in two."""
    ranks(WORLD).run(_exceptions, mode, env={"GEMMLINK_CHUNKS": "3"})


def _after_the_last_word(rank: int, mode: str) -> None:
    backend = Eager()
    for call in (0, 2):
        _call(rank, call, mode, backend)
        (op,) = calls.calls_of(groups.resolve())._ops.values()
        if rank == 1:
            with before(op, steps(op)[-1], fail_when_others_have_ended):
                assert isinstance(_attempt(rank, call + 1, mode, backend), Planned)
        else:
            _call(rank, call + 1, mode, backend)
            synchronised()


@pytest.mark.parametrize("mode", MODES)
def test_ranks_that_have_a_result_of_a_failed_call_recover_too(ranks: Ranks, mode: str) -> None:
    ranks(WORLD).run(_after_the_last_word, mode)


def _timeouts(rank: int, mode: str, lates: list[tuple[int, bool]]) -> None:
    backend = Failing()
    for call, (late, ends) in enumerate(lates):
        if rank == late:
            time.sleep(1.7)
        error = _attempt(rank, call, mode, backend)
        assert isinstance(error, PeerTimeout | Poisoned | None), f"{mode}, call {call}: {error!r}"
        assert (error is not None) == ends, f"{mode}, call {call}: {error!r}"


@each_mode
def test_the_call_after_a_timeout_is_right(ranks: Ranks, mode: str) -> None:
    calls = [(-1, False), (2, True), (-1, False), (-1, False)]
    ranks(WORLD).run(_timeouts, mode, calls, env={"GEMMLINK_TIMEOUT_S": "1"})


@pytest.mark.parametrize("mode", ["fused-push", "collective"])
def test_a_late_rank_is_waited_for_longer_in_the_call_that_prepares_anew(
    ranks: Ranks, mode: str
) -> None:
    """So one that is always late fails every other call, and the rest are right."""
    calls = [(-1, False), (2, True), (2, False), (0, True), (1, False), (-1, False)]
    ranks(WORLD).run(_timeouts, mode, calls, env={"GEMMLINK_TIMEOUT_S": "1"})
