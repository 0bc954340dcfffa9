"""Built-in protocols in all executions, a few of them; and mistakes that show in none.

All of them: ``python -m gemmlink.conformance.explore``.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from gemmlink.conformance.adversary.case import build
from gemmlink.conformance.adversary.program import compile_case
from gemmlink.conformance.adversary.run import run
from gemmlink.conformance.adversary.sweep import OPERATIONS
from gemmlink.conformance.explore import explore
from gemmlink.conformance.explore.__main__ import main
from gemmlink.conformance.explore.sizes import explore_some, mutants, protocols, sizes
from gemmlink.conformance.mutate import NAMED
from tests.adversary.cases import find

_COPY: dict[str, Any] = {"view": False, "buffers": 1, "send_complete": False}


@pytest.mark.parametrize("mode", ["push", "pull", "lanes"])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_protocol_in_all_executions(operation: str, mode: str) -> None:
    request = find(operation=operation, mode=mode, fused=True, **_COPY)
    found = explore_some(replace(request, chunks=1), limit=1000)
    assert found.fault is None, "\n".join(found.story)
    assert found.complete
    assert found.states > 3, "something must have been tried"


def test_two_buffers_let_ranks_be_a_call_apart() -> None:
    wanted: dict[str, Any] = {"operation": "all_gather", "mode": "push", "fused": False}
    one = explore_some(find(**wanted, **_COPY), limit=1000)
    two = explore_some(find(**wanted, **{**_COPY, "buffers": 2}), limit=1000)
    assert two.complete
    assert two.fault is None
    assert two.states > one.states


#: Of the mistakes with a name those that this protocol must not make, or may.
_HARMLESS = {"gate only before stores that leave", "a join taken for a release"}


def test_mistakes_with_a_name_show_in_some_execution() -> None:
    request = find(operation="all_gather", mode="push", fused=True, **_COPY)
    case = build(replace(request, rows=request.rows[:3], chunks=1))
    for mutant in NAMED:
        changed = case.changed(mutant.name, mutant.change)
        if changed.lowered == case.lowered:
            continue
        found = explore(compile_case(changed), limit=1000)
        assert found.complete, str(found)
        assert (found.fault is None) == (mutant.name in _HARMLESS), str(found)


def test_a_limit_is_a_limit() -> None:
    request = find(operation="all_gather", mode="push", fused=True, **_COPY)
    found = explore(compile_case(build(request)), limit=5)
    assert not found.complete
    assert found.fault is None
    assert found.states == 6
    assert [size.chunks for size in sizes(request)] == [2, 1, 1, 1]


def test_protocols_are_all_there() -> None:
    found = protocols()
    names = {request.name() for request in found}
    assert len(names) == len(found) > 400
    assert {request.operation for request in found} == set(OPERATIONS)


def test_the_command_tells_how_it_ends(capsys: pytest.CaptureFixture[str]) -> None:
    only = "all_gather split-push chunks=1 buffers=1 rows"
    assert main(["--only", only]) == 0
    assert "1 protocols, 0 explorations too large" in capsys.readouterr().out
    only = "all_gather fused-push chunks=2 buffers=2 send_complete=True rows"
    assert main(["--only", only, "--limit", "1"]) == 1
    assert "1 explorations too large" in capsys.readouterr().out
    assert main(["--only", "no such protocol"]) == 2


def test_what_a_seed_shows_is_among_all_executions() -> None:
    request = find(operation="all_gather", mode="pull", fused=True, **_COPY)
    case = build(replace(request, rows=request.rows[:3], chunks=1))
    shown = 0
    for changed in list(mutants(case))[::3]:
        program = compile_case(changed)
        faults = [outcome.fault for seed in range(5) if (outcome := run(program, seed)).fault]
        shown += bool(faults)
        if faults:
            assert explore(program).fault is not None, f"{changed.name}: {faults[0]}"
    assert shown > 10
