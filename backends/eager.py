"""Eager: torch multiplies. Works wherever torch works and is the reference for other backends.

On a CPU a 16-bit product has two ways. Where the processor has instructions for it (AMX, AVX-512
BF16) and the result is of the inputs' dtype, torch's own product is used: float32 sums, one
rounding. Otherwise the operands are widened to float32 block by block; see ``backends.widened``.
"""

from __future__ import annotations

import torch

from gemmlink.backends import processor, widened
from gemmlink.spec.contracts import INTERFACE
from gemmlink.spec.problem import Problem


class Eager:
    """``torch.mm``, straight into the destination."""

    name = "eager"
    interface = INTERFACE

    def supports(self, problem: Problem) -> str | None:
        """CPUs and CUDA devices (ROCm's are called so, too)."""
        if problem.device.type not in ("cpu", "cuda"):
            return f"eager multiplies on CPUs and CUDA devices, not on {problem.device.type}"
        return None

    def multiply(self, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
        """``out[:] = a @ b.T``; see ``contracts.Backend``."""
        dtype = a.dtype
        if dtype == torch.float32:  # first: it is the way of small calls, and serves empty ones too
            torch.mm(a, b.T, out=out)
        elif a.shape[1] == 0:
            out.zero_()
        elif not out.numel():
            return
        elif a.device.type != "cpu":
            _on_device(a, b, out)
        elif dtype == out.dtype and processor.multiplies(dtype):
            torch.mm(a, b.T, out=out)
        else:
            widened.multiply(a, b, out)


def _on_device(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
    # The library sums in float32 and rounds once, to either dtype.
    if out.dtype == a.dtype:
        torch.mm(a, b.T, out=out)
    else:
        torch.mm(a, b.T, out_dtype=out.dtype, out=out)
