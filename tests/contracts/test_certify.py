"""The command that certifies: exit codes, the header, a row for each clause and cell, gaps."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import gemmlink
from gemmlink import plugins
from gemmlink.backends.eager import Eager
from gemmlink.cli import main
from gemmlink.conformance import WordsContract, catalog, certify, parts
from gemmlink.conformance.parts import Mode
from gemmlink.errors import Unavailable
from gemmlink.spawn import RankFailed
from gemmlink.spec.contracts import Capabilities
from gemmlink.transport.shm import SharedMemory
from tests.contracts.forked import run_ranks_forked

HERE = "tests.contracts.test_certify"
CHOOSY = "tests.contracts.broken_backends:Choosy"
GATHERER = "tests.contracts.broken_phases:Gatherer"
#: What ``Choosy`` does: it refuses float16.
REFUSED = "backend/it_supports_every_pair_of_dtypes"
KEPT = "backend/inputs_are_left_alone"
CELL = "cell/all_gather/fused-push/float16-float32/world1"


class Needy(Eager):
    """A backend whose library is missing."""

    name = "needy"

    def __init__(self) -> None:
        raise Unavailable("backend 'needy' needs libneedy", "nothing", "Install libneedy.")


class Mute(Eager):
    """A backend that breaks when it is asked."""

    def supports(self, problem: object) -> str | None:
        raise ZeroDivisionError("mute")


class Plain(SharedMemory):
    """A transport without lanes."""

    name = "plain"

    def probe(self) -> Capabilities:
        return Capabilities(memory=("cpu",), host_words=True, host_data=True)


class Elsewhere(SharedMemory):
    """A transport for tensors that this machine has no device for."""

    name = "elsewhere"

    def probe(self) -> Capabilities:
        return Capabilities(memory=("cuda",), host_words=True, host_data=False)


@pytest.fixture(autouse=True)
def _world_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cells of world 1 alone, in this process: what they find is tested elsewhere."""

    def on_ranks(world: int, function: Callable[..., Any], *arguments: Any) -> Any:
        return [function(*arguments)]

    monkeypatch.setattr(catalog, "WORLDS", (1,))
    monkeypatch.setattr("gemmlink.cli.ranks.on_ranks", on_ranks)


def _certify(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, dict[str, Any]]:
    code = main(["conformance", *argv, "--json"])
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return code, found


@pytest.fixture
def one_mode(monkeypatch: pytest.MonkeyPatch) -> tuple[str, ...]:
    """Words that keep a run short: cells of one mode, and no clauses of its epilogue."""
    monkeypatch.setitem(catalog.CONTRACTS, "epilogue", ())
    return ("--epilogue", "fused-push")


def _by_id(found: dict[str, Any]) -> dict[str, Any]:
    return {row["id"]: row for row in found["rows"]}


