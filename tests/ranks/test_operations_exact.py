"""All-to-all, reduce-scatter and all-reduce are exact in every mode, however they are asked for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch.distributed as dist

from tests.conftest import Ranks
from tests.operations import NAMES, OBJECTS, PAIRS, Asked, K, check, strided
from tests.refs import MODES

CAPACITY = 9
#: M of each call.
ROWS = (CAPACITY, 2, 0, 1, 5)
each_mode = pytest.mark.parametrize("mode", MODES)


#: Result, buffers, whether sends are complete, chunks, lanes: every two values of any two of them.
CHOICES = (
    ("copy", 1, False, 1, 1),
    ("copy", 2, True, 4, 2),
    ("view", 1, True, 4, 1),
    ("view", 2, False, 1, 2),
    ("view", 1, False, 4, 2),
    ("copy", 2, True, 1, 1),
)


def _choices(mode: str) -> Iterator[dict[str, Any]]:
    """What an operation is asked for, as far as the mode has it."""
    for result, buffers, complete, chunks, lanes in CHOICES:
        if result == "copy" or mode != "collective":
            yield {
                "result": result,
                "buffers": buffers,
                "completion": "receive_and_send" if complete else "receive",
                "chunks": chunks,
                "lanes": lanes,
            }


def _rows(name: str, world: int) -> list[tuple[int, ...]]:
    """The M of each call: full, none, fewer than ranks; where blocks are stacked also unequal."""
    if name == "all_to_all":
        ragged = {1: (3, 0, 9)[:world], 3: (0, 5, 1)[:world]}
        return [ragged.get(turn, (rows,) * world) for turn, rows in enumerate(ROWS)]
    return [(rows,) * world for rows in ROWS]


def _every_operation(rank: int, mode: str) -> int:
    return sum(_every_choice(rank, mode, name) for name in NAMES)


def _every_choice(rank: int, mode: str, name: str) -> int:
    """One operation for each choice; dtypes, extents and what is kept take turns."""
    world, done = dist.get_world_size(), 0
    n = 5 * world + 1
    for number, choices in enumerate(_choices(mode)):
        dtype, out_dtype = PAIRS[number % len(PAIRS)]
        options: dict[str, Any] = {}
        if name == "all_to_all":
            extent = (5 * world, 0, world, 3 * world)[(number + number // 4) % 4]
            options = {"extent": extent, "keep_product": number % 3 == 0}
        asked = Asked(name, (), n, 0, options.get("extent"), dtype, out_dtype)
        with OBJECTS[name](
            n, K, CAPACITY, dtype, out_dtype, epilogue=mode, **choices, **options
        ) as op:
            kept = []
            for turn, rows in enumerate(_rows(name, world)):
                each = replace(asked, rows=rows, call=1 + turn + 10 * number)
                kept.append((each, _one(op, each, rank, choices["result"], turn)))
                done += 1
        for each, result in kept[-1:] if choices["result"] == "view" else kept:
            check(result, each, rank, f"{mode} {choices}, after close")
    return done


def _one(op: Any, asked: Asked, rank: int, result: str, turn: int) -> Any:
    """A call, every other one into a strided out, or with every rank's M said where it may be."""
    rest: dict[str, Any] = {}
    if asked.name == "all_to_all" and (turn % 2 or result == "view"):
        rest["rows"] = list(asked.rows)
    out, intact = strided(asked, rank)
    if result == "copy" and turn % 2 == 0:
        rest["out"] = out
    got = op(asked.a(rank), asked.b(rank), **rest)
    mine = check(got, asked, rank, f"{op.launch.parts.mode}, {op.launch.schedule.plan}")
    if "out" in rest:
        assert mine is out, "out is returned"
    intact()
    return got


@pytest.mark.parametrize("world", [1, 2, 3])
@each_mode
def test_exact_in_every_case(ranks: Ranks, mode: str, world: int) -> None:
    """Rows that are ragged, none, fewer than ranks; shards of 0, 1, 3 and 5 columns."""
    calls = len(NAMES) * len(ROWS) * len(list(_choices(mode)))
    assert ranks(world).run(_every_operation, mode, timeout_s=90) == [calls] * world
