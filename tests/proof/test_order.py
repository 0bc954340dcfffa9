"""Litmus tests of the proof: what orders two uses of a cell, and what does not."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from gemmlink.conformance.adversary.program import Op
from gemmlink.conformance.proof import Verdict, prove
from tests.proof.tiny import (
    NEW,
    NEWER,
    Does,
    copy,
    elect,
    fetch,
    join,
    make,
    program,
    publish,
    put,
    say,
    wait,
)


def _verdict(*does: Does, words: Sequence[tuple[int, int]] = ((0, 1),)) -> Verdict:
    return prove(program(*does, words=words))


def _refuted(found: Verdict, reason: str, *parts: str) -> None:
    assert found.reason == reason, str(found)
    for part in parts:
        assert part in str(found), str(found)


def _passed(writes: Sequence[Op], reads: Sequence[Op], at: int = 1) -> Verdict:
    """``a`` of rank 0 stores into cell 0, and ``b`` of rank ``at`` loads it."""
    a = Does("a", 0, [make(NEW), put(0), *writes])
    return _verdict(a, Does("b", at, [*reads, fetch(0)]), words=((0, at),))


def test_what_is_published_and_told_is_there() -> None:
    found = _passed([publish(), say()], [wait()])
    assert found.proved, str(found)
    assert found.pairs == 1


@pytest.mark.parametrize(
    ("writes", "reads", "missing"),
    [
        ([say(), publish()], [wait()], "nothing that rank 1's b#0 in call 1 has waited for"),
        ([say()], [wait()], "released to its device only, by the end of rank 0's a#0 in call 1"),
        ([publish("device"), say()], [wait()], "released to its device only, by 'publish device'"),
        ([publish(), say(scope="device")], [wait()], "it has waited for: wait (0, 1, 'system'"),
        ([publish(), say()], [wait(scope="device")], "is known to be done by 'publish system'"),
        ([publish(), say()], [wait(scope=None)], "stores call 1 rank 0 row 0 col 0"),
        ([publish(), say()], [], "it has waited for nothing"),
    ],
)
def test_whatever_is_missing_is_a_race(
    writes: Sequence[Op], reads: Sequence[Op], missing: str
) -> None:
    _refuted(_passed(writes, reads), "race", "cell 0:", "rank 1's b#0 in call 1 reads it", missing)


def test_on_one_device_its_scope_is_enough() -> None:
    assert _passed([publish("device"), say(scope="device")], [wait(scope="device")], at=0).proved


@pytest.mark.parametrize(
    ("fences", "cells", "enough"),
    [
        # Cell 0 is another wave's, cell 1 the leader's.
        (["retire", "barrier", "release"], (0, 1), True),
        (["retire", "release"], (0, 1), False),
        (["barrier", "retire", "release"], (0, 1), False),
        (["barrier", "release"], (0, 1), False),
    ],
)
def test_fences_in_their_order(fences: Sequence[str], cells: Sequence[int], enough: bool) -> None:
    ops: list[Op] = [(name, "system" if name == "release" else None) for name in fences]
    a = Does("a", 0, [make(NEW, NEW), put(*cells), *ops, say()])
    assert _verdict(a, Does("b", 1, [wait(), fetch(*cells)])).proved is enough


def test_a_load_of_another_wave_is_over_behind_a_barrier() -> None:
    def loads(*ops: Op) -> Verdict:
        a = Does("a", 0, [fetch(0), *ops, say()])
        return _verdict(a, Does("b", 1, [wait(), make(NEW), put(0)]))

    assert loads(("barrier", None), ("release", "device")).proved
    _refuted(loads(("release", "device")), "race", "rank 0's a#0 in call 1 reads it", "the load")


def test_the_first_value_that_satisfies_is_all_that_is_known() -> None:
    def awaits(value: int) -> Verdict:
        a = Does("a", 0, [say(value=1), make(NEW), put(0), publish(), say(value=2)])
        return _verdict(a, Does("b", 1, [wait(value=value), fetch(0)]))

    assert awaits(2).proved
    _refuted(awaits(1), "race")


def test_a_later_value_of_narrow_scope_may_be_the_one_that_is_seen() -> None:
    writes = [publish(), say(), say(value=2, scope="device")]
    _refuted(_passed(writes, [wait()]), "race")
    assert _passed([publish(), say(), say(value=2)], [wait()]).proved


def test_a_race_is_told_with_the_earlier_call_first() -> None:
    """Whatever the order in which the proof happens to come across the two."""
    reads = Does("b", 1, [*(wait(1, value) for value in range(1, 9)), fetch(0)])
    tells = Does("c", 0, [say(1, value) for value in range(1, 9)], call=1)
    stores = Does("a", 0, [make(NEWER), put(0)], call=2)
    late = Does("b", 1, [wait(1, 9), fetch(0)], call=1)
    word = Does("c", 0, [say(1, 9)], call=2)
    for does in ([reads, tells, stores], [tells, stores, word, late]):
        found = _verdict(*does, words=((0, 1), (0, 1)))
        _refuted(found, "race", "call 1 reads it ('fetch [0]')\nrank 0's a#0 in call 2 stores")


def test_an_acquire_is_for_the_waits_before_it_and_no_other_repeats_it() -> None:
    writes, late = [publish(), say()], ("acquire", "system")
    assert _passed(writes, [wait(scope=None), late]).proved
    _refuted(_passed(writes, [wait(scope="device"), late]), "race")
    waits = Does("b", 1, [wait(scope=None)])
    acquires = Does("b", 1, [late, fetch(0)], call=2)
    _refuted(_verdict(Does("a", 0, [put(0), *writes]), waits, acquires), "race")


def test_a_store_is_ordered_by_the_one_that_the_same_device_made_over_it() -> None:
    """The first never leaves its device by itself, but it cannot come after the second either."""
    a = Does("a", 0, [make(NEW), put(0), publish("device"), say(0, scope="device")])
    over = Does("over", 0, [wait(0), make(NEWER), put(0), publish(), say(1)])
    reads = Does("b", 1, [wait(1), ("show", ([(0, NEWER)], False))])
    assert _verdict(a, over, reads, words=((0, 0), (0, 1))).proved


def test_an_element_that_is_not_the_right_one() -> None:
    a = Does("a", 0, [make(NEW), put(0), publish(), say()])
    shows = Does("b", 1, [wait(), ("show", ([(0, NEWER)], False))])
    _refuted(_verdict(a, shows), "wrong", "finds call 1 rank 0 row 0 col 0 in cell 0")


# Elections.


def _elected(first: Sequence[Op], second: Sequence[Op], *others: Does) -> Verdict:
    """Two blocks of ``a``, each of which stores its cell; ``b`` waits and loads both."""
    one = Does("a", 0, [make(NEW), put(0), publish(), *first], index=0)
    two = Does("a", 0, [make(NEW), put(1), publish(), *second], index=1)
    reads = Does("b", 1, [wait(), fetch(0, 1)])
    return _verdict(one, two, *others, reads, words=((0, 1), (0, 0)))


def test_whoever_is_elected_tells_of_all() -> None:
    both = [elect(), say(by=0)]
    assert _elected(both, both).proved


def test_what_was_not_published_before_the_election() -> None:
    late = Does("a", 0, [make(NEW), put(1), elect(), publish(), say(by=0)], index=1)
    one = Does("a", 0, [elect(), say(by=0)], index=0)
    _refuted(_verdict(one, late, Does("b", 1, [wait(), fetch(1)])), "race", "a#1 in call 1 stores")


def test_a_word_that_only_some_set_is_not_sure() -> None:
    found = _elected([elect(), say(by=0)], [elect()])
    _refuted(found, "deadlock", "only rank 0's a#0 in call 1 sets, and another may be elected")


def test_a_value_that_is_not_sure_tells_nothing() -> None:
    """The first block knows of the second only if it is elected, and goes on to 2 in any case."""
    found = _elected([elect(), say(by=0), say(value=2)], [elect()])
    _refuted(found, "race", "rank 1's b#0 in call 1 reads it")


def test_who_is_elected_may_be_the_one_who_speaks_to_his_device_only() -> None:
    found = _elected([elect(), say(by=0)], [elect(), say(by=0, scope="device")])
    _refuted(found, "race", "rank 1's b#0 in call 1 reads it")


def test_who_announces_before_he_can_be_elected() -> None:
    both = [say(by=0), elect()]
    _refuted(_elected(both, both), "deadlock", "sets free[0] at rank 1 to nothing")


@pytest.mark.parametrize(("of", "come"), [(1, 2), (3, 2)])
def test_a_counter_that_does_not_count_all(of: int, come: int) -> None:
    both = [elect(of), say(by=0)]
    _refuted(_elected(both, both), "count", f"elects the last of {of}, and {come} come")


@pytest.mark.parametrize("before", [True, False])
def test_what_one_knows_is_told_by_all_only_if_known_before_the_election(before: bool) -> None:
    """``c`` stores cell 2, of which the first block of ``a`` hears."""
    c = Does("c", 0, [make(NEW), put(2), publish(), say(1)])
    hears = [wait(1), elect()] if before else [elect(), wait(1)]
    one = Does("a", 0, [*hears, say(by=0)], index=0)
    two = Does("a", 0, [elect(), say(by=0)], index=1)
    reads = Does("b", 1, [wait(), fetch(2)])
    found = _verdict(c, one, two, reads, words=((0, 1), (0, 0)))
    assert found.proved is before, str(found)


# Queues.


def _queue(ops: Sequence[Op], in_order: bool, call: int = 1) -> Does:
    return Does("lane", 0, ops, kind="queue", in_order=in_order, call=call)


@pytest.mark.parametrize("in_order", [True, False])
def test_a_word_behind_a_copy_tells_of_it_only_in_order(in_order: bool) -> None:
    lane = _queue([copy(0, 1), say()], in_order)
    found = _verdict(lane, Does("b", 1, [wait(), fetch(1)]))
    assert found.proved is in_order, str(found)
    if not in_order:
        _refuted(found, "race", "the end of rank 0's lane in call 1, when it has drained")


def test_a_join_tells_that_a_queue_has_drained() -> None:
    tells = Does("host", 0, [join("lane"), say()], kind="host")
    reads = Does("b", 1, [wait(), fetch(1)])
    assert _verdict(_queue([copy(0, 1)], in_order=False), tells, reads).proved


def test_a_queue_has_drained_when_all_before_is_done() -> None:
    tells = Does("host", 0, [join("lane"), say()], kind="host", call=2)
    reads = Does("b", 1, [wait(), fetch(1)])
    early, late = _queue([copy(0, 1)], in_order=False), _queue([], in_order=False, call=2)
    assert _verdict(early, late, tells, reads).proved


@pytest.mark.parametrize("in_order", [True, False])
def test_copies_of_one_queue_into_one_cell(in_order: bool) -> None:
    both = [_queue([copy(0, 2), copy(1, 2)], in_order)]
    for call in (1, 2):
        assert _verdict(*both).proved is in_order, f"calls 1 and {call}"
        both = [_queue([copy(0, 2)], in_order), _queue([copy(1, 2)], in_order, call=2)]


def test_a_queue_that_waits_for_what_comes_behind_it() -> None:
    first = _queue([wait(0)], in_order=True)
    second = _queue([say(0)], in_order=True)
    found = _verdict(first, second, words=((0, 0),))
    _refuted(
        found,
        "deadlock",
        "rank 0's lane in call 1: wait (0, 1, 'system', True), which rank 0's lane in call 1",
        "rank 0's lane in call 1 comes behind rank 0's lane in call 1, which is the same queue",
    )


# Words and waits.


def test_words_are_set_in_a_known_order() -> None:
    one, two = Does("a", 0, [say(value=1)]), Does("c", 0, [say(value=2)])
    _refuted(_verdict(one, two), "word", "nothing says that it happens in this order")
    after = Does("c", 0, [join("a"), say(value=2)])
    assert _verdict(one, after).proved


def test_words_only_grow() -> None:
    falls = Does("a", 0, [say(value=2), say(value=1)])
    _refuted(_verdict(falls), "word", "sets free[0] at rank 1 to 1", "words only grow")


def test_a_word_of_another_rank() -> None:
    _refuted(_verdict(Does("b", 1, [say()])), "word", "which is rank 0's")


def test_what_nobody_sets() -> None:
    waits = Does("b", 1, [wait(value=2)])
    found = _verdict(Does("a", 0, [say()]), waits)
    _refuted(found, "deadlock", "rank 1's b#0 in call 1: wait", "sets free[0] at rank 1 to only 1")


def test_waits_in_a_circle_are_told_as_one() -> None:
    one = Does("a", 0, [wait(1), say(0)])
    two = Does("b", 1, [wait(0), say(1)])
    # Whoever merely waits for them is left out.
    also = Does("c", 0, [join("a")])
    found = _verdict(also, one, two, words=((0, 1), (1, 0)))
    _refuted(found, "deadlock", "which rank 1's b#0 in call 1 must set", "where this began")
    assert len(found.counterexample) == 3
    assert "c#0" not in str(found)


def test_a_join_of_nobody() -> None:
    _refuted(_verdict(Does("a", 0, [join("ghost")])), "deadlock", "no ghost is in that call")


def test_a_rank_that_does_not_call_the_library() -> None:
    calls = Does("host", 0, [("collective", ("all_gather", [], []))], kind="host")
    _refuted(_verdict(calls), "deadlock", "the library's all_gather, which rank 1 never enters")
