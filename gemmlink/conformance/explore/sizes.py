"""Built-in variants, and smaller ones of each, for what is too large as it is.

Three calls are enough for each of two buffers to be used again, and for a call whose ranks are a
call apart to have one before and one behind it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from gemmlink.conformance.adversary.case import Case, Request, build
from gemmlink.conformance.adversary.program import compile_case
from gemmlink.conformance.adversary.sweep import requests
from gemmlink.conformance.explore.search import Explored, explore
from gemmlink.conformance.mistakes import OF_THE_CALLS, OF_THE_START
from gemmlink.conformance.mutate import NAMED, deletions, narrowings, swaps
from gemmlink.spec.lower import Grid

CALLS = 3

#: What two variants of one protocol have in common, of all that a plan may say.
_PLAN = ("lane_order", "view", "buffers", "send_complete")


def protocols() -> list[Request]:
    """Of the variants at two ranks the first of each protocol."""
    found: dict[tuple[object, ...], Request] = {}
    for request in requests(2):
        names = tuple(epilogue.name for epilogue in request.epilogues)
        plan = tuple(request.plan.get(name) for name in _PLAN)
        found.setdefault((request.operation, names, request.fused, *plan), request)
    return list(found.values())


def sizes(request: Request, calls: int = CALLS) -> Iterator[Request]:
    """``request`` with so many calls, then smaller and smaller."""
    whole = replace(request, rows=request.rows[:calls])
    yield whole
    if whole.chunks > 1 and whole.plan.get("lanes", 1) == 1:
        yield replace(whole, chunks=1)
    yield replace(whole, chunks=1, grid=Grid(2, 1))
    yield replace(whole, chunks=1, grid=Grid(1, 1))


def explore_some(request: Request, limit: int, calls: int = CALLS) -> Explored:
    """The largest that can be explored whole within the limit; the smallest if none can."""
    for size in sizes(request, calls):
        found = explore(compile_case(build(size)), limit)
        if found.complete:
            break
    return found


def mutants(case: Case) -> Iterator[Case]:
    """``case`` with one mistake each. What changes nothing is left out."""
    first = case.lowered[0]
    mechanical = (*deletions(first), *swaps(first), *narrowings(first))
    for mutant in (*mechanical, *NAMED, *OF_THE_START, *OF_THE_CALLS):
        changed = mutant.of(case)
        if replace(changed, name=case.name) != case:
            yield changed
