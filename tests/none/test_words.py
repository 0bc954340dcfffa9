"""`core.words`: what a transport offers is used; where it offers nothing, the three methods are."""

from __future__ import annotations

from typing import Any

import pytest

from gemmlink.core.words import reader, setter, waiter


class Plain:
    """Words of two ranks as a third party may write them: three methods and no more."""

    def __init__(self) -> None:
        self.cells: dict[tuple[int, int], int] = {}
        self.done: list[Any] = []

    def set(self, peer: int, offset: int, value: int) -> None:
        self.done.append((peer, offset, value))
        self.cells[peer, offset] = value

    def read(self, offset: int) -> int:
        self.done.append(offset)
        return self.cells.get((0, offset), 0)

    def wait(self, offset: int, at_least: int, timeout_s: float) -> int:
        self.done.append((offset, at_least, timeout_s))
        self.cells[0, offset] = at_least  # it came meanwhile
        return at_least


class Offering(Plain):
    """Binds, and says so."""

    def reader(self, *offsets: int) -> Any:
        return lambda: ("bound", *offsets)

    def setter(self, *groups: Any) -> Any:
        return lambda *values: self.done.append((groups, values))

    def waiter(self, offset: int, timeout_s: float) -> Any:
        return lambda at_least: (offset, at_least, timeout_s)


class Declining(Plain):
    """Has the methods, but nothing to offer on this machine."""

    def reader(self, *offsets: int) -> None:
        return None

    def setter(self, *groups: Any) -> None:
        return None

    def waiter(self, offset: int, timeout_s: float) -> None:
        return None


@pytest.fixture(params=[Plain, Declining])
def words(request: pytest.FixtureRequest) -> Any:
    return request.param()


def test_words_are_read_in_the_order_given(words: Any) -> None:
    words.cells = {(0, 8): 1, (0, 16): 2, (1, 8): 3}
    assert reader(words, 16, 8)() == (2, 1)
    assert words.done == [16, 8], "the first word must be read before those that it announces"


def test_words_are_written_in_the_order_given(words: Any) -> None:
    setter(words, ((0, 8), (1, 8)), (), ((1, 16),))(5, 6, 7)
    assert words.done == [(0, 8, 5), (1, 8, 5), (1, 16, 7)]


def test_values_and_groups_must_pair_up(words: Any) -> None:
    with pytest.raises(ValueError, match="zip"):
        setter(words, ((0, 8),))(1, 2)


def test_a_word_that_is_there_is_not_waited_for(words: Any) -> None:
    words.cells = {(0, 8): 4}
    wait = waiter(words, 8, 0.5)
    assert wait(4) == 4
    assert words.done == [8]
    assert wait(5) == 5
    assert words.done[-1] == (8, 5, 0.5)


def test_what_a_transport_offers_is_used() -> None:
    words: Any = Offering()
    read: Any = reader(words, 8)
    assert read() == ("bound", 8)
    setter(words, ((1, 8),))(3)
    assert words.done == [((((1, 8),),), (3,))]
    wait: Any = waiter(words, 8, 0.5)
    assert wait(2) == (8, 2, 0.5)
