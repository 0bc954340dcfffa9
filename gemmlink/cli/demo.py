"""``gemmlink demo``: one real projection on four CPU ranks, every mode, and who won.

The problem is the compressor projection of DeepSeek-V4-Pro: K = 7168, N = 2048, bfloat16 to
float32, with 64 rows a rank. Numbers come from ``perf.bench``; this module only words them.
"""

from __future__ import annotations

import argparse
import os
import textwrap
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from gemmlink.cli import arguments as words
from gemmlink.cli import bench, output, ranks

if TYPE_CHECKING:
    from gemmlink.perf.rows import Row

_SHAPE = (64, 2048, 7168)
_WORLD = 4


def add(parsers: words.Parsers) -> None:
    """Describe the command."""
    parser = words.command(
        parsers, "demo", run, "Run a real projection on four CPU ranks in every mode."
    )
    parser.add_argument("--rounds", type=words.positive, default=5)


def run(arguments: argparse.Namespace) -> output.Outcome:
    """Measure every mode, check every result, and say which is fastest and why."""
    import torch

    from gemmlink.perf import table
    from gemmlink.perf.bench import Plan

    plan = Plan((_SHAPE,), torch.bfloat16, torch.float32, rounds=arguments.rounds, samples=2)
    found = bench.measured([plan], ranks.world_for(None, _WORLD), threads=1)
    outcome = bench.outcome(plan, found)
    parts = (
        output.header(),
        "The compressor projection of DeepSeek-V4-Pro, each rank a process with one thread:",
        table.render(found),
        checked(found),
        verdict(found, os.cpu_count() or 1),
    )
    return replace(outcome, text="\n\n".join(parts))


def checked(rows: Sequence[Row]) -> str:
    """What it means that a row is right, and how many are."""
    right = sum(row.ok for row in rows)
    return _paragraph(
        f"Checked: {right} of {len(rows)} rows are right on every rank. Whole numbers come out "
        "equal to a float64 reference in every element; normal numbers, changed after the timed "
        "calls, stay within the relative L2 limit; outputs are filled with NaN before each check."
    )


def verdict(rows: Sequence[Row], cores: int) -> str:
    """Which mode is fastest, against unfused, and why. ``rows`` are those of one problem."""
    from gemmlink.perf.rows import fastest_mode

    best = fastest_mode(rows)
    if best is None:
        return "Verdict: no mode gave a right result, so there is nothing to compare."
    sentences = ["Verdict:", *_against_unfused(best, rows), *_where_time_goes(best)]
    if best.spread is None:
        sentences.append("One round says nothing about noise.")
    if cores < best.world:
        sentences.append(
            f"{best.world} ranks share {cores} cores here, and moving is work for the same cores "
            "as multiplying: overlap can hide waiting for a peer, but not that work."
        )
    return _paragraph(" ".join(sentences))


def _paragraph(text: str) -> str:
    return textwrap.fill(text, 100, break_on_hyphens=False)


def _against_unfused(best: Row, rows: Sequence[Row]) -> list[str]:
    from gemmlink.perf.table import duration

    first = [f"{best.mode} is the fastest mode, {duration(best.us)} a call.", *_near(best, rows)]
    if best.us is None or best.unfused_us is None:
        return [*first, "Unfused has no time to compare with."]
    unfused = f"unfused ({duration(best.unfused_us)})"
    gain, noise = best.unfused_us / best.us, _noise(best, rows)
    if abs(gain - 1) <= noise:
        return [
            *first,
            f"Against {unfused} that is a tie: a factor of {gain:.2f}, within the spread of the "
            f"rounds ({noise:.0%}).",
        ]
    if gain < 1:
        return [*first, f"It loses: {1 / gain:.2f} times the time of {unfused}."]
    return [*first, f"It is {gain:.2f} times as fast as {unfused}.", *_parts_of(best, rows)]


def _noise(best: Row, rows: Sequence[Row]) -> float:
    """The larger spread of the two that are compared, as a share."""
    return max(row.spread or 0.0 for row in rows if row is best or row.mode == "unfused")


def _near(best: Row, rows: Sequence[Row]) -> list[str]:
    """Modes that the noise of this run cannot tell from the best."""
    limit = (best.us or 0.0) * (1 + (best.spread or 0.0))
    modes = [row for row in rows if row.ok and row.complete and row.mode != "unfused"]
    near = [row.mode for row in modes if row is not best and (row.us or 0.0) <= limit]
    return [f"Not to be told from it in this noise: {', '.join(near)}."] if near else []


def _parts_of(best: Row, rows: Sequence[Row]) -> list[str]:
    """How much of a gain is the product's, how much the moving's."""
    from gemmlink.perf.table import duration

    same = next((row for row in rows if row.mode == "collective" and row.ok), None)
    if same is None or same.us is None or best.us is None or best.unfused_us is None:
        return []
    if same.mode == best.mode:
        return [
            f"It moves data as unfused does, so what it gains ({duration(best.unfused_us)} to "
            f"{duration(best.us)}) comes from the product: who multiplies, not how it travels."
        ]
    return [
        "Collective differs from unfused only in who multiplies and takes "
        f"{duration(same.us)}: {_signed(best.unfused_us - same.us)} of the gain are the "
        f"product's, and {_signed(same.us - best.us)} come from how the result travels."
    ]


def _signed(us: float) -> str:
    from gemmlink.perf.table import duration

    return f"{'-' if us < 0 else ''}{duration(abs(us))}"


def _where_time_goes(best: Row) -> list[str]:
    from gemmlink.perf.table import duration

    gemm, comm = best.gemm_us, best.comm_us
    if gemm is None or comm is None or gemm + comm == 0:
        return []
    most = min(gemm, comm) / (gemm + comm)
    larger = "Multiplying" if gemm >= comm else "Moving"
    return [
        f"Where the time goes: the product alone takes {duration(gemm)}, moving the result alone "
        f"{duration(comm)}. {larger} dominates, and hiding the other completely would save at "
        f"most {most:.1%} of the two in a row."
    ]
