"""A rank that raises or dies while an operation is being prepared: named, and nothing is left."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import pytest

from gemmlink.errors import PeerTimeout
from gemmlink.groups import TorchGroup
from gemmlink.transport.shm import ShmSession
from tests.conftest import Ranks
from tests.recovery import (
    HEARD_S,
    WORLD,
    Deed,
    Planned,
    exact,
    fail,
    failing,
    named,
    own_group,
    prepared,
    started,
)

#: Limit of a call, in seconds; five times as much for each exchange of ``prepare``.
LIMIT_S = 0.2
VICTIM = 1


@contextlib.contextmanager
def _at_exchange(index: int, deed: Deed) -> Iterator[list[int]]:
    """Within, this rank does ``deed`` before its exchange ``index``, barriers counted as well."""
    seen = [0]

    def counted(exchange: Callable[..., object]) -> Callable[..., object]:
        def run(*arguments: object, **named: object) -> object:
            seen[0] += 1
            if seen[0] == index + 1:
                deed()
            return exchange(*arguments, **named)

        return run

    with (
        mock.patch.object(TorchGroup, "all_gather", counted(TorchGroup.all_gather)),
        mock.patch.object(ShmSession, "barrier", counted(ShmSession.barrier)),
    ):
        yield seen


def _gives_up(rank: int, index: int, mode: str, group: TorchGroup) -> None:
    what = f"rank {VICTIM} is gone at exchange {index} of prepare"
    began = time.monotonic()
    error = failing(lambda: prepared(mode, group=group, timeout_s=LIMIT_S))
    assert isinstance(error, PeerTimeout), f"{what}: {error!r}"
    assert error.peer == VICTIM, f"{what}: {error}"
    assert time.monotonic() - began < 5 * LIMIT_S + HEARD_S
    assert named([os.getpid()]) == []


def _count(rank: int, mode: str) -> int:
    with _at_exchange(-1, fail) as seen, prepared(mode) as op:
        assert op.launch.epoch == 0
    return seen[0]


def _raising(rank: int, mode: str, path: str, indices: list[int]) -> None:
    group = own_group(path, rank, WORLD)
    for index in indices:
        if rank == VICTIM:
            with _at_exchange(index, fail):
                error = failing(lambda: prepared(mode, group=group, timeout_s=LIMIT_S))
            assert isinstance(error, Planned), repr(error)
            assert named([os.getpid()]) == []
        else:
            _gives_up(rank, index, mode, group)
        with prepared(mode, group=group) as op:
            exact(op, index, f"prepared after a failure at exchange {index}")


@pytest.mark.parametrize("mode", ["fused-push", "split-lanes"])
def test_a_rank_may_raise_in_any_exchange_of_prepare(
    ranks: Ranks, tmp_path: Path, mode: str
) -> None:
    """The others name it; the next ``prepare`` over the same group works."""
    count = ranks(WORLD).run(_count, mode)[0]
    assert count > 8
    indices = list(range(mode == "split-lanes", count, 3))
    ranks(WORLD).run(_raising, mode, str(tmp_path / "store"), indices, timeout_s=60)


def _victim(path: str, index: int, mode: str) -> None:
    with _at_exchange(index, lambda: os.kill(os.getpid(), signal.SIGKILL)):
        prepared(mode, group=own_group(path, VICTIM, WORLD), timeout_s=LIMIT_S * 100)


def _survivor(pool_rank: int, folder: str, index: int, mode: str) -> None:
    rank = [r for r in range(WORLD) if r != VICTIM][pool_rank]
    _gives_up(rank, index, mode, own_group(f"{folder}/all", rank, WORLD))
    with prepared(mode, group=own_group(f"{folder}/survivors", pool_rank, 2)) as op:
        exact(op, index, "the survivors alone")


@pytest.mark.parametrize("index", [0, 3, 5, 8, 10])
def test_a_rank_may_die_in_any_exchange_of_prepare(
    ranks: Ranks, tmp_path: Path, index: int
) -> None:
    pool = ranks(2)
    survivors = pool.pids()
    victim = started(_victim, f"{tmp_path}/all", index, "fused-lanes")
    pool.run(_survivor, str(tmp_path), index, "fused-lanes")
    victim.join(HEARD_S)
    assert victim.exitcode == -signal.SIGKILL
    assert named(survivors) == []
    assert victim.pid is not None
    assert named([victim.pid]) == []
