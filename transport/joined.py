"""One address range over two files: private pages up to a point, common pages from there on.

Python's ``mmap`` cannot place a mapping at a given address, which is what joins the two; the C
library's can.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from functools import lru_cache
from typing import Any

import torch

_MAP_FIXED = 0x10
_FAILED = ctypes.c_void_p(-1).value


@lru_cache(maxsize=1)
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (
        ctypes.c_void_p,
        ctypes.c_size_t,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_int64,
    )
    libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    return libc


def joined(private_fd: int, common_fd: int, split: int, nbytes: int) -> torch.Tensor:
    """A uint8 tensor of ``nbytes``: ``private_fd`` up to ``split``, ``common_fd`` from there on.

    Both files are mapped at the same offsets at which they appear. ``split`` is a multiple of the
    page size and less than ``nbytes``. The mapping lives as long as the tensor or a view of it;
    the files may be closed at once.
    """
    base = _map(None, nbytes, common_fd, 0)
    try:
        _map(base, split, private_fd, _MAP_FIXED)
    except OSError:
        _libc().munmap(base, nbytes)
        raise
    # A class of its own: plain ctypes arrays cannot be watched by a finalizer.
    kind: Any = type("_Memory", (ctypes.c_uint8 * nbytes,), {})
    memory = kind.from_address(base)
    weakref.finalize(memory, _libc().munmap, base, nbytes)
    return torch.frombuffer(memory, dtype=torch.uint8)


def _map(address: int | None, nbytes: int, fd: int, flags: int) -> int:
    protection = mmap.PROT_READ | mmap.PROT_WRITE
    base = _libc().mmap(address, nbytes, protection, mmap.MAP_SHARED | flags, fd, 0)
    if base == _FAILED or base is None:
        code = ctypes.get_errno()
        raise OSError(code, f"mapping {nbytes} bytes: {os.strerror(code)}")
    return int(base)
