"""The wait for a collective of the library, whose errors do not say what they are."""

from __future__ import annotations

from datetime import timedelta

import pytest

from gemmlink.core import library
from gemmlink.errors import PeerLost


class Work:
    """A collective that ends behind so many waits; from then on it raises ``error``."""

    def __init__(self, waits: int, error: str | None = None) -> None:
        self._left = waits
        self._error = error

    def wait(self, limit: timedelta) -> None:
        if self._left:
            self._left -= 1
            raise RuntimeError("Operation timed out!")
        if self._error is not None:
            raise RuntimeError(self._error)

    def is_completed(self) -> bool:
        return not self._left


class Slow(Work):
    """Ends while its wait is timing out, before anybody can look."""

    def __init__(self) -> None:
        super().__init__(1)


def _calm() -> None:
    pass


def test_one_that_ends_behind_a_slice_of_waiting_has_ended() -> None:
    assert library._ended(Slow(), _calm, "all_gather")


def test_one_that_goes_on_has_not_ended() -> None:
    work = Work(3)
    assert [library._ended(work, _calm, "all_gather") for _ in range(2)] == [False, False]
    assert library._ended(work, _calm, "all_gather")


def test_one_that_ends_with_an_error_is_a_lost_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "_REASON_S", 0.0)
    with pytest.raises(PeerLost, match=r"complete the library's all_to_all; got Connection closed"):
        library._ended(Work(0, "Connection closed by peer"), _calm, "all_to_all")


def test_a_reason_of_a_peer_goes_before(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise ValueError("a reason")

    monkeypatch.setattr(library, "_REASON_S", 5.0)
    with pytest.raises(ValueError, match="a reason"):
        library._ended(Work(0, "Connection closed by peer"), refuse, "all_gather")
