"""Flattening: one thread walks all actors of a rank and feeds its lanes as soon as it may."""

from __future__ import annotations

import pytest

from gemmlink.core.flatten import Placed, flatten
from gemmlink.epilogues.lanes import Lanes
from gemmlink.errors import InvalidArgument
from gemmlink.spec.operations import all_gather
from gemmlink.spec.schedule import (
    Action,
    Compute,
    Copy,
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

PHASE = all_gather(2, 5).phases[0]
LANE = (1, 0)


def _schedule(*programs: Program) -> Schedule:
    return Schedule(PHASE, Plan(0, 2, 2, True), programs)


def _lane(*actions: Action, actor: str = "lane") -> Program:
    return Program(actor, actions, lane=LANE)


def _lanes(fused: bool, chunks: int, lanes: int = 1, world: int = 2, **rest: str) -> list[Placed]:
    plan = Plan(0, world, chunks, fused, lanes=lanes, **rest)  # type: ignore[arg-type]
    return list(flatten(Lanes().schedule(PHASE, plan)))


def _kinds(placed: list[Placed]) -> list[str]:
    """Who computes, stores, copies and announces, in short."""
    shown = []
    for item in placed:
        action = item.action
        if isinstance(action, Compute | Copy):
            chunk = action.chunk if isinstance(action, Compute) else action.region.chunk
            shown.append(f"{item.actor} {type(action).__name__} {chunk}")
        elif isinstance(action, Set) and item.actor.startswith("lane"):
            shown.append(f"{item.actor} Set {action.word.chunk}")
    return shown


def test_fused_lanes_copy_a_chunk_before_the_next_is_computed() -> None:
    assert _kinds(_lanes(True, 3)) == [
        "producer Compute 0",
        "lane[1,0] Copy 0",
        "lane[1,0] Set 0",
        "producer Compute 1",
        "lane[1,0] Copy 1",
        "lane[1,0] Set 1",
        "producer Compute 2",
        "lane[1,0] Copy 2",
        "lane[1,0] Set 2",
    ]


def test_split_lanes_copy_once_the_producer_has_ended() -> None:
    placed = _lanes(False, 2)
    assert _kinds(placed) == [
        "producer Compute 0",
        "producer Compute 1",
        "lane[1,0] Copy 0",
        "lane[1,0] Set 0",
        "lane[1,0] Copy 1",
        "lane[1,0] Set 1",
    ]
    order = [item.actor for item in placed]
    assert order == sorted(order, key=["producer", "lane[1,0]", "consumer"].index)


def test_chunks_are_dealt_to_the_lanes_of_every_peer() -> None:
    """Peers in the order of sending, and every chunk once to each."""
    placed = _lanes(True, 3, lanes=2, world=3, lane_order="after_drain")
    assert [shown for shown in _kinds(placed) if "Copy" in shown] == [
        "lane[1,0] Copy 0",
        "lane[2,0] Copy 0",
        "lane[1,1] Copy 1",
        "lane[2,1] Copy 1",
        "lane[1,0] Copy 2",
        "lane[2,0] Copy 2",
    ]


def test_after_drain_a_chunk_is_announced_behind_the_joins_of_all_lanes_to_that_peer() -> None:
    placed = _lanes(True, 3, lanes=2, world=3, lane_order="after_drain")
    mover = [item.action for item in placed if item.actor == "mover"]
    wanted: list[Action] = []
    for peer in (1, 2):
        wanted += [Join(f"lane[{peer},{index}]", scope="system") for index in (0, 1)]
        wanted += [Set(Word("arrive", 0, chunk), at=peer) for chunk in (0, 1, 2)]
    assert mover == wanted
    assert not any("Set" in shown for shown in _kinds(placed)), "a lane announces"


def test_a_lane_is_fed_right_behind_the_word_that_it_waits_for() -> None:
    copy, word = Copy(Region(0, 1), to=1), Word("chunk", 0, 1)
    raised = [Set(Word("chunk", 0, 0), at=0), Set(word, at=0), Set(Word("chunk", 0, 2), at=0)]
    placed = flatten(_schedule(Program("producer", tuple(raised)), _lane(Wait(word), copy)))
    assert [item.action for item in placed] == [raised[0], raised[1], copy, raised[2]]


def test_a_word_at_another_rank_makes_no_lane_ready() -> None:
    word = Word("chunk", 0, 0)
    with pytest.raises(InvalidArgument, match="a lane waits only for words and actors of its own"):
        flatten(_schedule(Program("producer", (Set(word, at=1),)), _lane(Wait(word))))


@pytest.mark.parametrize(
    "wait",
    [
        Wait(Word("chunk", 0, 1)),
        Wait(Word("arrive", 1, 0)),
        Wait(Word("chunk", 0, 0), lag=1),
        Join("nobody"),
        Join("lane"),
    ],
    ids=str,
)
def test_a_lane_that_waits_for_what_nobody_does_is_refused(wait: Action) -> None:
    """A peer's word, a word of another call, and the lane itself are no more use to it."""
    copy = Copy(Region(0, 0), to=1)
    producer = Program("producer", (Set(Word("chunk", 0, 0), at=0),))
    with pytest.raises(InvalidArgument, match=r"words and actors of its own rank; got lane at '"):
        flatten(_schedule(producer, _lane(copy, wait, copy)))


def test_a_lane_is_joined_where_all_that_it_does_has_been_posted() -> None:
    copy, word, join = Copy(Region(0, 0), to=1), Word("chunk", 0, 0), Join("lane")
    lane = _lane(Wait(word), copy)
    producer = Program("producer", (Set(word, at=0),))
    placed = flatten(_schedule(producer, lane, Program("consumer", (join,))))
    assert [(item.actor, item.action) for item in placed[1:]] == [
        ("lane", copy),
        ("consumer", join),
    ]


def test_joining_a_lane_that_is_not_ready_is_refused() -> None:
    word = Word("chunk", 0, 0)
    lane = _lane(Wait(word), Copy(Region(0, 0), to=1))
    early = Program("consumer", (Join("lane"), Set(word, at=0)))
    with pytest.raises(InvalidArgument, match="consumer joins lane"):
        flatten(_schedule(lane, early))


def test_a_lane_may_follow_another_lane() -> None:
    first, second = Copy(Region(0, 0), to=1), Copy(Region(0, 1), to=1)
    behind = _lane(Join("lane"), second, actor="behind")
    for programs in ((_lane(first), behind), (behind, _lane(first))):
        placed = flatten(_schedule(*programs, Program("consumer", (Join("behind"),))))
        assert [item.action for item in placed] == [first, second, Join("behind")]


def test_a_lane_that_waits_for_nothing_is_fed_at_once() -> None:
    copy = Copy(Region(0, 0), to=1)
    store = Store(Region(0, 0), to=0)
    placed = flatten(_schedule(Program("producer", (Compute(0), store)), _lane(copy)))
    assert placed[0] == Placed("lane", copy)


def test_waits_and_joins_of_a_lane_are_not_executed() -> None:
    """They say where its other actions stand; a lane itself would wait for nothing else."""
    word = Word("chunk", 0, 0)
    lane = _lane(Wait(word), Join("producer"), Copy(Region(0, 0), to=1))
    placed = flatten(_schedule(Program("producer", (Set(word, at=0),)), lane))
    assert [type(item.action) for item in placed] == [Set, Copy]


def test_a_schedule_of_lanes_alone_is_posted() -> None:
    copy = Copy(Region(0, 0), to=1)
    assert [item.action for item in flatten(_schedule(_lane(copy)))] == [copy]


def test_no_actor_is_skipped_or_repeated() -> None:
    """Whatever the plan: all actions but the waits and joins of lanes, each once."""
    for fused in (True, False):
        for lanes in (1, 2, 5):
            plan = Plan(1, 3, 4, fused, send_complete=True, lanes=lanes)
            made = Lanes().schedule(PHASE, plan)
            wanted = [
                Placed(program.actor, action)
                for program in made.programs
                for action in program.actions
                if program.lane is None or not isinstance(action, Wait | Join)
            ]
            placed = list(flatten(made))
            assert sorted(placed, key=repr) == sorted(wanted, key=repr)
            assert any(isinstance(item.action, Deliver) for item in placed)
