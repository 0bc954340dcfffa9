"""What is left out makes no difference: trying everything everywhere comes to the same."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gemmlink.conformance.adversary.case import Case, build
from gemmlink.conformance.adversary.program import Program, compile_case
from gemmlink.conformance.explore import explore
from gemmlink.conformance.explore.sizes import mutants
from gemmlink.spec.lower import Grid
from tests.adversary.cases import find
from tests.explore.tiny import Draw

#: More than a tiny program has, where everything is tried.
LIMIT = 1500


def _agree(program: Program) -> bool:
    """Whether both find a fault; None of their kinds is one that the other cannot find."""
    found = explore(program, stop=False)
    whole = explore(program, LIMIT, reduce=False, stop=False)
    assert found.complete, str(found)
    assert found.kinds or not whole.kinds, f"{found} and {whole.kinds}"
    if whole.complete:
        # A fault ends a run: where there are several, the first may keep others from showing.
        assert found.kinds <= whole.kinds, f"{found} and {whole}"
        assert found.states <= whole.states
    return bool(found.kinds)


def test_programs_drawn_at_random() -> None:
    faulty = [_agree(Draw(seed).program()) for seed in range(40)]
    assert 5 < sum(faulty) < 35, "mistakes in some and not in all"


def _small(operation: str, mode: str, fused: bool, blocks: int = 1) -> Case:
    request = find(operation=operation, mode=mode, fused=fused, view=False, buffers=1)
    grid = Grid(blocks, blocks)
    return build(replace(request, rows=((1, 1),), n=request.n // 2, chunks=1, grid=grid))


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("mode", ["push", "pull", "lanes"])
@pytest.mark.parametrize("operation", ["all_gather", "reduce_scatter"])
def test_tiny_protocols(operation: str, mode: str, fused: bool) -> None:
    assert not _agree(compile_case(_small(operation, mode, fused)))


@pytest.mark.parametrize("mode", ["push", "pull"])
def test_mutants_of_tiny_protocols(mode: str) -> None:
    faulty = [
        _agree(compile_case(changed))
        for changed in list(mutants(_small("reduce_scatter", mode, True)))[::9]
    ]
    assert any(faulty)
    assert not all(faulty)
