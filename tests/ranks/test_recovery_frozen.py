"""A rank that is stopped at some point of a call, given up by the others, and then goes on."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest
import torch.distributed as dist

import gemmlink
from gemmlink.errors import PeerLost, PeerTimeout, Poisoned
from tests.conftest import Ranks
from tests.recovery import (
    HEARD_S,
    MODES,
    WORLD,
    Place,
    attempt,
    before,
    call_limit,
    exact,
    failing,
    places,
    poisoned,
    prepared,
    spread,
    synchronised,
)

FROZEN = 1
#: Limit of the calls in which a rank freezes, in seconds.
SHORT_S = 0.7


def _freeze() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def _stopped(pid: int) -> bool:
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rsplit(")", 1)[1].split()[0] in "Tt"


def _timed_out(error: PeerTimeout, op: gemmlink.GemmAllGather, rank: int, what: str) -> None:
    epoch = op.launch.epoch
    assert (error.peer, error.rank, error.epoch) == (FROZEN, rank, epoch), f"{what}: {error}"
    if isinstance(error, PeerLost):  # the other one has told
        return
    assert error.operation == "all_gather"
    assert error.seen < error.wanted, f"{what}: {error}"
    kind, _, rest = error.word.partition("[")
    assert kind in ("enter", "free", "arrive", "read"), error.word
    assert rest.startswith(str(FROZEN))
    assert ("chunk" in rest) == (kind == "arrive"), error.word
    assert f"rank {FROZEN} must set {error.word} to {error.wanted} within" in str(error)
    assert f"got {error.seen} at rank {rank} in call {epoch} of all_gather" in str(error)


def _others(
    rank: int, op: gemmlink.GemmAllGather, pid: int, few: Any, call: int, what: str
) -> bool:
    """What the ranks do that are not frozen, until the other one has been thawed.

    Returns whether they had a result: then the frozen one may have it, too.
    """
    started = time.monotonic()
    with call_limit(op, SHORT_S):
        error = attempt(op, call, what)
        completed = error is None
        if completed:  # it had sent everything
            error = failing(lambda: exact(op, call, what))
    assert time.monotonic() - started < SHORT_S + HEARD_S, what
    if not isinstance(error, Poisoned):
        assert isinstance(error, PeerTimeout), f"{what}: {error!r}"
        _timed_out(error, op, rank, what)
    dist.barrier(few)
    assert _stopped(pid), what
    again = failing(lambda: op.reset(timeout_s=0.2))
    assert isinstance(again, PeerTimeout), f"{what}: {again!r}"
    assert again.peer == FROZEN, f"{what}: {again}"
    poisoned(op, what)
    with prepared("fused-push", group=few) as other:
        for number in range(20):
            if rank == 0 and number == 5:
                os.kill(pid, signal.SIGCONT)
            exact(other, 1000 + number, f"beside the frozen rank; {what}")
    return completed


def _freezing(rank: int, mode: str, count: int) -> None:
    pid = synchronised(os.getpid())[FROZEN]
    few = dist.new_group([r for r in range(WORLD) if r != FROZEN])
    with prepared(mode) as op:
        found: list[Place | None] = [None, *places(op)]
        if count:
            found = [None, *spread(places(op), count)]
        for number, place in enumerate(found):
            what, call = f"rank {FROZEN} is frozen at {place or 'the door'}", 2 * number
            exact(op, call, "before")
            synchronised()
            if rank != FROZEN:
                completed = _others(rank, op, pid, few, call + 1, what)
            else:
                error = _frozen(op, place, call + 1, what)
                assert isinstance(error, PeerTimeout | Poisoned | None), f"{what}: {error!r}"
                completed = error is None
            all_completed = synchronised(completed)
            assert not all_completed[FROZEN] or all(all_completed), (
                f"{what}: it has a result that others gave up"
            )
            op.reset()
            exact(op, call, f"after the reset; {what}")
    if rank != FROZEN:
        dist.destroy_process_group(few)


def _frozen(
    op: gemmlink.GemmAllGather, place: Place | None, call: int, what: str
) -> Exception | None:
    if place is None:
        _freeze()
        return attempt(op, call, what)
    with before(op, place, _freeze):
        return attempt(op, call, what)


@pytest.mark.parametrize(("mode", "count"), [(m, 8 if m == "fused-lanes" else 2) for m in MODES])
def test_a_rank_that_thaws_harms_nobody(ranks: Ranks, mode: str, count: int) -> None:
    """The others time out, go on without it, and all of them recover the operation together."""
    ranks(WORLD).run(_freezing, mode, count, timeout_s=90)
