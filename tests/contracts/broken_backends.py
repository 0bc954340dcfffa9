"""Backends that break one clause each."""

from __future__ import annotations

import torch

from gemmlink.backends.eager import Eager


class Rounding(Eager):
    """Keeps sums in bfloat16."""

    name = "broken"

    def multiply(self, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
        total = torch.zeros(out.shape, dtype=torch.bfloat16)
        for first in range(0, a.shape[1], 16):
            block = slice(first, first + 16)
            total += (a[:, block].float() @ b[:, block].float().T).bfloat16()
        out.copy_(total)


class Spilling(Eager):
    """Writes one column more than there is."""

    name = "broken"

    def multiply(self, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
        super().multiply(a, b, out)
        if out.storage_offset() and out.numel():
            out.as_strided((out.shape[0], out.shape[1] + 1), out.stride())[:, -1] = 0


class Idle(Eager):
    """Does nothing where there is nothing to add up."""

    name = "broken"

    def multiply(self, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
        if a.shape[1]:
            super().multiply(a, b, out)


class Negative(Eager):
    """Gives a zero of the wrong sign."""

    name = "broken"

    def multiply(self, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
        super().multiply(a, b, out)
        if not a.shape[1]:
            out.neg_()


class Greedy(Eager):
    """Uses an input as scratch."""

    name = "broken"

    def multiply(self, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
        super().multiply(a, b, out)
        if a.is_contiguous():
            a.zero_()


class Straight(Eager):
    """Takes every matrix for a contiguous one."""

    name = "broken"

    def multiply(self, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
        super().multiply(_packed(a), _packed(b), out)


class Choosy(Eager):
    """Refuses float16."""

    name = "broken"

    def supports(self, problem: object) -> str | None:
        return "no float16" if "float16" in str(problem) else None


def _packed(values: torch.Tensor) -> torch.Tensor:
    rows, cols = values.shape
    room = values.untyped_storage().nbytes() // values.itemsize - values.storage_offset()
    return values.as_strided((rows, cols), (cols, 1)) if room >= rows * cols else values
