"""A CUDA runtime that is none: the functions that `transport.vendor` calls, over memory files.

Device memory is a memory file that is mapped; its handle says which process and descriptor, and
opening it maps the file once more, elsewhere. So handles work between real processes, with other
addresses there, and a use after the end is a fault. It tests our rules, not the driver: what a real
one refuses, or does in another order, this one need not.

Stricter than a driver in one thing: memory that is freed while a living process has it open ends
the test (`Misuse`), where a driver only says that the behaviour is undefined.
"""

from __future__ import annotations

import ctypes
import os
import struct
import threading
from typing import Any

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *(ctypes.c_int,) * 3, ctypes.c_long)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_PAGE = 4096
_SLOTS = _PAGE // 8

#: Ordinals are those of this list. `BUS` is what a device is called.
BUS = ["0000:1a:00.0", "0000:1b:00.0"]
#: Pairs (device, other) of which the first cannot access the second.
DEAF: set[tuple[int, int]] = set()
#: Code that a function returns instead of doing anything.
FAILS: dict[str, int] = {}
#: Bases of virtual memory, which has no handle.
VIRTUAL: set[int] = set()
#: Anything in it lets this process open its own handles, as if it were another.
FOREIGN: set[str] = set()
#: What was called, by name, with its ints.
LOG: list[tuple[Any, ...]] = []

_CODES = {2: "cudaErrorMemoryAllocation", 400: "cudaErrorInvalidResourceHandle"}
_allocated: dict[int, tuple[int, int]] = {}
_opened: dict[int, list[int]] = {}
_enabled: set[tuple[int, int]] = set()
_thread = threading.local()


class Misuse(BaseException):
    """What a driver calls undefined."""


class Status(int):
    """A code with a name, as the bindings have it."""

    @property
    def name(self) -> str:
        return _CODES.get(int(self), "cudaErrorUnknown")


class cudaIpcMemHandle_t:
    """64 bytes."""

    def __init__(self) -> None:
        self.raw: Any = ctypes.create_string_buffer(64)

    def getPtr(self) -> int:
        return ctypes.addressof(self.raw)


class CUpointer_attribute:
    CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE = 13


def forget() -> None:
    """Everything as at first, but for memory."""
    DEAF.clear()
    FAILS.clear()
    VIRTUAL.clear()
    FOREIGN.clear()
    LOG.clear()
    _enabled.clear()
    _thread.device = 0


def called(name: str) -> int:
    """How often a function was called."""
    return sum(entry[0] == name for entry in LOG)


def held() -> tuple[int, int]:
    """Allocations, and handles that are open."""
    return len(_allocated), len(_opened)


def _called(name: str, *values: Any) -> Status:
    LOG.append((name, *values))
    return Status(FAILS.get(name, 0))


def _current() -> int:
    return getattr(_thread, "device", 0)


def _map(fd: int, nbytes: int) -> int:
    # PROT_READ | PROT_WRITE, MAP_SHARED
    at = int(_libc.mmap(None, nbytes + _PAGE, 3, 1, fd, 0) or 0)
    return 0 if at in (0, ctypes.c_void_p(-1).value) else at


