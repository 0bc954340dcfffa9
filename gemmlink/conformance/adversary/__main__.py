"""``python -m gemmlink.conformance.adversary``: everything built in, under as many seeds as asked.

Exits with 1 at the first fault, and tells how to see its story.
"""

from __future__ import annotations

import argparse
import sys
import time

from gemmlink.conformance.adversary.case import Request, build
from gemmlink.conformance.adversary.program import compile_case
from gemmlink.conformance.adversary.run import run, story
from gemmlink.conformance.adversary.sweep import requests


def main(arguments: list[str] | None = None) -> int:
    """Run the sweep; the exit code."""
    told = _parse(arguments)
    wanted = [r for r in requests(told.world, told.more) if told.only in r.name()]
    wanted = wanted[told.share :: told.shares]
    began, runs = time.monotonic(), 0
    for request in wanted:
        program = compile_case(build(request))
        for seed in range(told.first, told.first + told.seeds):
            outcome = run(program, seed)
            runs += 1
            if outcome.fault is not None:
                return _tell(request, seed)
    took = time.monotonic() - began
    print(f"{len(wanted)} variants at {told.world} ranks, {runs} runs, all right; {took:.0f} s")
    return 0


def _tell(request: Request, seed: int) -> int:
    lines = story(build(request), seed).split("\n")
    print("\n".join(["...", *lines[-40:]]))
    return 1


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m gemmlink.conformance.adversary")
    parser.add_argument("--seeds", type=int, default=20, help="runs of each variant")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--world", type=int, default=2, help="ranks")
    parser.add_argument("--more", action="store_true", help="more sequences of M")
    parser.add_argument("--only", default="", help="variants whose name contains this")
    parser.add_argument("--share", type=int, default=0, help="which share of them, from 0")
    parser.add_argument("--shares", type=int, default=1, help="of how many")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
