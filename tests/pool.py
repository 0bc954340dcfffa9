"""Rank processes that stay alive between tests.

Starting a rank costs seconds (importing torch), so ranks are forked from one server process that
has imported it, and each pool of ranks serves one test after another. A rank that raises where no
error was expected, dies, or outlives its deadline costs its pool: all its ranks are killed and the
next use starts new ones, so that one failure never spreads to another test.

Functions that run on ranks live at the top level of a test module and take the rank first.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import shutil
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

_START_LIMIT_S = 120.0
#: How long the other ranks may go on after one has failed unexpectedly.
_GRACE_S = 5.0
#: Limits the waits of the library in a test that says nothing else; a hang is then an error soon.
_CALL_LIMIT_S = "20"
PRELOAD = ["torch", "torch.distributed", "pytest", "hypothesis", "pluggy"]


@dataclass(frozen=True)
class Failure:
    """An exception that ended a function on a rank, as plain values."""

    type: str
    text: str
    attributes: Mapping[str, Any]
    cause: str
    trace: str


@dataclass(frozen=True)
class Outcome:
    """What a function did on one rank: its value or its failure, and how long it took."""

    rank: int
    value: Any
    failure: Failure | None
    seconds: float

    @property
    def error(self) -> Failure:
        """The failure. Fails the test if there is none."""
        assert self.failure is not None, f"rank {self.rank} returned {self.value!r}, not an error"
        return self.failure


class RankFailed(AssertionError):
    """A rank raised, died or did not end in time, where a test expected a value."""


class RankPool:
    """``world`` rank processes over a gloo default group; started at first use."""

    def __init__(self, world: int) -> None:
        self.world = world
        self._processes: list[BaseProcess] = []
        self._pipes: list[Connection] = []
        self._folder = ""

    def run(
        self,
        function: Callable[..., Any],
        *arguments: Any,
        timeout_s: float = 30.0,
        env: Mapping[str, str] | None = None,
    ) -> list[Any]:
        """``function(rank, *arguments)`` on all ranks; the values in rank order.

        Raises ``RankFailed`` with every rank's traceback if any rank fails.
        """
        outcomes = self._outcomes(function, arguments, timeout_s, env, patient=False)
        failed = [outcome for outcome in outcomes if outcome.failure is not None]
        if failed:
            self.kill()
            raise RankFailed("\n".join(f"--- rank {o.rank}:\n{o.error.trace}" for o in failed))
        return [outcome.value for outcome in outcomes]

    def outcomes(
        self,
        function: Callable[..., Any],
        *arguments: Any,
        timeout_s: float = 30.0,
        env: Mapping[str, str] | None = None,
    ) -> list[Outcome]:
        """Like ``run``, for ranks that may raise: the value or the failure of each."""
        return self._outcomes(function, arguments, timeout_s, env, patient=True)

    def pids(self) -> list[int]:
        """Process ids in rank order; starts the ranks if need be."""
        self._start()
        return [process.pid or 0 for process in self._processes]

    def kill(self) -> None:
        """End all ranks at once. The next use starts new ones."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        for pipe in self._pipes:
            pipe.close()
        self._processes, self._pipes = [], []
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = ""

    def _outcomes(
        self,
        function: Callable[..., Any],
        arguments: tuple[Any, ...],
        timeout_s: float,
        env: Mapping[str, str] | None,
        patient: bool,
    ) -> list[Outcome]:
        self._start()
        limits = {"GEMMLINK_TIMEOUT_S": _CALL_LIMIT_S}
        task = pickle.dumps((function, arguments, {**limits, **(env or {})}))
        for pipe in self._pipes:
            pipe.send_bytes(task)
        return self._collect(timeout_s, patient)

    def _collect(self, timeout_s: float, patient: bool) -> list[Outcome]:
        found: dict[int, Outcome] = {}
        waiting = dict(enumerate(self._pipes))
        deadline = time.monotonic() + timeout_s
        while waiting:
            ready = wait(list(waiting.values()), max(0.0, deadline - time.monotonic()))
            if not ready:
                found.update({rank: _lost(rank, "did not end in time") for rank in waiting})
                break
            for rank in [rank for rank, pipe in waiting.items() if pipe in ready]:
                found[rank] = self._receive(rank, waiting.pop(rank))
                if found[rank].failure is not None and not patient:
                    deadline = min(deadline, time.monotonic() + _GRACE_S)
        if any(outcome.failure and outcome.failure.type == "Lost" for outcome in found.values()):
            self.kill()
        return [found[rank] for rank in sorted(found)]

    def _receive(self, rank: int, pipe: Connection) -> Outcome:
        try:
            outcome: Outcome = pickle.loads(pipe.recv_bytes())
        except (EOFError, ConnectionError):
            self._processes[rank].join(_GRACE_S)
            return _lost(rank, f"died with exit code {self._processes[rank].exitcode}")
        return outcome

    def _start(self) -> None:
        if self._processes:
            return
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        self._folder = tempfile.mkdtemp(prefix="gemmlink-pool-")
        for rank in range(self.world):
            here, there = context.Pipe()
            process = context.Process(
                target=_serve, args=(there, rank, self.world, self._folder), daemon=True
            )
            process.start()
            there.close()
            self._processes.append(process)
            self._pipes.append(here)
        failed = [o for o in self._collect(_START_LIMIT_S, patient=False) if o.failure is not None]
        if failed:
            self.kill()
            raise RankFailed(f"ranks did not start\n{failed[0].error.trace}")


def _lost(rank: int, what: str) -> Outcome:
    return Outcome(rank, None, Failure("Lost", what, {}, "", f"rank {rank} {what}"), 0.0)


def _serve(pipe: Connection, rank: int, world: int, folder: str) -> None:
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    # Every test ends with a collection, which would look through all of torch for a tenth of a
    # second on every rank. What was imported is never garbage.
    gc.freeze()
    pipe.send_bytes(pickle.dumps(_attempt(rank, _join_group, (world, folder), {})))
    while True:
        try:
            function, arguments, env = pickle.loads(pipe.recv_bytes())
        except EOFError:
            return
        outcome = _attempt(rank, _in_order, (function, arguments), env)
        pipe.send_bytes(pickle.dumps(outcome))


def _join_group(rank: int, world: int, folder: str) -> None:
    store = dist.FileStore(os.path.join(folder, "store"), world)
    limit = timedelta(seconds=_START_LIMIT_S)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=limit)


def _in_order(rank: int, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    import gemmlink

    gemmlink.clear_cache()
    value = function(rank, *arguments)
    pickle.dumps(value)  # an error here belongs to the function, not to the pool
    return value


def _attempt(
    rank: int, function: Callable[..., Any], arguments: tuple[Any, ...], env: Mapping[str, str]
) -> Outcome:
    started = time.monotonic()
    value, failure = None, None
    with mock.patch.dict(os.environ, env):
        try:
            value = function(rank, *arguments)
        except BaseException as error:
            failure = _describe(error)
    seconds = time.monotonic() - started
    gc.collect()  # operations that a failed case left open
    return Outcome(rank, value, failure, seconds)


def _describe(error: BaseException) -> Failure:
    plain = {
        name: value
        for name, value in vars(error).items()
        if isinstance(value, str | int | float | bool | None)
    }
    cause = repr(error.__cause__) if error.__cause__ is not None else ""
    return Failure(type(error).__name__, str(error), plain, cause, traceback.format_exc())
