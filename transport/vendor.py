"""The runtime library of a GPU vendor, behind one table of names.

CUDA is reached through ``cuda-bindings``, HIP through ``rocm-bindings-hip``; both are imported when
they are first needed. Every call returns a status, and every status is looked at: what is refused
becomes ``Unavailable`` with the call, the code and what helps.

Addresses and ordinals are ints. The ordinals are torch's, for both count the visible devices.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from gemmlink.errors import Unavailable

#: Size of an IPC handle, in bytes, of either vendor.
HANDLE_BYTES = 64
#: Codes that are the same for both vendors.
_OLD_DRIVER, _ALREADY_ENABLED = 35, 704
_BUS_ID_BYTES = 32
_DRIVER = "Install the vendor's driver; in a container, pass the devices in."


@dataclass(frozen=True)
class Names:
    """What one vendor calls things.

    ``calls`` maps our names to the vendor's. ``queries`` is the module of ``range``,
    ``attribute``, ``retain`` and ``drop``. ``fine_grained`` is passed to ``allocate`` if not None.
    ``legacy`` is the pointer attribute that tells whether memory has an IPC handle, where there is
    one; elsewhere memory that has an allocation handle of its own has none.
    """

    vendor: str
    module: str
    queries: str
    package: str
    extra: str
    handle: str
    calls: Mapping[str, str]
    fine_grained: int | None = None
    legacy: tuple[str, str] | None = None


_CALLS = {
    "count": "GetDeviceCount",
    "device": "GetDevice",
    "select": "SetDevice",
    "bus": "DeviceGetPCIBusId",
    "allocate": "Malloc",
    "zero": "Memset",
    "release": "Free",
    "synchronize": "DeviceSynchronize",
    "export": "IpcGetMemHandle",
    "open": "IpcOpenMemHandle",
    "close": "IpcCloseMemHandle",
    "reaches": "DeviceCanAccessPeer",
    "enable": "DeviceEnablePeerAccess",
    "last": "GetLastError",
    "version": "RuntimeGetVersion",
}
_REMEDIES = {
    "count": _DRIVER,
    "allocate": "Lower max_m, or end what else uses the device.",
    "export": "In a container, share the host's IPC namespace (docker run --ipc=host); "
    "without one, the driver's log says more.",
    "open": "Start the ranks in one container (or with --ipc=host and --pid=host), as one user, "
    "with the same devices visible.",
    "enable": "See docs/transports.md, ipc: the devices must be joined by peer access.",
    "zero": "The device has failed before: end the process.",
    "synchronize": "The device has failed before: end the process.",
}

CUDA = Names(
    vendor="CUDA",
    module="cuda.bindings.runtime",
    queries="cuda.bindings.driver",
    package="cuda-bindings",
    extra="cuda",
    handle="cudaIpcMemHandle_t",
    calls={
        **{ours: f"cuda{theirs}" for ours, theirs in _CALLS.items()},
        "range": "cuMemGetAddressRange",
        "attribute": "cuPointerGetAttribute",
    },
    legacy=("CUpointer_attribute", "CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE"),
)
HIP = Names(
    vendor="HIP",
    module="rocm.bindings.hip",
    queries="rocm.bindings.hip",
    package="rocm-bindings-hip",
    extra="rocm",
    handle="hipIpcMemHandle_t",
    calls={
        **{ours: f"hip{theirs}" for ours, theirs in _CALLS.items()},
        "allocate": "hipExtMallocWithFlags",
        "range": "hipMemGetAddressRange",
        "retain": "hipMemRetainAllocationHandle",
        "drop": "hipMemRelease",
    },
    fine_grained=1,  # hipDeviceMallocFinegrained: words that peers write must be seen in a kernel
)


class Vendor:
    """The calls that ``ipc`` makes. All of them are local; none is asynchronous."""

    def __init__(self, names: Names) -> None:
        self.name = names.vendor
        self._names = names
        self._runtime = _imported(names, names.module)
        self._queries = _imported(names, names.queries)
        for ours, theirs in names.calls.items():
            if not hasattr(self._home(ours), theirs):
                raise _too_old(names, theirs)

    def version(self) -> str:
        """Of the runtime library, as a number of the vendor's."""
        return str(self._call("version")[0])

    def count(self) -> int:
        """How many devices are visible."""
        return int(self._call("count")[0])

    @contextlib.contextmanager
    def on(self, device: int) -> Iterator[None]:
        """Within, calls of this thread concern ``device``."""
        before = int(self._call("device")[0])
        self._call("select", device)
        try:
            yield
        finally:
            if before != device:
                self._call("select", before)

    def bus(self, device: int) -> str:
        """The PCI bus id, by which processes with other visible devices know it, too."""
        text = self._call("bus", _BUS_ID_BYTES, device)[0]
        return _text(text)

    def find(self, bus: str) -> int | None:
        """The ordinal of the device with this bus id; None if it is not visible here."""
        return next((at for at in range(self.count()) if self.bus(at) == bus), None)

    def allocate(self, nbytes: int) -> int:
        """One zeroed base allocation on the current device."""
        flags = () if self._names.fine_grained is None else (self._names.fine_grained,)
        address = int(self._call("allocate", nbytes, *flags)[0])
        try:
            self._call("zero", address, 0, nbytes)
            self.synchronize()
        except BaseException:
            self.release(address)
            raise
        return address

    def release(self, address: int) -> None:
        """Give a base allocation back. Waits for the device."""
        self._call("release", address)

    def synchronize(self) -> None:
        """Wait for all that was enqueued on the current device."""
        self._call("synchronize")

    def export(self, base: int) -> bytes:
        """The handle by which other processes open the allocation that begins at ``base``."""
        handle = self._call("export", base)[0]  # whose bytes must be there while they are read
        return ctypes.string_at(_place(handle), HANDLE_BYTES)

    def open(self, handle: bytes) -> int:
        """Where this process, on the current device, sees another's base allocation."""
        raw = getattr(self._runtime, self._names.handle)()
        ctypes.memmove(_place(raw), handle, HANDLE_BYTES)
        lazily = 1  # enables peer access between the two devices
        return int(self._call("open", raw, lazily)[0])

    def close(self, address: int) -> None:
        """Take back ``open``."""
        self._call("close", address)

    def reaches(self, device: int, other: int) -> bool:
        """Whether ``device`` can access the memory of ``other``; the reverse may differ."""
        return bool(int(self._call("reaches", device, other)[0]))

    def enable(self, other: int) -> None:
        """Let the current device access the memory of ``other``. Idempotent."""
        self._call("enable", other, 0, fine=(_ALREADY_ENABLED,))

    def base_of(self, address: int) -> tuple[int, int]:
        """The allocation that ``address`` lies in: where it begins, and its size in bytes."""
        base, nbytes = self._call("range", address)[:2]
        return int(base), int(nbytes)

    def has_handle(self, base: int) -> bool:
        """Whether memory has an IPC handle: virtual memory (expandable segments, pools) has not."""
        if self._names.legacy is not None:
            kind, attribute = self._names.legacy
            asked = getattr(getattr(self._queries, kind), attribute)
            return bool(self._call("attribute", asked, base)[0])
        status, handle = self._status("retain", base)
        if int(status):
            return True
        self._call("drop", handle)
        return False

    def _home(self, ours: str) -> Any:
        apart = ("range", "attribute", "retain", "drop")
        return self._queries if ours in apart else self._runtime

    def _call(self, ours: str, *arguments: Any, fine: tuple[int, ...] = ()) -> tuple[Any, ...]:
        """What a call returns behind its status, which must be 0 or one of ``fine``."""
        status, *values = self._status(ours, *arguments)
        if int(status) and int(status) not in fine:
            raise self._refused(ours, status, arguments)
        return tuple(values)

    def _status(self, ours: str, *arguments: Any) -> tuple[Any, ...]:
        name = self._names.calls[ours]
        try:
            found: tuple[Any, ...] = getattr(self._home(ours), name)(*arguments)
        except RuntimeError as error:  # the bindings are there, the library behind them is not
            raise Unavailable(
                f"{name} needs the {self.name} library", str(error), _DRIVER
            ) from error
        if int(found[0]):
            # Where torch shares the runtime, it must not meet this error at its own next call.
            getattr(self._runtime, self._names.calls["last"])()
        return found

    def _refused(self, ours: str, status: Any, arguments: tuple[Any, ...]) -> Unavailable:
        plain = ", ".join(str(each) for each in arguments if isinstance(each, int))
        return Unavailable(
            f"{self._names.calls[ours]}({plain}) must succeed",
            f"{getattr(status, 'name', 'code')} ({int(status)})",
            self._remedy(ours, int(status)),
        )

    def _remedy(self, ours: str, code: int) -> str:
        if code == _OLD_DRIVER:
            return f"Install a newer driver, or the {self._names.package} of the driver's release."
        return _REMEDIES.get(ours, "See the vendor's description of that code.")


