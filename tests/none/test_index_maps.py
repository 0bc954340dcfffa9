"""Where every element of every operation goes, in every mode, whatever the sizes and the order.

Schedules are run on names of elements (``tests.simulator``); all that is written and read is
compared with the closed forms below.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gemmlink.core.compose import Choice
from gemmlink.core.memory import areas_used
from gemmlink.core.prepare import Request
from gemmlink.spec.problem import Problem
from gemmlink.spec.schedule import (
    Area,
    Copy,
    Deliver,
    Schedule,
    Set,
    Store,
    Sum,
    Wait,
)
from tests.refs import WINDOW_MODES
from tests.simulator import Key, Setup, Simulator, band

OPERATIONS = ("all_gather", "all_to_all", "reduce_scatter", "all_reduce")
PAIRS = ("split-push+pull", "fused-lanes+pull", "fused-pull+lanes", "split-lanes+push")
RAGGED = ("all_gather", "all_to_all")


MODES = [
    *((operation, mode) for operation in OPERATIONS for mode in WINDOW_MODES),
    *(("all_reduce", pair) for pair in PAIRS),
]
each_mode = pytest.mark.parametrize(("operation", "mode"), MODES)


def _choices(draw: st.DrawFn, mode: str) -> Choice:
    return Choice(
        epilogue=mode,
        chunks=draw(st.integers(1, 4)),
        lanes=draw(st.integers(1, 2)) if "lanes" in mode else 1,
        buffers=draw(st.integers(1, 2)),
        view=draw(st.booleans()),
        send_complete=draw(st.booleans()),
    )


@st.composite
def setups(draw: st.DrawFn, operation: str, mode: str) -> Setup:
    """Three calls in any world, with any sizes, asked for in any way."""
    world, capacity = draw(st.integers(1, 4)), draw(st.integers(0, 9))
    n = draw(st.integers(0, 9))
    choice = _choices(draw, mode)
    options: dict[str, Any] = {}
    if operation == "all_to_all":
        legal = [None] if n % world == 0 else []
        options["extent"] = draw(st.sampled_from([*legal, *range(0, n + 1, world)]))
        choice = replace(choice, keep_product=draw(st.booleans()))
    elif operation in ("all_gather", "all_reduce") and not choice.view and draw(st.booleans()):
        options["wire"] = torch.float8_e4m3fn
    some = st.integers(0, capacity)
    rows = st.tuples(*[some] * world) if operation in RAGGED else some.map(lambda m: (m,) * world)
    problem = Problem(n, 8, capacity, torch.float32, torch.float32, torch.device("cpu"))
    return Setup(
        Request(operation, problem, choice, 1.0, 5.0, options),
        world,
        tuple(draw(rows) for _ in range(3)),
        draw(st.sampled_from(["in_order", "after_drain"])),
    )


@each_mode
@hypothesis.settings(max_examples=8)
@given(data=st.data())
def test_every_element_goes_where_it_is_needed_and_nothing_else_moves(
    operation: str, mode: str, data: st.DataObject
) -> None:
    """What is read is there, and of this call; what is written has one writer and a reader."""
    setup = data.draw(setups(operation, mode))
    _assert_right(Simulator(setup, data.draw(st.integers(0, 1 << 30))))


def _assert_right(run: Simulator) -> None:
    run.run()
    setup = run.setup
    for (key, call), writes in run.writes.items():
        assert not (writes > 1).any(), f"{key}: two writers in call {call}"
        reads = run.reads.get((key, call), torch.zeros_like(writes))
        assert not (writes.bool() & ~reads.bool()).any(), f"{key}: written for nobody"
        assert not (reads.bool() & ~writes.bool()).any(), f"{key}: read and never written"
    _assert_seats(run)
    for call, rows in enumerate(setup.calls, start=1):
        for rank in range(setup.world):
            kept = torch.zeros(rows[rank], setup.problem.n, dtype=torch.int64)
            kept[:, _first_kept(setup) :] = 1
            assert torch.equal(run.local_writes(rank, call), kept), "the private buffer"


#: Kinds of action of which none is superfluous, in setups of several kinds. A wait may be, where
#: what it waits for follows from another, and a view needs no delivery.
NEEDED: list[tuple[str, str, dict[str, Any], tuple[type, ...]]] = [
    ("all_to_all", "fused-push", {"chunks": 2}, (Store, Set, Wait, Deliver)),
    ("all_to_all", "split-lanes", {"view": True}, (Store, Copy, Set)),
    ("reduce_scatter", "split-pull", {}, (Store, Set, Wait, Sum)),
    ("all_reduce", "fused-lanes+pull", {}, (Store, Copy, Set, Deliver, Sum)),
]


@pytest.mark.parametrize(("operation", "mode", "choices", "kinds"), NEEDED)
def test_no_action_can_be_left_out(
    operation: str, mode: str, choices: dict[str, Any], kinds: tuple[type, ...]
) -> None:
    """So the test above can fail: for each action there is an order in which its lack shows."""
    choice = Choice(epilogue=mode, **{"chunks": 1, **choices})
    problem = Problem(4, 8, 4, torch.float32, torch.float32, torch.device("cpu"))
    options: dict[str, Any] = {"extent": 4} if operation == "all_to_all" else {}
    request = Request(operation, problem, choice, 1.0, 5.0, options)
    setup = Setup(request, 2, ((4, 4),) * 3)
    whole = setup.schedules()
    assert _fault(setup, whole) is None
    for index, action in enumerate(whole[0].actions()):
        if isinstance(action, kinds):
            less = [_without(whole[0], index), *whole[1:]]
            assert _fault(setup, less) is not None, f"nothing is wrong without '{action}'"


def _without(whole: Schedule, index: int) -> Schedule:
    programs = []
    for program in whole.programs:
        kept = [action for i, action in enumerate(program.actions) if i != index]
        index -= len(program.actions)
        programs.append(replace(program, actions=tuple(kept)))
    return replace(whole, programs=tuple(programs))


def _fault(setup: Setup, schedules: list[Schedule]) -> str | None:
    """What is found in some of many orders; also what is written for nobody."""
    for seed in range(60):
        try:
            _assert_right(Simulator(setup, seed, schedules))
        except AssertionError as error:
            return str(error)
    return None


def _first_kept(setup: Setup) -> int:
    """The first column of the own product that the private buffer has."""
    extent = setup.request.options.get("extent")
    if setup.choice.keep_product:
        return 0
    return setup.problem.n if extent is None else int(extent)


def _assert_seats(run: Simulator) -> None:
    """What lies in the windows in the end lies where the index maps say."""
    for key, area in run.windows.items():
        for row, col in area.nonzero().tolist():
            if int(area[row, col]) > 0:  # else the owner of a view has written over it
                call, source, *element = run.named(int(area[row, col]))
                wanted = _seat(run, key, call, source, element[0], element[1])
                assert (row, col) in wanted, f"{key} has {element} of {source} at {(row, col)}"


def _seat(
    run: Simulator, key: Key, call: int, source: int, row: int, col: int
) -> list[tuple[int, int]]:
    """Where an element may lie in an area of a window, by the index maps of the operations.

    Gather: ``recv[s, t]``. All-to-all: ``recv[s, t, f]`` of rank d is ``product_s[t, d*shard+f]``,
    and ``staging[d, t, f]`` of rank s the same. Sums: ``recv[s]`` is rank d's band of source s.
    """
    owner, phase, area, _ = key
    world, capacity = run.world, run.setup.problem.capacity
    name = run.operation.name
    rows = run.setup.calls[call - 1]
    start = sum(rows[:source]) if run.plan.view else source * capacity
    if name == "all_gather":
        return [(start + row, col)] if area == "inbox" else []
    if name == "all_to_all":
        shard = run.operation.phases[0].routes[0].width
        to, local = divmod(col, shard)
        if area == "outbox":
            return [(to * capacity + row, local)] if source == owner else []
        return [(start + row, local)] if to == owner else []
    if phase == 1:
        return [(row, col)] if source == world else []
    mine = band(rows[owner], world, owner)
    if area == "sum":
        return [(row - mine.start, col)] if source == world and row in mine else []
    if area == "outbox":
        return [(row, col)] if source == owner else []
    slot = -(-capacity // world)
    return [(source * slot + row - mine.start, col)] if row in mine else []


@hypothesis.settings(max_examples=30)
@given(data=st.data(), place=st.sampled_from(MODES))
def test_the_areas_of_a_window_are_those_that_are_used(
    data: st.DataObject, place: tuple[str, str]
) -> None:
    """Neither an area that nobody touches nor one that somebody touches and is not there."""
    setup = data.draw(setups(*place))
    busy = replace(setup, calls=((setup.problem.capacity,) * setup.world,) * 2)
    run = Simulator(busy, 3)
    run.run()
    areas = areas_used(run.operation, list(run.schedules), setup.problem)
    sizes: dict[tuple[int, Area], int] = {(a.phase, a.area): a.nbytes for a in areas}
    touched = {(phase, area) for _, phase, area, _ in run.windows}
    assert touched <= sizes.keys()
    assert (
        not sizes.keys() - touched
        or not setup.problem.capacity
        or not setup.problem.n
        or (setup.world == 1 or setup.request.options.get("extent") == 0)
    )
    for key in touched:
        _assert_room(run, key, sizes[key])


def _assert_room(run: Simulator, key: tuple[int, Area], nbytes: int) -> None:
    places: Any = run.places[key[0]]
    if places.phase.wire is None:
        assert nbytes == places.height(key[1]) * places.width * 4
    else:
        assert nbytes >= places.height(key[1]) * (places.width + 4)
