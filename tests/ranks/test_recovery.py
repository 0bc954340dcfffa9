"""A rank that comes late, raises or dies at any point of a call: what the others hear, and after.

Every place of the protocol is tried: each word by which a rank enters a call, each step of its
schedule, and while it prepares.
"""

from __future__ import annotations

import os
import signal
import time
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

import gemmlink
from gemmlink.errors import PeerLost, Poisoned
from tests.conftest import Ranks
from tests.recovery import (
    ENTRY_WORDS,
    HEARD_S,
    LIMIT_S,
    MODES,
    WORLD,
    Place,
    Planned,
    attempt,
    before,
    exact,
    fail,
    fail_when_others_have_ended,
    failing,
    named,
    own_group,
    places,
    poisoned,
    prepared,
    served,
    spread,
    started,
    steps,
    synchronised,
    timed,
)

each_mode = pytest.mark.parametrize("mode", MODES)

#: Everything else that an operation may be asked for, with a mode that it means something to.
CHOICES: list[tuple[str, dict[str, Any]]] = [
    ("fused-push", {"result": "view"}),
    ("split-pull", {"result": "view", "completion": "receive_and_send"}),
    ("fused-pull", {"completion": "receive_and_send"}),
    ("fused-lanes", {"result": "view", "lanes": 2}),
    ("split-lanes", {"buffers": 2, "completion": "receive_and_send", "lanes": 2}),
    ("fused-push", {"buffers": 2, "result": "view"}),
    ("fused-pull", {"buffers": 2}),
]


# Late.


def _late(rank: int, mode: str) -> None:
    with prepared(mode) as op:
        for number, place in enumerate([None, *places(op)]):
            late = rank == number % WORLD
            if late and place is None:
                time.sleep(0.1)
            if late and place is not None:
                with before(op, place, lambda: time.sleep(0.06)):
                    exact(op, number, f"late at {place}")
            else:
                exact(op, number, f"another is late at {place}")


@each_mode
def test_a_rank_may_be_late_at_any_point(ranks: Ranks, mode: str) -> None:
    """Long enough for the others to look for a reason, and to find none."""
    ranks(WORLD).run(_late, mode, timeout_s=60)


# Failed.


def _raising(rank: int, mode: str, count: int, choices: dict[str, Any]) -> None:
    with prepared(mode, **choices) as op:
        entry = [place for place in places(op) if place not in steps(op)]
        found = [*spread(entry, 4), *steps(op)]
        found = spread(found, count) if count else found
        can_complete = synchronised([served(op, place) for place in found])[1]
        for number, place in enumerate(found):
            may_complete = rank in can_complete[number]
            _raise_and_go_on(rank, op, place, 3 * number + 1, may_complete)


def _raise_and_go_on(
    rank: int, op: gemmlink.GemmAllGather, place: Place, call: int, may_complete: bool
) -> None:
    what = f"rank 1 raises at {place}"
    epoch = op.launch.epoch + 1
    began = time.monotonic()
    if rank == 1:
        with before(op, place, fail):
            error = attempt(op, call, what)
        assert isinstance(error, Planned), f"{what}, where it has {error!r}"
    else:
        error = attempt(op, call, what)
        assert may_complete or error is not None, f"{what}: a result from nothing"
        if error is not None:
            assert isinstance(error, PeerLost), f"{what}: {error!r}"
            assert (error.peer, error.rank, error.epoch) == (1, rank, epoch), f"{what}: {error}"
            assert "rank 1 must complete" in str(error)
            assert f"call {epoch} of all_gather" in str(error)
    assert time.monotonic() - began < HEARD_S, what
    poisoned(op, what)
    op.reset()
    op.check()
    exact(op, call + 1, f"after a reset: {what}")


@each_mode
def test_a_rank_may_raise_at_any_point(ranks: Ranks, mode: str) -> None:
    """It has its own exception, the others ``PeerLost``; then nothing works but ``reset``."""
    ranks(WORLD).run(_raising, mode, 0, {}, timeout_s=60)


@pytest.mark.parametrize(("mode", "choices"), CHOICES)
def test_a_reset_serves_every_kind_of_result(
    ranks: Ranks, mode: str, choices: dict[str, Any]
) -> None:
    ranks(WORLD).run(_raising, mode, 9, choices, timeout_s=60)


def _completed(rank: int, mode: str) -> None:
    with prepared(mode) as op:
        exact(op, 0, "before")
        if rank == 1:
            with before(op, steps(op)[-1], fail_when_others_have_ended):
                assert isinstance(attempt(op, 1, "last step"), Planned)
        else:
            exact(op, 1, "rank 1 fails after it has sent everything")
            synchronised()
        synchronised()
        error = failing(op.check)
        assert isinstance(error, Poisoned)
        assert "call 2" in str(error), error
        poisoned(op, "after it")
        epochs = synchronised(op.launch.epoch)
        assert epochs == [2] * WORLD, f"a call that is refused at once uses no number: {epochs}"
        op.reset()
        exact(op, 2, "after the reset")


