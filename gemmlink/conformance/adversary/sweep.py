"""Everything built in, in every variant, as cases for the adversary.

M changes from call to call, so that whatever is where it was not before shows: blocks of ranks that
are even, ragged, or empty. Four calls use each of two buffers twice.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any

import torch

from gemmlink.conformance.adversary.case import Request, rows_of
from gemmlink.epilogues.collective import LibraryCollective
from gemmlink.epilogues.lanes import Lanes
from gemmlink.epilogues.pull import Pull
from gemmlink.epilogues.push import Push
from gemmlink.spec.contracts import Epilogue

#: M of every rank, call by call.
Rows = tuple[tuple[int, ...], ...]

OPERATIONS = ("all_gather", "all_to_all", "reduce_scatter", "all_reduce")

#: M of each rank in each call, for operations whose ranks may differ. Blocks move from call to call
#: and still overlap those of the call before, and of the one before that, which had the same of two
#: buffers; one rank has nothing to send once. What two ranks have is repeated for others.
_RAGGED: Sequence[Sequence[int]] = ((2, 1), (1, 2), (0, 2), (2, 2))
#: The same where products are added.
_EQUAL: Sequence[int] = (3, 4, 0, 2)
#: More of both, for whoever has time.
_MORE_RAGGED = (((2, 2), (1, 1), (2, 2)), ((1, 2), (2, 0), (1, 1), (0, 0)))
_MORE_EQUAL = ((3, 2, 4), (2, 1, 0, 1, 3))


def requests(world: int = 2, more: bool = False) -> Iterator[Request]:
    """All variants at ``world`` ranks; with ``more`` sequences of M if asked for."""
    for operation in OPERATIONS:
        for epilogues, fused, extra in _modes(operation):
            for plan in _plans(epilogues, extra):
                yield from _requests_of(
                    operation, epilogues, fused, plan, _rows(operation, world, more)
                )


def _modes(operation: str) -> Iterator[tuple[tuple[Epilogue, ...], bool, dict[str, Any]]]:
    """Epilogues, form of the first, and what concerns its lanes."""
    yield (LibraryCollective(),), False, {}
    single: tuple[Epilogue, ...] = (Push(), Pull(), Lanes())
    pairs = product(single, single) if operation == "all_reduce" else ()
    for epilogues in [
        *((each,) for each in single),
        *((a, b) for a, b in pairs if a.name != b.name),
    ]:
        for fused in (False, True):
            if any(epilogue.needs.lanes for epilogue in epilogues):
                for order, lanes in product(("in_order", "after_drain"), (1, 2)):
                    yield epilogues, fused, {"lane_order": order, "lanes": lanes}
            else:
                yield epilogues, fused, {}


def _plans(epilogues: Sequence[Epilogue], extra: dict[str, Any]) -> Iterator[dict[str, Any]]:
    if not epilogues[0].needs.window:
        yield extra
        yield {**extra, "keep": True}
        return
    for view, buffers, complete in product((False, True), (1, 2), (False, True)):
        yield {"view": view, "buffers": buffers, "send_complete": complete, **extra}
    # What is kept touches no window: the plainest plan of each form tells all.
    if len(epilogues) == 1 and extra in ({}, {"lane_order": "in_order", "lanes": 1}):
        yield {"view": False, "buffers": 1, "send_complete": False, "keep": True, **extra}
    if len(epilogues) == 1 and epilogues[0].needs.common:
        yield {"view": True, "common": True}
        yield {"view": True, "common": True, "buffers": 2}


def _requests_of(
    operation: str,
    epilogues: tuple[Epilogue, ...],
    fused: bool,
    plan: dict[str, Any],
    all_rows: Sequence[Rows],
) -> Iterator[Request]:
    if plan.get("common") and operation != "all_gather":
        return
    if plan.get("keep") and operation != "all_to_all":
        return
    chunks = 2 if fused or plan.get("lanes", 1) > 1 else 1
    base: dict[str, Any] = {"fused": fused, "plan": plan, "chunks": chunks}
    world = len(all_rows[0][0])
    for rows in all_rows:
        for n, options in _options(operation, world, plan):
            yield Request(operation, epilogues, rows=rows, n=n, options=options, **base)
    if epilogues[0].needs.window and not plan["view"] and not plan.get("keep"):
        n, options = next(_options(operation, world, plan))
        rows = all_rows[0]
        yield Request(operation, epilogues, rows=rows, n=n, options=options, entry=True, **base)


def _rows(operation: str, world: int, more: bool) -> list[Rows]:
    if operation in ("reduce_scatter", "all_reduce"):
        patterns = [[(m,) * world for m in calls] for calls in (_EQUAL, *_MORE_EQUAL)]
    else:
        ragged = (_RAGGED, *_MORE_RAGGED)
        patterns = [[tuple(call[r % 2] for r in range(world)) for call in c] for c in ragged]
    return [rows_of(pattern) for pattern in (patterns if more else patterns[:1])]


def _options(
    operation: str, world: int, plan: Mapping[str, Any]
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Columns, and arguments of the operation."""
    if operation == "all_to_all":
        yield 2 * world, {}
        yield 2 * world + 1, {"extent": 2 * world}
    else:
        yield 2, {}
    if operation in ("all_gather", "all_reduce") and not plan.get("view"):
        yield 2, {"wire": torch.float8_e4m3fn}
