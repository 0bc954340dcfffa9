"""The quantisers: float tensors to fp8 operands, one scale a group.

For each group: ``scale`` from ``amax``, the largest size of its *finite* elements; then
``element = to_float8(value / scale)``, the quotient rounded to float32 first.

- NaN stays NaN, an infinity becomes the largest element of the group with its sign; neither
  touches the scale, so the rest of the group is as if they were not there.
- A group without a finite element other than 0 has scale 1.
- float32 scales are ``amax / MAXIMUM[dtype]``. ue8m0 scales are the smallest power of two that is
  not below that (rounded *up*), so that no finite value of the group is clamped; the standard's
  own suggestion rounds down and clamps what lies in the top quarter of a binade.
- No scale is below 2**-126, the smallest normal float32, since devices may flush smaller ones to
  zero. A group with ``amax < MAXIMUM * 2**-126`` has a coarser step than its size asks for.
- ue8m0 scales are at most 2**119, so that 448 times the scale is a float32. Values beyond
  448 * 2**119 (7/8 of the range) are clamped to it. float32 scales need no such limit.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from gemmlink.errors import InvalidArgument
from gemmlink.quantize.float8 import MAXIMUM, check_float8, to_float8
from gemmlink.quantize.operands import Quantized
from gemmlink.quantize.scales import (
    Block1x128,
    Block128x128,
    Operand,
    PerChannel,
    PerToken,
    Scale,
    check_multiple,
)
from gemmlink.quantize.ue8m0 import Mx1x32, Mx32x32, codes_of, decoded
from gemmlink.spec.problem import INPUT_DTYPES, dtype_name

_SMALLEST_SCALE = 2.0**-126
E4M3FN = torch.float8_e4m3fn


def ptpc(values: torch.Tensor, operand: Operand, dtype: torch.dtype = E4M3FN) -> Quantized:
    """Per-token (A) or per-channel (B): one float32 scale a row, ``PerToken`` or ``PerChannel``.

    ``values`` is ``(rows, K)`` in float32, bfloat16 or float16, any strides, any sizes; ``dtype``
    the fp8 dtype. The rules for scales, NaN and infinities are the module's. Allocates a few
    float32 copies. Raises ``InvalidArgument``.
    """
    kind: type[Scale] = _side(operand, PerToken, PerChannel)
    wide = _wide(values, dtype)
    scale = _float32_scale(_amax(wide, (len(wide), 1)), dtype)
    return Quantized(_divided(wide, scale, dtype), kind(scale.flatten()))


def blockscale(values: torch.Tensor, operand: Operand, dtype: torch.dtype = E4M3FN) -> Quantized:
    """1x128 groups (A, ``Block1x128``) or 128x128 blocks (B, ``Block128x128``), float32 scales.

    ``values`` as for ``ptpc``. K, and N for B, must be multiples of 128, else ``InvalidArgument``
    that names the nearest: kernels read whole groups, and padding with zeros before quantising
    changes no scale. M is free.
    """
    kind: type[Scale] = _side(operand, Block1x128, Block128x128)
    wide = _wide(values, dtype)
    scale = _float32_scale(_amax(wide, _groups(wide, kind)), dtype)
    laid = scale.T.contiguous() if operand == "a" else scale
    return Quantized(_divided(wide, scale, dtype), kind(laid))


def mxfp8(values: torch.Tensor, operand: Operand) -> Quantized:
    """1x32 groups (A, ``Mx1x32``) or 32x32 blocks (B, ``Mx32x32``), ue8m0 scales, float8_e4m3fn.

    ``values`` as for ``ptpc``. K, and N for B, must be multiples of 32, else ``InvalidArgument``
    that names the nearest. M is free here; packed scales need a multiple of 64.
    """
    kind: type[Scale] = _side(operand, Mx1x32, Mx32x32)
    wide = _wide(values, E4M3FN)
    codes = codes_of(_exponent(_amax(wide, _groups(wide, kind))))
    return Quantized(_divided(wide, decoded(codes), E4M3FN), kind(codes))


#: The quantisers by the name of their format.
FORMATS: dict[str, Callable[..., Quantized]] = {
    "ptpc": ptpc,
    "blockscale": blockscale,
    "mxfp8": mxfp8,
}


def _side(operand: Operand, a: type[Scale], b: type[Scale]) -> type[Scale]:
    if operand not in ("a", "b"):
        raise InvalidArgument('operand must be "a" (tokens) or "b" (weights)', repr(operand))
    return a if operand == "a" else b


def _wide(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``values`` as a contiguous float32 tensor, perhaps itself."""
    check_float8(dtype)
    if values.dtype not in INPUT_DTYPES:
        names = ", ".join(dtype_name(known) for known in INPUT_DTYPES)
        raise InvalidArgument(
            f"values to quantise must be one of {names}", dtype_name(values.dtype)
        )
    if values.dim() != 2:
        raise InvalidArgument(
            "values to quantise must be (rows, K)", f"shape {tuple(values.shape)}"
        )
    return values.detach().float().contiguous()


def _groups(wide: torch.Tensor, kind: type[Scale]) -> tuple[int, int]:
    """How many groups along rows and along K."""
    (rows, k), (high, across) = wide.shape, kind.group
    check_multiple("K", k, across)
    check_multiple("M" if kind.operand == "a" else "N", rows, high)
    return rows // high, k // across


def _cells(wide: torch.Tensor, groups: tuple[int, int]) -> torch.Tensor:
    """A view ``(groups of rows, rows in a group, groups along K, columns in a group)``."""
    (rows, k), (down, across) = wide.shape, groups
    return wide.view(down, rows // max(down, 1), across, k // max(across, 1))


def _amax(wide: torch.Tensor, groups: tuple[int, int]) -> torch.Tensor:
    """The largest size of a finite element of each group; 0 if there is none."""
    if not wide.numel():
        return wide.new_zeros(groups)
    size = wide.abs()
    size = size.where(size.isfinite(), size.new_zeros(()))
    return _cells(size, groups).amax(dim=(1, 3))


def _divided(wide: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """fp8 elements of ``wide / scale``; ``scale`` is float32, one for each group."""
    if not wide.numel():
        return wide.to(dtype)
    quotient = _cells(wide, (scale.shape[0], scale.shape[1])) / scale[:, None, :, None]
    return to_float8(quotient, dtype).view(wide.shape)


def _float32_scale(amax: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    # The largest float32 is a whole multiple of 448 and of 240 with a float32 quotient, and
    # rounding is monotone, so MAXIMUM * scale is finite for every amax.
    scale = (amax / MAXIMUM[dtype]).clamp(min=_SMALLEST_SCALE)
    return scale.where(amax > 0, scale.new_ones(()))


def _exponent(amax: torch.Tensor) -> torch.Tensor:
    """Smallest e with ``amax <= 448 * 2**e``, within -126..119; 0 where ``amax`` is 0. Exact."""
    top, top_exponent = math.frexp(MAXIMUM[E4M3FN])
    fraction, exponent = torch.frexp(amax)
    exponent = exponent - top_exponent + (fraction > top)
    exponent = exponent.clamp(-126, 128 - top_exponent)
    return exponent.where(amax > 0, exponent.new_zeros(()))
