"""One product: shapes, dtypes, and how its rows are cut into chunks."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from gemmlink.errors import InvalidArgument

INPUT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def dtype_name(dtype: torch.dtype) -> str:
    """``torch.bfloat16`` -> ``"bfloat16"``."""
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True)
class Problem:
    """``C = A @ B.T`` on every rank: A is ``(M, k)`` and local, B is ``(n, k)``, C is ``(M, n)``.

    ``capacity`` is the largest M (rows per rank) that the window has room for; the M of a call may
    be anything from 0 to ``capacity`` and may differ between ranks.
    """

    n: int
    k: int
    capacity: int
    dtype: torch.dtype
    out_dtype: torch.dtype
    device: torch.device

    def __post_init__(self) -> None:
        for name, value in (("n", self.n), ("k", self.k), ("max_m", self.capacity)):
            if value < 0:
                raise InvalidArgument(f"{name} must be at least 0", f"{name}={value}")
        check_dtypes(self.dtype, self.out_dtype)

    @property
    def row_bytes(self) -> int:
        """Bytes of one row of C."""
        return self.n * self.out_dtype.itemsize

    @property
    def slot_bytes(self) -> int:
        """Bytes of the largest C that one rank can produce."""
        return self.capacity * self.row_bytes


def check_dtypes(dtype: torch.dtype, out_dtype: torch.dtype) -> None:
    """Raise ``InvalidArgument`` unless the pair of dtypes is one that every backend must serve."""
    if dtype not in INPUT_DTYPES:
        names = ", ".join(dtype_name(d) for d in INPUT_DTYPES)
        raise InvalidArgument(f"inputs must be one of {names}", dtype_name(dtype))
    if out_dtype not in (dtype, torch.float32):
        raise InvalidArgument(
            "out_dtype must be float32 or the dtype of the inputs",
            f"{dtype_name(out_dtype)} for {dtype_name(dtype)} inputs",
        )


def chunk_rows(rows: int, chunks: int, chunk: int) -> tuple[int, int]:
    """First and one-past-last row of ``chunk`` when ``rows`` rows are cut into ``chunks``.

    Chunks differ by at most one row, cover every row once, and may be empty.

    >>> [chunk_rows(7, 3, c) for c in range(3)]
    [(0, 2), (2, 4), (4, 7)]
    """
    return chunk * rows // chunks, (chunk + 1) * rows // chunks
