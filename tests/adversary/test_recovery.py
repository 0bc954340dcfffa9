"""A rank fails in the middle of a call; the reset makes all as new, and needs each of its steps."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from gemmlink.conformance.adversary.case import Request, build
from gemmlink.conformance.adversary.program import Program, compile_case
from gemmlink.conformance.adversary.recovery import Steps, recover
from gemmlink.conformance.adversary.run import Outcome
from gemmlink.conformance.adversary.sweep import OPERATIONS, requests
from tests.adversary.cases import find

#: Calls before the reset.
BEFORE = 3
SEEDS = range(40)


def _program(request: Request, after: int = 2) -> Program:
    rows = (request.rows + request.rows)[: BEFORE + after]
    return compile_case(build(replace(request, rows=rows)))


def _caught(steps: Steps, *wanted: dict[str, Any]) -> Outcome | None:
    for each, after in ((each, after) for each in wanted for after in (1, 2)):
        program = _program(find(**each), after)
        for seed in SEEDS:
            outcome = recover(program, seed, BEFORE, steps)
            if outcome.fault is not None:
                return outcome
    return None


@pytest.mark.parametrize("operation", OPERATIONS)
def test_all_goes_on_after_a_reset(operation: str) -> None:
    wanted = [r for r in requests(2) if r.operation == operation and r.epilogues[0].needs.window]
    for number, request in enumerate(wanted[:: 23 if operation == "all_reduce" else 5]):
        program = _program(request)
        for seed in range(number * 3, number * 3 + 3):
            outcome = recover(program, seed, BEFORE)
            assert outcome.fault is None, str(outcome)


def test_three_ranks_go_on_as_well() -> None:
    program = _program(find(3, operation="all_gather", mode="lanes", fused=True))
    for seed in SEEDS:
        outcome = recover(program, seed, BEFORE)
        assert outcome.fault is None, str(outcome)


def test_ranks_do_fail_in_every_call() -> None:
    program = _program(find(operation="all_gather", mode="push", fused=True))
    failures = set()
    for seed in SEEDS:
        told: list[str] = []
        recover(program, seed, BEFORE, story=told)
        failures |= {line.split("fails in ")[1] for line in told if "fails in " in line}
    assert failures == {"call 1", "call 2", "call 3"}


def test_the_same_seed_is_the_same_recovery() -> None:
    program = _program(find(operation="all_gather", mode="pull", fused=True))
    for seed in SEEDS:
        assert recover(program, seed, BEFORE) == recover(program, seed, BEFORE)


_GATHER: dict[str, Any] = {"operation": "all_gather", "fused": True, "buffers": 1, "view": False}
_VIEW: dict[str, Any] = {"operation": "all_gather", "fused": True, "view": True}
_LANES: dict[str, Any] = {**_GATHER, "mode": "lanes", "lane_order": "after_drain", "lanes": 2}


@pytest.mark.parametrize(
    ("steps", "wanted"),
    [
        (Steps(quiesce=False), (_LANES,)),
        (Steps(publish=False), ({**_VIEW, "mode": "push"},)),
        (Steps(issued=False), ({**_GATHER, "mode": "pull"}, {**_GATHER, "mode": "push"})),
        (Steps(counters=False), ({**_GATHER, "mode": "push"},)),
        # What may be lost is that a fast rank has entered, where ranks tell each other their M: a
        # slow one waits for that until the fast one enters its next call, which may never be.
        (Steps(wait=False), tuple({**_GATHER, "mode": m, "entry": True} for m in ("pull", "push"))),
    ],
    ids=["quiesce", "publish", "issued", "counters", "wait"],
)
def test_no_step_can_be_left_out(steps: Steps, wanted: tuple[dict[str, Any], ...]) -> None:
    assert _caught(Steps(), *wanted) is None
    assert _caught(steps, *wanted) is not None, "nobody notices"
