"""Rows as a picture: one bar for each mode, one group of bars for each problem."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

from gemmlink.errors import Unavailable
from gemmlink.perf.rows import Row


def save(rows: Sequence[Row], path: str) -> None:
    """Write a PNG. Raises ``Unavailable`` without matplotlib."""
    pyplot = library()
    groups = [
        list(group) for _, group in groupby(rows, key=lambda row: (row.op, row.m, row.n, row.k))
    ]
    figure, axes = pyplot.subplots(1, len(groups), squeeze=False, figsize=(6 * len(groups), 4))
    for axis, group in zip(axes[0], groups, strict=True):
        _bars(axis, [row for row in group if row.us is not None])
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)


def library() -> Any:
    """matplotlib's pyplot, drawing to files only."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError as error:
        raise Unavailable(
            "--plot needs matplotlib", str(error), "Install it: pip install 'gemmlink[bench]'"
        ) from error
    return pyplot


def _bars(axis: Any, rows: list[Row]) -> None:
    names = [f"{row.mode} {row.result}\n{max(row.chunks, 1)} chunks" for row in rows]
    axis.barh(range(len(rows)), [row.us for row in rows])
    axis.set_yticks(range(len(rows)), names)
    axis.invert_yaxis()
    axis.set_xlabel("us a call")
    if rows:
        first = rows[0]
        axis.set_title(f"{first.op}, {first.m} x {first.n} x {first.k}, {first.world} ranks")
        if first.bound_us is not None:
            axis.axvline(first.bound_us, linestyle="--", color="black", label="bound")
            axis.legend()
