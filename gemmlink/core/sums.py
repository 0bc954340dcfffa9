"""Ordered sums: what several ranks have for one, added up in the order of the ranks.

Floating-point sums depend on their order. Here it is always source 0 first, so that every mode,
and every call, gives the same bits for the same terms.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch

#: Elements that are summed at a time where a wider copy is needed: they stay in a core's cache.
_BLOCK = 1 << 16

#: The wider sums of each thread, kept: fresh memory costs more than the sum.
_kept = threading.local()


def ordered_sum(terms: Sequence[torch.Tensor], out: torch.Tensor) -> None:
    """``out[:] = terms[0] + terms[1] + ...``, in this order, in float32, rounded once.

    All are ``(rows, n)``, the terms of one dtype. ``out`` may overlap no term.
    """
    dtype = terms[0].dtype
    if len(terms) == 1:
        out.copy_(terms[0])
    elif dtype == out.dtype and (len(terms) == 2 or dtype == torch.float32):
        # The sum of two numbers is rounded once, whatever their dtype.
        torch.add(terms[0], terms[1], out=out)
        for term in terms[2:]:
            out.add_(term)
    else:
        _sum_by_blocks(terms, out)


def _sum_by_blocks(terms: Sequence[torch.Tensor], out: torch.Tensor) -> None:
    rows, n = out.shape
    # A device has no such cache, and each step would be launches.
    step = max(1, min(rows, _BLOCK // max(1, n)) if out.device.type == "cpu" else rows)
    total = _scratch(step * n, out.device)
    for first in range(0, rows, step):
        count = min(step, rows - first)
        sums = total[: count * n].view(count, n)
        sums.copy_(terms[0][first : first + count])
        for term in terms[1:]:
            sums.add_(term[first : first + count])
        out[first : first + count].copy_(sums)


def _scratch(elements: int, device: torch.device) -> torch.Tensor:
    if device.type != "cpu":  # a graph that is captured has memory of its own
        return torch.empty(elements, device=device)
    sums: torch.Tensor | None = getattr(_kept, "sums", None)
    if sums is None or len(sums) < elements:
        with torch.inference_mode(False):
            sums = _kept.sums = torch.empty(elements)
    return sums
