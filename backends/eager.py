"""Eager: torch multiplies. Works wherever torch works and is the reference for other backends.

On a CPU, 16-bit inputs are multiplied in float32: exact products, one rounding at the end, and on
processors without 16-bit matrix instructions several times faster than torch's own 16-bit product.
B is widened a block of rows at a time into a small scratch, so that a call never holds a float32
copy of the weights (measured: 40 ms against 100 ms for ``a.float() @ b.float().T`` at 64 x 2048 x
7168, with 2 MiB of scratch in place of 56 MiB).
"""

from __future__ import annotations

import torch

from gemmlink.spec.contracts import INTERFACE
from gemmlink.spec.problem import Problem

#: Bytes of float32 scratch for widened rows of B. Below this, more blocks cost nothing; above it
#: the block leaves the second-level cache.
_SCRATCH_BYTES = 2 << 20


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
        if a.shape[1] == 0:
            out.zero_()
        elif out.numel() and a.dtype == torch.float32:
            torch.mm(a, b.T, out=out)
        elif out.numel():
            _widened(a, b, out)


def _widened(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
    n, k = b.shape
    block = max(1, min(n, _SCRATCH_BYTES // (4 * k)))
    scratch = torch.empty(block, k)
    wide = a.float()
    for first in range(0, n, block):
        last = min(n, first + block)
        rows = scratch[: last - first]
        rows.copy_(b[first:last])
        if out.dtype == torch.float32:
            torch.mm(wide, rows.T, out=out[:, first:last])
        else:
            out[:, first:last].copy_(wide @ rows.T)
