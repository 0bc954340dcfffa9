"""Scale layouts in ue8m0: one byte ``c`` for the scale ``2 ** (c - 127)``, ``0xFF`` for NaN.

No sign, no zero, no infinity; ``0x00`` is 2**-127 (OCP Microscaling Formats 1.0, 5.4.1). A NaN
scale makes NaN of its whole group, of zeros too. Plain layouts are indexed like the operand. The
packed ones are what gfx950's scaled matrix instruction loads: lane ``16 * s + r`` needs the scale
of row ``r`` and K block ``s``, so K blocks come first, and the scales of its four 16-row tiles
share a word, from which the instruction picks a byte.

A plain and a packed layout of the same number of bytes cannot be told apart by their contents,
and reading one as the other is silent; the types keep them apart.
"""

from __future__ import annotations

import torch

from gemmlink.errors import InvalidArgument
from gemmlink.quantize.scales import Scale, check_multiple

#: Rows of A whose scales are permuted together: four tiles of sixteen.
PACKED_ROWS = 64


def codes_of(exponent: torch.Tensor) -> torch.Tensor:
    """uint8 codes of integer exponents, which must be in -127..127."""
    return (exponent + 127).to(torch.uint8)


def decoded(codes: torch.Tensor) -> torch.Tensor:
    """float32 scales of uint8 codes; exact, 2**-127 as a subnormal."""
    return codes.view(torch.float8_e8m0fnu).float()


class _Codes(Scale):
    """Plain ue8m0 bytes, kept as uint8 codes whichever of the two dtypes was given."""

    format = "mxfp8"
    dtypes = (torch.uint8, torch.float8_e8m0fnu)

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "tensor", self.tensor.view(torch.uint8))

    def of_rows(self, first: int, last: int) -> torch.Tensor:
        high = self.group[0]
        rows = torch.arange(first, last, device=self.tensor.device) // high
        return decoded(self.tensor[rows])


class Mx1x32(_Codes):
    """A of ``mxfp8``: ue8m0 ``(M, K/32)`` row-major, as uint8 codes or ``float8_e8m0fnu``.

    The scale of element ``(row, k)`` lies at index ``row * (K/32) + k // 32``.
    """

    operand = "a"
    group = (1, 32)
    advice = "The first dimension is M."

    def pack(self) -> Mx1x32Packed:
        """A copy in the packed layout. M must be a multiple of 64; ``unpack`` is its inverse."""
        m, blocks = self.tensor.shape
        check_multiple("M", m, PACKED_ROWS)
        tiles = self.tensor.view(m // PACKED_ROWS, 4, 16, blocks)
        ordered = tiles.permute(3, 0, 2, 1).contiguous().view(-1)
        return Mx1x32Packed(ordered.view(torch.int32).view(blocks, m // 4))


class Mx32x32(_Codes):
    """B of ``mxfp8``: ue8m0 ``(N/32, K/32)`` row-major, as uint8 codes or ``float8_e8m0fnu``.

    The scale of element ``(n, k)`` lies at index ``(n // 32) * (K/32) + k // 32``.
    """

    operand = "b"
    group = (32, 32)
    advice = "The first dimension is N/32."

    def pack(self) -> Mx32x32Packed:
        """A copy in the packed layout; ``unpack`` is its inverse."""
        return Mx32x32Packed(self.tensor.T.to(torch.int32).contiguous())


class Mx1x32Packed(Scale):
    """A of ``mxfp8`` for gfx950: int32 ``(K/32, M/4)``, K-block-major, M a multiple of 64.

    The scale of element ``(row, k)`` is byte ``(row % 64) // 16`` (0 the lowest) of the word at
    ``[k // 32, (row // 64) * 16 + row % 16]``. As bytes this is ``(K/32, M/64, 16, 4)``.
    """

    format = "mxfp8"
    operand = "a"
    group = (1, 32)
    dtypes = (torch.int32,)
    advice = "The first dimension is K/32; Mx1x32(codes).pack() makes it."

    def expected(self, rows: int, k: int) -> tuple[int, ...]:
        check_multiple("M", rows, PACKED_ROWS)
        return super().expected(rows, k)[1], rows // 4

    def unpack(self) -> Mx1x32:
        """A copy in the plain layout."""
        blocks, words = self.tensor.shape
        check_multiple("M", 4 * words, PACKED_ROWS)
        ordered = self.tensor.view(-1).view(torch.uint8).view(blocks, words // 16, 16, 4)
        return Mx1x32(ordered.permute(1, 3, 2, 0).reshape(4 * words, blocks).contiguous())

    def plain(self) -> Mx1x32:
        return self.unpack()


class Mx32x32Packed(Scale):
    """B of ``mxfp8`` for gfx950: int32 ``(K/32, N/32)``, K-block-major, one code a word.

    The scale of element ``(n, k)`` is the word at ``[k // 32, n // 32]``, 0 to 255: the byte is
    widened, not packed four to a word.
    """

    format = "mxfp8"
    operand = "b"
    group = (32, 32)
    dtypes = (torch.int32,)
    advice = "The first dimension is K/32; Mx32x32(codes).pack() makes it."

    def expected(self, rows: int, k: int) -> tuple[int, ...]:
        return super().expected(rows, k)[::-1]

    def unpack(self) -> Mx32x32:
        """A copy in the plain layout. Raises ``InvalidArgument`` for a word outside 0..255."""
        wrong = (self.tensor < 0) | (self.tensor > 255)
        if bool(wrong.any()):
            raise InvalidArgument(
                "Mx32x32Packed must hold one ue8m0 code, 0 to 255, in each word",
                f"{int(self.tensor[wrong][0])}",
                "Bytes packed four to a word are another layout.",
            )
        return Mx32x32(self.tensor.T.to(torch.uint8).contiguous())

    def plain(self) -> Mx32x32:
        return self.unpack()
