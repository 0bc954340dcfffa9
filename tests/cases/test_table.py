"""docs/cases.md lists every case once, and says of each where it is tested: that must be true."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
#: Cases are numbered from 1 to this.
LAST = 66


def _rows() -> list[list[str]]:
    lines = (ROOT / "docs" / "cases.md").read_text().splitlines()
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if "| O-" in line]


def _tests(file: str) -> set[str]:
    body = ast.parse((ROOT / file).read_text()).body
    return {item.name for item in body if isinstance(item, ast.FunctionDef) if "test_" in item.name}


def _claimed(row: list[str]) -> list[str]:
    return re.findall(r"`([^`]+)`", row[2])


def test_every_case_has_a_row_in_order() -> None:
    assert [row[0] for row in _rows()] == [f"O-{number:02}" for number in range(1, LAST + 1)]


@pytest.mark.parametrize("row", _rows(), ids=lambda row: row[0])
def test_a_row_is_true(row: list[str]) -> None:
    """A file under tests/cases has a test of that id; any other test exists under its name."""
    name, what, tested, later = row
    assert what
    assert tested or later, f"{name} is neither tested nor excused"
    prefix = f"test_o_{name.removeprefix('O-')}_"
    for claim in _claimed(row):
        file, _, function = claim.partition("::")
        found = _tests(file)
        if function:
            assert function in found, f"{name}: no {claim}"
        else:
            assert any(test.startswith(prefix) for test in found), f"{name}: no {prefix} in {file}"


def test_every_test_of_a_case_is_in_the_table() -> None:
    claims = {row[0]: _claimed(row) for row in _rows()}
    for path in sorted((ROOT / "tests" / "cases").glob("test_*.py")):
        file = str(path.relative_to(ROOT))
        for test in sorted(_tests(file)):
            if path.name != "test_table.py":
                found = re.match(r"test_o_(\d\d)_", test)
                assert found, f"{file}::{test} bears no id"
                assert file in claims[f"O-{found[1]}"], f"{file}::{test} is not in the table"
