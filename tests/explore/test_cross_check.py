"""The proof and all executions agree, of protocols and of mistakes in them.

All of both: ``python -m gemmlink.conformance.cross_check``, and that with ``--mutants``.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from gemmlink.conformance import cross_check
from gemmlink.conformance.adversary.case import build
from gemmlink.conformance.cross_check import judge, judge_mutants, judge_protocol, main
from gemmlink.conformance.explore import Explored
from gemmlink.conformance.explore.sizes import mutants
from gemmlink.conformance.proof import Verdict
from tests.adversary.cases import find

_COPY: dict[str, Any] = {"view": False, "buffers": 1, "send_complete": False}
_PUSH: dict[str, Any] = {"operation": "all_gather", "mode": "push", "fused": True, **_COPY}
_LANES: dict[str, Any] = {**_PUSH, "mode": "lanes", "lane_order": "in_order", "lanes": 1}


@pytest.mark.parametrize("mode", ["push", "pull", "lanes"])
@pytest.mark.parametrize("operation", ["all_to_all", "all_reduce"])
def test_what_is_proved_is_right_in_all_executions(operation: str, mode: str) -> None:
    request = find(operation=operation, mode=mode, fused=True, **_COPY)
    assert judge_protocol(replace(request, chunks=1), limit=2000).agreement == "right"


@pytest.mark.parametrize("wanted", [_PUSH, {**_PUSH, "mode": "pull", "fused": False}, _LANES])
def test_mistakes_are_refuted_if_and_only_if_some_execution_goes_wrong(
    wanted: dict[str, Any],
) -> None:
    found = list(judge_mutants(find(**wanted), limit=2000))
    assert [str(each) for each in found if each.agreement not in ("right", "wrong")] == []
    kinds = [each.agreement for each in found]
    assert kinds.count("wrong") > kinds.count("right") > 5


def test_a_proof_of_what_goes_wrong_is_noticed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cross_check, "prove", lambda _: Verdict("all is well", 1, 1, 0.0))
    only = "all_gather split-pull chunks=1 buffers=1 rows"
    assert main(["--mutants", "--only", only, "--limit", "2000"]) == 1
    assert "unsound: all_gather split-pull" in capsys.readouterr().out


def test_what_goes_wrong_in_no_execution_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    case = build(find(**_PUSH))
    nothing = Explored(case.name, 1, 1, complete=True)
    monkeypatch.setattr(cross_check, "explore", lambda *_: nothing)
    assert judge(case, 1).agreement == "right"
    (ungated,) = [m for m in mutants(case) if m.name.endswith(": no gate")]
    judged = judge(ungated, 1)
    assert (judged.agreement, judged.reason) == ("careful", "race")


def test_what_is_too_large_is_told() -> None:
    assert judge(build(find(**_PUSH)), limit=1).agreement == "large"


def test_the_command_tells_how_it_ends(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--only", "all_gather split-pull chunks=1 buffers=1 rows"]) == 0
    assert "1 protocols: {'right': 1}" in capsys.readouterr().out
    assert main(["--only", "no such protocol"]) == 2
