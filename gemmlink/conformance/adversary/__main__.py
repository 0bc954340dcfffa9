"""``python -m gemmlink.conformance.adversary``: everything built in, under as many seeds as asked.

Exits with 1 at the first fault, and tells what had happened until then.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from dataclasses import replace

from gemmlink.conformance.adversary.case import Request, build
from gemmlink.conformance.adversary.program import Program, compile_case
from gemmlink.conformance.adversary.recovery import recover
from gemmlink.conformance.adversary.run import Outcome, run
from gemmlink.conformance.adversary.sweep import requests

#: Calls before and after a reset, where ranks are to fail.
_BEFORE, _AFTER = 3, 2


def main(arguments: list[str] | None = None) -> int:
    """Run the sweep; the exit code."""
    told = _parse(arguments)
    wanted = [r for r in requests(told.world, told.more) if told.only in r.name()]
    if told.fail:
        wanted = [each for r in wanted if r.epilogues[0].needs.window for each in _longer(r)]
    wanted = wanted[told.share :: told.shares]
    began, runs = time.monotonic(), 0
    for request in wanted:
        program = compile_case(build(request))
        for seed in range(told.first, told.first + told.seeds):
            outcome = _run(program, seed, told.fail, None)
            runs += 1
            if outcome.fault is not None:
                return _tell(program, seed, told.fail)
    took = time.monotonic() - began
    print(f"{len(wanted)} variants at {told.world} ranks, {runs} runs, all right; {took:.0f} s")
    return 0 if wanted else 2


def _longer(request: Request) -> Iterator[Request]:
    """More calls; and with entry records, which allow for refusals, where the sweep has none."""
    longer = replace(request, rows=(request.rows + request.rows)[: _BEFORE + _AFTER])
    yield longer
    if longer.plan["view"]:
        yield replace(longer, entry=True)


def _run(program: Program, seed: int, fail: bool, story: list[str] | None) -> Outcome:
    if fail:
        return recover(program, seed, _BEFORE, story=story)
    return run(program, seed, story=story)


def _tell(program: Program, seed: int, fail: bool) -> int:
    lines: list[str] = []
    outcome = _run(program, seed, fail, lines)
    print("\n".join(["...", *lines[-40:], str(outcome)]))
    return 1


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m gemmlink.conformance.adversary")
    parser.add_argument("--seeds", type=int, default=20, help="runs of each variant")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--world", type=int, default=2, help="ranks")
    parser.add_argument("--more", action="store_true", help="more sequences of M")
    parser.add_argument("--fail", action="store_true", help="let calls end badly, then go on")
    parser.add_argument("--only", default="", help="variants whose name contains this")
    parser.add_argument("--share", type=int, default=0, help="which share of them, from 0")
    parser.add_argument("--shares", type=int, default=1, help="of how many")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
