"""Calls end badly in every way; all goes on afterwards, and needs each of the steps for it."""

from __future__ import annotations

from dataclasses import fields, replace
from functools import cache
from typing import Any

import pytest

from gemmlink.conformance.adversary import __main__ as command
from gemmlink.conformance.adversary import trouble
from gemmlink.conformance.adversary.case import Request, build
from gemmlink.conformance.adversary.program import Program, compile_case
from gemmlink.conformance.adversary.recovery import Recovery, Steps, recover
from gemmlink.conformance.adversary.run import Outcome
from gemmlink.conformance.adversary.sweep import OPERATIONS, requests
from gemmlink.conformance.mistakes import OF_THE_RECOVERY, Dropped
from tests.adversary.cases import find

#: Calls before the reset, and after it.
BEFORE, AFTER = 3, 2
SEEDS = range(40)
#: Some mistakes are rarely noticed: that a late word overtakes a whole call must happen first.
_MANY = range(80)

_GATHER: dict[str, Any] = {
    **{"operation": "all_gather", "mode": "push", "fused": True},
    **{"buffers": 1, "view": False, "entry": True},
}
_PULL = {**_GATHER, "mode": "pull"}
_LANES = {**_GATHER, "mode": "lanes", "lane_order": "after_drain", "lanes": 2}
_VIEW = {**_GATHER, "view": True, "entry": False}
_SCENARIOS = ("one", "two", "again", "copy", "refused", "refused and failed")


def _program(request: Request, after: int = AFTER) -> Program:
    rows = (request.rows + request.rows)[: BEFORE + after]
    return compile_case(build(replace(request, rows=rows)))


@cache
def _programs(**wanted: Any) -> Program:
    return _program(find(**wanted))


def _caught(steps: Steps, scenario: str, *wanted: dict[str, Any]) -> Outcome | None:
    for each in wanted:
        program = _programs(**each)
        for seed in SEEDS if steps == Steps() else _MANY:
            outcome = recover(program, seed, BEFORE, steps, scenario=scenario)
            if outcome.fault is not None:
                return outcome
    return None


@pytest.mark.parametrize("operation", OPERATIONS)
def test_all_goes_on_whatever_happens(operation: str) -> None:
    wanted = [r for r in requests(2) if r.operation == operation and r.epilogues[0].needs.window]
    for number, request in enumerate(wanted[:: 23 if operation == "all_reduce" else 5]):
        program = _program(request)
        for seed in range(number * 3, number * 3 + 3):
            outcome = recover(program, seed, BEFORE)
            assert outcome.fault is None, str(outcome)


@pytest.mark.parametrize("scenario", _SCENARIOS)
def test_three_ranks_go_on_as_well(scenario: str) -> None:
    program = _program(find(3, **_LANES))
    for seed in SEEDS[:20]:
        outcome = recover(program, seed, BEFORE, scenario=scenario)
        assert outcome.fault is None, str(outcome)


@pytest.mark.parametrize("buffers", [1, 2])
def test_a_view_can_be_refused_as_well(buffers: int) -> None:
    program = _program(replace(find(**{**_VIEW, "buffers": buffers}), entry=True))
    for seed in SEEDS:
        outcome = recover(program, seed, BEFORE, scenario="refused")
        assert outcome.fault is None, str(outcome)


def _told(seed: int, scenario: str, wanted: dict[str, Any]) -> list[str]:
    told: list[str] = []
    recover(_programs(**wanted), seed, BEFORE, story=told, scenario=scenario)
    return [line.split(maxsplit=1)[1] for line in told if " fails in " in line or "refuses" in line]


def test_ranks_do_fail_in_every_call() -> None:
    failures = {line.split("fails in ")[1] for s in SEEDS for line in _told(s, "one", _GATHER)}
    assert failures == {"call 1", "call 2", "call 3"}


def test_scenarios_are_what_they_say() -> None:
    together = [_told(seed, "two", _GATHER) for seed in SEEDS]
    assert any(len({line.split("call")[1] for line in told}) == 2 for told in together)
    again = [_told(seed, "again", _GATHER) for seed in SEEDS]
    assert max(len(told) for told in again) == 4, "nobody fails after the reset"
    copies = [_told(seed, "copy", _LANES) for seed in SEEDS]
    assert sum(bool(told) for told in copies) > len(SEEDS) // 2
    refused = [_told(seed, "refused", _GATHER) for seed in SEEDS]
    assert all("refuses" in told[0] for told in refused)
    assert any(len(told) == 2 for told in refused), "no peer hears of it"


