"""A lane whose copy fails: the call is lost, nothing is announced, and a reset makes it good."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator
from unittest import mock

import pytest
import torch

import gemmlink
from gemmlink.errors import InvalidArgument, PeerLost, PeerTimeout, Poisoned
from gemmlink.spec.contracts import Lane
from tests.conftest import Ranks
from tests.recovery import (
    HEARD_S,
    LIMIT_S,
    WORLD,
    K,
    N,
    attempt,
    call_limit,
    exact,
    failing,
    poisoned,
    prepared,
    synchronised,
)

#: The rank one of whose lanes fails, and the peer that the lane leads to.
BROKEN, PEER = 1, 0

each_mode = pytest.mark.parametrize("mode", ["split-lanes", "fused-lanes"])


def _lane(op: gemmlink.GemmAllGather) -> Lane:
    return op.launch.program.lanes[f"lane[{PEER},0]"]


@contextlib.contextmanager
def _failing_copies(rank: int, op: gemmlink.GemmAllGather) -> Iterator[None]:
    """Within, no copy of that lane succeeds; it ends when one has failed."""
    failed = threading.Event()

    def fail(target: torch.Tensor, source: torch.Tensor) -> None:
        failed.set()
        raise ArithmeticError("the engine broke")

    if rank != BROKEN:
        yield
        return
    with mock.patch.object(_lane(op), "_copy", fail):
        yield
        assert failed.wait(HEARD_S), "the lane was given nothing to copy"


def _recovers(op: gemmlink.GemmAllGather, what: str) -> None:
    poisoned(op, what)
    op.reset()
    for call in (5, 6, 7):
        exact(op, call, f"after {what}")


# Noticed in the call itself: completion="receive_and_send" waits for the lanes.


def _noticed(rank: int, mode: str) -> None:
    with prepared(mode, completion="receive_and_send") as op:
        for turn in (1, 2):
            exact(op, 0, "before")
            with _failing_copies(rank, op):
                error = attempt(op, 1, "a copy fails")
            if rank == BROKEN:
                assert isinstance(error, ArithmeticError), repr(error)
            elif rank == PEER or error is not None:  # the third rank may have all the data
                assert isinstance(error, PeerLost), repr(error)
                assert error.peer == BROKEN
            synchronised()
            _recovers(op, f"failure {turn}")


@each_mode
def test_a_failed_copy_is_the_ranks_own_exception_and_can_be_made_good(
    ranks: Ranks, mode: str
) -> None:
    ranks(WORLD).run(_noticed, mode)


# Not noticed by the rank itself, which has its result before its lanes have ended.


def _lost_copy(rank: int, op: gemmlink.GemmAllGather) -> None:
    """A call that the peer of the lane gives up, while the other two have their results."""
    exact(op, 0, "before")
    synchronised()  # else a copy of that call might be the one that fails
    with _failing_copies(rank, op), call_limit(op, 2.0 if rank == PEER else LIMIT_S):
        error = attempt(op, 1, "a copy fails unnoticed")
        synchronised()
    assert (error is not None) == (rank == PEER), repr(error)
    if error is not None:
        assert type(error) is PeerTimeout, repr(error)
        assert (error.peer, error.word) == (BROKEN, f"arrive[{BROKEN},chunk 0]")


def _unnoticed(rank: int, mode: str) -> None:
    told: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    with prepared(mode) as op:
        _lost_copy(rank, op)
        with mock.patch.object(logging.getLogger("gemmlink"), "handlers", [handler]):
            _recovers(op, "a failure that nobody has noticed")
    warned = ["gemmlink resets all_gather after a failed copy: the engine broke"]
    assert told == (warned if rank == BROKEN else []), told


@each_mode
def test_a_failed_copy_that_its_rank_has_not_noticed_can_be_made_good(
    ranks: Ranks, mode: str
) -> None:
    """Its peer names the rank and the chunk at its limit."""
    ranks(WORLD).run(_unnoticed, mode)


def _refused_after(rank: int, mode: str) -> None:
    """The call after it is refused by the rank itself, which meets the failure only then."""
    with prepared(mode) as op:
        exact(op, 0, "before")
        synchronised()
        with _failing_copies(rank, op):
            error = attempt(op, 1, "a copy fails unnoticed")
        assert isinstance(error, PeerLost) == (rank == PEER), repr(error)
        assert rank == PEER or error is None, repr(error)
        if rank == BROKEN:
            error = failing(lambda: op(torch.ones(1, K + 1), torch.ones(N, K)))
            assert isinstance(error, InvalidArgument), repr(error)
            error = failing(op.check)
            assert isinstance(error, Poisoned), repr(error)
            assert "ArithmeticError: the engine broke" in str(error)
        else:
            error = failing(lambda: exact(op, 2, "another has refused it"))
            assert isinstance(error, PeerLost | Poisoned), f"rank {rank}: {error!r}"
        _recovers(op, "a refusal after a failed copy")


@each_mode
def test_a_refusal_does_not_hide_a_failed_copy(ranks: Ranks, mode: str) -> None:
    """A refused call leaves the operation usable, but not one whose peer lacks data."""
    ranks(WORLD).run(_refused_after, mode)


# A lane that cannot be mended.


def _for_good(rank: int, mode: str) -> None:
    with prepared(mode) as op:
        _lost_copy(rank, op)
        if rank == BROKEN:
            broken = ArithmeticError("the engine is gone")
            with mock.patch.object(_lane(op), "drain", side_effect=broken):
                assert failing(op.reset) is broken
        else:
            error = failing(lambda: op.reset(timeout_s=0.5))
            assert isinstance(error, PeerTimeout), repr(error)
        poisoned(op, "a reset that did not end")
        synchronised()
        _recovers(op, "a lane that was mended after all")


def test_a_lane_that_fails_for_good_ends_the_reset(ranks: Ranks) -> None:
    """On its rank with its own exception; the others wait for that rank in vain."""
    ranks(WORLD).run(_for_good, "fused-lanes")
