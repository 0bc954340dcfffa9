"""The support matrix: the page in docs is the one for what is built in; its entries."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from gemmlink.cli import main
from gemmlink.conformance import catalog, certify, matrix
from gemmlink.conformance.certify import Job, OnRanks, Row
from gemmlink.epilogues.push import Push

PAGE = Path(__file__).parents[2] / "docs" / "support-matrix.md"


def _ran(outcomes: dict[str, Row], job: Job) -> list[Row]:
    names = [
        name
        for part in job.parts
        if part.named
        for _, contract in certify._contracts(job, part)
        for name in catalog.clause_ids(contract)
    ]
    return [outcomes.get(name, Row(name, "passed")) for name in names]


@pytest.fixture
def outcomes(monkeypatch: pytest.MonkeyPatch) -> dict[str, Row]:
    """Everything passes without being run, except what a test puts in here."""
    found: dict[str, Row] = {}

    def all_clauses(jobs: Sequence[Job]) -> list[list[Row]]:
        return [_ran(found, job) for job in jobs]

    def cells(job: Job, on_ranks: OnRanks) -> list[Row]:
        names = catalog.cell_ids({mode.name: mode.operations for mode in job.modes})
        return [found.get(name, Row(name, "passed")) for name in names]

    monkeypatch.setattr(certify, "all_clauses", all_clauses)
    monkeypatch.setattr(certify, "cells", cells)
    return found


def _line(page: str, name: str, section: str = "") -> list[str]:
    """The first line of that name, or the first behind the title of a section."""
    lines = page[page.index(f"## {section}") :].splitlines()
    line = next(line for line in lines if line.startswith(f"| `{name}`"))
    return [entry.strip() for entry in line.strip("|").split("|")]


def test_the_page_in_docs_is_for_what_is_built_in(outcomes: dict[str, Row], tmp_path: Path) -> None:
    """A new part, mode, clause or pair of dtypes needs a new page. CI runs what it says."""
    path = tmp_path / "page.md"
    assert main(["conformance", "--matrix", str(path)]) == 0
    assert path.read_text() == PAGE.read_text()


def test_no_cell_of_the_page_is_skipped() -> None:
    """The number is fixed, here and in .ci/check_matrix.sh."""
    assert PAGE.read_text().endswith(" passed, 0 failed, 0 gap, 0 skipped.\n")


def test_an_entry_tells_the_worst_behind_it(outcomes: dict[str, Row]) -> None:
    cell = "cell/all_gather/{}/bfloat16-float32/world2"
    reason = "backend 'eager' needs a GPU; got none. Buy one."
    for mode, row in {
        "fused-push": Row("", "failed", "wrong"),
        "split-push": Row("", "gap", "not yet"),
        "fused-pull": Row("", "skipped", reason),
    }.items():
        outcomes[cell.format(mode)] = Row(cell.format(mode), row.state, row.reason)
    lost = "transport/words/a_wait_is_bounded"
    outcomes[lost] = Row(lost, "failed", "endless")
    page = matrix.build(lambda *arguments: None).page()
    column = 3  # mode, two pairs before it
    found = {
        mode: _line(page, mode, "Operation all_gather")[column]
        for mode in ("fused-push", "split-push", "fused-pull", "fused-lanes")
    }
    assert found == {
        "fused-push": "FAILS",
        "split-push": "gap",
        "fused-pull": "needs a GPU",
        "fused-lanes": "ok",
    }
    assert _line(page, "fused-push", "Operation all_to_all")[column] == "ok"
    assert _line(page, "eager")[column + 1] == "needs a GPU"
    assert _line(page, "shm") == ["`shm`", "cpu", "ok", "ok", "FAILS", "ok", "ok"]
    assert page.endswith(" 2 failed, 1 gap, 1 skipped.\n")


def test_a_failure_is_written_and_told(
    outcomes: dict[str, Row], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lost = "epilogue/schedules_are_pure"
    outcomes[lost] = Row(lost, "failed", "two schedules")
    path = tmp_path / "page.md"
    assert main(["conformance", "--matrix", str(path)]) == 1
    assert f"failed   {lost}" in capsys.readouterr().out
    assert "FAILS" in path.read_text()


def test_what_is_not_offered_is_a_dash(outcomes: dict[str, Row]) -> None:
    page = matrix.build(lambda *arguments: None).page()
    titles = next(line for line in page.splitlines() if line.startswith("| mode | contract"))
    names = [title.strip() for title in titles.strip("|").split("|")]
    told = {mode: dict(zip(names, _line(page, mode), strict=True)) for mode in ("collective",)}
    assert (told["collective"]["view"], told["collective"]["lanes"]) == ("-", "-")
    assert _line(page, "fused-lanes")[-4:] == ["ok", "ok", "ok", "ok"]


def test_an_operation_that_a_mode_does_not_serve_is_a_dash(
    outcomes: dict[str, Row], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has no cells there, which is neither a failure nor a skip."""
    monkeypatch.setattr(Push, "phases", ("gather",))
    page = matrix.build(lambda *arguments: None).page()
    assert set(_line(page, "fused-push", "Operation all_gather")[1:]) == {"ok"}
    for operation in ("all_to_all", "reduce_scatter", "all_reduce"):
        assert set(_line(page, "fused-push", f"Operation {operation}")[1:]) == {"-"}
        assert set(_line(page, "fused-pull", f"Operation {operation}")[1:]) == {"ok"}
    assert page.endswith(" 0 failed, 0 gap, 0 skipped.\n")
