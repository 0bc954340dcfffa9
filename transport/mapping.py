"""Memory files mapped as tensors: one file, or private pages of one followed by common of another.

The C library's ``mmap`` is called because Python's can do neither thing that is needed here: place
a mapping at a given address, which joins two files into one range; and (before Python 3.13) map a
file without keeping a descriptor of it open for as long as the mapping lives.
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


def mapped(fd: int, nbytes: int) -> torch.Tensor:
    """A uint8 tensor of ``nbytes`` over the file ``fd``, shared, readable and writable.

    The mapping lives as long as the tensor or a view of it; the file may be closed at once.
    """
    return _tensor(_map(None, nbytes, fd, 0), nbytes)


def joined(private_fd: int, common_fd: int, split: int, nbytes: int) -> torch.Tensor:
    """As ``mapped``, with ``private_fd`` up to ``split`` and ``common_fd`` from there on.

    Both files are mapped at the same offsets at which they appear. ``split`` is a multiple of the
    page size and less than ``nbytes``.
    """
    base = _map(None, nbytes, common_fd, 0)
    try:
        _map(base, split, private_fd, _MAP_FIXED)
    except OSError:
        _libc().munmap(base, nbytes)
        raise
    return _tensor(base, nbytes)


def _tensor(base: int, nbytes: int) -> torch.Tensor:
    # A class of its own: plain ctypes arrays cannot be watched by a finalizer.
    kind: Any = type("_Memory", (ctypes.c_uint8 * nbytes,), {})
    memory = kind.from_address(base)
    ending = weakref.finalize(memory, _libc().munmap, base, nbytes)
    ending.atexit = False  # a lane or a view may still be in use then; the system takes it back
    return torch.frombuffer(memory, dtype=torch.uint8)


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


def _map(address: int | None, nbytes: int, fd: int, flags: int) -> int:
    protection = mmap.PROT_READ | mmap.PROT_WRITE
    base = _libc().mmap(address, nbytes, protection, mmap.MAP_SHARED | flags, fd, 0)
    if base == _FAILED or base is None:
        code = ctypes.get_errno()
        raise OSError(code, f"mapping {nbytes} bytes: {os.strerror(code)}")
    return int(base)