def names() -> Names:
    """The vendor of the devices that this torch serves. Raises ``Unavailable`` if there is none."""
    if torch.version.hip is not None:
        return HIP
    if torch.version.cuda is not None:
        return CUDA
    raise Unavailable(
        "transport 'ipc' needs CUDA or ROCm",
        "a torch for CPUs only",
        "Install a torch with CUDA or ROCm (see pytorch.org for the right index).",
    )


def _imported(names: Names, module: str) -> Any:
    try:
        return importlib.import_module(module)
    except (ImportError, OSError, RuntimeError) as error:
        raise Unavailable(
            f"transport 'ipc' needs {module}",
            f"{type(error).__name__}: {error}",
            f"pip install {names.package} (or gemmlink[{names.extra}]), of the release that fits "
            f"torch's {names.vendor}.",
        ) from error


def _too_old(names: Names, name: str) -> Unavailable:
    return Unavailable(
        f"transport 'ipc' needs {name} of {names.package}",
        "a release without it",
        f"pip install --upgrade {names.package}",
    )


def _place(handle: Any) -> int:
    """Where the bytes of a handle lie; the two libraries wrap the struct in different ways."""
    return int(handle.getPtr() if hasattr(handle, "getPtr") else handle)


def _text(value: Any) -> str:
    raw = value if isinstance(value, bytes) else ctypes.string_at(int(value))
    return raw.split(b"\0")[0].decode().strip().lower()
