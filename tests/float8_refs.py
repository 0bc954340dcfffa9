"""fp8 in plain Python numbers, written from the formats' definitions: no tensor arithmetic at all.

Tests compare what torch computes in ``gemmlink.quantize`` with this.
"""

from __future__ import annotations

import math
import struct
from bisect import bisect_left
from collections.abc import Callable
from functools import cache

import torch

FN, FNUZ = torch.float8_e4m3fn, torch.float8_e4m3fnuz
NAN, INF = float("nan"), float("inf")
TOP = {FN: 448.0, FNUZ: 240.0}
#: Half the distance of two neighbours below the smallest normal number.
HALF_SUBNORMAL = {FN: 2.0**-10, FNUZ: 2.0**-11}

Rows = list[list[float]]
ScaleRule = Callable[[float], float]


def value_of(code: int, dtype: torch.dtype) -> float:
    """The number that a byte means."""
    if (code & 0x7F == 0x7F) if dtype == FN else (code == 0x80):
        return NAN
    bias = 7 if dtype == FN else 8
    sign, exponent, mantissa = -1.0 if code & 0x80 else 1.0, code >> 3 & 15, code & 7
    if exponent == 0:
        return sign * math.ldexp(mantissa, -2 - bias)
    return sign * math.ldexp(8 + mantissa, exponent - bias - 3)


@cache
def _sizes(dtype: torch.dtype) -> list[float]:
    """Finite values with sign bit 0; a value's code is its place."""
    return [value_of(code, dtype) for code in range(128 if dtype == FNUZ else 127)]


def code_of(number: float, dtype: torch.dtype) -> int:
    """The byte for a number: nearest, ties to the even code, no overflow. NaN: 0x7F or 0x80."""
    if math.isnan(number):
        return 0x7F if dtype == FN else 0x80
    sizes, size = _sizes(dtype), min(abs(number), TOP[dtype])
    above = min(bisect_left(sizes, size), len(sizes) - 1)
    below = max(above - 1, 0)
    up, down = abs(sizes[above] - size), abs(size - sizes[below])
    code = above if up < down or (up == down and above % 2 == 0) else below
    negative = math.copysign(1.0, number) < 0
    return code + 0x80 if negative and (code or dtype == FN) else code


def float32(number: float) -> float:
    """``number`` rounded to float32."""
    return float(struct.unpack("f", struct.pack("f", number))[0])


def float32_scale(top: float) -> ScaleRule:
    """The rule of ptpc and blockscale: amax / top, at least the smallest normal number."""
    return lambda amax: max(float32(amax / top), 2.0**-126) if amax else 1.0


def ue8m0_scale(amax: float) -> float:
    """The rule of mxfp8, by trying every power of two."""
    if amax == 0:
        return 1.0
    return next((2.0**e for e in range(-126, 119) if amax <= 448 * 2.0**e), 2.0**119)


def quantised(
    values: Rows, group: tuple[int, int], rule: ScaleRule, dtype: torch.dtype
) -> tuple[list[list[int]], Rows]:
    """Codes of the elements, and scales ``[row group][column group]``."""
    high, wide = group
    scales = []
    for top in range(0, len(values), high):
        line = []
        for left in range(0, len(values[0]), wide):
            cells = [v for row in values[top : top + high] for v in row[left : left + wide]]
            line.append(rule(max([abs(v) for v in cells if math.isfinite(v)], default=0.0)))
        scales.append(line)
    codes = [
        [code_of(_quotient(v, scales[i // high][j // wide]), dtype) for j, v in enumerate(row)]
        for i, row in enumerate(values)
    ]
    return codes, scales


def _quotient(value: float, scale: float) -> float:
    return float32(value / scale) if math.isfinite(value) else value


def adversarial(seed: int, rows: int, cols: int) -> torch.Tensor:
    """float32 ``(rows, cols)``: every bit pattern as likely, then runs of one kind of trouble.

    Left to right in each row: noise of ordinary size, zeros, subnormals, huge numbers, ties of the
    fp8 grid, and single NaN, infinities and -0.0 strewn over all.
    """
    generator = torch.Generator().manual_seed(seed)

    def bits(count: int) -> torch.Tensor:
        drawn = torch.randint(-(2**31), 2**31, (rows, count), generator=generator)
        return drawn.to(torch.int32).view(torch.float32)

    def normal(count: int) -> torch.Tensor:
        return torch.randn(rows, count, generator=generator)

    width = -(-cols // 6)
    ties = torch.randint(-128, 129, (rows, width), generator=generator) / 8 + 1 / 16
    parts = [bits(width), normal(width), normal(width) * 0, normal(width) * 2.0**-130]
    out = torch.cat([*parts, normal(width) * 2.0**125, ties], dim=1)[:, :cols].contiguous()
    for trouble in (NAN, INF, -INF, -0.0, 2.0**-149, 3.4e38):
        at = torch.randint(0, rows * cols, (1 + rows * cols // 200,), generator=generator)
        out.view(-1)[at] = trouble
    return out
