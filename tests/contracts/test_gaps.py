"""Files of gaps: read strictly, and strict xfails under pytest."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gemmlink.conformance import BackendContract, WordsContract, catalog, failures, gaps
from gemmlink.conformance.clauses import _jobs
from gemmlink.errors import InvalidArgument

ROOT = Path(__file__).parents[2]
CHOOSY = "tests.contracts.broken_backends:Choosy"
#: What ``Choosy`` fails, and a clause that it keeps.
FAILS = "backend/it_supports_every_pair_of_dtypes"
KEEPS = "backend/inputs_are_left_alone"


def _file(folder: Path, *lines: str) -> Path:
    path = folder / "mine.gaps"
    path.write_text("\n".join(lines))
    return path


def _contract(base: type, **values: Any) -> Any:
    return type("Mine", (base,), {"__module__": __name__, **values})


def test_a_file_has_ids_and_reasons(tmp_path: Path) -> None:
    path = _file(tmp_path, "# known", "", f"  {FAILS} : no bfloat16: not yet ")
    (gap,) = gaps.read(path).values()
    assert (gap.id, gap.reason, gap.where) == (FAILS, "no bfloat16: not yet", f"{path}:3")


@pytest.mark.parametrize(
    ("lines", "text"),
    [
        ([FAILS], "'id: reason'"),
        ([f"{FAILS}:"], "'id: reason'"),
        ([f"{FAILS}: one", f"{FAILS}: two"], "declared once"),
    ],
)
def test_a_line_that_is_wrong_is_an_error(tmp_path: Path, lines: list[str], text: str) -> None:
    with pytest.raises(InvalidArgument, match=text):
        gaps.read(_file(tmp_path, *lines))


def test_a_file_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="must be readable"):
        gaps.read(tmp_path / "absent.gaps")


def test_a_file_is_named_by_path_or_by_module(tmp_path: Path) -> None:
    here = Path(__file__).parent
    assert gaps.locate("mine.gaps", tmp_path) == tmp_path / "mine.gaps"
    assert gaps.locate(f"{__name__}:mine.gaps", tmp_path) == here / "mine.gaps"
    assert gaps.beside(__name__) == here / "test_gaps.gaps"
    with pytest.raises(InvalidArgument, match="no such module"):
        gaps.locate("no_such_module:mine.gaps", tmp_path)


@pytest.mark.parametrize(
    "name",
    [
        "backend/inputs_are_left_alonee",
        "words/a_wait_is_bounded",
        "cell/all_gather/fused-push/bfloat16-float32/world9",
        "cell/all_gather/fused-push/int8-float32/world2",
        "cell/gather_all/fused-push/bfloat16-float32/world2",
        "cell/all_gather",
    ],
)
def test_an_id_that_nothing_has_is_unknown(name: str) -> None:
    assert not catalog.is_known(name)


def test_an_id_of_a_clause_or_cell_is_known() -> None:
    assert catalog.is_known("transport/words/a_wait_is_bounded")
    cell = "cell/all_gather/fused-mine/bfloat16-float32/world2"
    assert catalog.is_known(cell)
    assert catalog.is_known(cell, {"fused-mine": ("all_gather",)})
    assert not catalog.is_known(cell, {"fused-push": ("all_gather",)})
    assert not catalog.is_known(cell, {"fused-mine": ("all_to_all",)})


def test_a_class_with_an_unknown_gap_cannot_be_made(tmp_path: Path) -> None:
    """So that pytest reports it whichever tests are selected."""
    path = _file(tmp_path, "transport/words/a_wait_is_bounded: fine", f"{KEEPS}e: misspelt")
    with pytest.raises(InvalidArgument, match=f"{re.escape(f'{path}:2')}.*did you mean {KEEPS}"):
        _contract(BackendContract, gaps=str(path))


def test_failures_leaves_gaps_out_and_names_those_that_pass(tmp_path: Path) -> None:
    path = _file(tmp_path, f"{FAILS}: not yet", f"{KEEPS}: once")
    found = failures(_contract(BackendContract, backend=CHOOSY, gaps=str(path)))
    assert set(found) == {"test_inputs_are_left_alone"}
    assert f"it passes, and {path}:2 declares it" in found["test_inputs_are_left_alone"]


def test_gaps_of_one_class_are_no_gaps_of_another(tmp_path: Path) -> None:
    """The methods are shared, their marks are not."""
    path = _file(tmp_path, f"{KEEPS}: once")
    marked, other = _contract(BackendContract, gaps=str(path)), _contract(BackendContract)
    assert hasattr(marked.test_inputs_are_left_alone, "pytestmark")
    assert not hasattr(other.test_inputs_are_left_alone, "pytestmark")
    assert not hasattr(marked.test_strides_are_arbitrary, "pytestmark")


def test_ranks_need_not_import_the_class_with_the_gaps(tmp_path: Path) -> None:
    """It lies among somebody's tests."""
    path = _file(tmp_path, "transport/words/a_wait_is_bounded: the bus has no clock")
    jobs = _jobs(_contract(WordsContract, gaps=str(path)))
    assert {job.defined_in for job in jobs} == {"gemmlink.conformance.words:WordsContract"}
    assert "test_a_wait_is_bounded" in {job.name for job in jobs}


def test_a_gap_is_a_strict_xfail(tmp_path: Path) -> None:
    _file(tmp_path, f"{FAILS}: not yet", f"{KEEPS}: once", "transport/lane/copies_arrive: none")
    (tmp_path / "test_mine.py").write_text(
        "from gemmlink.conformance import BackendContract\n"
        f"class TestMine(BackendContract):\n    backend = {CHOOSY!r}\n    gaps = 'mine.gaps'\n"
    )
    argv = [sys.executable, "-m", "pytest", "-q", "-rxf", "-p", "no:cacheprovider"]
    wanted = "supports_every or left_alone"
    done = subprocess.run(
        [*argv, "-c", "/dev/null", "-k", wanted, str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert "1 failed, " in done.stdout, done.stdout
    assert "1 xfailed" in done.stdout, done.stdout
    assert "[XPASS(strict)] once" in done.stdout, done.stdout
    assert done.returncode == 1
