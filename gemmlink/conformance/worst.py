"""What an epilogue under test does on the worst machine: small cases for the adversary.

Two ranks, every operation in which the epilogue serves a phase, every form; results that are copied
out and views, and the plan that relies on most: two buffers, complete on the sending side.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

from gemmlink import plugins
from gemmlink.conformance import asked
from gemmlink.conformance.adversary.case import Case, Request, build, rows_of
from gemmlink.conformance.adversary.run import first_fault
from gemmlink.conformance.asked import Wanted
from gemmlink.errors import InvalidArgument, Unsupported
from gemmlink.spec.contracts import Epilogue

_WORLD = 2
#: Runs of each case, under other seeds than those of the case before.
_SEEDS = 3

#: M of each rank, call by call, where ranks may differ and where they may not.
_RAGGED = rows_of(((2, 1), (1, 2), (0, 2), (2, 2)))
_EQUAL = rows_of(((3, 3), (4, 4), (0, 0), (2, 2)))
#: Columns, a few for each tile, and options where there are any: something stays with its rank.
_COLS: Mapping[str, tuple[int, Mapping[str, Any]]] = {
    "all_to_all": (2 * _WORLD + 1, {"extent": 2 * _WORLD})
}
#: Lanes that keep an order, and lanes that do not.
_LANES = ({"lane_order": "in_order", "lanes": 1}, {"lane_order": "after_drain", "lanes": 2})


def faults(epilogue: Epilogue, wanted: Wanted) -> Iterator[str]:
    """What goes wrong with an epilogue, in words, case by case. What it may refuse is left out."""
    for number, request in enumerate(cases(epilogue, wanted)):
        try:
            case = build(request)
        except Unsupported:
            continue
        except InvalidArgument as error:
            yield f"{request.name()} cannot be told by tiles and fences: {error}"
            continue
        fault = _fault(case, range(number * _SEEDS, (number + 1) * _SEEDS))
        if fault is not None:
            yield fault


def cases(epilogue: Epilogue, wanted: Wanted) -> Iterator[Request]:
    """All that is run; ``wanted`` as for ``asked``."""
    other = cast(Epilogue, plugins.find("epilogue", asked.companion(epilogue)))
    operations = dict.fromkeys(v.operation for v in asked.variants(epilogue, wanted.operations))
    for operation in operations:
        n, options = _COLS.get(operation, (2, {}))
        plain = Request(operation, (epilogue,), False, _rows(operation), n=n, options=options)
        kinds = [phase.name for phase in plain.made().phases]
        epilogues = tuple(epilogue if kind in epilogue.phases else other for kind in kinds)
        for fused in epilogues[0].forms():
            for plan in _plans(epilogue, wanted):
                yield replace(plain, epilogues=epilogues, fused=fused, plan=plan, chunks=2)


def _fault(case: Case, seeds: Sequence[int]) -> str | None:
    outcome = first_fault(case, seeds)
    return None if outcome is None else f"{case.name}, seed {outcome.seed}: {outcome.fault}"


def _rows(operation: str) -> tuple[tuple[int, ...], ...]:
    return _RAGGED if operation in ("all_gather", "all_to_all") else _EQUAL


def _plans(epilogue: Epilogue, wanted: Wanted) -> Iterator[Mapping[str, Any]]:
    for lanes in _LANES if epilogue.needs.lanes else ({},):
        for result in wanted.results if epilogue.needs.window else ("copy",):
            yield {"view": result == "view", **lanes}
        if epilogue.needs.window:
            yield {
                "view": wanted.results[-1] == "view",
                "buffers": wanted.buffers[-1],
                "send_complete": wanted.completions[-1] == "receive_and_send",
                **lanes,
            }
