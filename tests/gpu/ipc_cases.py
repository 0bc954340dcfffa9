"""What only `ipc` has: foreign processes, threads as ranks, memory of the caching allocator."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch

import gemmlink
from gemmlink import groups
from gemmlink.errors import Unavailable
from gemmlink.rendezvous import agree
from gemmlink.threads import thread_groups
from gemmlink.transport import handles, leftovers
from gemmlink.transport.ipc import Ipc
from gemmlink.transport.site import Site, view
from gemmlink.transport.vendor import Vendor
from tests.device_cases import CLASSES, inputs, make, on, raised, received, wanted
from tests.refs import assert_equal

CUDA = "cuda"
M = 8


@contextlib.contextmanager
def no_memory() -> Iterator[None]:
    """This process cannot allocate windows."""
    refusal = Unavailable("cudaMalloc must succeed", "cudaErrorMemoryAllocation (2)")
    with mock.patch.object(Vendor, "allocate", side_effect=refusal):
        yield


def _key(name: str) -> str:
    return f"{name}{time.time_ns() >> 40}"


def foreign_processes(rank: int, world: int) -> list[int]:
    """Every rank stores its process id in every window; each returns what lies in its own."""
    with on(CUDA):
        session = Ipc().open(groups.resolve(), key=_key("foreign"), timeout_s=20.0)
        window = session.window(1 << 20)
        for peer in range(world):
            window.tensor(peer).view(torch.int64)[rank] = os.getpid()
        torch.cuda.synchronize()
        session.barrier(20.0)
        found: list[int] = window.tensor(rank).view(torch.int64)[:world].tolist()
        session.barrier(20.0)
        session.close()
        return found


def windows_come_and_go(rank: int, world: int, times: int, nbytes: int) -> dict[str, Any]:
    """So many windows, one after another; the device's free memory before and after."""
    with on(CUDA):
        session = Ipc().open(groups.resolve(), key=_key("windows"), timeout_s=20.0)
        for _ in range(3):
            session.window(nbytes).free()
        session.barrier(20.0)
        before = torch.cuda.mem_get_info()[0]
        session.barrier(20.0)
        for turn in range(times):
            window = session.window(nbytes)
            window.tensor((rank + turn) % world)[rank] = 1
            window.free()
        left = leftovers.sweep()
        session.barrier(20.0)
        after = torch.cuda.mem_get_info()[0]
        session.barrier(20.0)
        session.close()
        return {"lost": before - after, "left": left, "after close": leftovers.sweep()}


def a_kept_view(rank: int, world: int) -> dict[str, Any]:
    """A view of a peer's memory, held after all ranks have closed, keeps it; then it goes."""
    with on(CUDA):
        group = groups.resolve()
        session = Ipc().open(group, key=_key("kept"), timeout_s=20.0)
        window = session.window(1 << 20)
        window.tensor(rank).fill_(rank + 1)
        session.barrier(20.0)
        kept = window.tensor((rank + 1) % world)
        session.close()
        meet = _key("kept-meet")
        agree(group, f"{meet}/1", dict, 20.0)
        seen = int(kept.sum()) // (1 << 20)
        held = leftovers.sweep()
        del kept, window
        leftovers.sweep()
        agree(group, f"{meet}/2", dict, 20.0)
        return {"seen": seen, "held": held, "after": leftovers.sweep()}