@each_mode
def test_a_completed_call_keeps_its_result_when_another_rank_fails(ranks: Ranks, mode: str) -> None:
    """It learns of the failure at the next look or call."""
    ranks(WORLD).run(_completed, mode)


def _heard_late(rank: int, mode: str) -> None:
    """Rank 1 fails in a call that the others completed, and tells rank 2 late, in their next."""
    last_told = ENTRY_WORDS * (WORLD - 1) + 2

    def fail_in_their_next_call() -> None:
        synchronised()
        time.sleep(0.2)
        fail()

    with prepared(mode) as op:
        if rank == 1:
            with (
                before(op, steps(op)[-1], fail_in_their_next_call),
                before(op, ("word", last_told), lambda: time.sleep(0.5)),
            ):
                assert isinstance(attempt(op, 1, "last step"), Planned)
        else:
            exact(op, 1, "completed")
            synchronised()
            error = attempt(op, 2, "while rank 1 fails")
            assert isinstance(error, Poisoned), f"rank {rank}: {error!r}"
        poisoned(op, "after it")
        op.reset()
        exact(op, 3, "after the reset")


@each_mode
def test_a_failure_that_is_heard_of_from_another_is_not_that_ones(ranks: Ranks, mode: str) -> None:
    ranks(WORLD).run(_heard_late, mode)


# Dead.


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _victim(path: str, rank: int, mode: str, place: Place | None) -> None:
    op = prepared(mode, group=own_group(path, rank, WORLD))
    exact(op, 1, "the victim's first call")
    _all_have_it(op)
    if place is None:
        _die()
    else:
        with before(op, place, _die):
            exact(op, 2, "the victim's last call")
    os._exit(77)  # it never came to the place


def _all_have_it(op: gemmlink.GemmAllGather) -> None:
    # A rank that has its own result may still be sending: killed there, it fails the first call.
    op.group.all_gather(b"", key="first call", timeout_s=LIMIT_S)


def _killed(process: BaseProcess) -> int:
    process.join(HEARD_S)
    assert process.exitcode == -signal.SIGKILL, f"the victim ended with {process.exitcode}"
    assert process.pid is not None
    return process.pid


def _survivor(pool_rank: int, folder: str, mode: str, victim: int, place: Place | None) -> None:
    what = f"rank {victim} is killed at {place or 'the end of a call'}"
    rank = [r for r in range(WORLD) if r != victim][pool_rank]
    op = prepared(mode, group=own_group(f"{folder}/all", rank, WORLD))
    exact(op, 1, what)
    _all_have_it(op)
    began, error = time.monotonic(), attempt(op, 2, what)
    if error is None:  # it had sent everything
        assert place is not None, what
        error = failing(lambda: exact(op, 3, what))
    if isinstance(error, Poisoned):  # the other survivor had no result
        assert "failed in call 2" in str(error), f"{what}: {error}"
    else:
        assert isinstance(error, PeerLost), f"{what}: {error!r}"
        assert (error.peer, error.rank, error.epoch) == (victim, rank, op.launch.epoch), str(error)
        assert f"rank {victim} must complete call {error.epoch} of all_gather" in str(error)
    assert time.monotonic() - began < HEARD_S, f"{what}: the limit was waited for"
    poisoned(op, what)
    assert timed(op.close) < 1, what
    with prepared(mode, group=own_group(f"{folder}/survivors", pool_rank, 2)) as other:
        exact(other, 4, f"the survivors alone: {what}")


def _kill_at(ranks: Ranks, folder: Path, mode: str, place: Place | None, number: int) -> None:
    own = folder / str(number)
    own.mkdir()
    pool, victim = ranks(2), number % WORLD
    survivors = pool.pids()
    process = started(_victim, f"{own}/all", victim, mode, place)
    pool.run(_survivor, str(own), mode, victim, place)
    assert named([*survivors, _killed(process)]) == []


def _places(rank: int, mode: str) -> list[Place]:
    with prepared(mode) as op:
        return places(op)


def test_a_rank_may_be_killed_at_any_point(ranks: Ranks, tmp_path: Path) -> None:
    mode = "fused-lanes"
    found = ranks(WORLD).run(_places, mode)[0]
    for number, place in enumerate([None, *found[::2]]):
        _kill_at(ranks, tmp_path, mode, place, number)


@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "fused-lanes"])
def test_a_rank_may_be_killed_in_any_mode(ranks: Ranks, tmp_path: Path, mode: str) -> None:
    found = ranks(WORLD).run(_places, mode)[0]
    for number, place in enumerate([None, *spread(found[5:], 3)]):
        _kill_at(ranks, tmp_path, mode, place, number)
