"""``python -m gemmlink.conformance.cross_check``: the proof and all executions must agree.

The proof works out what comes before what; exploring walks, and looks where it gets. They share the
lowered case and nothing by which either judges. So what is proved must go wrong in no execution,
and what goes wrong in one must be refuted - of every built-in protocol at two ranks, and with
``--mutants`` of every small mistake in it.

Exits with 1 if a proof is *unsound*: something is proved that goes wrong. A proof may be more
careful than need be: it may refute what goes wrong in no execution of these calls. Such cases are
listed, and so is what is too large to be explored.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from gemmlink.conformance.adversary.case import Case, Request, build
from gemmlink.conformance.adversary.program import compile_case
from gemmlink.conformance.explore import explore
from gemmlink.conformance.explore.__main__ import parser
from gemmlink.conformance.explore.sizes import CALLS, mutants, protocols, sizes
from gemmlink.conformance.proof import prove

#: ``right``, ``wrong``: both say so. ``unsound``: proved, and goes wrong. ``careful``: refuted, and
#: goes wrong in no execution. ``large``: not explored to the end.
Agreement = Literal["right", "wrong", "unsound", "careful", "large"]


@dataclass(frozen=True)
class Judged:
    """What both say of a case. ``reason``: why the proof refutes it; ``fault``: what goes wrong."""

    case: str
    agreement: Agreement
    reason: str | None = None
    fault: str | None = None

    def __str__(self) -> str:
        return f"{self.agreement}: {self.case}; proof: {self.reason}, executions: {self.fault}"


def judge(case: Case, limit: int) -> Judged:
    """Prove it, and explore it with at most ``limit`` states."""
    program = compile_case(case)
    reason = prove(program).reason
    explored = explore(program, limit)
    fault = None if explored.fault is None else explored.fault.kind
    if fault is not None:
        agreement: Agreement = "unsound" if reason is None else "wrong"
    elif not explored.complete:
        agreement = "large"
    else:
        agreement = "right" if reason is None else "careful"
    return Judged(case.name, agreement, reason, fault)


def judge_protocol(request: Request, limit: int, calls: int = CALLS) -> Judged:
    """The same for the largest size of a protocol that can be explored."""
    for size in sizes(request, calls):
        judged = judge(build(size), limit)
        if judged.agreement != "large":
            break
    return judged


def judge_mutants(request: Request, limit: int, calls: int = CALLS) -> Iterator[Judged]:
    """The same for every mistake in the smallest size in which blocks share the work."""
    small = replace(request, rows=request.rows[:calls], chunks=1)
    for changed in mutants(build(small)):
        yield judge(changed, limit)


def main(arguments: list[str] | None = None) -> int:
    """Compare what is asked for; the exit code."""
    told = parser("python -m gemmlink.conformance.cross_check").parse_args(arguments)
    found = [request for request in protocols() if told.only in request.name()]
    wanted = found[told.share :: told.shares]
    began, counts = time.monotonic(), Counter[Agreement]()
    for request in wanted:
        for judged in _judged(request, told.mutants, told.limit, told.calls):
            counts[judged.agreement] += 1
            if judged.agreement not in ("right", "wrong"):
                print(judged, flush=True)
    what = "mutants of " if told.mutants else ""
    print(f"{what}{len(wanted)} protocols: {dict(counts)}; {time.monotonic() - began:.0f} s")
    if counts["unsound"]:
        return 1
    return 0 if wanted else 2


def _judged(request: Request, broken: bool, limit: int, calls: int) -> Iterator[Judged]:
    if broken:
        yield from judge_mutants(request, limit, calls)
    else:
        yield judge_protocol(request, limit, calls)


if __name__ == "__main__":
    sys.exit(main())
