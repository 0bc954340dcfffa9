"""``gemmlink bench``: what every mode costs on a problem. The protocol is in ``perf.bench``."""

from __future__ import annotations

import argparse
import logging
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from gemmlink.cli import arguments as words
from gemmlink.cli import output, ranks
from gemmlink.errors import Unavailable, Unsupported

if TYPE_CHECKING:
    from gemmlink.perf.bench import Plan
    from gemmlink.perf.rows import Row

_log = logging.getLogger("gemmlink")


def add(parsers: words.Parsers) -> None:
    """Describe the command."""
    parser = words.command(
        parsers, "bench", run, "Time modes against unfused, the product alone and moving alone."
    )
    parser.add_argument(
        "--op", type=words.operations, default=("all_gather",), metavar="OP[,OP...]",
        help=f"{', '.join(words.OPERATIONS)}, or all",
    )  # fmt: skip
    words.add_extent(parser)
    parser.add_argument("--world", type=words.positive, help="ranks (default 2, or the launcher's)")
    parser.add_argument(
        "--shape", type=words.shape, action="extend", nargs="+", required=True, metavar="M,N,K",
        help="rows per rank, columns, inner size (a rank's own); one or more",
    )  # fmt: skip
    words.add_dtypes(parser)
    words.add_choices(parser, ("transport", "backend"))
    parser.add_argument(
        "--epilogue", type=words.names, default=("all",), metavar="NAME[,NAME...]",
        help="names, module:attribute, pairs such as lanes+pull (one a phase); all for each form",
    )  # fmt: skip
    parser.add_argument(
        "--chunks", type=words.numbers, default=(None,), metavar="C[,C...]",
        help="chunks per rank, each measured; auto lets the library decide",
    )  # fmt: skip
    parser.add_argument(
        "--result", type=words.results, default=("copy",), metavar="copy[,view]",
        help="copied out, or a view of the window; each is measured",
    )  # fmt: skip
    parser.add_argument("--rounds", type=words.positive, default=5)
    parser.add_argument("--samples", type=words.positive, default=5, help="timed calls in a burst")
    parser.add_argument("--threads", type=words.positive, default=1, help="torch threads of a rank")
    parser.add_argument("--plot", metavar="FILE.png", help="draw the times (needs matplotlib)")


def run(arguments: argparse.Namespace) -> output.Outcome:
    """Measure and tell."""
    from gemmlink.perf.bench import Plan

    if arguments.plot:
        from gemmlink.perf import plot

        plot.library()  # before the work, not after it
    words.check_extent(arguments.extent, arguments.op)
    given, wanted = words.torch_dtypes(arguments)
    plans = [
        Plan(
            shapes=tuple(arguments.shape),
            dtype=given,
            out_dtype=wanted,
            epilogues=arguments.epilogue,
            transport=arguments.transport,
            backend=arguments.backend,
            chunks=arguments.chunks,
            results=arguments.result,
            rounds=arguments.rounds,
            samples=arguments.samples,
            operation=operation,
            extent=arguments.extent if operation == "all_to_all" else None,
        )
        for operation in arguments.op
    ]
    found = measured(plans, ranks.world_for(arguments.world, 2), arguments.threads)
    if arguments.plot:
        plot.save(found, arguments.plot)
    return outcome(plans[0], found)


def measured(plans: Sequence[Plan], world: int, threads: int) -> list[Row]:
    """Rows of plans, measured on ``world`` ranks. Refuses what is wrong before any rank starts."""
    from gemmlink.perf import bench, rows

    for plan in plans:
        refuse_nonsense(plan, world)
    _warn_if_busy()
    values = ranks.on_ranks(world, bench.measure, plans, threads=threads)
    return [
        rows.rounded(row)
        for number, plan in enumerate(plans)
        for row in rows.combine(plan, world, [value[number] for value in values])
    ]


def refuse_nonsense(plan: Plan, world: int) -> None:
    """Raise ``InvalidArgument`` for a name or number that means nothing; leave the rest to rows."""
    from gemmlink.core.compose import compose
    from gemmlink.perf.field import phases_of

    for shape in plan.shapes:
        problem = plan.problem(shape)
        operation = phases_of(plan.operation, world, problem.n, plan.extent)
        for choice in plan.choices():
            try:
                compose(problem, world, choice, operation)
            except (Unavailable, Unsupported):
                continue


def _warn_if_busy() -> None:
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    if load > cores / 2:
        _log.warning("others use this machine (load %.1f on %d cores): noisy times", load, cores)


def outcome(plan: Plan, found: Sequence[Row], text: str = "") -> output.Outcome:
    """Wrong if any row is; skipped if nothing, or not what was named, could be measured.

    ``plan``: any of those that were measured; they name the same modes.
    """
    from gemmlink.perf import table

    wrong = sum(not row.ok and not row.skipped for row in found)
    skipped = sum(row.skipped for row in found)
    modes = [row for row in found if row.mode not in ("unfused", "gemm-only")]
    named = "all" not in plan.epilogues
    code = output.RIGHT
    if wrong:
        code = output.WRONG
    elif skipped and (named or all(row.skipped for row in modes)):
        code = output.SKIPPED
    return output.Outcome(
        code=code,
        checked=len(found) - skipped,
        failed=wrong,
        rows=[row.as_dict() for row in found],
        text=text or f"{output.header()}\n{table.render(found)}",
    )
