"""`core.device.blocks`: what becomes one launch, and what must not change places."""

from __future__ import annotations

import pytest

from gemmlink.core.device.blocks import Block, Exchange, Fan, Joined, Moves, Posted, blocks
from gemmlink.core.flatten import flatten
from gemmlink.core.products import Columns, Product, group
from gemmlink.epilogues.lanes import Lanes
from gemmlink.epilogues.pull import Pull
from gemmlink.epilogues.push import Push
from gemmlink.spec import operations
from gemmlink.spec.contracts import Epilogue
from gemmlink.spec.operations import Operation
from gemmlink.spec.schedule import Deliver, Plan, Schedule, Set, Wait, chain

WORLD = 4
EPILOGUES = (Push(), Pull(), Lanes())
OPERATIONS = [
    operations.all_gather(WORLD, 8),
    operations.all_to_all(WORLD, 12, 8),
    operations.reduce_scatter(WORLD, 8),
    operations.all_reduce(WORLD, 8),
]


def _schedule(epilogue: Epilogue, operation: Operation, **plan: bool | int) -> Schedule:
    made = []
    for number, phase in enumerate(operation.phases):
        values = {"chunks": 1, "fused": False, **plan}
        each = Plan(0, WORLD, phase=number, phases=len(operation.phases), **values)  # type: ignore[arg-type]
        made.append(epilogue.schedule(phase, each))
    return chain(made)


def _blocks(schedule: Schedule) -> list[Block]:
    lanes = {p.actor for p in schedule.programs if p.lane is not None}
    return blocks(group(flatten(schedule), schedule.plan.chunks, None), lanes)


def _kinds(made: list[Block]) -> list[str]:
    return [type(block).__name__ for block in made]


def test_a_split_push_is_five_launches() -> None:
    made = _blocks(_schedule(Push(), OPERATIONS[0]))
    assert _kinds(made) == ["Exchange", "Product", "Moves", "Exchange", "Moves", "Exchange"]
    _, _, spread, told, taken, _ = made
    assert isinstance(spread, Moves)
    (fan,) = spread.moves
    assert isinstance(fan, Fan)
    assert [store.to for store in fan.stores] == [1, 2, 3], "one read for all peers"
    assert isinstance(told, Exchange)
    assert (len(told.sets), len(told.waits)) == (4, 4)
    assert isinstance(taken, Moves)
    assert len(taken.moves) == 4


def test_parts_for_several_peers_are_one_launch() -> None:
    made = _blocks(_schedule(Push(), OPERATIONS[1]))
    moves = [block for block in made if isinstance(block, Moves)]
    assert len(moves) == 2, "what is sent, and what is delivered"
    assert [type(move) for move in moves[0].moves] == [Fan] * 3
    assert {move.load is not None for move in moves[0].moves if isinstance(move, Fan)} == {True}


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.name)
@pytest.mark.parametrize("epilogue", EPILOGUES, ids=lambda epilogue: epilogue.name)
@pytest.mark.parametrize("fused", [False, True], ids=["split", "fused"])
@pytest.mark.parametrize("view", [False, True], ids=["copy", "view"])
@pytest.mark.parametrize("buffers", [1, 2])
def test_order_is_kept(
    epilogue: Epilogue, operation: Operation, fused: bool, view: bool, buffers: int
) -> None:
    schedule = _schedule(epilogue, operation, fused=fused, chunks=3, view=view, buffers=buffers)
    made = _blocks(schedule)
    first, last = made[0], made[-1]
    assert isinstance(first, Exchange)
    assert first.enters
    assert isinstance(last, Exchange)
    assert last.leaves
    assert sum(isinstance(block, Exchange) and block.enters for block in made) == 1
    assert sum(isinstance(block, Exchange) and block.leaves for block in made) == 1
    _nothing_is_lost(schedule, made)
    _sets_stay_behind(schedule, made)
    if any(isinstance(block, Posted) for block in made):
        posted = max(at for at, block in enumerate(made) if isinstance(block, Posted))
        assert any(isinstance(block, Joined) for block in made[posted:-1]), "lanes left running"


def _flat(made: list[Block]) -> list[object]:
    """Actions in the order of launches, those of one launch in the order of its parts."""
    actions: list[object] = []
    for block in made:
        if isinstance(block, Exchange):
            actions += [*block.sets, *block.waits]
        elif isinstance(block, Moves):
            for move in block.moves:
                actions += move.stores if isinstance(move, Fan) else [move]
        elif isinstance(block, Posted):
            actions += [item.action for item in block.actions]
        elif isinstance(block, Product):
            actions.append(block.store)
        elif isinstance(block, Columns):
            actions += [product.store for product in block.products]
        elif not isinstance(block, Joined):
            actions.append(block.action)
    return actions


def _nothing_is_lost(schedule: Schedule, made: list[Block]) -> None:
    lanes = {p.actor for p in schedule.programs if p.lane is not None}
    flat = _flat(made)
    for placed in flatten(schedule):
        action = placed.action
        word = getattr(action, "word", None)
        local = word is not None and word.kind == "chunk"
        if not local and isinstance(action, Set | Wait | Deliver):
            assert action in flat, f"{placed.actor}: {action} is not launched"
    assert lanes or not any(isinstance(block, Posted) for block in made)


def _sets_stay_behind(schedule: Schedule, made: list[Block]) -> None:
    """No word is announced before anything that it was announced behind."""
    flat = _flat(made)
    lanes = {p.actor for p in schedule.programs if p.lane is not None}
    before: list[object] = []
    for placed in flatten(schedule):
        if placed.actor in lanes:
            continue
        action = placed.action
        if isinstance(action, Set) and action in flat:
            at = flat.index(action)
            late = [each for each in before if each in flat and flat.index(each) > at]
            assert not late, f"{action} comes before {late[0]}"
        if isinstance(action, Wait | Deliver):
            before.append(action)
