"""Transport ``shm``: CPU ranks on one host, through POSIX shared memory.

Each rank owns one segment per window; every rank maps all of them. Words are aligned 64-bit cells
in the segments, read and written by real atomic instructions (``transport.atomics``). Segments have
no names where ranks see each other's ``/proc``; elsewhere names are removed as soon as all ranks
have mapped a segment. So a killed job leaves nothing.
"""

from __future__ import annotations

import os
import platform
import socket
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from gemmlink.errors import PeerTimeout, Unavailable, Unsupported
from gemmlink.rendezvous import agree
from gemmlink.spec.contracts import INTERFACE, Capabilities, Group
from gemmlink.transport import atomics, segments
from gemmlink.transport.cpu_lanes import CpuLane
from gemmlink.transport.liveness import Watch, process
from gemmlink.transport.mapping import joined, mapped

_LINE = 64


class SharedMemory:
    """See the module's docstring."""

    name = "shm"
    interface = INTERFACE

    def probe(self) -> Capabilities:
        """Needs Linux and an implementation of atomic words."""
        if not sys.platform.startswith("linux"):
            raise Unavailable("transport 'shm' needs Linux", platform.system())
        return Capabilities(
            memory=("cpu",),
            host_words=True,
            host_data=True,
            lanes=("in_order",),
            common=True,
            details={
                "atomics": atomics.IMPLEMENTATION,
                "/dev/shm free": f"{segments.shm_free() >> 20} MiB",
                "memory free": f"{segments.memory_free() >> 20} MiB",
            },
        )

    def open(self, group: Group, *, key: str, timeout_s: float) -> ShmSession:
        """Collective; checks first that all ranks share a host."""
        places = agree(group, f"{key}/host", lambda: {**_place(), **process()}, timeout_s)
        for rank, place in enumerate(places):
            if place["boot"] != places[0]["boot"]:
                raise Unsupported(
                    "transport 'shm' needs all ranks on one host",
                    f"rank 0 on {places[0]['host']} and rank {rank} on {place['host']}",
                    "Use epilogue='collective', or a group of ranks on one host.",
                )
        return ShmSession(group, key, timeout_s, places)


class ShmSession:
    """An open ``shm`` transport; makes windows whose segments all ranks map."""

    def __init__(
        self, group: Group, key: str, timeout_s: float, places: list[dict[str, Any]]
    ) -> None:
        self._watches = [Watch(place) for place in places]
        self._named = any(place["pids"] != places[0]["pids"] for place in places)
        self.rank = group.rank
        self.world = group.world
        self._group = group
        self._key = key
        self._timeout_s = timeout_s
        self._windows: list[ShmWindow] = []
        self._made = 0
        self._barriers = 0
        try:
            self._control = self._first_window()
        except BaseException:
            self.close()
            raise

    def _first_window(self) -> ShmWindow:
        try:
            return self.window(self.world * _LINE)
        except Unsupported:
            if self._named:
                raise
            self._named = True  # some rank may not look into another's /proc; all have heard of it
            return self.window(self.world * _LINE)

    def window(self, nbytes: int, common_from: int | None = None) -> ShmWindow:
        """Collective; see ``contracts.Session``."""
        self._made += 1
        key = f"{self._key}/window{self._made}"
        window = ShmWindow(self._group, key, nbytes, common_from, self._timeout_s, self._named)
        # One that has been freed must not be kept: its words hold the memory.
        self._windows = [known for known in self._windows if not known.freed]
        self._windows.append(window)
        return window

    def barrier(self, timeout_s: float) -> None:
        """Collective; set the own word at every peer, then wait for every peer's word."""
        self._barriers += 1
        words = self._control.words
        for peer in range(self.world):
            words.set(peer, self.rank * _LINE, self._barriers)
        deadline = time.monotonic() + timeout_s
        for peer in range(self.world):
            left = max(0.0, deadline - time.monotonic())
            seen = words.wait(peer * _LINE, self._barriers, left)
            if seen < self._barriers:
                raise PeerTimeout(
                    f"every rank must come to barrier {self._barriers} within {timeout_s:g} s",
                    f"nothing from rank {peer} at rank {self.rank}",
                    operation="barrier",
                    epoch=self._barriers,
                    rank=self.rank,
                    peer=peer,
                    word=f"barrier[{peer}]",
                    seen=seen,
                    wanted=self._barriers,
                )

    def alive(self, peer: int) -> bool | None:
        """From the peer's process, if it is of this process's namespace."""
        return self._watches[peer].alive()

    def close(self) -> None:
        """Local; peers keep their own mappings."""
        for watch in self._watches:
            watch.close()
        for window in self._windows:
            window.free()
        self._windows.clear()


