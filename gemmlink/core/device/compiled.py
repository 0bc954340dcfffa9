"""Compiles ``kernels.cu`` at run time, for the device at hand, with the compiler of torch.

torch has that as a private function; it is looked for and asked with care, and nothing else of it
is used: launches go through ``driver``.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from gemmlink.errors import Unavailable

_FIX = "Install a torch with CUDA, 2.9 or newer: pip install 'torch>=2.9'."


def why_not() -> str | None:
    """None if kernels can be compiled here as far as can be told without a device, else why not."""
    if torch.version.hip is not None:
        return "a torch for ROCm, for which the kernels have not been written yet"
    if torch.version.cuda is None:
        return "a torch without CUDA"
    if not callable(getattr(torch.cuda, "_compile_kernel", None)):
        return f"torch {torch.__version__}, which has no torch.cuda._compile_kernel"
    return None


@lru_cache(maxsize=64)
def function(name: str, device: int) -> int:
    """The handle of kernel ``name``, loaded on CUDA device ``device``. Kept for good.

    Raises ``Unavailable`` with the compiler's own words when it cannot be had.
    """
    lacking = why_not()
    if lacking is not None:
        raise Unavailable("CUDA tensors need kernels compiled by torch", lacking, _FIX)
    source = Path(__file__).with_name("kernels.cu").read_text()
    compile_kernel: Any = torch.cuda._compile_kernel
    try:
        with torch.cuda.device(device):
            kernel = compile_kernel(source, name)
        handle = ctypes.cast(kernel.func, ctypes.c_void_p).value
    except Exception as error:  # whatever a private function of another version does
        raise Unavailable(
            "torch must compile the kernels of the device program",
            f"{type(error).__name__}: {error}",
            _FIX,
        ) from error
    if not handle:
        raise Unavailable("torch must give the handle of a kernel", repr(handle), _FIX)
    _kept.append(kernel)
    return int(handle)


#: Modules are unloaded with their Python objects.
_kept: list[Any] = []