def test_scenarios_are_those_that_fit() -> None:
    def names(after: int = AFTER, **wanted: Any) -> set[str]:
        return set(trouble.fitting(_program(find(**wanted), after), BEFORE))

    assert names(**_LANES) == set(_SCENARIOS)
    assert names(**_GATHER) == {*_SCENARIOS} - {"copy"}
    assert names(**_VIEW) == {"one", "two", "again"}
    assert names(1, **_VIEW) == {"one", "two"}


def test_the_same_seed_is_the_same_recovery() -> None:
    program = _program(find(**_PULL))
    for seed in SEEDS:
        assert recover(program, seed, BEFORE) == recover(program, seed, BEFORE)


#: Where each step is needed.
WHERE: dict[str, tuple[dict[str, Any], ...]] = {
    "unquiesced reset": (_LANES,),
    "unquiesced reset after a failed copy": (_LANES,),
    "stores not published before the reset": (_VIEW,),
    "highest completed instead of issued epoch": (_PULL, _GATHER),
    "counters not cleared in the reset": (_GATHER,),
    # What is lost is that a fast rank has failed again: a slow one clears the record of it.
    "first call after the reset before all have cleared": (_PULL, _GATHER),
    "nobody is told of a failure": (_GATHER,),
    "nobody is told of a refusal": (_GATHER,),
    "nobody looks for who has left the call": (_GATHER,),
    "records trusted though their source has left": ({**_GATHER, "buffers": 2},),
    "refused call not left": (_GATHER,),
    "counters not cleared after a refused call": (_GATHER,),
}


@pytest.mark.parametrize("dropped", OF_THE_RECOVERY, ids=lambda dropped: dropped.name)
def test_no_step_can_be_left_out(dropped: Dropped) -> None:
    wanted = WHERE[dropped.name]
    assert _caught(Steps(), dropped.scenario, *wanted) is None
    assert _caught(dropped.steps, dropped.scenario, *wanted) is not None, "nobody notices"


def test_every_step_is_left_out_once() -> None:
    assert list(WHERE) == [dropped.name for dropped in OF_THE_RECOVERY]
    left = [
        {f.name for f in fields(d.steps) if not getattr(d.steps, f.name)} for d in OF_THE_RECOVERY
    ]
    assert set().union(*left) == {each.name for each in fields(Steps)}


def test_an_entry_that_nobody_sees_is_lost_in_a_reset_without_its_last_step() -> None:
    """A slow rank waits for it until the fast one enters its next call, which may never be."""
    program = _program(find(**_PULL), after=1)
    faults = [recover(program, s, BEFORE, Steps(wait=False), scenario="one").fault for s in SEEDS]
    assert "deadlock" in {fault.kind for fault in faults if fault is not None}


def test_without_records_a_refusal_with_two_buffers_would_overwrite_what_is_read() -> None:
    """Nothing else says that a peer has come as far as the call that was refused."""
    program = _program(find(**{**_GATHER, "buffers": 2, "entry": False}))
    faults = [recover(program, seed, BEFORE, scenario="refused").fault for seed in SEEDS]
    assert "race" in {fault.kind for fault in faults if fault is not None}


def test_rare_troubles_come_at_last_when_nothing_else_does() -> None:
    """A lane that has stopped holds all up: the rank that owns it notices even then."""
    program = _program(find(**_LANES))
    machine = Recovery(program, 0, BEFORE, scenario="copy")
    for each in machine.script.troubles:
        each.patience = 1_000_000
    machine.run()
    assert all(each.over for each in machine.script.troubles)


def test_the_command_lets_calls_end_badly(capsys: pytest.CaptureFixture[str]) -> None:
    only = "all_gather fused-push chunks=2 view=True buffers=2 rows"
    assert command.main(["--fail", "--seeds", "4", "--only", only]) == 0
    assert "2 variants at 2 ranks, 8 runs, all right" in capsys.readouterr().out
