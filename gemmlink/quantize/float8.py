"""The two 8-bit floats with 4 exponent and 3 mantissa bits. They are different numbers.

| | ``float8_e4m3fn`` (OCP OFP8) | ``float8_e4m3fnuz`` (gfx942) |
| --- | --- | --- |
| exponent bias | 7 | 8 |
| largest | 448 (``0x7E``) | 240 (``0x7F``) |
| smallest normal, subnormal | 2**-6, 2**-9 | 2**-7, 2**-10 |
| NaN | ``0x7F`` and ``0xFF`` | ``0x80`` only |
| -0.0 | ``0x80`` | does not exist |
| infinity | does not exist | does not exist |

The same byte means half as much in ``e4m3fnuz`` (``0x38`` is 1.0 and 0.5), so a tensor of one is
never reinterpreted as the other, and the two are never multiplied with each other.
"""

from __future__ import annotations

import torch

from gemmlink.errors import InvalidArgument
from gemmlink.spec.problem import dtype_name

#: Largest finite value of each fp8 dtype that may hold elements.
MAXIMUM = {torch.float8_e4m3fn: 448.0, torch.float8_e4m3fnuz: 240.0}


def check_float8(dtype: torch.dtype) -> None:
    """Raise ``InvalidArgument`` unless ``dtype`` is one of the keys of ``MAXIMUM``."""
    if dtype not in MAXIMUM:
        names = " or ".join(dtype_name(known) for known in MAXIMUM)
        raise InvalidArgument(f"fp8 elements must be {names}", dtype_name(dtype))


def to_float8(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``values`` (any shape and float dtype) in ``dtype``: the nearest, ties to even, saturating.

    What lies beyond the largest finite value becomes that value with its sign, infinities too. NaN
    stays NaN. In ``float8_e4m3fnuz`` -0.0 becomes +0.0. float64 is rounded to float32 before.

    torch's own cast does not saturate ``float8_e4m3fnuz`` (248 and more become NaN), and
    ``float8_e4m3fn`` only in newer versions (2.7 makes more than 464 NaN, 2.13 makes it 448), so
    values are clamped first.
    """
    check_float8(dtype)
    top = MAXIMUM[dtype]
    return values.float().clamp(-top, top).to(dtype)
