"""16-bit inputs multiplied in float32, on processors without an instruction for it.

A product of two bfloat16 or float16 numbers is exact in float32, so widening both operands and
multiplying there gives float32 accumulation and one rounding at the end. It is done block by block,
in scratch that stays in the cache: never a float32 copy of the weights, nor of a large A. The sizes
below were the best compromise of two processors (AVX2 and AVX-512); see docs/measurements. Scratch
is kept for the next call of the same thread, some 3 MiB where M is a few hundred rows.
"""

from __future__ import annotations

import threading

import torch

#: Up to so many rows of A, whole rows of B are widened: A is small, and B is read in order.
_FEW_ROWS = 8
_ROWS_BYTES = 1 << 20
#: Above it, blocks of so many rows of B (the first number up to ``_SOME_ROWS`` of A) and of at most
#: ``_DEPTH`` of K: of A as many of K as make ``_A_BYTES``, in steps of ``_STEP``, and at least
#: ``_LEAST_DEPTH``.
_COLUMNS = (256, 512)
_SOME_ROWS = 64
_DEPTH = 1024
_LEAST_DEPTH = 256
_A_BYTES = 512 << 10
_STEP = 64


def blocks(m: int, n: int, k: int) -> tuple[int, int]:
    """How much of K, and how many rows of B, are widened at a time."""
    if m <= _FEW_ROWS:
        return k, max(1, min(n, _ROWS_BYTES // (4 * k)))
    depth = max(_LEAST_DEPTH, min(_DEPTH, _A_BYTES // (4 * m) // _STEP * _STEP))
    return min(k, depth), min(n, _COLUMNS[m > _SOME_ROWS])


def multiply(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
    """``out[:] = a @ b.T`` for 16-bit a and b, accumulated in float32. No size is 0."""
    work = _Blocks(a, b)
    if out.dtype == torch.float32:
        work.into_float32(out)
    else:
        work.into_16_bit(out)


class _Kept(threading.local):
    """Scratch of one thread, as large as it ever needed."""

    def __init__(self) -> None:
        self._flat = torch.empty(0)

    def cut(self, *shapes: tuple[int, int]) -> list[torch.Tensor]:
        """Uninitialised float32 tensors that share nothing; good until the next ``cut``."""
        sizes = [rows * columns for rows, columns in shapes]
        if self._flat.numel() < sum(sizes):
            # One made under inference_mode could not be written outside it.
            with torch.inference_mode(False):
                self._flat = torch.empty(sum(sizes))
        starts = [sum(sizes[:index]) for index in range(len(sizes))]
        return [
            self._flat[start : start + size].view(shape)
            for start, size, shape in zip(starts, sizes, shapes, strict=True)
        ]


_kept = _Kept()


class _Blocks:
    def __init__(self, a: torch.Tensor, b: torch.Tensor) -> None:
        self._a = a
        self._b = b
        (m, self._k), self._n = a.shape, b.shape[0]
        self._depth, self._columns = blocks(m, self._n, self._k)
        depth, columns = self._depth, self._columns
        shapes = (m, depth), (columns, depth), (m, columns)
        self._wide_a, self._wide_b, self._sums = _kept.cut(*shapes)

    def into_float32(self, out: torch.Tensor) -> None:
        """Sums grow in ``out`` itself, so each block of A is widened once."""
        for low in range(0, self._k, self._depth):
            wide = self._widen_a(low)
            for first in range(0, self._n, self._columns):
                last = min(self._n, first + self._columns)
                self._add(wide, low, first, last, out[:, first:last])

    def into_16_bit(self, out: torch.Tensor) -> None:
        """Sums grow in a scratch, a block of columns at a time, and are rounded once."""
        wide = self._widen_a(0)
        for first in range(0, self._n, self._columns):
            last = min(self._n, first + self._columns)
            part = self._sums[:, : last - first]
            for low in range(0, self._k, self._depth):
                if self._depth < self._k:
                    wide = self._widen_a(low)
                self._add(wide, low, first, last, part)
            out[:, first:last].copy_(part)

    def _widen_a(self, low: int) -> torch.Tensor:
        high = min(self._k, low + self._depth)
        return self._wide_a[:, : high - low].copy_(self._a[:, low:high])

    def _add(
        self, wide_a: torch.Tensor, low: int, first: int, last: int, sums: torch.Tensor
    ) -> None:
        high = min(self._k, low + self._depth)
        wide_b = self._wide_b[: last - first, : high - low].copy_(self._b[first:last, low:high])
        if low == 0:
            torch.mm(wide_a, wide_b.T, out=sums)
        else:
            sums.addmm_(wide_a, wide_b.T)
