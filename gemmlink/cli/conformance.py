"""``gemmlink conformance``: certifies parts, or proves those of this installation together.

With a part named: every clause of its contract, and every cell of what it composes to. With
``--quick`` or ``--world``, or nothing named: the cells alone, as a self-test. With ``--matrix``:
all of it for everything built in, as a page.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from gemmlink.cli import arguments as words
from gemmlink.cli import output, ranks
from gemmlink.errors import InvalidArgument

if TYPE_CHECKING:
    from gemmlink.conformance.certify import Job, Row
    from gemmlink.conformance.quick import Group

_QUICK = (1, 2, 3)
_FULL = (1, 2, 3, 4, 5)


def add(parsers: words.Parsers) -> None:
    """Describe the command."""
    parser = words.command(
        parsers, "conformance", run,
        "Certify a transport, an epilogue or a backend; without one, compare every mode with "
        "exact references.",
    )  # fmt: skip
    parser.add_argument("--quick", action="store_true", help="cells of worlds 1 to 3: a self-test")
    parser.add_argument("--world", type=words.positive, help="cells of this world only")
    words.add_choices(parser, ("transport", "backend"))
    parser.add_argument(
        "--epilogue", type=words.names, default=("all",), metavar="NAME[,NAME...]",
        help="names or module:attribute; all for every epilogue in each of its forms",
    )  # fmt: skip
    words.add_device(parser, None, "of the tensors; else what the transport serves")
    parser.add_argument(
        "--gaps", type=Path, metavar="FILE", help="known gaps; else those beside each plugin"
    )
    parser.add_argument(
        "--matrix", type=Path, metavar="FILE", help="write the support matrix of what is built in"
    )


def run(arguments: argparse.Namespace) -> output.Outcome:
    """Run what was asked for and tell."""
    named = _named(arguments)
    if arguments.matrix is not None:
        return _matrix(arguments, named)
    if named and not arguments.quick and arguments.world is None:
        return _certify(arguments)
    if arguments.gaps is not None:
        raise InvalidArgument(
            "--gaps is for certifying a part", "no part, or --quick or --world", "Name a part."
        )
    return _self_test(arguments)


def _named(arguments: argparse.Namespace) -> bool:
    parts = (arguments.transport, arguments.backend)
    return any(part != "auto" for part in parts) or "all" not in arguments.epilogue


# Certifying.


def _certify(arguments: argparse.Namespace) -> output.Outcome:
    from gemmlink.conformance import certify

    _refuse_launcher()
    job = certify.plan(
        _asked(arguments.transport),
        () if "all" in arguments.epilogue else arguments.epilogue,
        _asked(arguments.backend),
        arguments.gaps,
        arguments.device,
    )
    return report(job, certify.run(job, ranks.on_ranks))


def _asked(name: str) -> str | None:
    return None if name == "auto" else name


def _refuse_launcher() -> None:
    if ranks.launched_world() is not None:
        raise InvalidArgument(
            "certifying starts ranks of its own, and may end them",
            "a rank of a launcher",
            "Run it without torchrun, or with --quick.",
        )


def report(job: Job, rows: Sequence[Row]) -> output.Outcome:
    """Right if nothing failed and nothing was skipped."""
    from gemmlink.conformance.certify import count

    counts = count(rows)
    code = output.RIGHT
    if counts["failed"]:
        code = output.WRONG
    elif counts["skipped"]:
        code = output.SKIPPED
    lines = [output.header()]
    lines += [line for part in job.parts for line in part.lines()]
    lines += [line for row in rows for line in row.lines()]
    lines.append(", ".join(f"{number} {state}" for state, number in counts.items()))
    return output.Outcome(
        code,
        len(rows) - counts["skipped"],
        counts["failed"],
        [row.as_dict() for row in rows],
        "\n".join(lines),
        {"parts": [part.as_dict() for part in job.parts]},
    )


# The support matrix.


def _matrix(arguments: argparse.Namespace, named: bool) -> output.Outcome:
    from gemmlink.conformance import matrix

    if named or arguments.quick or arguments.world is not None or arguments.gaps is not None:
        raise InvalidArgument("--matrix is about all that is built in", "more words", "Omit them.")
    _refuse_launcher()
    made = matrix.build(ranks.on_ranks)
    arguments.matrix.write_text(made.page(), encoding="utf-8")
    failed = [row for row in made.rows if row.state == "failed"]
    lines = [line for row in failed for line in row.lines()]
    lines.append(f"{arguments.matrix}: {made.summary()}")
    code = output.WRONG if failed else output.RIGHT
    found = [row.as_dict() for row in made.rows]
    return output.Outcome(code, len(found), len(failed), found, "\n".join(lines))


# The self-test.


def _self_test(arguments: argparse.Namespace) -> output.Outcome:
    from gemmlink.conformance import devices, quick

    device = arguments.device or devices.served_by(_asked(arguments.transport))
    devices.require(device)
    suite = quick.Suite(arguments.transport, arguments.epilogue, arguments.backend, device)
    found: list[Group] = []
    for world in _worlds(arguments):
        quick.refuse_nonsense(suite, world)
        values = ranks.on_ranks(world, quick.run, suite)
        found += quick.merge(world, values)
    return outcome(suite.epilogues, found)


def _worlds(arguments: argparse.Namespace) -> Sequence[int]:
    launched = ranks.launched_world()
    if launched is not None or arguments.world is not None:
        return (ranks.world_for(arguments.world, 1),)
    return _QUICK if arguments.quick else _FULL


def outcome(epilogues: Sequence[str], found: Sequence[Group]) -> output.Outcome:
    """Right if no case failed; skipped if nothing, or not what was named, could run."""
    failed = sum(group.failed for group in found)
    passed = sum(group.passed for group in found)
    skipped = [group for group in found if group.skipped]
    code = output.RIGHT
    if failed:
        code = output.WRONG
    elif skipped and ("all" not in epilogues or not passed):
        code = output.SKIPPED
    lines = [group.line() for group in found]
    last = f"{passed} passed, {failed} failed"
    if skipped:
        last += f", {len(skipped)} groups skipped"
    rows = [group.as_dict() for group in found]
    return output.Outcome(code, passed + failed, failed, rows, "\n".join([*lines, last]))
