"""The few calls of the CUDA driver that a device program makes, through ctypes.

A launch through torch's Python costs 27 us of host time; one prepared argument and one call of the
driver cost a fraction of that. Streams and events are the driver's handles, as ints; a torch stream
gives its own as ``cuda_stream``.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import Any

import torch

from gemmlink.errors import GemmlinkError, Unavailable

_NO_CONTEXT = 201
_NOT_READY = 600
_NO_TIMING = 2
_NON_BLOCKING = 1


class DriverError(GemmlinkError, RuntimeError):
    """The CUDA driver refused something; after most of these the process's device is lost."""


@lru_cache(maxsize=1)
def library() -> Any:
    """The driver's library. Raises ``Unavailable`` where there is none."""
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise Unavailable(
            "CUDA tensors need the NVIDIA driver", str(error), "Install the NVIDIA driver."
        ) from error


def version() -> str:
    """The newest CUDA that the driver serves, ``13.0``. Raises as ``library`` does."""
    number = ctypes.c_int()
    library().cuDriverGetVersion(ctypes.byref(number))
    return f"{number.value // 1000}.{number.value % 1000 // 10}"


_HANDLE, _INT, _UINT, _SIZE = ctypes.c_void_p, ctypes.c_int, ctypes.c_uint, ctypes.c_size_t
_ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "cuLaunchKernel": (_HANDLE, *(_UINT,) * 7, *(_HANDLE,) * 3),
    "cuMemcpyDtoDAsync_v2": (ctypes.c_uint64, ctypes.c_uint64, _SIZE, _HANDLE),
    "cuEventCreate": (ctypes.POINTER(_HANDLE), _UINT),
    "cuEventRecord": (_HANDLE, _HANDLE),
    "cuEventQuery": (_HANDLE,),
    "cuStreamWaitEvent": (_HANDLE, _HANDLE, _UINT),
    "cuStreamCreate": (ctypes.POINTER(_HANDLE), _UINT),
    "cuStreamIsCapturing": (_HANDLE, ctypes.POINTER(_INT)),
}


class Driver:
    """Launches, copies and events on one device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._cuda = library()
        for name, types in _ARGUMENTS.items():
            getattr(self._cuda, name).argtypes = types
        self._launch = self._cuda.cuLaunchKernel
        self._pointers = (_HANDLE * 1)()

    def launch(
        self, function: int, across: int, down: int, threads: int, argument: Any, stream: int
    ) -> None:
        """Launch a kernel that takes one struct. It is copied before this returns."""
        pointers = self._pointers
        pointers[0] = ctypes.addressof(argument)
        arguments = (function, across, down, 1, threads, 1, 1, 0, stream, pointers, None)
        code = self._launch(*arguments)
        if code:
            self._again("cuLaunchKernel", code, *arguments)

    def copy(self, to: int, source: int, nbytes: int, stream: int) -> None:
        """Enqueue a copy between two places of device memory, by a copy engine where one serves."""
        self._call("cuMemcpyDtoDAsync_v2", to, source, nbytes, stream)

    def new_stream(self) -> int:
        """A stream that is nobody else's and has no order with the default one."""
        made = _HANDLE()
        self._call("cuStreamCreate", ctypes.byref(made), _NON_BLOCKING)
        return int(made.value or 0)

    def event(self) -> int:
        """A new event. It is never destroyed: an operation has few."""
        made = _HANDLE()
        self._call("cuEventCreate", ctypes.byref(made), _NO_TIMING)
        return int(made.value or 0)

    def record(self, event: int, stream: int) -> None:
        """Mark the present end of ``stream``."""
        self._call("cuEventRecord", event, stream)

    def wait(self, stream: int, event: int) -> None:
        """Let what is enqueued on ``stream`` from now on wait for ``event``."""
        self._call("cuStreamWaitEvent", stream, event, 0)

    def has_happened(self, event: int) -> bool:
        """Whether the device has come to where ``event`` was last recorded. Never blocks."""
        code = self._cuda.cuEventQuery(event)
        if code not in (0, _NOT_READY):
            raise self._refused("cuEventQuery", code)
        return bool(code == 0)

    def is_capturing(self, stream: int) -> bool:
        """Whether ``stream`` is being captured into a graph. The default stream cannot be."""
        if stream == 0:
            return False
        status = _INT()
        self._call("cuStreamIsCapturing", stream, ctypes.byref(status))
        return status.value != 0

    def _call(self, name: str, *arguments: Any) -> None:
        code = getattr(self._cuda, name)(*arguments)
        if code:
            self._again(name, code, *arguments)

    def _again(self, name: str, code: int, *arguments: Any) -> None:
        if code == _NO_CONTEXT:  # a thread in which nobody has used CUDA yet
            torch.cuda.set_device(self._device)
            code = getattr(self._cuda, name)(*arguments)
        if code:
            raise self._refused(name, code)

    def _refused(self, name: str, code: int) -> DriverError:
        text = ctypes.c_char_p()
        self._cuda.cuGetErrorName(code, ctypes.byref(text))
        what = (text.value or b"?").decode()
        return DriverError(f"{name} must succeed on {self._device}", f"{what} ({code})")
