"""Walkers: where they are, and that forks go their own ways."""

from __future__ import annotations

from typing import Any

from gemmlink.conformance.adversary.program import compile_case
from gemmlink.conformance.adversary.tasks import Task
from gemmlink.conformance.explore.ahead import Ahead
from gemmlink.conformance.explore.choices import settle
from gemmlink.conformance.explore.outline import Outline
from gemmlink.conformance.explore.walker import Walker
from tests.adversary.cases import case


def _walker(**wanted: Any) -> Walker:
    return Walker(Outline(compile_case(case(**wanted))))


def _push() -> Walker:
    return _walker(operation="all_gather", mode="push", fused=True, view=False, buffers=1)


def test_a_fork_is_at_the_same_place_and_goes_its_own_way() -> None:
    for mode in ("push", "pull", "lanes"):
        walker = _walker(operation="all_gather", mode=mode, fused=True, buffers=1)
        for _ in range(30):
            before = walker.key()
            fork = walker.fork()
            assert fork.key() == before
            turn = next(turn for turn in fork.ready if fork.enabled(turn))
            fork.do(turn)
            assert fork.key() != before
            assert walker.key() == before, "what a fork does shows elsewhere"
            walker = fork


def test_flights_are_forked_with_what_they_have_moved() -> None:
    walker = _walker(operation="all_gather", mode="lanes", fused=True, lane_order="after_drain")
    for _ in range(200):
        turn = next(turn for turn in reversed(walker.ready) if walker.enabled(turn))
        fork = walker.fork()
        walker.do(turn, 0)
        twin = next(turn for turn in reversed(fork.ready) if fork.enabled(turn))
        fork.do(twin, 0)
        assert fork.key() == walker.key()


def test_the_first_that_must_be_tried_are_two_that_add_to_one_counter() -> None:
    turns = settle(walker := _push())
    assert [walker.next_op(turn)[0] for turn in turns if isinstance(turn, Task)] == ["elect"] * 2
    assert len({walker.next_op(turn)[1] for turn in turns if isinstance(turn, Task)}) == 1


def test_while_one_stands_still_nobody_gets_beyond_what_needs_him() -> None:
    turns = settle(walker := _push())
    both = Ahead(walker, {id(turn) for turn in turns})
    one = Ahead(walker, {id(turns[0])})
    first = turns[0]
    assert isinstance(first, Task)
    counter = ("counter", walker.next_op(first)[1][0])
    assert counter in one.changed, "the other one may add first"
    assert counter not in both.changed
    named = {walker.program.words[n][0].kind for kind, n in both.changed if kind == "word"}
    assert "free" not in named, "no call ends without them"