def _users(at: int, nbytes: int) -> ctypes.Array[ctypes.c_int64]:
    """Processes that have the memory open: the page behind it."""
    return (ctypes.c_int64 * _SLOTS).from_address(at + (nbytes + 7) // 8 * 8)


def _alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def cudaGetDeviceCount() -> tuple[Any, ...]:
    return _called("cudaGetDeviceCount"), len(BUS)


def cudaGetDevice() -> tuple[Any, ...]:
    return Status(0), _current()


def cudaSetDevice(device: int) -> tuple[Any, ...]:
    if not 0 <= device < len(BUS):
        return (Status(101),)
    _thread.device = device
    return (Status(0),)


def cudaDeviceGetPCIBusId(length: int, device: int) -> tuple[Any, ...]:
    return _called("cudaDeviceGetPCIBusId", device), BUS[device].encode().ljust(length, b"\0")


def cudaMalloc(nbytes: int) -> tuple[Any, ...]:
    status = _called("cudaMalloc", nbytes)
    if status or nbytes > 1 << 40:
        return status or Status(2), None
    fd = os.memfd_create("fake-cuda", os.MFD_CLOEXEC)
    os.ftruncate(fd, nbytes + _PAGE)
    at = _map(fd, nbytes)
    if not at:
        os.close(fd)
        return Status(2), None
    _allocated[at] = (fd, nbytes)
    ctypes.memset(at, 0xA5, nbytes)  # fresh memory holds anything
    return status, at


def cudaMemset(address: int, value: int, nbytes: int) -> tuple[Any, ...]:
    ctypes.memset(address, value, nbytes)
    return (_called("cudaMemset", address, nbytes),)


def cudaFree(address: int) -> tuple[Any, ...]:
    status = _called("cudaFree", address)
    if address not in _allocated:
        raise Misuse(f"{address:#x} was freed and is no allocation")
    fd, nbytes = _allocated[address]
    users = [pid for pid in _users(address, nbytes) if pid and _alive(pid)]
    if users:
        raise Misuse(f"{address:#x} was freed while processes {users} had it open")
    del _allocated[address]
    _libc.munmap(address, nbytes + _PAGE)
    os.close(fd)
    return (status,)


def cudaDeviceSynchronize() -> tuple[Any, ...]:
    return (_called("cudaDeviceSynchronize"),)


def cudaIpcGetMemHandle(base: int) -> tuple[Any, ...]:
    status = _called("cudaIpcGetMemHandle", base)
    if status or base not in _allocated:
        return status or Status(1), None
    handle = cudaIpcMemHandle_t()
    fd, nbytes = _allocated[base]
    handle.raw[:40] = struct.pack("=5q", os.getpid(), fd, nbytes, os.fstat(fd).st_ino, base)
    return status, handle


def cudaIpcOpenMemHandle(handle: cudaIpcMemHandle_t, flags: int) -> tuple[Any, ...]:
    pid, fd, nbytes, inode, _ = struct.unpack("=5q", handle.raw[:40])
    status = _called("cudaIpcOpenMemHandle", pid, flags)
    if status or (pid == os.getpid() and not FOREIGN):
        return status or Status(400), None
    try:
        file = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return Status(400), None
    same = os.fstat(file).st_ino == inode
    at = _map(file, nbytes) if same else 0
    os.close(file)
    if not at:
        return Status(400), None
    users = _users(at, nbytes)
    slot = next(slot for slot in range(os.getpid() % _SLOTS, _SLOTS) if not users[slot])
    users[slot] = os.getpid()
    _opened[at] = [nbytes, slot]
    return status, at


def cudaIpcCloseMemHandle(address: int) -> tuple[Any, ...]:
    status = _called("cudaIpcCloseMemHandle", address)
    if address not in _opened:
        raise Misuse(f"{address:#x} was closed and is not open")
    nbytes, slot = _opened.pop(address)
    _users(address, nbytes)[slot] = 0
    _libc.munmap(address, nbytes + _PAGE)
    return (status,)


def cudaDeviceCanAccessPeer(device: int, other: int) -> tuple[Any, ...]:
    status = _called("cudaDeviceCanAccessPeer", device, other)
    return status, int(device != other and (device, other) not in DEAF)


def cudaDeviceEnablePeerAccess(other: int, flags: int) -> tuple[Any, ...]:
    status, pair = _called("cudaDeviceEnablePeerAccess", other, flags), (_current(), other)
    if other == _current() or pair in DEAF:
        return (Status(101),)
    if not status and pair in _enabled:
        return (Status(704),)
    _enabled.add(pair)
    return (status,)


def cudaGetLastError() -> tuple[Any, ...]:
    return (_called("cudaGetLastError"),)


def cudaRuntimeGetVersion() -> tuple[Any, ...]:
    return _called("cudaRuntimeGetVersion"), 13000


def cuMemGetAddressRange(address: int) -> tuple[Any, ...]:
    for base, (_, nbytes) in _allocated.items():
        if base <= address < base + nbytes:
            return Status(0), base, nbytes
    return Status(1), None, None


def cuPointerGetAttribute(attribute: int, base: int) -> tuple[Any, ...]:
    assert attribute == CUpointer_attribute.CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE
    return Status(0), int(base not in VIRTUAL)
