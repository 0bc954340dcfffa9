"""One operand of an fp8 product: elements and the scales they belong to."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from gemmlink.errors import InvalidArgument
from gemmlink.quantize.float8 import check_float8
from gemmlink.quantize.scales import Operand, Scale
from gemmlink.spec.problem import dtype_name


@dataclass(frozen=True, eq=False)
class Quantized:
    """fp8 ``elements`` ``(rows, K)`` of any strides, and their ``scale``; both kept, not copied.

    Raises ``InvalidArgument`` unless the dtype is an fp8 one, the scale object covers exactly this
    shape, both are on one device, and ``mxfp8`` has ``float8_e4m3fn`` (the standard knows no
    ``float8_e4m3fnuz``). Only shapes and dtypes are looked at, never values.
    """

    elements: torch.Tensor
    scale: Scale

    def __post_init__(self) -> None:
        if not isinstance(self.scale, Scale):
            raise InvalidArgument(
                "scale must be an object that says its layout, such as PerToken(tensor)",
                type(self.scale).__name__,
                "For A's block scales Block1x128.from_tensor(tensor, m, k) recognises the layout.",
            )
        check_float8(self.dtype)
        if self.elements.dim() != 2:
            raise InvalidArgument("elements must be (rows, K)", f"shape {self.shape}")
        if self.format == "mxfp8" and self.dtype != torch.float8_e4m3fn:
            raise InvalidArgument("mxfp8 elements must be float8_e4m3fn", dtype_name(self.dtype))
        self.scale.check(*self.shape)
        if self.scale.tensor.device != self.elements.device:
            raise InvalidArgument(
                "elements and scale must be on one device",
                f"{self.elements.device} and {self.scale.tensor.device}",
            )

    @property
    def shape(self) -> tuple[int, ...]:
        """``(rows, K)``."""
        return tuple(self.elements.shape)

    @property
    def dtype(self) -> torch.dtype:
        """Of the elements."""
        return self.elements.dtype

    @property
    def format(self) -> str:
        """``"ptpc"``, ``"blockscale"`` or ``"mxfp8"``."""
        return self.scale.format

    @property
    def operand(self) -> Operand:
        """``"a"`` or ``"b"``."""
        return self.scale.operand

    def plain(self) -> Quantized:
        """The same operand with its scales in a plain layout: itself, unless they are packed."""
        scale = self.scale.plain()
        return self if scale is self.scale else Quantized(self.elements, scale)

    def dequantize(self) -> torch.Tensor:
        """``element * scale`` of every element: float32 ``(rows, K)``.

        Each product is rounded once (in ``mxfp8`` none is). Beyond the float32 range it is
        infinite, which needs a scale that no quantiser of gemmlink makes.
        """
        return values_of(self, torch.float32)


def values_of(operand: Quantized, dtype: torch.dtype) -> torch.Tensor:
    """``element * scale`` in float32, or float64 where it is exact: ``(rows, K)``."""
    out = torch.empty(operand.shape, dtype=dtype, device=operand.elements.device)
    fill_rows(out, operand.plain(), 0)
    return out


def fill_rows(out: torch.Tensor, operand: Quantized, first: int) -> None:
    """Put the values of ``len(out)`` rows from ``first`` on into ``out``.

    ``out`` is contiguous float32 or float64 ``(rows, K)``; the scales of ``operand`` are plain.
    """
    rows, k = out.shape
    if not out.numel():
        return
    out.copy_(operand.elements[first : first + rows])
    scales = operand.scale.of_rows(first, first + rows).to(out.dtype)
    groups = scales.shape[1]
    out.view(rows, groups, k // groups).mul_(scales[:, :, None])
