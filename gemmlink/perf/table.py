"""Rows as text: a block for each problem, a line for each mode."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from gemmlink.perf.rows import Row

_HEAD = (
    "mode",
    "chunks",
    "multiplied by",
    "time",
    "/unfused",
    "/bound",
    "spread",
    "rel L2",
    "result",
)


def render(rows: Sequence[Row]) -> str:
    """All rows in their order, a block for each problem."""
    blocks = [_block(list(group)) for _, group in groupby(rows, key=_problem)]
    return "\n\n".join(blocks)


def _problem(row: Row) -> tuple[object, ...]:
    return (row.op, row.world, row.m, row.n, row.k, row.extent, row.dtype, row.out_dtype)


def _block(rows: list[Row]) -> str:
    first = rows[0]
    title = (
        f"{first.op}, {first.world} ranks, {first.m} rows a rank, N = {first.n}, K = {first.k}, "
        f"{'' if first.extent is None else f'extent {first.extent}, '}"
        f"{first.dtype} -> {first.out_dtype}"
    )
    lines = [title, *_aligned([_HEAD, *(_cells(row) for row in rows)])]
    lines.append(
        f"product alone {duration(first.gemm_us)}, moving alone {duration(first.comm_us)}, "
        f"bound {duration(first.bound_us)}"
    )
    return "\n".join(lines)


def _cells(row: Row) -> tuple[str, ...]:
    return (
        row.mode if row.result == "copy" else f"{row.mode} {row.result}",
        str(row.chunks) if row.chunks else "-",
        row.backend,
        duration(row.us),
        _times(row.ratio_unfused),
        _times(row.ratio_bound),
        "-" if row.spread is None else f"{row.spread:.0%}",
        "-" if row.rel_l2 is None else f"{row.rel_l2:.1e}",
        verdict(row),
    )


def verdict(row: Row) -> str:
    """One word, and the reason if the row is not right."""
    if row.ok:
        words = ["exact", *(() if row.complete else ("incomplete",)), *filter(None, (row.note,))]
        return ", ".join(words)
    return row.reason or "" if row.skipped else f"WRONG: {row.reason}"


def duration(us: float | None) -> str:
    """Microseconds for reading: ``73.1 us``, ``8.20 ms``."""
    if us is None:
        return "-"
    return f"{us:.1f} us" if us < 1000 else f"{us / 1000:.2f} ms"


def _times(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.2f}x"


def _aligned(table: list[tuple[str, ...]]) -> list[str]:
    widths = [max(len(line[column]) for line in table) for column in range(len(table[0]) - 1)]
    right = range(3, len(widths))
    lines = []
    for line in table:
        cells = [
            cell.rjust(width) if column in right else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=False))
        ]
        lines.append("  " + "  ".join([*cells, line[-1]]).rstrip())
    return lines
