"""Programs by hand, each with a mistake that shows in one order of events and not in the other."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from gemmlink.conformance.adversary.run import run
from gemmlink.conformance.explore import explore
from gemmlink.spec.lowered import (
    Acquire,
    Action,
    Announce,
    Counter,
    Elect,
    Fetch,
    Make,
    Put,
    Strand,
)
from gemmlink.spec.schedule import Copy, Join, Region, Wait
from tests.explore.tiny import block, publish, tile, tiny, word

MINE, OTHER = word(0), word(1)
COUNTER = Counter("a", 0)
PUT: tuple[Action, ...] = (Make(tile(0)), Put(tile(0), 1, "inbox"))
SAY = Announce(MINE, 1, "system")
LAST = Announce(MINE, 1, "system", by=COUNTER)
LOOK: tuple[Action, ...] = (Acquire("system"), Fetch(tile(0), 1, "inbox"))
#: Three blocks of a reader add to a counter, and so it matters where they are.
MEET = Elect(Counter("b", 0), 3)
OTHERS = [block("b", 1, MEET), block("b", 2, MEET)]
#: M of a second call in which nobody has anything to move.
EMPTY = ((1, 1), (0, 0))


def _kinds(
    mine: Sequence[Strand], others: Sequence[Strand], rows: Sequence[tuple[int, int]] = ((1, 1),)
) -> set[str]:
    """What goes wrong in some execution. Trying everything everywhere must come to the same."""
    program = tiny([mine, others], rows)
    found = explore(program, stop=False)
    whole = explore(program, reduce=False, stop=False)
    assert found.complete
    assert whole.complete
    assert found.kinds == whole.kinds
    assert found.states <= whole.states
    return set(found.kinds)


def _reader(*before: Action) -> list[Strand]:
    return [block("b", 0, *before, Wait(MINE), *LOOK)]


def test_what_is_told_and_published_is_right() -> None:
    assert not _kinds([block("a", 0, *PUT, *publish(), SAY)], _reader())


def test_what_is_not_told_is_a_race_whoever_comes_first() -> None:
    for fences in ((), publish()):
        program = tiny([[block("a", 0, *PUT, *fences)], [block("b", 0, *LOOK)]], ((1, 1),))
        found = explore(program)
        assert found.fault is not None
        assert found.fault.kind == "race"
        assert found.states == 0, "no order need be tried"


@pytest.mark.parametrize("late", [0, 1])
def test_either_may_be_the_last_to_add(late: int) -> None:
    # Whoever adds before it stores is right only if it is the last.
    store = (*PUT, *publish())
    elect = Elect(COUNTER, 2)
    right = [block("a", 0, *store, elect, LAST), block("a", 1, elect, LAST)]
    assert not _kinds(right, _reader())
    wrong = [block("a", i, elect, *(store if i == late else ()), LAST) for i in range(2)]
    assert _kinds(wrong, _reader()) == {"race"}


@pytest.mark.parametrize("late", [0, 1])
def test_who_was_elected_tells_places_apart(late: int) -> None:
    # It is remembered while they meet again.
    elect, again = Elect(COUNTER, 2), Elect(Counter("a", 1), 2)
    store = (*PUT, *publish())
    wrong = [block("a", i, elect, again, *(store if i == late else ()), LAST) for i in range(2)]
    assert _kinds(wrong, _reader()) == {"race"}


@pytest.mark.parametrize("late", [0, 1])
def test_what_a_word_tells_of_tells_places_apart(late: int) -> None:
    # Both set it to the same value, and only one of them has stored.
    store = (*PUT, *publish())
    both = [block("a", i, *(store if i == late else ()), SAY) for i in range(2)]
    assert _kinds(both, [*_reader(MEET), *OTHERS]) == {"race"}


@pytest.mark.parametrize("first", [True, False])
def test_what_was_heard_tells_places_apart(first: bool) -> None:
    # It was heard before the blocks meet, and is acquired after that.
    late = Announce(MINE, 1, "device", lag=-1)
    actions = (SAY, *PUT, *publish()) if first else (*PUT, *publish(), SAY, late)
    reader = block("b", 0, Wait(MINE), MEET, *LOOK)
    rows = EMPTY if first else EMPTY[:1]
    assert _kinds([block("a", 0, *actions)], [reader, *OTHERS], rows) == {"race"}


def test_a_wait_may_see_the_first_value_and_not_the_second() -> None:
    # Only the word of the second call comes behind what was stored in the first.
    first = block("a", 0, SAY, *PUT, *publish())
    assert _kinds([first], _reader(), EMPTY) == {"race"}
    # The same if it comes to the wait only when both values are there.
    assert _kinds([first], [*_reader(MEET), *OTHERS], EMPTY) == {"race"}


def test_a_wait_may_see_the_second_value_and_not_the_first() -> None:
    # The second value is told to the own device only, and comes when somebody else saw the first.
    first = block("a", 0, *PUT, *publish(), SAY, Wait(OTHER), Announce(MINE, 1, "device", lag=-1))
    witness = block("c", 0, Wait(MINE), Announce(OTHER, 0, "system"))
    assert _kinds([first], [*_reader(), witness]) == {"race"}


@pytest.mark.parametrize("late", [0, 1])
def test_a_wait_may_see_what_somebody_sets_who_is_yet_to_be_elected(late: int) -> None:
    elect, again = Elect(COUNTER, 2), Announce(MINE, 1, "device", by=COUNTER)
    first: tuple[Action, ...] = (*PUT, *publish(), SAY, elect)
    both = [first, (elect,)]
    blocks = [block("a", i, *each, *([again] * (i == late))) for i, each in enumerate(both)]
    assert _kinds(blocks, _reader()) == {"race"}


def test_a_wait_may_see_what_is_set_in_the_next_call() -> None:
    # Elected every second time, that is in the second call, it tells the own device only.
    again = (Elect(COUNTER, 2), Announce(MINE, 1, "device", by=COUNTER))
    first = block("a", 0, *PUT, *publish(), SAY, *again, Wait(OTHER))
    witness = block("c", 0, Wait(MINE), Announce(OTHER, 0, "system"))
    assert _kinds([first], [*_reader(), witness], EMPTY) == {"race"}


def test_a_word_that_two_set_may_fall() -> None:
    early = Announce(MINE, 1, "system", lag=1)
    for one, other in ((SAY, early), (early, SAY)):
        blocks = [block("a", 0, one), block("a", 1, other)]
        assert _kinds(blocks, [block("b", 0, Wait(MINE))]) == {"word"}
        # The same if the second one cannot set it yet.
        blocks = [block("a", 0, one), block("a", 1, Elect(COUNTER, 1), other)]
        assert _kinds(blocks, [block("b", 0, Wait(MINE))]) == {"word"}


@pytest.mark.parametrize("in_order", [True, False])
def test_a_queue_without_order_sets_a_word_before_its_copy_is_there(in_order: bool) -> None:
    told = block("c", 0, Announce(OTHER, 0, "system"))
    between: tuple[Action, ...]
    for between in ((), (Wait(OTHER),)):
        copied = (Copy(Region(0, 0), 1), *between, SAY)
        lane = Strand("lane", 0, "queue", copied, (1, 0), in_order)
        assert _kinds([lane], [*_reader(), told]) == (set() if in_order else {"race"})


def test_a_queue_may_learn_while_its_copies_are_on_their_way() -> None:
    # The copy is right only if it is made after the word has come that tells of its source.
    own = (Make(tile(0)), Put(tile(0), 0, "inbox"), *publish(), Announce(MINE, 0, "system"))
    copied = Copy(Region(0, 0), 1)
    told: tuple[Action, ...]
    for told in ((Wait(MINE), Acquire("system")), (Join("a"),)):
        for early in (True, False):
            order = (copied, *told) if early else (*told, copied)
            lane = Strand("lane", 0, "queue", order, (1, 0), in_order=False)
            assert _kinds([block("a", 0, *own), lane], []) == ({"race"} if early else set())


def test_a_join_of_a_queue_waits_for_its_copies() -> None:
    lane = Strand("lane", 0, "queue", (Copy(Region(0, 0), 1),), (1, 0), in_order=False)
    assert not _kinds([lane, block("a", 0, Join("lane"), SAY)], _reader())


def test_a_busy_queue_does_not_know_that_its_call_has_ended() -> None:
    # What the queue copies was stored in the same call, and nobody has told it. The end of the call
    # must not pass for that, when the next call begins before the queue comes to the copy.
    own = (Make(tile(0)), Put(tile(0), 0, "inbox"), *publish())
    lane = Strand("lane", 0, "queue", (Wait(OTHER), Copy(Region(0, 0), 1)), (1, 0))
    late = [block("b", 0, Announce(OTHER, 0, "system"))]
    program = tiny([[block("a", 0, *own), lane], late], EMPTY)
    for seed in range(40):
        outcome = run(program, seed)
        assert outcome.fault is not None, str(outcome)
        assert outcome.fault.kind == "race", str(outcome)
    assert _kinds([block("a", 0, *own), lane], late, EMPTY) == {"race"}


def test_who_waits_for_ever_is_named() -> None:
    found = explore(tiny([[block("a", 0, Wait(OTHER))], []], ((1, 1),)))
    assert found.fault is not None
    assert found.fault.kind == "deadlock"
    assert "rank 0's a#0 in call 1 waits for arrive[1,chunk 0] >= 1 and sees 0" in found.fault.text


def test_a_story_leads_to_the_fault() -> None:
    blocks = [block("a", 0, Elect(COUNTER, 2), *PUT, LAST), block("a", 1, Elect(COUNTER, 2), LAST)]
    found = explore(tiny([blocks, _reader()], ((1, 1),)))
    assert found.fault is not None
    assert any("put rank 0 chunk 0" in line for line in found.story)
    assert "fetch rank 0 chunk 0" in found.story[-1] or "put rank 0" in found.story[-1]
