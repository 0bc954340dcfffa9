"""``gemmlink conformance``: proves the parts of this installation together, on CPU ranks."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING

from gemmlink.cli import arguments as words
from gemmlink.cli import output, ranks

if TYPE_CHECKING:
    from gemmlink.conformance.quick import Group

_QUICK = (1, 2, 3)
_FULL = (1, 2, 3, 4, 5)


def add(parsers: words.Parsers) -> None:
    """Describe the command."""
    parser = words.command(
        parsers, "conformance", run, "Compare every mode with exact references on small problems."
    )
    parser.add_argument("--quick", action="store_true", help="worlds 1 to 3 only: the self-test")
    parser.add_argument("--world", type=words.positive, help="this world only")
    words.add_choices(parser, ("transport", "backend"))
    parser.add_argument(
        "--epilogue", type=words.names, default=("all",), metavar="NAME[,NAME...]",
        help="names or module:attribute; all for every epilogue in each of its forms",
    )  # fmt: skip


def run(arguments: argparse.Namespace) -> output.Outcome:
    """Run all worlds and tell."""
    from gemmlink.conformance import quick

    suite = quick.Suite(arguments.transport, arguments.epilogue, arguments.backend)
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
