"""Everything built in is proved, in every variant; of the many pairs of an all-reduce a third.

The rest: ``python -m gemmlink check protocol``, which CI runs.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from gemmlink.conformance.adversary.case import Request, build
from gemmlink.conformance.adversary.program import compile_case
from gemmlink.conformance.adversary.sweep import OPERATIONS, requests
from gemmlink.conformance.proof import Verdict, prove
from gemmlink.spec.lower import Grid


def _prove(request: Request) -> Verdict:
    found = prove(compile_case(build(request)))
    assert found.proved, str(found)
    return found


@pytest.mark.parametrize("operation", OPERATIONS)
def test_variants_at_two_ranks(operation: str) -> None:
    every = 3 if operation == "all_reduce" else 1
    wanted = [r for r in requests(2) if r.operation == operation][::every]
    assert len(wanted) > 60
    assert sum(_prove(request).pairs for request in wanted) > 100 * len(wanted)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_some_variants_at_three_ranks(operation: str) -> None:
    wanted = [r for r in requests(3) if r.operation == operation]
    for request in wanted[::17]:
        _prove(request)


@pytest.mark.parametrize("grid", [Grid(1, 1), Grid(3, 2), Grid(2, 3)], ids=str)
def test_other_grids(grid: Grid) -> None:
    """Fewer tiles than blocks, and tiles that blocks share unevenly."""
    for request in list(requests(2))[::40]:
        _prove(replace(request, grid=grid))


@pytest.mark.parametrize("mode", ["push", "pull", "lanes"])
def test_eight_ranks_and_eight_chunks(mode: str) -> None:
    calls = tuple(tuple(8 + (call + rank) % 3 for rank in range(8)) for call in range(3))
    plan = {"lane_order": "after_drain", "lanes": 2} if mode == "lanes" else {}
    wanted = (
        request
        for request in requests(8)
        if request.operation == "all_gather"
        and (request.epilogues[0].name, request.fused) == (mode, True)
        and plan.items() <= request.plan.items()
    )
    found = _prove(replace(next(wanted), chunks=8, rows=calls))
    assert found.nodes > 10_000
