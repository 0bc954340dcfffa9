"""Scale layouts in float32. A scale object says by its type where each group's scale lies.

An operand is ``(rows, K)``: A has M rows (tokens), B has N rows (output channels). A *group* is a
block of the operand that shares one scale; ``element * scale`` is the value.

A scale object keeps the tensor it was given, not a copy, and the tensor is contiguous: kernels
compute addresses from the type alone, so strides would be lost. The group sizes and index
formulas are those of the kernels that read them (ptpc and blockscale GEMM of gfx950, and DeepGEMM's
1x128 by 128x128 recipe).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from gemmlink.errors import InvalidArgument
from gemmlink.spec.problem import dtype_name

Operand = Literal["a", "b"]


def check_multiple(name: str, value: int, of: int) -> None:
    """Raise ``InvalidArgument`` that names the nearest legal sizes unless ``of`` divides ``value``.

    A zero-padded last group has the scale that its values alone would have, so padding loses
    nothing, while a kernel cannot read a group that is not whole.
    """
    if value % of == 0:
        return
    below, above = value // of * of, -(-value // of) * of
    nearest = f"{below} or {above}" if below else f"{above}"
    raise InvalidArgument(
        f"{name} must be a multiple of {of}",
        f"{name}={value}",
        f"The nearest is {nearest}; pad with zeros to {above} before quantising.",
    )


@dataclass(frozen=True, eq=False)
class Scale:
    """What all scale objects share. ``tensor`` is contiguous; its dtype and shape are the type's.

    ``format`` and ``operand`` say what the scales are for, ``group`` how many rows and columns of
    the operand share one (0 columns: the whole row).
    """

    tensor: torch.Tensor

    format: ClassVar[str]
    operand: ClassVar[Operand]
    group: ClassVar[tuple[int, int]]
    dims: ClassVar[int] = 2
    dtypes: ClassVar[tuple[torch.dtype, ...]] = (torch.float32,)
    #: Said when the shape does not fit the operand.
    advice: ClassVar[str] = ""

    def __post_init__(self) -> None:
        name, tensor = type(self).__name__, self.tensor
        if not isinstance(tensor, torch.Tensor):
            raise InvalidArgument(f"{name} must hold a tensor", type(tensor).__name__)
        if tensor.dtype not in self.dtypes:
            names = " or ".join(dtype_name(known) for known in self.dtypes)
            raise InvalidArgument(f"{name} must be {names}", dtype_name(tensor.dtype))
        if tensor.dim() != self.dims:
            raise InvalidArgument(
                f"{name} must have {self.dims} dimension{'s' * (self.dims > 1)}",
                f"shape {tuple(tensor.shape)}",
            )
        if not tensor.is_contiguous():
            raise InvalidArgument(
                f"{name} must be contiguous, since kernels read it by index and not by stride",
                f"shape {tuple(tensor.shape)}, stride {tensor.stride()}",
                "Pass tensor.contiguous() if the element at each index is right.",
            )

    def expected(self, rows: int, k: int) -> tuple[int, ...]:
        """The shape of ``tensor`` for a ``(rows, k)`` operand; raises if it has no whole groups."""
        high, wide = self.group
        check_multiple("M" if self.operand == "a" else "N", rows, high)
        check_multiple("K", k, wide)
        return rows // high, k // wide

    def check(self, rows: int, k: int) -> None:
        """Raise ``InvalidArgument`` unless these are the scales of a ``(rows, k)`` operand."""
        want = self.expected(rows, k)
        if tuple(self.tensor.shape) != want:
            raise InvalidArgument(
                f"{type(self).__name__} of a ({rows}, {k}) operand must have shape {want}",
                f"{tuple(self.tensor.shape)}",
                self.advice,
            )

    def plain(self) -> Scale:
        """The same scales in the layout that is read by row: itself, unless it is packed."""
        return self

    def of_rows(self, first: int, last: int) -> torch.Tensor:
        """Scales of rows ``first`` to ``last``: float32 ``(last - first, groups along K)``.

        A copy or a view of the own memory; not to be written.
        """
        raise NotImplementedError


class _PerRow(Scale):
    """One float32 scale for each row of the operand."""

    format = "ptpc"
    group = (1, 0)
    dims = 1
    advice = "Every rank passes the scales of its own rows, and only those."

    def __post_init__(self) -> None:
        if isinstance(self.tensor, torch.Tensor) and self._one_line(tuple(self.tensor.shape)):
            object.__setattr__(self, "tensor", self.tensor.flatten())
        super().__post_init__()

    @staticmethod
    def _one_line(shape: tuple[int, ...]) -> bool:
        return len(shape) == 2 and shape[1] == 1

    def expected(self, rows: int, k: int) -> tuple[int, ...]:
        return (rows,)

    def of_rows(self, first: int, last: int) -> torch.Tensor:
        return self.tensor[first:last, None]


class PerToken(_PerRow):
    """A of ``ptpc``: float32 ``(M,)``, or ``(M, 1)``; one scale a row."""

    operand = "a"


class PerChannel(_PerRow):
    """B of ``ptpc``: float32 ``(N,)``, or ``(N, 1)`` or ``(1, N)``; one scale an output channel."""

    operand = "b"

    @staticmethod
    def _one_line(shape: tuple[int, ...]) -> bool:
        return len(shape) == 2 and 1 in shape


class Block1x128(Scale):
    """A of ``blockscale``: float32 ``(K/128, M)``, K-block-major.

    The scale of element ``(row, k)`` lies at index ``(k // 128) * M + row``.

    A tensor whose order is not known goes through ``from_tensor``, which refuses what has two
    readings.
    """

    format = "blockscale"
    operand = "a"
    group = (1, 128)
    advice = "The first dimension is K/128; Block1x128.from_tensor takes the other spellings."

    def expected(self, rows: int, k: int) -> tuple[int, ...]:
        return super().expected(rows, k)[::-1]

    def of_rows(self, first: int, last: int) -> torch.Tensor:
        return self.tensor.T[first:last]

    @classmethod
    def from_row_major(cls, scale: torch.Tensor) -> Block1x128:
        """From a ``(M, K/128)`` tensor whose ``[row, kb]`` is the scale of that row and K block.

        Whatever its strides. Copies unless it is column-major already.
        """
        if scale.dim() != 2:
            raise InvalidArgument("scale must be (M, K/128)", f"shape {tuple(scale.shape)}")
        return cls(scale.T.contiguous())

    @classmethod
    def from_tensor(cls, scale: torch.Tensor, m: int, k: int) -> Block1x128:
        """From a tensor in one of the spellings that agree on the memory order ``kb * M + row``.

        - flat, ``M * K/128`` elements in that order;
        - ``(K/128, M)`` with unit stride along M: stride ``(M, 1)``, or ``(pitch, 1)``;
        - ``(M, K/128)`` column-major: stride ``(1, M)``, or ``(1, pitch)``.

        Another pitch than M (padding, or 0 where one scale serves every K block) means a copy; the
        rest shares memory. With M or K/128 equal to 1 both
        memory orders are the same, so any strides and both shapes are taken. With M and K/128 equal
        and more than 1 the shape does not say which dimension is M: always refused.

        Raises ``InvalidArgument``; for a row-major ``(M, K/128)`` with its two readings (the values
        are in that order, or the memory is K-block-major already and only labelled so) and how to
        say each. Such a tensor has the right shape in both, and the wrong one silently gives a
        relative error near a quarter.
        """
        check_multiple("K", k, 128)
        blocks = k // 128
        if scale.dim() == 1 and len(scale) == m * blocks:
            return cls(scale.reshape(blocks, m).contiguous())
        if scale.dim() != 2 or set(scale.shape) != {m, blocks}:
            raise _no_spelling(scale, m, blocks)
        if min(m, blocks) <= 1:
            return cls(scale.reshape(blocks, m).contiguous())
        if m == blocks:
            raise _square(scale, k)
        by_block = scale if scale.shape[0] == blocks else scale.T
        if by_block.stride(1) != 1:
            raise _two_readings(scale, m, k) if by_block is not scale else _transposed(scale)
        return cls(by_block.contiguous())


def _layout(scale: torch.Tensor) -> str:
    return f"shape {tuple(scale.shape)}, stride {scale.stride()}"


def _no_spelling(scale: torch.Tensor, m: int, blocks: int) -> InvalidArgument:
    return InvalidArgument(
        f"A's block scales must be flat ({m * blocks},), ({blocks}, {m}), or column-major "
        f"({m}, {blocks}), which is [K/128, M] and [M, K/128]",
        f"shape {tuple(scale.shape)}",
    )


def _two_readings(scale: torch.Tensor, m: int, k: int) -> InvalidArgument:
    return InvalidArgument(
        "A's block scales in shape [M, K/128] must be column-major (stride (1, M)); row-major "
        "memory of that shape has two readings",
        f"{_layout(scale)} for M={m}, K={k}",
        "If scale[row, kb] is the scale of that row and K block, say "
        "Block1x128.from_row_major(scale). If the memory is in the order kb * M + row already and "
        f"the shape is only a label, say Block1x128(scale.reshape({k // 128}, {m})).",
    )


def _square(scale: torch.Tensor, k: int) -> InvalidArgument:
    return InvalidArgument(
        "A's block scales must show which dimension is M; here M equals K/128, so the shape has "
        "two readings",
        f"{_layout(scale)} for M={len(scale)}, K={k}",
        "If scale[row, kb] is the scale of that row and K block, say "
        "Block1x128.from_row_major(scale). If scale[kb, row] is, say "
        "Block1x128(scale.contiguous()).",
    )


def _transposed(scale: torch.Tensor) -> InvalidArgument:
    return InvalidArgument(
        "A's block scales in shape [K/128, M] must have unit stride along M",
        _layout(scale),
        "If scale[kb, row] is the scale of that row and K block, say "
        "Block1x128(scale.contiguous()).",
    )


class Block128x128(Scale):
    """B of ``blockscale``: float32 ``(N/128, K/128)``, row-major.

    The scale of element ``(n, k)`` lies at index ``(n // 128) * (K/128) + k // 128``.
    """

    format = "blockscale"
    operand = "b"
    group = (128, 128)
    advice = "The first dimension is N/128."

    def of_rows(self, first: int, last: int) -> torch.Tensor:
        return self.tensor[torch.arange(first, last, device=self.tensor.device) // 128]
