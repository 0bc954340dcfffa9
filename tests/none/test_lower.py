"""Lowered schedules: what a chunk is in blocks, tiles and fences."""

from __future__ import annotations

from collections import Counter as Count
from dataclasses import replace
from typing import Any

import pytest

from gemmlink.conformance.adversary.case import Request, schedule_of
from gemmlink.conformance.adversary.sweep import requests
from gemmlink.epilogues.collective import LibraryCollective
from gemmlink.epilogues.lanes import Lanes
from gemmlink.epilogues.pull import Pull
from gemmlink.epilogues.push import Push
from gemmlink.errors import InvalidArgument
from gemmlink.spec.lower import Grid, lower
from gemmlink.spec.lowered import (
    Acquire,
    Action,
    Announce,
    Barrier,
    Elect,
    Fetch,
    Look,
    Lowered,
    Make,
    Post,
    Put,
    Release,
    Retire,
    Show,
    Strand,
)
from gemmlink.spec.operations import Operation, all_gather, all_reduce
from gemmlink.spec.schedule import (
    Collective,
    Compute,
    Copy,
    Join,
    Plan,
    Program,
    Region,
    Schedule,
    Store,
    Wait,
)

GATHER = all_gather(2, 4)


def _lowered(epilogue: Any, fused: bool, grid: Grid | None = None, **plan: Any) -> Lowered:
    entry = plan.pop("entry", False)
    schedule = epilogue.schedule(GATHER.phases[0], Plan(0, 2, 1, fused, **plan))
    return lower(GATHER, schedule, grid, entry)


def _by_hand(*actions: Any, lane: tuple[int, int] | None = None) -> Lowered:
    plan = Plan(0, 2, 1, True)
    schedule = Schedule(GATHER.phases[0], plan, (Program("producer", actions, lane),))
    return lower(GATHER, schedule)


def _strand(lowered: Lowered, name: str) -> Strand:
    return next(strand for strand in lowered.strands if strand.name == name)


def _kinds(actions: tuple[Action, ...]) -> list[type]:
    return [type(action) for action in actions]


def test_a_tile_is_published_and_counted_before_it_is_announced() -> None:
    lowered = _lowered(Push(), True)
    block = _strand(lowered, "producer#1")
    assert block.index == 1
    assert "\n".join(map(str, block.actions)) == "\n".join(
        [
            "wait free[1] >= n-1",
            "acquire (system)",
            "make rank 0 chunk 0 tile 1",
            "put rank 0 chunk 0 tile 1 -> window 0",
            "put rank 0 chunk 0 tile 1 -> window 1",
            "retire",
            "barrier",
            "release (system)",
            "elect by producer.2, the last of 2",
            "if elected by producer.2, set arrive[0,chunk 0] = n at rank 0 (system)",
            "if elected by producer.2, set arrive[0,chunk 0] = n at rank 1 (system)",
        ]
    )


@pytest.mark.parametrize(("blocks", "tiles"), [(1, 1), (1, 3), (2, 3), (3, 2), (4, 4)])
def test_every_tile_of_a_chunk_counts_wherever_it_is(blocks: int, tiles: int) -> None:
    lowered = _lowered(Push(), True, Grid(blocks, tiles))
    made: Count[int] = Count()
    for action in lowered.actions():
        if isinstance(action, Make):
            made[action.tile.index] += 1
        if isinstance(action, Elect) and action.counter.actor == "producer":
            assert action.of == tiles
    assert made == Count(range(tiles))
    votes = [a for a in lowered.actions() if isinstance(a, Elect)]
    assert sum(a.counter.actor == "producer" for a in votes) == tiles


def test_tiles_cover_every_column_once() -> None:
    lowered = _lowered(Push(), True, Grid(2, 3))
    tiles = [action.tile for action in lowered.actions() if isinstance(action, Make)]
    assert sorted(col for tile in tiles for col in range(*tile.cols(4))) == [0, 1, 2, 3]


def test_words_behind_waits_are_set_by_the_last_block() -> None:
    for block in ("consumer#0", "consumer#1"):
        actions = _strand(_lowered(Push(), True), block).actions
        assert _kinds(actions[-6:]) == [Join, Retire, Barrier, Release, Elect, Announce]
        elect = actions[-2]
        assert isinstance(elect, Elect)
        assert elect.of == 2, "one vote a block"


def test_what_a_copy_engine_reads_is_published_before_the_kernel_ends() -> None:
    lowered = _lowered(Lanes(), False)
    assert _kinds(_strand(lowered, "producer#0").actions)[-5:-2] == [Retire, Barrier, Release] or (
        _kinds(_strand(lowered, "producer#0").actions)[-3:] == [Retire, Barrier, Release]
    )
    lane = _strand(lowered, "lane[1,0]")
    assert (lane.kind, lane.lane, lane.in_order) == ("queue", (1, 0), True)
    assert _kinds(lane.actions) == [Join, Copy, Announce]


