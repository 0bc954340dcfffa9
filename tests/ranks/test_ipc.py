"""`ipc` between real processes and threads, over a fake runtime (`tests.fake_cuda`)."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

import pytest
import torch

from gemmlink import groups
from gemmlink.rendezvous import agree, next_key
from gemmlink.threads import thread_groups
from gemmlink.transport import leftovers
from gemmlink.transport.ipc import IpcSession
from tests import device_cases, fake_cuda
from tests.conftest import Ranks
from tests.fake_ipc import FakeIpc

FAKE = "tests.fake_ipc:FakeIpc"
ENV = {"GEMMLINK_TRANSPORT": FAKE}
_LIMIT_S = 10.0


def _session(device: int = 0) -> IpcSession:
    fake_cuda.forget()
    fake_cuda.cudaSetDevice(device)
    group = groups.resolve()
    return FakeIpc().open(group, key=next_key(group, "ipc"), timeout_s=_LIMIT_S)


def _meet(name: str) -> None:
    group = groups.resolve()
    agree(group, next_key(group, name), dict, _LIMIT_S)


def _gone() -> None:
    """Nothing is left of any window in this process, once all ranks have let go."""
    _meet("gone")
    assert leftovers.sweep() == 0, "leftovers"
    assert fake_cuda.held() == (0, 0), fake_cuda.held()


def _text(action: Any) -> str:
    try:
        action()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def open_fails_on_one(rank: int, world: int) -> str:
    session = _session()
    if rank == 1:
        fake_cuda.FAILS["cudaIpcOpenMemHandle"] = 400
    text = _text(lambda: session.window(4096))
    fake_cuda.forget()
    session.window(4096).free()
    session.close()
    _gone()
    return text


def test_a_handle_that_one_rank_cannot_open_is_an_error_on_all(ranks: Ranks) -> None:
    first, second, third = ranks(3).run(open_fails_on_one, 3)
    assert second.startswith("Unavailable: the memory of rank 0 on 0000:1a:00.0 must be mapped: ")
    assert "cudaErrorInvalidResourceHandle (400). Start the ranks in one container" in second
    for text in (first, third):
        assert text.startswith("Unavailable: rank 1 refused: the memory of rank 0"), text


def no_memory_on_one(rank: int, world: int) -> str:
    session = _session()
    if rank == 1:
        fake_cuda.FAILS["cudaMalloc"] = 2
    text = _text(lambda: session.window(4096))
    session.close()
    _gone()
    return text


def test_a_rank_without_memory_is_an_error_on_all(ranks: Ranks) -> None:
    first, second = ranks(2).run(no_memory_on_one, 2)
    assert second.startswith("Unavailable: a window needs 4096 bytes of device memory: cudaMalloc")
    assert "Lower max_m" in second
    assert first.startswith("Unavailable: rank 1 refused: a window needs 4096 bytes"), first


def one_way_access(rank: int, world: int) -> str:
    fake_cuda.forget()
    if rank == 1:
        fake_cuda.DEAF.add((1, 0))
    fake_cuda.cudaSetDevice(rank)
    group = groups.resolve()
    key = next_key(group, "deaf")
    return _text(lambda: FakeIpc().open(group, key=key, timeout_s=_LIMIT_S))


def test_access_in_one_direction_is_refused_on_both_ranks(ranks: Ranks) -> None:
    for text in ranks(2).run(one_way_access, 2):
        assert text.startswith("Unsupported: transport 'ipc' needs devices that access each"), text
        assert "rank 1 on 0000:1b:00.0, which cannot access rank 0 on 0000:1a:00.0" in text, text


def two_devices(rank: int, world: int) -> None:
    session = _session(device=rank % 2)
    window = session.window(4096)
    window.tensor((rank + 1) % world)[rank] = rank + 1
    session.barrier(_LIMIT_S)
    before = (rank - 1) % world
    assert int(window.tensor(rank)[before]) == before + 1
    session.close()
    _gone()


def test_processes_on_two_devices(ranks: Ranks) -> None:
    ranks(3).run(two_devices, 3)


def any_order(rank: int, world: int) -> None:
    for turn in range(world):
        session = _session()
        windows = [session.window(4096) for _ in range(3)]
        time.sleep(0.3 if rank == turn else 0.0)  # longer than anybody lingers
        for window in windows if rank % 2 else windows[::-1]:
            window.free()
            window.free()
        session.close()
        session.close()
    _gone()


def test_windows_end_in_any_order_and_leave_nothing(ranks: Ranks) -> None:
    ranks(3).run(any_order, 3)


def freed_before_the_peer(rank: int, world: int) -> float:
    session = _session()
    window = session.window(4096)
    window.tensor(rank).fill_(rank + 1)
    session.barrier(_LIMIT_S)
    started = time.monotonic()
    if rank == 0:
        session.close()
    took = time.monotonic() - started
    _meet("closed")
    if rank == 1:
        assert int(window.tensor(0)[7]) == 1, "memory of a rank that has closed before"
        session.close()
    _gone()
    return took


def test_a_rank_that_closes_first_neither_waits_nor_takes_its_memory_away(ranks: Ranks) -> None:
    first, _ = ranks(2).run(freed_before_the_peer, 2)
    assert first < 2.0


def kept_view(rank: int, world: int) -> None:
    session = _session()
    window = session.window(4096)
    window.tensor(rank).fill_(rank + 1)
    session.barrier(_LIMIT_S)
    kept = window.tensor((rank + 1) % world)[100:200].view(torch.int32)
    session.close()
    del window, session
    _meet("closed")
    assert bytes(kept.untyped_storage()[100:101]) == bytes([(rank + 1) % world + 1])
    assert leftovers.sweep() == 1, "a view that is held"
    del kept
    leftovers.sweep()
    _gone()


def test_a_view_keeps_what_it_shows_after_all_have_closed(ranks: Ranks) -> None:
    ranks(2).run(kept_view, 2)


def killed(rank: int, world: int) -> dict[str, Any]:
    session = _session()
    session.window(4096)
    session.barrier(_LIMIT_S)
    if rank == world - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    while session.alive(world - 1) is not False:
        time.sleep(0.01)
    started = time.monotonic()
    session.close()
    took = time.monotonic() - started
    deadline = time.monotonic() + 5
    while leftovers.sweep() and time.monotonic() < deadline:
        time.sleep(0.01)
    return {"took": took, "held": fake_cuda.held()}


def test_a_dead_peer_holds_nothing_up(ranks: Ranks) -> None:
    for outcome in ranks(3).outcomes(killed, 3)[:2]:
        assert outcome.failure is None, outcome
        assert outcome.value["took"] < 2.0, outcome
        assert outcome.value["held"] == (0, 0), outcome


def every_way(rank: int, world: int, name: str, modes: list[str]) -> None:
    fake_cuda.forget()
    device_cases.every_way(rank, world, "cpu", name, modes)
    _gone()


@pytest.mark.parametrize("name", device_cases.OPERATIONS)
def test_operations_are_exact_and_give_all_memory_back(ranks: Ranks, name: str) -> None:
    modes = ["split-push", "split-pull", "fused-lanes"]
    ranks(2).run(every_way, 2, name, modes, env=ENV, timeout_s=60)


def _one_thread(group: Any, device: int, failures: list[BaseException]) -> None:
    try:
        fake_cuda.cudaSetDevice(device)
        session = FakeIpc().open(group, key="threads", timeout_s=_LIMIT_S)
        window = session.window(4096)
        peer = (group.rank + 1) % group.world
        window.tensor(peer)[group.rank] = group.rank + 1
        window.words.set(peer, 64, 7)
        assert window.words.wait(64, 7, 5.0) == 7
        session.barrier(_LIMIT_S)
        before = (group.rank - 1) % group.world
        assert int(window.tensor(group.rank)[before]) == before + 1
        session.barrier(_LIMIT_S)
        session.close()
    except BaseException as error:
        failures.append(error)


@pytest.mark.parametrize("devices", [(0, 0, 0), (0, 1, 1)], ids=["one device", "two devices"])
def test_threads_are_ranks_and_open_no_handle(devices: tuple[int, ...]) -> None:
    fake_cuda.forget()
    failures: list[BaseException] = []
    threads = [
        threading.Thread(target=_one_thread, args=(group, device, failures))
        for group, device in zip(thread_groups(len(devices)), devices, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not failures, failures
    assert fake_cuda.called("cudaIpcGetMemHandle") == 0, "nobody needs a handle"
    assert bool(fake_cuda.called("cudaDeviceEnablePeerAccess")) is (len(set(devices)) > 1)
    assert leftovers.sweep() == 0
    assert fake_cuda.held() == (0, 0)
