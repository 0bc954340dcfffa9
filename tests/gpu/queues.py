"""Which streams of one context hold others up, and what that does to ranks that are threads.

``python -m tests.gpu.queues`` runs every setting in a process of its own, each bounded in time:

- *held*: while a kernel runs on one stream, those others on which a small kernel, or a copy, does
  not end beside it. They share its hardware queue. ``pool`` are torch's streams (number 32 is the
  first one again), ``own`` are the driver's, made after them.
- *threads*: all_reduce over fused lanes between two threads, with lanes on streams of their own
  (``forks``), as processes have them, and in line, as threads have them.

If held-up streams and failures vanish with more connections, it is the queues; if failures vanish
with ``EAGER`` only, it is the loading of kernels.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch

from gemmlink.core import prepare
from gemmlink.core.device.driver import Driver
from gemmlink.threads import thread_groups
from tests.device_cases import inputs, make, on, received, wanted

_M = 8
_CALLS = 10
_LIMIT_S = 4.0
#: Of a clock below 2 GHz: some 60 ms.
_CYCLES = 120_000_000
_LOOK_S = 0.02
_CONNECTIONS = (None, "2", "8", "32")
_LOADING = ("LAZY", "EAGER")


def held() -> None:
    """Print, for each stream, the streams that wait while it is busy."""
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    driver = Driver(device)
    streams = {f"pool{at}": torch.cuda.Stream() for at in range(33)}  # type: ignore[no-untyped-call]
    for at in range(8):
        streams[f"own{at}"] = torch.cuda.ExternalStream(driver.new_stream(), device)  # type: ignore[no-untyped-call]
    cells = {name: torch.zeros(2, device=device) for name in streams}
    for how in ("kernel", "copy"):
        for _ in range(2):  # the first time loads the kernels
            found = {busy: _held_by(busy, streams, cells, how, driver) for busy in list(streams)}
        for busy, others in found.items():
            print(f"  {how}: {busy} holds up {' '.join(others) or 'none'}")


def _held_by(
    busy: str, streams: dict[str, Any], cells: dict[str, torch.Tensor], how: str, driver: Driver
) -> list[str]:
    torch.cuda.synchronize()
    with torch.cuda.stream(streams[busy]):
        torch.cuda._sleep(_CYCLES)  # type: ignore[no-untyped-call]
    events: dict[str, Any] = {}
    for name, stream in streams.items():
        if name == busy:
            continue
        at = cells[name].data_ptr()
        with torch.cuda.stream(stream):
            if how == "copy":
                driver.copy(at + 4, at, 4, stream.cuda_stream)
            else:
                cells[name].fill_(1.0)
            events[name] = torch.cuda.Event()  # type: ignore[no-untyped-call]
            events[name].record()
    time.sleep(_LOOK_S)
    waiting = [name for name, event in events.items() if not event.query()]
    still = not streams[busy].query()
    torch.cuda.synchronize()
    return waiting if still else ["(the kernel ended too early)"]


def threads(forks: bool) -> None:
    """Print how two ranks fare."""
    told = ["", ""]
    ready = threading.Barrier(2)
    started = time.monotonic()
    shared = mock.patch.object(prepare, "_is_shared", return_value=not forks)
    with on("cuda"), shared:
        workers = [
            threading.Thread(target=_rank, args=(group, ready, told), daemon=True)
            for group in thread_groups(2)
        ]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join(40.0)
    took = time.monotonic() - started
    print(f"  threads, {'forks' if forks else 'in line'}: {took:.1f} s")
    for rank, text in enumerate(told):
        print(f"    rank {rank}: {text or 'has not ended'}")


def _rank(group: Any, ready: threading.Barrier, told: list[str]) -> None:
    rank = group.rank
    try:
        torch.cuda.set_device(0)
        with torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]
            a, b = (each.cuda() for each in inputs("all_reduce", rank, 0, _M, torch.float32))
            torch.mm(a, b.T).sum().item()
            ready.wait(30.0)
            told[rank] = f"exact {_calls(group)} times"
    except BaseException as error:
        told[rank] = f"{type(error).__name__}: {error}"
        ready.abort()


def _calls(group: Any) -> int:
    rest = {"group": group, "transport": "ipc", "epilogue": "fused-lanes", "timeout_s": _LIMIT_S}
    with make("all_reduce", "cuda", _M, **rest) as op:
        caller: Any = op
        for call in range(_CALLS):
            pair = inputs("all_reduce", group.rank, call, _M, torch.float32)
            got = received(caller(*(each.cuda() for each in pair))).cpu()
            want = wanted("all_reduce", group.rank, call, (_M, _M), torch.float32, torch.float32)
            assert torch.equal(got, want), f"call {call} is wrong"
        op.check()
    return _CALLS


def _apart(what: str, connections: str | None, loading: str) -> None:
    print(f"{what}: CUDA_DEVICE_MAX_CONNECTIONS={connections} CUDA_MODULE_LOADING={loading}")
    environment = {**os.environ, "CUDA_MODULE_LOADING": loading}
    environment.pop("CUDA_DEVICE_MAX_CONNECTIONS", None)
    if connections is not None:
        environment["CUDA_DEVICE_MAX_CONNECTIONS"] = connections
    command = [sys.executable, "-m", "tests.gpu.queues", what]
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
        print(done.stdout, done.stderr[-1500:] if done.returncode else "", flush=True)
    except subprocess.TimeoutExpired as late:
        print("  not within 60 s;", (late.stdout or b"").decode()[-1500:], flush=True)


def main() -> None:
    """All settings, or the one that is named."""
    parts: dict[str, Callable[[], None]] = {
        "held": held,
        "forks": lambda: threads(True),
        "in-line": lambda: threads(False),
    }
    if sys.argv[1:]:
        parts[sys.argv[1]]()
        return
    for connections in _CONNECTIONS:
        _apart("held", connections, "LAZY")
        for loading in _LOADING:
            _apart("forks", connections, loading)
        _apart("in-line", connections, "LAZY")


if __name__ == "__main__":
    main()
