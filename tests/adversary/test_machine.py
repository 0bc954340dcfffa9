"""Runs: the same seed gives the same run, and what goes wrong is told so that it can be found."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import pytest

from gemmlink.conformance.adversary import values
from gemmlink.conformance.adversary.case import Case
from gemmlink.conformance.adversary.faults import Fault
from gemmlink.conformance.adversary.program import compile_case
from gemmlink.conformance.adversary.run import Outcome, first_fault, run, story
from gemmlink.spec import operations
from gemmlink.spec.lower import lower
from gemmlink.spec.operations import all_gather
from gemmlink.spec.schedule import (
    Action,
    Compute,
    Deliver,
    Join,
    Plan,
    Program,
    Region,
    Schedule,
    Set,
    Store,
    Wait,
    Word,
)
from tests.adversary.cases import case

SEEDS = range(30)


def _fault(found: Outcome | None, kind: str) -> Fault:
    assert found is not None, "nothing was noticed"
    assert found.fault is not None
    assert found.fault.kind == kind, str(found.fault)
    return found.fault


def test_the_same_seed_is_the_same_run() -> None:
    program = compile_case(case(operation="all_gather", mode="lanes", fused=True))
    again = compile_case(case(operation="all_gather", mode="lanes", fused=True))
    for seed in SEEDS:
        one, two = run(program, seed), run(again, seed)
        assert (one.trace, one.turns) == (two.trace, two.turns)


def test_seeds_differ() -> None:
    program = compile_case(case(operation="all_gather", mode="push", fused=True))
    assert len({run(program, seed).trace for seed in SEEDS}) == len(SEEDS)


def test_a_story_tells_every_action() -> None:
    told = story(case(operation="all_gather", mode="push", fused=False), seed=3)
    assert re.search(r"^ *\d+ rank 1's mover#1 in call 2: put rank 1 chunk 0 tile 1", told, re.M)
    assert told.endswith(": right")


# Schedules by hand, of an all-gather of one chunk that is pushed.

PHASE = all_gather(2, 2).phases[0]


def _by_hand(
    producer: Callable[[Plan], list[Action]], consumer: Callable[[Plan], list[Action]]
) -> Case:
    operation = all_gather(2, 2)
    made = []
    for rank in range(2):
        plan = Plan(rank, 2, 1, True)
        programs = (
            Program("producer", tuple(producer(plan))),
            Program("consumer", tuple(consumer(plan))),
        )
        made.append(lower(operation, Schedule(PHASE, plan, programs)))
    return Case("by hand", tuple(made), ((2, 1), (1, 2), (2, 2)))


def _gate(plan: Plan) -> list[Action]:
    return [Wait(Word("free", peer), lag=1) for peer in plan.peers]


def _push(plan: Plan) -> list[Action]:
    region = Region(plan.rank, 0)
    stores: list[Action] = [Store(region, to=rank) for rank in plan.everyone]
    return [Compute(0), *stores]


def _say(plan: Plan) -> list[Action]:
    return [Set(Word("arrive", plan.rank), at=rank) for rank in plan.everyone]


def _take(plan: Plan) -> list[Action]:
    actions: list[Action] = []
    for source in plan.everyone:
        actions += [Wait(Word("arrive", source)), Deliver(Region(source, 0), plan.rank)]
    return [*actions, Join("producer"), *_leave(plan)]


def _leave(plan: Plan) -> list[Action]:
    return [Set(Word("free", plan.rank), at=peer) for peer in plan.peers]


def _right(plan: Plan) -> list[Action]:
    return [*_gate(plan), *_push(plan), *_say(plan)]


def test_the_schedule_by_hand_is_right() -> None:
    assert first_fault(_by_hand(_right, _take), SEEDS) is None


def test_a_missing_gate_overwrites_what_is_in_use() -> None:
    program = compile_case(_by_hand(lambda plan: [*_push(plan), *_say(plan)], _take))
    faults = [run(program, seed).fault for seed in SEEDS]
    fault = next(each for each in faults if each is not None and each.kind == "race")
    assert re.search(r"consumer#\d in call 1", fault.text), fault.text
    assert re.search(r"producer#\d (in|stored).* call 2", fault.text), fault.text
    assert re.search(r"row \d col \d of the inbox in window \d", fault.text), fault.text


def test_a_missing_gate_gives_wrong_results_even_when_luck_is_forgiven() -> None:
    broken = _by_hand(lambda plan: [*_push(plan), *_say(plan)], _take)
    fault = _fault(first_fault(broken, range(300), strict=False), "wrong")
    assert "must find call" in fault.text


def test_a_consumer_that_does_not_wait_finds_what_was_there_before() -> None:
    def hasty(plan: Plan) -> list[Action]:
        return [action for action in _take(plan) if not isinstance(action, Wait)]

    fault = _fault(first_fault(_by_hand(_right, hasty), SEEDS, strict=False), "wrong")
    assert "finds" in fault.text


def test_whoever_waits_in_vain_is_named_and_who_owes_the_word() -> None:
    broken = _by_hand(lambda plan: [*_gate(plan), *_push(plan)], _take)
    fault = _fault(first_fault(broken, range(1)), "deadlock")
    assert (
        "rank 0's consumer#0 in call 1 waits for arrive[0,chunk 0] >= 1 and sees 0; "
        "rank 0's nobody must set it" in fault.text
    )


def test_a_circle_of_joins_is_a_deadlock() -> None:
    broken = _by_hand(lambda plan: [Join("consumer"), *_right(plan)], _take)
    fault = _fault(first_fault(broken, range(1)), "deadlock")
    assert "rank 0's producer#0 in call 1 waits for consumer" in fault.text
    assert "rank 0's producer#0 or producer#1 must set it" in fault.text


def test_a_word_has_one_writer() -> None:
    def steal(plan: Plan) -> list[Action]:
        return [*_right(plan), Set(Word("arrive", 1 - plan.rank), at=plan.rank)]

    fault = _fault(first_fault(_by_hand(steal, _take), SEEDS), "word")
    assert re.search(r"sets arrive\[(\d),chunk 0\], which is rank \1's", fault.text)


def test_a_word_never_falls() -> None:
    def fall(plan: Plan) -> list[Action]:
        late = [replace(action, lag=1) for action in _say(plan) if isinstance(action, Set)]
        return [*_right(plan), *late]

    fault = _fault(first_fault(_by_hand(fall, _take), SEEDS), "word")
    assert "words only grow" in fault.text


def test_data_of_the_wrong_call_is_told_by_its_call() -> None:
    def lagging(plan: Plan) -> list[Action]:
        return [
            replace(action, lag=1) if isinstance(action, Wait) else action for action in _take(plan)
        ]

    fault = _fault(first_fault(_by_hand(_right, lagging), range(200), strict=False), "wrong")
    assert re.search(r"finds (call \d|what was there).*must find call \d", fault.text), fault.text


# The oracle.


def test_the_oracle_of_each_operation() -> None:
    def c(rank: int, row: int, col: int) -> values.Value:
        return values.product(7, rank, row, col)

    rows = (2, 1, 3)
    gather = values.expected(operations.all_gather(3, 4), rows, 7, 0, 3, 2)
    assert gather == c(2, 0, 2)
    scatter = values.expected(operations.all_to_all(3, 7, 6), rows, 7, 1, 2, 1)
    assert scatter == c(1, 0, 3)
    equal = (5, 5, 5)
    band = values.expected(operations.reduce_scatter(3, 4), equal, 7, 2, 0, 3)
    assert band == values.add([c(rank, 4, 3) for rank in range(3)])
    whole = values.expected(operations.all_reduce(3, 4), equal, 7, 2, 4, 0)
    assert whole == values.add([c(rank, 4, 0) for rank in range(3)])
    assert values.add([c(0, 0, 0), c(1, 0, 0)]) != values.add([c(1, 0, 0), c(0, 0, 0)])


@pytest.mark.parametrize("strict", [True, False])
def test_a_right_schedule_is_right_in_both_moods(strict: bool) -> None:
    right = case(operation="all_to_all", mode="pull", fused=True)
    assert first_fault(right, SEEDS, strict) is None
