"""fp8 operands: how they are made, how their scales lie in memory, what their product is.

>>> import torch
>>> from gemmlink import quantize
>>> a = quantize.mxfp8(torch.ones(2, 64), "a")
>>> b = quantize.mxfp8(torch.ones(32, 64), "b")
>>> quantize.reference(a, b).unique().tolist()
[64.0]

| module | holds |
| --- | --- |
| ``float8`` | the two element dtypes, their limits, and the saturating cast |
| ``scales`` | float32 scales: ``PerToken``, ``PerChannel``, ``Block1x128``, ``Block128x128`` |
| ``ue8m0`` | power-of-two scales, plain and packed: ``Mx1x32``, ``Mx32x32`` |
| ``operands`` | ``Quantized``: fp8 elements with the scales they belong to |
| ``formats`` | the quantisers ``ptpc``, ``blockscale``, ``mxfp8`` |
| ``product`` | ``reference`` and ``multiply`` |

Imports go ``float8`` <- ``scales`` <- ``ue8m0`` <-
``operands`` <- ``formats``, ``product``. Outside the package only ``gemmlink.errors`` and
``gemmlink.spec`` are used.
"""

from gemmlink.quantize.float8 import MAXIMUM, to_float8
from gemmlink.quantize.formats import FORMATS, blockscale, mxfp8, ptpc
from gemmlink.quantize.operands import Quantized
from gemmlink.quantize.product import multiply, reference
from gemmlink.quantize.scales import Block1x128, Block128x128, PerChannel, PerToken, Scale
from gemmlink.quantize.ue8m0 import Mx1x32, Mx1x32Packed, Mx32x32, Mx32x32Packed

__all__ = [
    "FORMATS",
    "MAXIMUM",
    "Block1x128",
    "Block128x128",
    "Mx1x32",
    "Mx1x32Packed",
    "Mx32x32",
    "Mx32x32Packed",
    "PerChannel",
    "PerToken",
    "Quantized",
    "Scale",
    "blockscale",
    "multiply",
    "mxfp8",
    "ptpc",
    "reference",
    "to_float8",
]
