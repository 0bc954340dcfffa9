"""Everything built in, in every variant, against the adversary; few seeds each.

More of them: ``python -m gemmlink.conformance.adversary --seeds 500``.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from gemmlink.conformance.adversary.case import Request, build
from gemmlink.conformance.adversary.run import first_fault
from gemmlink.conformance.adversary.sweep import OPERATIONS, requests
from gemmlink.conformance.mutate import edited
from gemmlink.spec.lower import Grid
from gemmlink.spec.lowered import Lowered, Put


def _sweep(world: int, operation: str, every: int, seeds: int) -> int:
    wanted = [r for r in requests(world) if r.operation == operation][::every]
    for number, request in enumerate(wanted):
        # Other seeds for each variant: more interleavings are seen in all.
        found = first_fault(build(request), range(number * seeds, (number + 1) * seeds))
        assert found is None, str(found)
    return len(wanted)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_variants_at_two_ranks(operation: str) -> None:
    # Pairs of epilogues make many variants of an all-reduce: CI looks at those left out here, and
    # at more seeds.
    every = 3 if operation == "all_reduce" else 1
    assert _sweep(2, operation, every, seeds=1) > 60


@pytest.mark.parametrize("operation", OPERATIONS)
def test_some_variants_at_three_ranks(operation: str) -> None:
    assert _sweep(3, operation, every=17, seeds=2) > 5


def test_variants_are_all_there() -> None:
    def modes(operation: str) -> set[tuple[str, bool]]:
        return {_mode(r) for r in requests(2) if r.operation == operation}

    plain = {(mode, fused) for mode in ("push", "pull", "lanes") for fused in (True, False)}
    assert modes("all_gather") == plain | {("collective", False)}
    pairs = {f"{a}+{b}" for a in ("push", "pull", "lanes") for b in ("push", "pull", "lanes")}
    pairs -= {f"{a}+{a}" for a in ("push", "pull", "lanes")}
    assert modes("all_reduce") - modes("all_gather") == {(p, f) for p in pairs for f in (1, 0)}
    for request in requests(2):
        assert any(0 in call for call in request.rows), "no variant without an empty call"


def test_what_is_kept_is_looked_at() -> None:
    """Of an all-to-all the whole product may be kept; whoever drops it is caught in every mode."""
    kept = [r for r in requests(2) if r.plan.get("keep")]
    assert {r.operation for r in kept} == {"all_to_all"}
    assert len({_mode(r) for r in kept}) == 7, "not every mode"
    for request in kept:
        whole = build(request)
        found = first_fault(whole.changed("kept", _drop_what_is_kept), range(2))
        assert found is not None, whole.name


def _drop_what_is_kept(lowered: Lowered) -> Lowered:
    return edited(
        lowered,
        lambda strand: [a for a in strand.actions if not isinstance(a, Put) or a.area != "product"],
    )


def _mode(request: Request) -> tuple[str, bool]:
    return "+".join(epilogue.name for epilogue in request.epilogues), request.fused


@pytest.mark.parametrize("operation", ["all_gather", "all_reduce"])
def test_more_sequences_of_rows(operation: str) -> None:
    fewer = [r for r in requests(2) if r.operation == operation]
    more = [r for r in requests(2, more=True) if r.operation == operation]
    assert len(more) > 2 * len(fewer)
    for request in more[:: len(more) // 30]:
        found = first_fault(build(request), range(2))
        assert found is None, str(found)


@pytest.mark.parametrize("grid", [Grid(1, 1), Grid(3, 2), Grid(2, 3)], ids=str)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_other_grids(operation: str, grid: Grid) -> None:
    """Fewer tiles than blocks, and tiles that blocks share unevenly."""
    wanted = [r for r in requests(2) if r.operation == operation]
    for number, request in enumerate(wanted[:: len(wanted) // 20]):
        found = first_fault(build(replace(request, grid=grid)), range(number, number + 2))
        assert found is None, str(found)
