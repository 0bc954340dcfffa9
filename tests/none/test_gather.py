"""`core.gather` and `core.placing`: where blocks lie, and which of them may be copied together."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from gemmlink.core.flatten import Placed, flatten
from gemmlink.core.gather import last_of_together
from gemmlink.core.placing import packed
from gemmlink.epilogues.lanes import Lanes
from gemmlink.epilogues.pull import Pull
from gemmlink.epilogues.push import Push
from gemmlink.spec.operations import all_gather
from gemmlink.spec.problem import Problem
from gemmlink.spec.schedule import Deliver, Plan, Region, Set, Wait, Word

SMALL = Problem(16, 16, 4, torch.float32, torch.float32, torch.device("cpu"))
PLAN = Plan(1, 3, chunks=1, fused=False)

each_epilogue = pytest.mark.parametrize("epilogue", [Push(), Pull(), Lanes()])


def _placed(epilogue: Any, plan: Plan) -> tuple[Placed, ...]:
    return flatten(epilogue.schedule(all_gather(plan.world, 16).phases[0], plan))


@each_epilogue
@pytest.mark.parametrize("buffers", [1, 2])
@pytest.mark.parametrize("send_complete", [False, True])
def test_small_blocks_are_copied_with_the_last(
    epilogue: Any, buffers: int, send_complete: bool
) -> None:
    plan = replace(PLAN, buffers=buffers, send_complete=send_complete)
    placed = _placed(epilogue, plan)
    delivers = [item.action for item in placed if isinstance(item.action, Deliver)]
    assert last_of_together(placed, plan, SMALL) == delivers[-1]


@each_epilogue
def test_chunks_are_copied_as_they_come(epilogue: Any) -> None:
    for fused in (False, True):
        plan = replace(PLAN, chunks=2, fused=fused)
        assert last_of_together(_placed(epilogue, plan), plan, SMALL) is None


@each_epilogue
@pytest.mark.parametrize(("rows", "together"), [(341, True), (342, False)])
def test_large_blocks_are_copied_as_they_come(epilogue: Any, rows: int, together: bool) -> None:
    problem = replace(SMALL, capacity=rows)  # 64 bytes a row, 3 blocks: 64 KiB are 341.3
    last = last_of_together(_placed(epilogue, PLAN), PLAN, problem)
    assert (last is not None) == together


@each_epilogue
def test_a_view_copies_nothing(epilogue: Any) -> None:
    plan = replace(PLAN, view=True)
    assert last_of_together(_placed(epilogue, plan), plan, SMALL) is None


def _written(*actions: Any) -> tuple[Placed, ...]:
    return tuple(Placed("consumer", action) for action in actions)


def test_a_block_is_copied_before_anybody_hears_that_it_was() -> None:
    """Copied behind ``free``, a block could be that of the next call already."""
    plan = replace(PLAN, rank=0, world=2)
    own, other = Deliver(Region(0, 0), 0), Deliver(Region(1, 0), 0)
    wait, free = Wait(Word("arrive", 1)), Set(Word("free", 0), at=1)
    assert last_of_together(_written(own, wait, other, free), plan, SMALL) == other
    assert last_of_together(_written(own, free, wait, other), plan, SMALL) is None


def test_every_source_must_be_delivered_once() -> None:
    plan = replace(PLAN, rank=0, world=2)
    own = Deliver(Region(0, 0), 0)
    assert last_of_together(_written(own), plan, SMALL) is None
    assert last_of_together(_written(own, own), plan, SMALL) is None
    assert last_of_together((), plan, SMALL) is None


def test_packed_blocks_lie_one_behind_the_other() -> None:
    placing = packed((3, 0, 5))
    assert (list(placing.starts), placing.total, placing.longest) == ([0, 3, 3], 8, 5)
    assert not placing.even
    assert packed((2, 2)).even
    assert packed((0, 0)).total == 0