def sub_allocation(rank: int, world: int) -> int:
    """Memory of torch's allocator, told by base and offset; what rank 0's reads elsewhere."""
    with on(CUDA):
        site, group = Site(), groups.resolve()
        first, mine = (torch.full((4096,), rank + 7, device=CUDA) for _ in range(2))
        torch.cuda.synchronize()
        key = _key("sub")

        def tell() -> dict[str, Any]:
            address = mine.data_ptr()
            record = handles.told(site.vendor, address, mine.nbytes, with_handle=True)
            return {**record, "place": handles.place(site.vendor, site.index)}

        records = agree(group, f"{key}/tell", tell, 20.0)
        places = [record["place"] for record in records]
        how = handles.way(places[rank], places[0], rank == 0)
        bus = places[0]["bus"]
        reached = handles.Reached(site.vendor, how, records[0], bus, site.index)
        shown = view(reached.address, mine.nbytes, site.device, None).view(torch.int64)
        seen = int(shown.min()), int(shown.max())
        torch.cuda.synchronize()
        reached.close()
        agree(group, f"{key}/end", dict, 20.0)
        del first
        assert seen[0] == seen[1], seen
        return seen[0]


def virtual_memory(rank: int, world: int) -> dict[str, Any]:
    """Memory of expandable segments is refused by name."""
    with on(CUDA):
        site = Site()
        torch.cuda.memory._set_allocator_settings("expandable_segments:True")
        try:
            memory = torch.empty(64 << 20, dtype=torch.uint8, device=CUDA)
            address, nbytes = memory.data_ptr(), memory.nbytes
            return raised(lambda: handles.told(site.vendor, address, nbytes, with_handle=True))
        finally:
            torch.cuda.memory._set_allocator_settings("expandable_segments:False")


def under_expandable_segments(rank: int, world: int) -> None:
    """The transport's own windows do not come from torch's allocator."""
    with on(CUDA):
        torch.cuda.memory._set_allocator_settings("expandable_segments:True")
        try:
            a, b = (each.to(CUDA) for each in inputs("all_gather", rank, 0, M, torch.float32))
            got = gemmlink.gemm_all_gather(a, b, transport="ipc")
            want = wanted("all_gather", rank, 0, (M,) * world, torch.float32, torch.float32)
            assert_equal(got.cpu(), want, "expandable segments")
            gemmlink.clear_cache()
        finally:
            torch.cuda.memory._set_allocator_settings("expandable_segments:False")


def threads(world: int, mode: str) -> None:
    """So many ranks as threads of this one process, each on a stream of its own."""
    errors: list[BaseException] = []
    ready = threading.Barrier(world)
    with on(CUDA):
        workers = [
            threading.Thread(target=_one_thread, args=(each, mode, ready, errors))
            for each in thread_groups(world)
        ]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join(90.0)
    assert not errors, errors
    assert not any(worker.is_alive() for worker in workers), "a thread has not ended"
    assert leftovers.sweep() == 0, "memory that was not given back"


def _one_thread(
    group: Any, mode: str, ready: threading.Barrier, errors: list[BaseException]
) -> None:
    try:
        torch.cuda.set_device(0)
        with torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]
            # Threads share a context: what is loaded for the first time must not wait behind the
            # kernel of another rank that waits for this one.
            a, b = (each.to(CUDA) for each in inputs("all_gather", 0, 0, M, torch.float32))
            torch.mm(a, b.T).sum().item()
            ready.wait(60.0)
            for name in CLASSES:
                _calls(group, name, mode)
    except BaseException as error:
        errors.append(error)
        ready.abort()


def _calls(group: Any, name: str, mode: str) -> None:
    rank, world = group.rank, group.world
    rest = {"group": group, "transport": "ipc", "epilogue": mode, "timeout_s": 15.0}
    with make(name, CUDA, M, **rest) as op:
        caller: Any = op
        for call in range(5):
            a, b = (each.to(CUDA) for each in inputs(name, rank, call, M, torch.float32))
            want = wanted(name, rank, call, (M,) * world, torch.float32, torch.float32)
            got = received(caller(a, b))
            assert_equal(got.cpu(), want, f"{name} {mode}, thread {rank}, call {call}")
        op.check()


def doctor_steps(rank: int, world: int) -> list[tuple[str, bool, str]]:
    """What ``doctor`` walks."""
    from gemmlink.transport.ipc_steps import walk

    with on(CUDA):
        return [(step.name, step.ok, step.text) for step in walk()]