def test_a_join_never_publishes() -> None:
    split = _lowered(Push(), False)
    for block in ("producer#0", "producer#1"):
        assert Release not in _kinds(_strand(split, block).actions)
    packed = _lowered(Push(), False, view=True)
    assert _kinds(_strand(packed, "producer#0").actions)[-3:] == [Retire, Barrier, Release]


def test_a_kernel_without_tiles_has_one_block() -> None:
    names = [strand.name for strand in _lowered(Pull(), True).strands]
    assert names == [
        "producer#0", "producer#1", "mover#0", "mover#1", "consumer#0", "reader",
    ]  # fmt: skip


def test_every_wait_is_followed_by_an_acquire_of_its_own() -> None:
    for request in requests(2):
        for strand in _all(request).strands:
            for one, two in zip(strand.actions, strand.actions[1:], strict=False):
                assert not isinstance(one, Wait) or isinstance(two, Acquire), (
                    f"{strand.name}: {one}"
                )


def _all(request: Request) -> Lowered:
    operation: Operation = request.made()
    return lower(operation, schedule_of(request, operation, 0), request.grid, request.entry)


def test_records_are_posted_before_anything_and_looked_up_before_use() -> None:
    lowered = _lowered(Pull(), False, entry=True)
    assert lowered.strands[0].name == "entry"
    assert Post in _kinds(lowered.strands[0].actions)
    mover = _strand(lowered, "mover#0").actions
    assert isinstance(mover[0], Join)
    look = next(i for i, action in enumerate(mover) if isinstance(action, Look))
    foreign = next(
        i
        for i, action in enumerate(mover)
        if isinstance(action, Fetch) and action.tile.region.source == 1
    )
    assert look < foreign


def test_a_view_is_looked_at_where_it_lies() -> None:
    copied = [a for a in _lowered(Push(), True).actions() if isinstance(a, Show)]
    assert {action.area for action in copied} == {"result"}
    view = _lowered(Push(), True, view=True, send_complete=True)
    shown = [a for a in view.actions() if isinstance(a, Show)]
    assert {(action.at, action.area, action.writes) for action in shown} == {(0, "inbox", True)}
    assert not any(isinstance(a, Put) and a.area == "result" for a in view.actions())


def test_the_library_is_called_by_the_host() -> None:
    host = _strand(_lowered(LibraryCollective(), False), "host")
    assert (host.kind, _kinds(host.actions)) == ("host", [Join, Collective])


def test_sums_lie_where_the_next_phase_finds_them() -> None:
    operation = all_reduce(2, 4)
    request = Request("all_reduce", (Pull(),), False, ((2, 2),), n=4)
    lowered = lower(operation, schedule_of(request, operation, 1))
    puts = [a for a in _strand(lowered, "mover#0").actions if isinstance(a, Put)]
    assert [(p.at, p.area, p.tile.region) for p in puts] == [(1, "inbox", Region(1, 0, 0, 1))]


def test_equal_schedules_give_equal_digests_and_every_action_counts() -> None:
    lowered = _lowered(Push(), False)
    assert lowered == _lowered(Push(), False)
    assert lowered.digest() == _lowered(Push(), False).digest()
    seen = {lowered.digest()}
    for place, strand in enumerate(lowered.strands):
        for index in range(len(strand.actions)):
            rest = strand.actions[:index] + strand.actions[index + 1 :]
            strands = list(lowered.strands)
            strands[place] = replace(strand, actions=rest)
            seen.add(replace(lowered, strands=tuple(strands)).digest())
    assert len(seen) == 1 + sum(len(strand.actions) for strand in lowered.strands)


def test_a_store_without_a_product_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="store each region right after making it"):
        _by_hand(Store(Region(0, 0), to=1))
    with pytest.raises(InvalidArgument, match="store each region right after making it"):
        _by_hand(Compute(0), Store(Region(0, 1), to=1))


def test_actors_do_what_their_kind_does() -> None:
    with pytest.raises(InvalidArgument, match="a lane copies, waits, joins and sets words"):
        _by_hand(Compute(0), lane=(1, 0))
    with pytest.raises(InvalidArgument, match="a library's actor joins and calls the library"):
        _by_hand(Compute(0), Collective("all_gather"))
    with pytest.raises(InvalidArgument, match="a kernel does not call the library"):
        _by_hand(Copy(Region(0, 0), to=1))
