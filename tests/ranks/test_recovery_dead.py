"""A rank that is killed at any point of a call: what the others hear, and what they do after."""

from __future__ import annotations

import os
import signal
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

import pytest

import gemmlink
from gemmlink.errors import PeerLost, Poisoned
from tests.conftest import Ranks
from tests.recovery import (
    HEARD_S,
    LIMIT_S,
    MODES,
    OPERATIONS,
    WORLD,
    Deed,
    Place,
    Scene,
    at_the_same_time,
    attempt,
    before,
    exact,
    failing,
    in_threads,
    lane_places,
    named,
    own_group,
    places,
    poisoned,
    prepared,
    spread,
    started,
    timed,
)

each_mode = pytest.mark.parametrize("mode", MODES)

#: Places, the first of them before the call. Each is tried over a group of its own, in which the
#: victim has another rank than in the next.
Places = list[Place | None]


def _die() -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("it is alive")


def _victim_at(folder: str, mode: str, number: int, place: Place | None, deed: Deed) -> None:
    rank = number % WORLD
    op = prepared(mode, group=own_group(f"{folder}/all{number}", rank, WORLD))
    exact(op, 1, "the victim's first call")
    _all_have_it(op)
    if place is None:
        deed()
    else:
        with before(op, place, deed):
            exact(op, 2, "the victim's last call")
    raise AssertionError(f"it did not end at {place}")


def _all_have_it(op: gemmlink.GemmAllGather) -> None:
    # A rank that has its own result may still be sending: killed there, it fails the first call.
    op.group.all_gather(b"", key="first call", timeout_s=LIMIT_S)


def _survivor_of(
    folder: str, mode: str, number: int, place: Place | None, pool_rank: int, beside: bool
) -> None:
    victim = number % WORLD
    what = f"rank {victim} is killed at {place or 'the end of a call'}"
    rank = [r for r in range(WORLD) if r != victim][pool_rank]
    op = prepared(mode, group=own_group(f"{folder}/all{number}", rank, WORLD))
    exact(op, 1, what)
    _all_have_it(op)
    error = attempt(op, 2, what)
    if error is None:  # it had sent everything
        assert place is not None, what
        error = failing(lambda: exact(op, 3, what))
    if isinstance(error, Poisoned):  # the other survivor had no result
        assert "failed in call 2" in str(error), f"{what}: {error}"
    else:  # not a mere PeerTimeout: none of the two has waited for the limit
        assert isinstance(error, PeerLost), f"{what}: {error!r}"
        assert (error.peer, error.rank, error.epoch) == (victim, rank, op.launch.epoch), str(error)
        assert f"rank {victim} must complete call {error.epoch} of {op.operation}" in str(error)
    poisoned(op, what)
    for _ in range(2):
        _reset_in_vain(op, victim, what)
    poisoned(op, what)
    assert timed(op.close) < HEARD_S, what
    if beside:
        with prepared(mode, group=own_group(f"{folder}/few{number}", pool_rank, 2)) as other:
            exact(other, 4, f"the survivors alone: {what}")


def _reset_in_vain(op: gemmlink.GemmAllGather, victim: int, what: str) -> None:
    error = failing(op.reset)
    assert isinstance(error, PeerLost), f"a reset after {what}: {error!r}"
    found = (error.peer, error.rank, error.epoch, error.operation)
    assert found == (victim, op.group.rank, op.launch.epoch, op.operation), str(error)
    assert str(error) == (
        f"every rank must come to a reset of {op.operation}; got a process of rank {victim} that "
        "has ended. Only close() and a group without that rank help."
    )


def _killed(process: BaseProcess) -> int:
    process.join(HEARD_S)
    assert process.exitcode == -signal.SIGKILL, f"the victim ended with {process.exitcode}"
    assert process.pid is not None
    return process.pid


def _places(rank: int, mode: str) -> Places:
    with prepared(mode) as op:
        return [None, *places(op), *lane_places(op)]


# All places at once: the process has an operation, a group and a thread for each.


def _victim(folder: str, mode: str, found: Places) -> None:
    scene = Scene(len(found))

    def act(number: int) -> None:
        _victim_at(folder, mode, number, found[number], scene.stop)

    at_the_same_time(act, len(found), lambda: scene.when_all_have_stopped(_die))


def _survivor(pool_rank: int, folder: str, mode: str, found: Places) -> None:
    def act(number: int) -> None:
        _survivor_of(folder, mode, number, found[number], pool_rank, beside=True)

    in_threads(act, len(found))


@pytest.mark.parametrize("mode", [*MODES, *OPERATIONS])
def test_a_rank_may_be_killed_at_any_point(ranks: Ranks, tmp_path: Path, mode: str) -> None:
    """The others hear who it was, at once; they can close, and form a group without it."""
    found = ranks(WORLD).run(_places, mode)[0]
    pool = ranks(2)
    survivors = pool.pids()
    process = started(_victim, str(tmp_path), mode, found)
    pool.run(_survivor, str(tmp_path), mode, found, timeout_s=3 * LIMIT_S)
    assert named([*survivors, _killed(process)]) == []


# One place at a time: its lanes die with the rank, in the middle of what they do.


def _one_victim(folder: str, mode: str, number: int, place: Place | None) -> None:
    _victim_at(folder, mode, number, place, _die)


def _one_survivor(pool_rank: int, folder: str, mode: str, number: int, place: Place | None) -> None:
    _survivor_of(folder, mode, number, place, pool_rank, beside=False)


@each_mode
def test_a_rank_may_be_killed_with_its_lanes(ranks: Ranks, tmp_path: Path, mode: str) -> None:
    found = ranks(WORLD).run(_places, mode)[0]
    pool = ranks(2)
    survivors = pool.pids()
    for number, place in enumerate(spread(found[5:], 4 if mode.endswith("lanes") else 2)):
        process = started(_one_victim, str(tmp_path), mode, number, place)
        pool.run(_one_survivor, str(tmp_path), mode, number, place)
        assert named([*survivors, _killed(process)]) == []


# In a reset.


def _resetting(path: str, rank: int) -> Any:
    op = prepared("fused-push", group=own_group(path, rank, WORLD))
    exact(op, 1, "before")
    return op


def _victim_in_reset(path: str, exchange: int) -> None:
    op = _resetting(path, 1)
    all_gather, came = op.group.all_gather, iter(range(exchange))

    def until_it_dies(*arguments: Any, **named: Any) -> Any:
        if next(came, None) is None:
            _die()
        return all_gather(*arguments, **named)

    with mock.patch.object(op.group, "all_gather", until_it_dies):
        op.reset()


def _survivor_of_reset(pool_rank: int, path: str, exchange: int) -> None:
    op = _resetting(path, [0, 2][pool_rank])
    _reset_in_vain(op, 1, f"a death in exchange {exchange}")
    poisoned(op, f"a death in exchange {exchange}")
    op.close()


@pytest.mark.parametrize("exchange", [0, 1])
def test_a_rank_may_die_in_a_reset(ranks: Ranks, tmp_path: Path, exchange: int) -> None:
    """Also when it has told its epoch already."""
    pool = ranks(2)
    survivors = pool.pids()
    process = started(_victim_in_reset, f"{tmp_path}/all", exchange)
    pool.run(_survivor_of_reset, f"{tmp_path}/all", exchange)
    assert named([*survivors, _killed(process)]) == []
