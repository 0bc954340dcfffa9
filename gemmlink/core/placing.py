"""Where the blocks of all ranks lie in a result, remembered: calls of few sizes need few."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate


@dataclass(frozen=True)
class Placing:
    """Blocks one behind the other: the first row of each, and how many rows there are."""

    starts: Sequence[int]
    total: int
    longest: int
    #: Whether all blocks have the same number of rows.
    even: bool


@lru_cache(maxsize=256)
def packed(rows: tuple[int, ...]) -> Placing:
    """Blocks of so many rows, in rank order."""
    *starts, total = accumulate(rows, initial=0)
    return Placing(starts, total, max(rows), min(rows) == max(rows))