def test_what_is_right_exits_0_and_has_a_header(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["conformance", "--backend", "eager"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"gemmlink {gemmlink.__version__}, python 3.")
    assert "torch 2." in lines[0]
    assert lines[1].startswith("transport shm (default), gemmlink.transport.shm:SharedMemory")
    assert "lanes: in_order" in lines[2]
    backend = lines.index(
        f"backend   eager, gemmlink.backends.eager:Eager, gemmlink {gemmlink.__version__}, on cpu"
    )
    assert "bfloat16-float32" in lines[backend + 1]
    assert "passed   backend/strides_are_arbitrary" in lines
    assert "passed   cell/all_gather/fused-push/bfloat16-float32/world1" in lines
    assert "passed   cell/all_reduce/split-lanes/float16-float16/world1" in lines
    cells = 7 * 4 * 5  # modes, operations, pairs of dtypes
    clauses = len(catalog.clause_ids(catalog.CONTRACTS["backend"][0]))
    assert lines[-1] == f"{clauses + cells} passed, 0 failed, 0 gap, 0 skipped"


def test_json_has_the_same(capsys: pytest.CaptureFixture[str], one_mode: tuple[str, ...]) -> None:
    code, found = _certify(capsys, "--backend", CHOOSY, *one_mode)
    assert code == 1
    assert list(found) == ["ok", "checked", "failed", "versions", "rows", "parts"]
    assert found["ok"] is False
    kinds = {part["kind"]: part for part in found["parts"]}
    assert list(kinds) == ["transport", "epilogue", "backend"]
    assert [part["named"] for part in kinds.values()] == [False, True, True]
    assert Path(kinds["backend"]["origin"]).name == "broken_backends.py"
    assert "float16-float16" not in kinds["backend"]["capabilities"]["dtypes"]
    rows = _by_id(found)
    assert len(rows) == len(found["rows"]) == found["checked"]
    assert {row["state"] for row in rows.values()} == {"passed", "failed"}
    assert "float16" in rows[REFUSED]["reason"]
    assert rows[REFUSED]["sentence"].startswith("``supports`` is None for what can be served")
    assert "must support the problem" in rows[CELL]["reason"]
    assert found["failed"] == sum(not row["ok"] for row in rows.values())


def test_declared_gaps_are_no_failures_and_strict(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, one_mode: tuple[str, ...]
) -> None:
    argv = ("--backend", CHOOSY, *one_mode)
    _, found = _certify(capsys, *argv)
    failing = [row["id"] for row in found["rows"] if row["state"] == "failed"]
    assert {REFUSED, CELL} <= set(failing)
    path = tmp_path / "choosy.gaps"
    path.write_text("".join(f"{name}: no float16 yet\n" for name in failing))
    code, found = _certify(capsys, *argv, "--gaps", str(path))
    rows = _by_id(found)
    assert (code, found["failed"]) == (0, 0)
    assert {name for name, row in rows.items() if row["state"] == "gap"} == set(failing)
    assert rows[CELL]["reason"] == "no float16 yet"
    path.write_text(f"{path.read_text()}{KEPT}: once\n")
    code, found = _certify(capsys, *argv, "--gaps", str(path))
    assert (code, found["failed"]) == (1, 1)
    assert f"it passes, and {path}:{len(failing) + 1}" in _by_id(found)[KEPT]["reason"]


@pytest.mark.parametrize(
    "name", ["backend/inputs_are_left", "cell/all_gather/fused-psh/float16-float32/world1"]
)
def test_an_unknown_gap_is_an_error_before_anything_runs(
    name: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(certify, "run", None)
    path = tmp_path / "choosy.gaps"
    path.write_text(f"{name}: misspelt")
    assert main(["conformance", "--backend", CHOOSY, "--gaps", str(path)]) == 2
    assert f"{name} at {path}:1 (did you mean " in capsys.readouterr().err


def test_gaps_lie_beside_the_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And count for what is in it: clauses of its kind, and cells."""
    (tmp_path / "choosy_plugin.py").write_text(
        "from tests.contracts.broken_backends import Choosy\n"
    )
    lines = [f"{REFUSED}: not yet", f"{CELL}: not yet", "epilogue/schedules_are_pure: elsewhere"]
    (tmp_path / "choosy_plugin.gaps").write_text("\n".join(lines))
    monkeypatch.syspath_prepend(str(tmp_path))
    job = certify.plan(backend="choosy_plugin:Choosy", epilogues=["fused-push"])
    assert set(job.gaps) == {REFUSED, CELL}
    assert certify.plan(backend=CHOOSY).gaps == {}


@pytest.mark.parametrize(
    ("line", "argv"),
    [
        ("epilogue/schedules_are_pure", []),
        ("epilogue/schedules_are_pure", ["--backend", CHOOSY]),
        (CELL, []),
    ],
)
def test_what_is_built_in_has_no_gaps(
    line: str, argv: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "push.gaps"
    path.write_text(f"{line}: hard")
    assert main(["conformance", "--epilogue", "fused-push", *argv, "--gaps", str(path)]) == 2
    assert "built in" in capsys.readouterr().err


def test_what_is_missing_is_skipped_with_the_reason(capsys: pytest.CaptureFixture[str]) -> None:
    code, found = _certify(capsys, "--backend", f"{HERE}:Needy")
    assert (code, found["checked"], found["failed"]) == (3, 0, 0)
    assert {row["state"] for row in found["rows"]} == {"skipped"}
    assert all("needs libneedy" in row["reason"] for row in found["rows"])
    assert "needs libneedy" in found["parts"][2]["lacks"]


@pytest.mark.parametrize(
    "argv",
    [
        ("--transport", f"{HERE}:Elsewhere"),
        ("--transport", f"{HERE}:Elsewhere", "--epilogue", "fused-push"),
        ("--backend", "eager", "--device", "cuda"),
    ],
)
def test_tensors_on_a_device_that_is_not_here_are_skipped(
    argv: tuple[str, ...], capsys: pytest.CaptureFixture[str], no_device: None
) -> None:
    code, found = _certify(capsys, *argv)
    assert (code, found["checked"], found["failed"]) == (3, 0, 0)
    assert {part["device"] for part in found["parts"]} == {"cuda"}
    ids = {row["id"] for row in found["rows"]}
    assert not any("collective" in name for name in ids), "collectives serve CPU tensors"
    assert "cell/all_to_all/fused-push/float16-float32/world1" in ids
    assert main(["conformance", "--quick", *argv]) == 3


@pytest.fixture
def no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """None that torch sees."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.mark.parametrize(
    ("transport", "device"), [("shm", "cpu"), ("symm_mem", "cuda"), (None, "cpu")]
)
def test_tensors_are_those_that_the_transport_serves(transport: str | None, device: str) -> None:
    job = certify.plan(transport=transport, backend="eager")
    assert job.device == device
    for part in job.parts:
        for _, contract in certify._contracts(job, part):
            assert vars(contract)["device"] == device


@pytest.mark.parametrize(
    ("argv", "code", "text"),
    [
        (["--transport", "shm", "--device", "cuda"], 3, "serves cpu tensors"),
        (["--epilogue", "collective", "--device", "cuda"], 3, "collectives serve CPU tensors"),
        (["--transport", f"{HERE}:Plain", "--epilogue", "lanes"], 3, "needs lanes"),
        (["--epilogue", "fused-collective"], 3, "must have the form"),
        (["--epilogue", "push,pull"], 2, "one epilogue is certified at a time"),
        (["--epilogue", "fused-lanes+pull"], 2, "a part is certified alone"),
        (["--gaps", "mine.gaps"], 2, "--gaps is for certifying a part"),
        (["--backend", "eager", "--quick", "--gaps", "mine.gaps"], 2, "--gaps is for"),
        (["--backend", "eager", "--matrix", "page.md"], 2, "--matrix is about all"),
        (["--backend", "eagre"], 2, "Did you mean 'eager'?"),
        (["--backend", CHOOSY, "--gaps", "absent.gaps"], 2, "must be readable"),
    ],
)
def test_what_cannot_be_certified_is_said_at_once(
    argv: list[str], code: int, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["conformance", *argv]) == code
    assert text in capsys.readouterr().err


def test_an_epilogue_has_cells_for_what_it_serves(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The others are neither failed nor skipped, and no gap can be declared for them."""
    monkeypatch.setitem(catalog.CONTRACTS, "epilogue", ())
    argv = ("--epilogue", f"fused-{GATHERER}")
    code, found = _certify(capsys, *argv)
    assert code == 0
    assert {row["id"].split("/")[1] for row in found["rows"]} == {"all_gather"}
    assert found["parts"][1]["capabilities"]["phases"] == "gather"
    path = tmp_path / "gatherer.gaps"
    path.write_text("cell/all_reduce/fused-gatherer/float16-float32/world1: not yet")
    assert main(["conformance", *argv, "--gaps", str(path)]) == 2
    assert "did you mean cell/all_" in capsys.readouterr().err


def test_the_self_test_takes_pairs_for_what_has_two_phases(
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, found = _certify(capsys, "--world", "1", "--epilogue", "fused-push+pull,split-push")
    assert code == 0
    served = {(row["mode"], row["operation"]) for row in found["rows"]}
    others = {("split-push", name) for name in catalog.OPERATIONS}
    assert served == {("fused-push+pull", "all_reduce"), *others}
    assert main(["conformance", "--world", "1", "--epilogue", "push+pull+lanes"]) == 2
    assert "a mode must serve an operation" in capsys.readouterr().err


def test_a_launcher_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert main(["conformance", "--backend", "eager"]) == 2
    assert "without torchrun" in capsys.readouterr().err


def test_a_transport_without_lanes_is_not_asked_for_them() -> None:
    job = certify.plan(transport=f"{HERE}:Plain")
    assert "fused-push" in {mode.name for mode in job.modes}
    assert not any("lanes" in mode.name for mode in job.modes)
    sections = {contract.section for _, contract in certify._contracts(job, job.parts[0])}
    assert sections == {"transport/session", "transport/window", "transport/words"}


def test_ranks_report_which_clause_failed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On real ranks, and only the contracts of the part that was named."""
    monkeypatch.setitem(catalog.CONTRACTS, "transport", (WordsContract,))
    monkeypatch.setattr(certify, "cells", lambda job, on_ranks: [])
    monkeypatch.setattr("gemmlink.conformance.clauses.run_ranks", run_ranks_forked)
    name = "tests.contracts.broken_transports:NarrowWords"
    code, found = _certify(capsys, "--transport", name)
    assert code == 1
    rows = _by_id(found)
    wrong = [name for name, row in rows.items() if row["state"] == "failed"]
    # What is bound holds 64 bits and so differs from what is not.
    also = "transport/words/bound_words_do_what_the_methods_do"
    assert set(wrong) == {"transport/words/a_word_is_a_signed_64_bit_number", also}
    assert len(rows) == len(catalog.clause_ids(WordsContract))
    assert "rank 0: read gave" in rows["transport/words/a_word_is_a_signed_64_bit_number"]["reason"]


def test_a_failure_tells_its_clause_once() -> None:
    row = certify.Row(
        "backend/x", "failed", "It is right.\nrank 0: it is not\n\nat all", "It is right."
    )
    assert row.lines() == [
        "failed   backend/x",
        "         It is right.",
        "         rank 0: it is not",
        "         at all",
    ]
    assert certify.Row("cell/x", "failed", "wrong").lines() == ["failed   cell/x", "         wrong"]


def test_a_mode_that_ends_a_rank_costs_no_other_mode() -> None:
    def on_ranks(world: int, function: Any, suite: Any) -> Any:
        if "fused-bad" in suite.epilogues:
            raise RankFailed({1: "died with exit code 7"})
        return [function(suite)]

    job = certify.plan(backend="eager")
    modes = (Mode("fused-bad", "fused-bad", False), Mode("split-pull", "split-pull", False))
    rows = certify.cells(certify.Job(job.parts, modes, {}), on_ranks)
    states = {(row.id.split("/")[2], row.state) for row in rows}
    assert states == {("fused-bad", "failed"), ("split-pull", "passed")}
    assert "died with exit code 7" in str(rows[0].reason)


def test_a_part_that_cannot_even_say_what_it_is_has_a_header() -> None:
    """And then clauses that fail, not a traceback."""
    part = parts.describe("backend", f"{HERE}:Mute")
    assert part.capabilities == {"unknown": "ZeroDivisionError: mute"}


def test_the_header_names_the_distribution() -> None:
    version = pytest.__version__
    assert parts._origin("pytest") == f"pytest {version}"
    assert parts._origin("no_such_module") == "unknown"


def test_a_registered_part_is_found_by_its_name() -> None:
    plugins.register(plugins.Entry("choosy", CHOOSY, "backend"))
    try:
        part = parts.describe("backend", "choosy")
    finally:
        plugins.unregister("choosy")
    assert (part.target, part.origin, part.built_in) == (CHOOSY, "register", False)
