"""The commands: ``gemmlink X``, or ``python -m gemmlink X``.

| module | job |
| --- | --- |
| ``demo``, ``bench``, ``explain``, ``doctor``, ``plugins``, ``conformance`` | a command each |
| ``arguments`` | words on the command line that several commands share |
| ``devices`` | what ``doctor`` looks at for tensors on devices |
| ``ranks`` | where a command's ranks come from: spawned, or a launcher's |
| ``output`` | the one JSON object, logs, exit codes |

A command module has ``add(parsers)`` and ``run(arguments) -> Outcome``. It imports torch, and what
imports torch, only inside ``run``: ``--help`` answers at once.

Exit codes: 0 right, 1 wrong, 2 usage, 3 skipped for want of hardware or a library.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import gemmlink
from gemmlink.cli import bench, conformance, demo, doctor, explain, output, plugins
from gemmlink.errors import GemmlinkError

_COMMANDS = (demo, bench, explain, doctor, plugins, conformance)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    try:
        arguments = _parser().parse_args(argv)
    except SystemExit as stop:  # argparse has printed help or what is wrong
        return stop.code if isinstance(stop.code, int) else output.USAGE
    with output.logging_to_stderr():
        try:
            outcome = arguments.run(arguments)
        except GemmlinkError as error:
            outcome = output.failure(arguments.command, error)
        except KeyboardInterrupt:
            return output.INTERRUPTED
        return output.emit(outcome, arguments.json)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="gemmlink", description="A matrix product and its collective as one operation."
    )
    parser.add_argument("--version", action="version", version=gemmlink.__version__)
    parsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in _COMMANDS:
        command.add(parsers)
    return parser