class ShmWindow:
    """One segment a rank, all of them mapped here.

    Common bytes are rank 0's: every other rank's segment ends where they begin, and is mapped in
    front of rank 0's.
    """

    def __init__(
        self,
        group: Group,
        key: str,
        nbytes: int,
        common_from: int | None,
        timeout_s: float,
        named: bool,
    ) -> None:
        self.nbytes = nbytes
        self.freed = False
        self._common_from = common_from
        self._named = named
        self._rank = group.rank
        self._lanes: dict[tuple[int, int], CpuLane] = {}
        self._tensors: list[torch.Tensor] = []
        self._segment: segments.Segment | None = None
        try:
            records = agree(group, f"{key}/create", self._create, timeout_s)
            agree(group, f"{key}/map", lambda: self._map(records), timeout_s)
        except BaseException:
            self.free()
            raise
        finally:
            if self._segment is not None:
                self._segment.close()
        self.addresses: Sequence[int | None] = [tensor.data_ptr() for tensor in self._tensors]
        self.words = ShmWords(self._tensors, group.rank)

    def _create(self) -> dict[str, Any]:
        whole = self._common_from is None or self._rank == 0
        nbytes = self.nbytes if whole else int(self._common_from or 0)
        self._segment = segments.create(nbytes, self._named)
        return self._segment.record()

    def _map(self, records: list[dict[str, Any]]) -> dict[str, Any]:
        # A tensor keeps its mapping alive, and with it every view that a caller still holds.
        files: list[int] = []
        try:
            for peer, record in enumerate(records):
                files.append(segments.open_peer(record, peer))
            self._tensors = [self._map_one(file, files[0]) for file in files]
        except OSError as error:
            raise Unavailable(
                f"{self.nbytes} bytes of every rank's window must fit this process's address space",
                str(error),
                "Raise the limit (ulimit -v), or lower max_m.",
            ) from error
        finally:
            for file in files:
                os.close(file)
        return {}

    def _map_one(self, file: int, first: int) -> torch.Tensor:
        if self._common_from is None:
            return mapped(file, self.nbytes)
        return joined(file, first, self._common_from, self.nbytes)

    def tensor(self, peer: int) -> torch.Tensor:
        """All bytes of ``peer``'s segment."""
        return self._tensors[peer]

    def lane(self, peer: int, index: int) -> CpuLane:
        """A worker thread that copies."""
        key = (peer, index)
        if key not in self._lanes:
            own = self._tensors[self._rank]
            self._lanes[key] = CpuLane(own, self._tensors[peer], self.words, peer, index)
        return self._lanes[key]

    def free(self) -> None:
        """Drop the mappings; memory goes when the last view of it does."""
        self.freed = True
        for lane in self._lanes.values():
            lane.close()
        self._lanes = {}
        self._tensors = []
        self.addresses = []


class ShmWords:
    """Words at fixed addresses, through ``transport.atomics``."""

    def __init__(self, tensors: list[torch.Tensor], rank: int) -> None:
        self._mapped = tensors  # a word must never be touched after its memory has been unmapped
        self._bases = [tensor.data_ptr() for tensor in tensors]
        self._own = self._bases[rank]

    def set(self, peer: int, offset: int, value: int) -> None:
        """Release store; see ``contracts.Words``."""
        atomics.store(self._bases[peer] + offset, value)

    def read(self, offset: int) -> int:
        """Acquire load."""
        return atomics.load(self._own + offset)

    def wait(self, offset: int, at_least: int, timeout_s: float) -> int:
        """Bounded wait that yields the processor."""
        return atomics.wait(self._own + offset, at_least, int(timeout_s * 1e9))

    # Optional: see contracts.BoundWords. None where only the extension could do it faster.

    def reader(self, *offsets: int) -> Callable[[], tuple[int, ...]] | None:
        """Acquire loads."""
        if atomics.bound is None:
            return None
        return atomics.bound.reader(tuple(self._own + at for at in offsets), self._mapped)

    def setter(self, *groups: tuple[tuple[int, int], ...]) -> Callable[..., None] | None:
        """Release stores."""
        if atomics.bound is None:
            return None
        addresses = tuple(tuple(self._bases[peer] + at for peer, at in group) for group in groups)
        return atomics.bound.setter(addresses, self._mapped)

    def waiter(self, offset: int, timeout_s: float) -> Callable[[int], int] | None:
        """Bounded wait; it takes no clock and keeps the interpreter when the word is there."""
        if atomics.bound is None:
            return None
        return atomics.bound.waiter(self._own + offset, int(timeout_s * 1e9), self._mapped)


def _place() -> dict[str, Any]:
    with open("/proc/sys/kernel/random/boot_id") as file:
        return {"boot": file.read().strip(), "host": f"{socket.gethostname()} (pid {os.getpid()})"}
