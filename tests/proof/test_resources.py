"""Who may wait where: rules that hold, and protocols that break them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from gemmlink.conformance.adversary.case import build
from gemmlink.conformance.adversary.program import Program, compile_case
from gemmlink.conformance.proof import Device, prove, residency, resources
from gemmlink.spec.lower import Grid
from gemmlink.spec.lowered import Lowered
from tests.adversary.cases import find
from tests.proof.tiny import Does, join, program, say, wait

_COPY = {"view": False, "buffers": 1, "send_complete": False}
PULL: dict[str, Any] = {"operation": "all_gather", "mode": "pull", "fused": True, **_COPY}
PUSH: dict[str, Any] = {**PULL, "mode": "push", "fused": False}
LANES: dict[str, Any] = {**PULL, "operation": "all_reduce", "mode": "lanes", "lanes": 1}


def _program(wanted: dict[str, Any], grid: Grid, change: Any = None) -> Program:
    whole = build(replace(find(**wanted), grid=grid))
    return compile_case(whole if change is None else whole.changed("changed", change))


def _movers_first(lowered: Lowered) -> Lowered:
    """Movers are launched before the producer whose words they wait for."""
    movers = [strand for strand in lowered.strands if strand.actor == "mover"]
    rest = [strand for strand in lowered.strands if strand.actor != "mover"]
    return replace(lowered, strands=(*movers, *rest))


@pytest.mark.parametrize("slots", [1, 2])
def test_movers_that_keep_the_producer_out(slots: int) -> None:
    broken = _program(PULL, Grid(2, 2), _movers_first)
    assert prove(broken).proved, "all blocks may run, so that the order is right"
    found = prove(broken, Device(slots))
    assert found.reason == "resources", str(found)
    text = str(found)
    assert "mover#0 in call 1: wait arrive" in text
    assert f"producer#0 in call 1 finds no slot: device 0 has {slots}, taken by rank 0's" in text
    assert "where this began" in text


def test_movers_leave_room_for_the_producer() -> None:
    assert residency(_program(PULL, Grid(2, 2), _movers_first), Device(slots=3)).proved


@pytest.mark.parametrize("slots", [1, 2, 3])
def test_a_producer_that_comes_first_is_in_nobodys_way(slots: int) -> None:
    assert residency(_program(PULL, Grid(2, 2)), Device(slots)).proved


def test_a_consumer_may_overtake_what_joins_first() -> None:
    """Split push: all slots may go to consumers, while the mover waits for the producer's end."""
    split = _program(PUSH, Grid(2, 2))
    found = residency(split, Device(slots=2))
    assert found.reason == "resources", str(found)
    assert "mover#0 in call 1 finds no slot: device 0 has 2, taken by rank 0's consumer" in str(
        found
    )
    assert residency(split, Device(slots=3)).proved


@pytest.mark.parametrize(("slots", "proved"), [(1, False), (2, False), (3, True)])
def test_ranks_that_share_a_device_need_room_for_each_other(slots: int, proved: bool) -> None:
    found = residency(_program(PULL, Grid(1, 1)), Device(slots, ranks=2))
    assert found.proved is proved, str(found)
    if not proved:
        assert "finds no slot: device 0 has" in str(found)
    assert residency(_program(PULL, Grid(1, 1)), Device(slots, ranks=2, exclusive=True)).proved


def test_on_a_shared_device_one_block_waits_for_others() -> None:
    wide = _program(PULL, Grid(2, 2))
    found = residency(wide, Device(slots=64, ranks=2))
    assert found.reason == "resources"
    assert "in each of 2 blocks" in str(found)
    assert "a device that 2 ranks share" in str(found)
    for allowed in (Device(64, ranks=2, exclusive=True), Device(64, ranks=1)):
        assert residency(wide, allowed).proved
    assert residency(_program(PULL, Grid(1, 1)), Device(64, ranks=2)).proved


def test_orders_that_are_too_many_are_not_called_right(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resources, "_LIMIT", 20)
    tight = _program(PULL, Grid(2, 2))
    found = residency(tight, Device(slots=3))
    assert found.reason == "resources"
    assert "4 blocks may wait at the same time on device 0, which has 3 slots" in str(found)
    assert residency(tight, Device(slots=5)).proved, "no order need be gone through"
    phases = {**PULL, "operation": "all_reduce", "mode": "push+pull", "fused": False}
    assert residency(_program(phases, Grid(2, 2)), Device(slots=5)).proved, "one behind the other"


def test_a_join_in_the_middle_keeps_the_slot() -> None:
    """``late`` joins ``a`` behind something else, ``first`` before anything."""

    def joins(*ops: Any) -> Program:
        late = Does("late", 0, ops)
        return program(late, Does("a", 0, [say()]), Does("b", 1, [wait()]))

    assert residency(joins(join("a"), say(value=2)), Device(1)).proved
    found = residency(joins(("retire", None), join("a"), say(value=2)), Device(1))
    assert found.reason == "resources", str(found)
    assert "a#0 in call 1 finds no slot: device 0 has 1, taken by rank 0's late#0" in str(found)


def test_a_queue_does_one_phase_after_the_other() -> None:
    def phase_one_first(lowered: Lowered) -> Lowered:
        queue = [strand for strand in lowered.strands if strand.lane is not None]
        swapped = {queue[0].actor: queue[1], queue[1].actor: queue[0]}
        strands = tuple(swapped.get(strand.actor, strand) for strand in lowered.strands)
        return replace(lowered, strands=strands)

    assert prove(_program(LANES, Grid(2, 2))).proved
    found = prove(_program(LANES, Grid(2, 2), phase_one_first))
    assert found.reason == "deadlock"
    told = (
        "lane[1,0] in call 1 comes behind rank 0's lane[1,0]/1 in call 1, which is the same queue"
    )
    assert told in str(found)
