"""How one rank's device memory is told to another, and how the other reaches it.

A record (``told``) names the host, process and device that memory belongs to, and its place: the
allocation's *base*, an offset, and the base's IPC handle for those who need one. From two records
follows the way (``way``):

    OWN      the rank itself: its own pointer
    POINTER  the same process: that pointer too, with peer access if the device is another
    HANDLE   another process: the opened handle, plus the offset

A handle is opened once in a process, however many ranks in it are threads, and closed by the last.
"""

from __future__ import annotations

import enum
import os
import socket
import threading
from typing import Any

from gemmlink.errors import Unsupported
from gemmlink.transport.liveness import process
from gemmlink.transport.vendor import Vendor

Record = dict[str, Any]
_BOOT = "/proc/sys/kernel/random/boot_id"


class Way(enum.Enum):
    """See the module's docstring."""

    OWN = "own"
    POINTER = "pointer"
    HANDLE = "handle"


def place(vendor: Vendor, device: int) -> Record:
    """Where a rank is: what decides the way between two."""
    with open(_BOOT) as file:
        boot = file.read().strip()
    return {
        "boot": boot,
        "host": f"{socket.gethostname()} (pid {os.getpid()})",
        "vendor": vendor.name,
        "bus": vendor.bus(device),
        **process(),
    }


def way(mine: Record, theirs: Record, is_self: bool) -> Way:
    """How the rank at ``mine`` reaches memory of the rank at ``theirs``."""
    if is_self:
        return Way.OWN
    # The same number in another namespace is another process.
    same = (mine["pid"], mine["pids"]) == (theirs["pid"], theirs["pids"])
    return Way.POINTER if same else Way.HANDLE


def refuse_apart(places: list[Record]) -> None:
    """Raise ``Unsupported`` unless all ranks are on one host and of one vendor."""
    first = places[0]
    for rank, other in enumerate(places):
        for field, what in (("boot", "on one host"), ("vendor", "with devices of one vendor")):
            if other[field] != first[field]:
                raise Unsupported(
                    f"transport 'ipc' needs all ranks {what}",
                    f"rank 0 on {first['host']}, {first['vendor']}, and rank {rank} on "
                    f"{other['host']}, {other['vendor']}",
                    "Use a group of ranks on one host.",
                )


def reach(vendor: Vendor, device: int, places: list[Record]) -> list[bool | None]:
    """Whether ``device`` can access each place's device; None for one that is not visible here."""
    own = vendor.bus(device)
    found: dict[str, bool | None] = {own: True}  # a device that is asked about itself says no
    for each in places:
        if each["bus"] not in found:
            other = vendor.find(each["bus"])
            found[each["bus"]] = None if other is None else vendor.reaches(device, other)
    return [found[each["bus"]] for each in places]


def refuse_unreachable(places: list[Record], reached: list[list[bool | None]]) -> None:
    """Raise ``Unsupported`` if some device cannot access another; one way may work without other.

    ``reached[a][b]`` is what rank a found of rank b.
    """
    for rank, row in enumerate(reached):
        for peer, can in enumerate(row):
            if can is False:
                back = {True: "can", False: "cannot", None: "does not know whether it can"}
                raise Unsupported(
                    "transport 'ipc' needs devices that access each other's memory, both ways",
                    f"rank {rank} on {places[rank]['bus']}, which cannot access rank {peer} on "
                    f"{places[peer]['bus']}, which {back[reached[peer][rank]]} the reverse",
                    "See nvidia-smi topo -p2p r, or rocm-smi --showtopoaccess; use a group of "
                    "devices that are joined.",
                )


def told(vendor: Vendor, address: int, nbytes: int, with_handle: bool) -> Record:
    """The record of memory on the current device, wherever in its allocation it lies.

    ``with_handle``: for other processes. Raises ``Unsupported`` for memory that has none.
    """
    base, size = vendor.base_of(address)
    record = {"base": base, "offset": address - base, "nbytes": nbytes, "handle": ""}
    # First, for virtual memory is made of many small allocations.
    if with_handle and not vendor.has_handle(base):
        raise Unsupported(
            "memory that other processes open must come from the plain allocator",
            f"virtual memory at {base:#x} (expandable segments, or a memory pool)",
            "Unset expandable_segments in PYTORCH_CUDA_ALLOC_CONF (PYTORCH_HIP_ALLOC_CONF), "
            "or use transport='symm_mem'.",
        )
    if address + nbytes > base + size:
        raise Unsupported(
            "memory that is told to peers must lie in one allocation",
            f"{nbytes} bytes at {address:#x}, in one of {size} bytes at {base:#x}",
        )
    if with_handle:
        record["handle"] = vendor.export(base).hex()
    return record


class Reached:
    """Memory of one rank as this process uses it, at ``address``, until ``close``."""

    def __init__(self, vendor: Vendor, how: Way, record: Record, bus: str, device: int) -> None:
        self._vendor = vendor
        self._device = device
        self._handle = b""
        if how is Way.HANDLE:
            self._handle = bytes.fromhex(record["handle"])
            self.address = _opened.open(vendor, device, self._handle) + int(record["offset"])
            return
        other = vendor.find(bus) if how is Way.POINTER else device
        if other is not None and other != device:
            vendor.enable(other)
        self.address = int(record["base"]) + int(record["offset"])

    def close(self) -> None:
        """Close the handle, if there is one and nobody else here uses it. Idempotent."""
        handle, self._handle = self._handle, b""
        if handle:
            _opened.close(self._vendor, self._device, handle)


class _Opened:
    """Handles that are open in this process, each with the number of its users."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: dict[tuple[int, bytes], list[int]] = {}

    def open(self, vendor: Vendor, device: int, handle: bytes) -> int:
        with self._lock:
            known = self._known.get((device, handle))
            if known is None:
                known = self._known[device, handle] = [vendor.open(handle), 0]
            known[1] += 1
            return known[0]

    def close(self, vendor: Vendor, device: int, handle: bytes) -> None:
        with self._lock:
            known = self._known[device, handle]
            known[1] -= 1
            if known[1] == 0:
                del self._known[device, handle]
                vendor.close(known[0])


_opened = _Opened()
