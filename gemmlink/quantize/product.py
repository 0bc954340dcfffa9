"""The product of two fp8 operands: a reference in float64, and what the eager backend calls.

Both mean ``out[m, n] = sum over k of (a[m, k] * scale_a) * (b[n, k] * scale_b)``. They differ in
where they round:

| | ``reference`` | ``multiply`` |
| --- | --- | --- |
| ``element * scale`` | exact | rounded to float32 (exact in ``mxfp8``) |
| products and sum | float64 | float32, in the order that torch chooses |
| result | one rounding | one rounding |

So ``multiply`` lies within ``(K + 2) * 2**-24`` times the sum of the products' sizes of the
reference, before the result is rounded. A kernel that applies scales to partial sums (ptpc once at
the end, blockscale after each 128 columns) rounds in other places and keeps to a bound of the same
form, but not to the same bits; and a sum whose scaled operands leave the float32 range may not in
the kernel.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from gemmlink.errors import InvalidArgument
from gemmlink.quantize.operands import Quantized, fill_rows, values_of
from gemmlink.spec.problem import INPUT_DTYPES, dtype_name

#: Bytes of float32 scratch for rows of A: B is widened anew for each block of them.
_A_BYTES = 16 << 20
#: The same for B: a block should stay in the second-level cache (see ``backends.eager``).
_B_BYTES = 2 << 20


def reference(a: Quantized, b: Quantized, out_dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """``a @ b.T`` of the exact values, in float64, then in ``out_dtype``: ``(M, N)``.

    ``a`` is ``(M, K)``, ``b`` ``(N, K)``. Holds float64 copies of both operands. torch rounds to 16
    bits by way of float32. Raises ``InvalidArgument`` as ``multiply`` does.
    """
    check_pair(a, b)
    _check_out_dtype(out_dtype)
    return (values_of(a, torch.float64) @ values_of(b, torch.float64).T).to(out_dtype)


def multiply(a: Quantized, b: Quantized, out: torch.Tensor) -> None:
    """``out[:] = a @ b.T`` for a ``(M, K)``, b ``(N, K)``, out ``(M, N)``; as ``Backend.multiply``.

    ``out`` is float32, bfloat16 or float16 with unit column stride, overlaps no operand and may
    lie in a window. With K = 0 it becomes +0.0. Scratch is 16 MiB of A and 2 MiB of B in float32,
    or one row where that is longer, and for packed scales a plain copy (a 32nd of the operand).

    Raises ``InvalidArgument`` for operands that do not belong together (``check_pair``) and for a
    wrong ``out``, before anything is written.
    """
    check_pair(a, b)
    _check_out(a, b, out)
    if a.shape[1] == 0:
        out.zero_()
    elif out.numel():
        _by_blocks(a, b, out)


def check_pair(a: Quantized, b: Quantized) -> None:
    """Raise ``InvalidArgument`` unless ``a`` and ``b`` are A and B of one product."""
    if (a.operand, b.operand) != ("a", "b"):
        kinds = f"{type(a.scale).__name__} and {type(b.scale).__name__}"
        raise InvalidArgument("the first operand must have A's scales, the second B's", kinds)
    if a.format != b.format:
        raise InvalidArgument("both operands must be of one format", f"{a.format} and {b.format}")
    if a.dtype != b.dtype:
        raise InvalidArgument(
            "float8_e4m3fn and float8_e4m3fnuz are different numbers and are never mixed",
            f"a {dtype_name(a.dtype)}, b {dtype_name(b.dtype)}",
            "Quantise one of them again from its source; the same bytes viewed as the other dtype "
            "are off by a factor of 2.",
        )
    if a.shape[1] != b.shape[1]:
        raise InvalidArgument(
            "both operands must have the same K", f"K={a.shape[1]} and K={b.shape[1]}"
        )
    if a.elements.device != b.elements.device:
        raise InvalidArgument(
            "both operands must be on one device", f"{a.elements.device} and {b.elements.device}"
        )


def _check_out_dtype(dtype: torch.dtype) -> None:
    if dtype not in INPUT_DTYPES:
        names = ", ".join(dtype_name(known) for known in INPUT_DTYPES)
        raise InvalidArgument(f"the result must be one of {names}", dtype_name(dtype))


def _check_out(a: Quantized, b: Quantized, out: torch.Tensor) -> None:
    _check_out_dtype(out.dtype)
    want = (a.shape[0], b.shape[0])
    if tuple(out.shape) != want:
        raise InvalidArgument(f"out must have shape {want}", f"{tuple(out.shape)}")
    if out.device != a.elements.device:
        raise InvalidArgument(
            "out must be on the operands' device", f"{out.device} and {a.elements.device}"
        )


def _by_blocks(a: Quantized, b: Quantized, out: torch.Tensor) -> None:
    a, b = a.plain(), b.plain()
    for top, high in _blocks(a, _A_BYTES):
        below = top + len(high)
        for left, wide in _blocks(b, _B_BYTES):
            right = left + len(wide)
            if out.dtype == torch.float32:
                torch.mm(high, wide.T, out=out[top:below, left:right])
            else:
                out[top:below, left:right].copy_(high @ wide.T)


def _blocks(operand: Quantized, nbytes: int) -> Iterator[tuple[int, torch.Tensor]]:
    """First row and float32 values of each block of rows; the next one overwrites the last."""
    rows, k = operand.shape
    block = max(1, min(rows, nbytes // (4 * k)))
    scratch = torch.empty(block, k, device=operand.elements.device)
    for first in range(0, rows, block):
        part = scratch[: min(block, rows - first)]
        fill_rows(part, operand, first)
        yield first, part
