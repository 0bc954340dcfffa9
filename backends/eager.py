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
    """``torch.mm`` on CPU tensors, straight into the destination."""

    name = "eager"
    interface = INTERFACE

    def supports(self, problem: Problem) -> str | None:
        """CPU only."""
        if problem.device.type != "cpu":
            return f"eager multiplies on the CPU, not on {problem.device.type}"
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
        elif dtype == out.dtype and processor.multiplies(dtype):
            torch.mm(a, b.T, out=out)
        else:
            widened.multiply(a, b, out)
