"""How rows travel in another dtype than the result's: fp8 elements and a scale for each row.

A row of n elements takes n bytes of fp8, then its float32 scale, padded to a multiple of 16 bytes:
elements and scale of a row lie side by side, so that one word announces both.

Each row is divided by its largest magnitude over that of the dtype, 448 for e4m3fn, and rounded to
the nearest: an error of at most 1/16 of an element, or of 2**-9 / 448 of the largest one of its row
where that is more; 2.6e-2 relative L2 for normally distributed values. NaN stays NaN; an infinity
becomes the largest finite number of its row, as ``gemmlink.quantize`` says.
"""

from __future__ import annotations

import torch

from gemmlink import quantize
from gemmlink.errors import InvalidArgument, Unsupported
from gemmlink.spec.problem import dtype_name

#: What is said where a wire dtype is chosen.
ERROR = "relative L2 error some 2.6e-2, an element at most 1/16 (values normally distributed)"

WIRE_DTYPES = (torch.float8_e4m3fn,)

_SCALE = 4
_UNIT = 16


def check_wire_dtype(dtype: object) -> None:
    """Raise an error of ours unless ``dtype`` is None or one that rows can travel in."""
    if dtype is None or dtype in WIRE_DTYPES:
        return
    if not isinstance(dtype, torch.dtype):
        raise InvalidArgument("wire_dtype must be a torch.dtype or None", repr(dtype))
    names = ", ".join(dtype_name(each) for each in WIRE_DTYPES)
    raise Unsupported(f"wire_dtype must be {names}, or None", dtype_name(dtype))


def row_bytes(n: int) -> int:
    """Bytes of an encoded row of ``n`` elements."""
    return -(-(n + _SCALE) // _UNIT) * _UNIT


def encode(values: torch.Tensor, encoded: torch.Tensor) -> None:
    """``values`` ``(rows, n)`` into uint8 ``(rows, row_bytes(n))``; padding is left alone."""
    n = values.shape[1]
    made = quantize.ptpc(values, "a")
    encoded[:, :n].copy_(made.elements.view(torch.uint8))
    scales = made.scale.tensor.view(torch.uint8).view(-1, _SCALE)
    encoded[:, n : n + _SCALE].copy_(scales)


def decode(encoded: torch.Tensor, values: torch.Tensor) -> None:
    """What ``encode`` made of them, into ``values`` ``(rows, n)`` of any float dtype."""
    n = values.shape[1]
    elements = encoded[:, :n].contiguous().view(WIRE_DTYPES[0]).float()
    # Copied in any case: a single row counts as contiguous, and begins at any byte.
    scales = encoded[:, n : n + _SCALE].clone().view(torch.float32)
    values.copy_(elements.mul_(scales))
