"""``python -m gemmlink.conformance.explore``: all executions of every built-in protocol.

Exits with 1 at the first fault, and tells how it comes about; also if something is too large for
the limit. With ``--mutants`` it breaks each protocol in every way that ``mutate`` knows, and tells
which mistakes show in no execution.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import replace

from gemmlink.conformance.adversary.case import Request, build
from gemmlink.conformance.adversary.program import compile_case
from gemmlink.conformance.adversary.sweep import requests
from gemmlink.conformance.explore.search import Explored, explore
from gemmlink.conformance.explore.sizes import CALLS, explore_some, mutants, protocols


def main(arguments: list[str] | None = None) -> int:
    """Explore what is asked for; the exit code."""
    told = _parse(arguments)
    found = list(requests(2)) if told.all else protocols()
    wanted = [r for r in found if told.only in r.name()][told.share :: told.shares]
    began, open_ends = time.monotonic(), 0
    for request in wanted:
        if told.mutants:
            open_ends += _break(replace(request, rows=request.rows[: told.calls]), told.limit)
            continue
        since = time.monotonic()
        came = explore_some(request, told.limit, told.calls)
        print(f"{came.states:7} states {time.monotonic() - since:6.1f} s  {came.case}", flush=True)
        if came.fault is not None:
            return _tell(came)
        open_ends += not came.complete
    took = time.monotonic() - began
    print(f"{len(wanted)} protocols, {open_ends} explorations too large; {took:.0f} s")
    return (1 if open_ends else 0) if wanted else 2


def _break(request: Request, limit: int) -> int:
    """Tell which mutants show nothing; how many are too large."""
    case, caught, open_ends = build(request), 0, 0
    for changed in mutants(case):
        came = explore(compile_case(changed), limit)
        caught += came.fault is not None
        open_ends += not came.complete
        if came.fault is None:
            extent = "none in all executions" if came.complete else "too large"
            print(f"  {extent}: {changed.name.removeprefix(case.name)}", flush=True)
    print(f"{caught} mutants caught of {case.name}", flush=True)
    return open_ends


def _tell(came: Explored) -> int:
    print("\n".join(["...", *came.story[-40:], str(came)]))
    return 1


def parser(prog: str) -> argparse.ArgumentParser:
    """What every command that explores built-in protocols may be told."""
    parser = argparse.ArgumentParser(prog=prog)
    parser.add_argument("--only", default="", help="protocols whose name contains this")
    parser.add_argument("--limit", type=int, default=20_000, help="states of each")
    parser.add_argument("--calls", type=int, default=CALLS, help="calls of each")
    parser.add_argument("--mutants", action="store_true", help="protocols with one mistake each")
    parser.add_argument("--share", type=int, default=0, help="which share of them, from 0")
    parser.add_argument("--shares", type=int, default=1, help="of how many")
    return parser


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    words = parser("python -m gemmlink.conformance.explore")
    words.add_argument("--all", action="store_true", help="all variants of each protocol")
    return words.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
