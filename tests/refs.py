"""Modes, inputs and references: whole numbers, so that every product is exact, equality is fair.

Entries are -2..2. A sum of K <= 64 products is then a whole number of at most 256 in size, which
float32, float16 and bfloat16 all hold exactly, in whatever order it is added up.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

#: The modes that move data through windows, and all modes.
WINDOW_MODES = (
    "fused-push",
    "split-push",
    "fused-pull",
    "split-pull",
    "fused-lanes",
    "split-lanes",
)
MODES = (*WINDOW_MODES, "collective")
#: Every epilogue once, for tests of what does not depend on the form.
FEW_MODES = ("fused-push", "split-pull", "fused-lanes", "collective")

#: Largest K for which every output dtype is exact.
EXACT_K = 64


def whole(seed: int, rows: int, cols: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """``(rows, cols)`` of whole numbers from -2 to 2; another tensor for another seed."""
    generator = torch.Generator().manual_seed(1000003 * seed + 17)
    return torch.randint(-2, 3, (rows, cols), generator=generator).to(dtype)


def seed_of(rank: int, call: int) -> int:
    """A seed for the rows of ``rank`` in ``call``; none is used twice, or for B (negative)."""
    return 1 + call * 1000 + rank


def a_of(
    rank: int, call: int, rows: int, k: int, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """A of ``rank`` in ``call``; any rank can rebuild any other's."""
    return whole(seed_of(rank, call), rows, k, dtype)


def b_of(call: int, n: int, k: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """B in ``call``, the same on every rank."""
    return whole(-1 - call, n, k, dtype)


def product(a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``a @ b.T`` in float64, rounded once to ``dtype``."""
    return (a.double() @ b.double().T).to(dtype)


def gathered(
    call: int, rows: Sequence[int], b: torch.Tensor, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """What every rank must get in ``call`` when rank r has ``rows[r]`` rows. No communication."""
    blocks = [a_of(rank, call, m, b.shape[1], b.dtype) for rank, m in enumerate(rows)]
    return product(torch.cat(blocks), b, dtype or b.dtype)


def assert_equal(got: torch.Tensor, want: torch.Tensor, what: str) -> None:
    """Every element the same, dtype and shape too; the message says where it differs first."""
    assert got.dtype == want.dtype, f"{what}: dtype {got.dtype}, want {want.dtype}"
    assert got.shape == want.shape, f"{what}: shape {tuple(got.shape)}, want {tuple(want.shape)}"
    wrong = (got != want).nonzero()
    if len(wrong):
        at = tuple(wrong[0].tolist())
        raise AssertionError(
            f"{what}: {len(wrong)} of {got.numel()} elements differ, first at {at}: "
            f"{got[at].item()}, want {want[at].item()}"
        )


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    """L2 norm of the difference over that of ``want``, in float64."""
    want = want.double()
    return float((got.double() - want).norm() / want.norm())
