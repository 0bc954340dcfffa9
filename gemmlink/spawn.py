"""Runs a function on several CPU rank processes of this machine, for commands and tests.

Ranks meet through a file (``FileStore``) and talk over loopback, so nothing outside this machine is
needed. Every rank has one torch thread unless told otherwise: the ranks share the processor.
"""

from __future__ import annotations

import fcntl
import gc
import logging
import multiprocessing
import os
import pickle
import shutil
import socket
import struct
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import torch
import torch.distributed as dist

from gemmlink import settings
from gemmlink.errors import GemmlinkError, Unavailable

_log = logging.getLogger("gemmlink")

_GRACE_S = 5.0

# Linux: <linux/sockios.h> and <net/if.h>.
_GET_FLAGS = 0x8913
_SET_FLAGS = 0x8914
_IS_UP = 1


class RankFailed(GemmlinkError):
    """A rank process raised, died, or did not end in time. ``failures``: rank -> what happened."""

    def __init__(self, failures: dict[int, str]) -> None:
        self.failures = failures
        text = "\n".join(f"--- rank {rank}:\n{what}" for rank, what in sorted(failures.items()))
        super().__init__(f"{len(failures)} of the ranks failed\n{text}")

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(self), (self.failures,))


def run_ranks(
    world: int,
    function: Callable[..., Any],
    *arguments: Any,
    timeout_s: float = 120.0,
    threads: int = 1,
    method: str = "spawn",
) -> list[Any]:
    """``function(*arguments)`` on ``world`` fresh processes, each a rank of a gloo default group.

    ``function`` must be importable (processes are spawned) and return something picklable. Returns
    the values in rank order. Raises ``RankFailed`` if any rank raises, dies or outlives
    ``timeout_s``; no process is left behind in any case.

    ``method="forkserver"`` forks the ranks from the server that this process has or then starts,
    which is quick once that has imported torch. Such ranks have the server's variables and its seed
    of hashes, so they say nothing of what may differ between processes.
    """
    if world > 1:
        ensure_loopback()
    warned = settings.warn_unknown()  # here, not once more in every rank
    context: Any = multiprocessing.get_context(method)
    folder = tempfile.mkdtemp(prefix="gemmlink-ranks-")
    pipes: list[Connection] = []
    processes: list[BaseProcess] = []
    try:
        for rank in range(world):
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(
                target=_rank_main,
                args=(sender, rank, world, folder, threads, timeout_s, warned, function, arguments),
                daemon=True,
            )
            process.start()
            sender.close()
            pipes.append(receiver)
            processes.append(process)
        return _collect(pipes, processes, timeout_s)
    finally:
        _end(processes)
        shutil.rmtree(folder, ignore_errors=True)


def ensure_loopback() -> None:
    """Bring ``lo`` up if it is down, as in a fresh network namespace: gloo connects through it.

    Raises ``Unavailable`` when that is not permitted.
    """
    if not sys.platform.startswith("linux"):
        return
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        request = struct.pack("16sh14x", b"lo", 0)
        try:
            flags = struct.unpack_from("16sh", fcntl.ioctl(probe, _GET_FLAGS, request))[1]
            if flags & _IS_UP:
                return
            fcntl.ioctl(probe, _SET_FLAGS, struct.pack("16sh14x", b"lo", flags | _IS_UP))
        except OSError as error:
            raise Unavailable(
                "ranks of this machine need the loopback interface",
                f"'lo' that is down or absent ({error})",
                "Bring it up: ip link set lo up",
            ) from error
    _log.warning("the loopback interface was down in this network namespace; brought it up")


def _rank_main(
    sender: Connection,
    rank: int,
    world: int,
    folder: str,
    threads: int,
    timeout_s: float,
    warned: frozenset[str],
    function: Callable[..., Any],
    arguments: Sequence[Any],
) -> None:
    try:
        gc.freeze()  # else a rank looks through all of torch once more when it ends, for a second
        settings.do_not_warn_of(warned)
        torch.set_num_threads(threads)
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        store = dist.FileStore(os.path.join(folder, "store"), world)
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=timeout_s)
        )
        value = function(*arguments)
        sender.send_bytes(pickle.dumps(("ok", value)))
        dist.destroy_process_group()
    except BaseException:
        sender.send_bytes(pickle.dumps(("error", traceback.format_exc())))
    finally:
        sender.close()


def _collect(pipes: list[Connection], processes: list[BaseProcess], timeout_s: float) -> list[Any]:
    values: dict[int, Any] = {}
    failures: dict[int, str] = {}
    deadline = time.monotonic() + timeout_s
    waiting = dict(enumerate(pipes))
    while waiting:
        limit = deadline if not failures else min(deadline, time.monotonic() + _GRACE_S)
        ready = wait(list(waiting.values()), max(0.0, limit - time.monotonic()))
        if not ready:
            for rank in waiting:
                failures.setdefault(rank, f"still running after {timeout_s:g} s")
            break
        for rank in [rank for rank, pipe in waiting.items() if pipe in ready]:
            kind, value = _receive(waiting.pop(rank), processes[rank])
            (values if kind == "ok" else failures)[rank] = value
    if failures:
        raise RankFailed(failures)
    return [values[rank] for rank in range(len(pipes))]


def _receive(pipe: Connection, process: BaseProcess) -> tuple[str, Any]:
    try:
        kind, value = pickle.loads(pipe.recv_bytes())
    except EOFError:
        process.join(_GRACE_S)
        return "error", f"died with exit code {process.exitcode}"
    return kind, value


def _end(processes: list[BaseProcess]) -> None:
    deadline = time.monotonic() + _GRACE_S
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
        if process.is_alive():
            process.kill()
            process.join()
