"""``--no-skips``: a test that is skipped has failed, one that fails as expected has not."""

from __future__ import annotations

from typing import Any, cast

import pytest

from tests.conftest import _judged


class Config:
    """As much of a configuration as is asked."""

    def __init__(self, no_skips: bool) -> None:
        self.no_skips = no_skips

    def getoption(self, name: str) -> bool:
        """The option that was given."""
        assert name == "no_skips"
        return self.no_skips


def _report(outcome: Any) -> pytest.TestReport:
    why = ("test_a.py", 3, "Skipped: no compiler")
    return pytest.TestReport("test_a.py::test_b", ("test_a.py", 3, ""), {}, outcome, why, "call")


@pytest.mark.parametrize(
    ("no_skips", "outcome", "judged"),
    [
        (True, "skipped", "failed"),
        (False, "skipped", "skipped"),
        (True, "passed", "passed"),
        (True, "failed", "failed"),
    ],
)
def test_a_skip_is_a_failure_where_nothing_may_be_skipped(
    no_skips: bool, outcome: str, judged: str
) -> None:
    report = _judged(_report(outcome), cast(pytest.Config, Config(no_skips)))
    assert report.outcome == judged


def test_the_failure_tells_the_reason() -> None:
    report = _judged(_report("skipped"), cast(pytest.Config, Config(True)))
    assert report.longrepr == ("--no-skips: test_a.py::test_b was not run. Skipped: no compiler")


def test_an_expected_failure_is_no_skip() -> None:
    report = _report("skipped")
    report.wasxfail = "known"
    assert _judged(report, cast(pytest.Config, Config(True))).outcome == "skipped"
