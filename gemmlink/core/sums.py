"""Ordered sums: what several ranks have for one, added up in the order of the ranks.

Floating-point sums depend on their order. Here it is always source 0 first, so that every mode,
and every call, gives the same bits for the same terms.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

#: Elements that are summed at a time where a wider copy is needed: they stay in a core's cache.
_BLOCK = 1 << 16


def ordered_sum(terms: Sequence[torch.Tensor], out: torch.Tensor) -> None:
    """``out[:] = terms[0] + terms[1] + ...``, in this order, in float32, rounded once.

    All are ``(rows, n)`` and of one dtype. ``out`` may overlap no term.
    """
    if out.dtype == torch.float32:
        _sum_in_place(terms, out)
        return
    # A device has no such cache, and each step would be launches.
    step = max(1, _BLOCK // max(1, out.shape[1])) if out.device.type == "cpu" else max(1, len(out))
    for first in range(0, len(out), step):
        block = [term[first : first + step] for term in terms]
        wide = torch.empty(block[0].shape, dtype=torch.float32, device=out.device)
        _sum_in_place(block, wide)
        out[first : first + step].copy_(wide)


def _sum_in_place(terms: Sequence[torch.Tensor], out: torch.Tensor) -> None:
    if len(terms) == 1:
        out.copy_(terms[0])
        return
    if out.dtype == terms[0].dtype:
        torch.add(terms[0], terms[1], out=out)
    else:  # torch would round the sum of two narrow numbers first
        out.copy_(terms[0]).add_(terms[1])
    for term in terms[2:]:
        out.add_(term)
