"""Runs an epilogue in every way it offers, on ranks, with whole numbers: results must be equal.

All-gathers run with every combination of options. Of the other operations half the combinations
run, so chosen that every two options meet: schedules are judged in all of them (``epilogues``).
"""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist

from gemmlink import plugins
from gemmlink.conformance import asked, devices, trials
from gemmlink.conformance.asked import Variant
from gemmlink.conformance.clauses import LIMIT_S, Desk, require
from gemmlink.conformance.problems import Case
from gemmlink.errors import Unsupported
from gemmlink.groups import SELF
from gemmlink.prepared import Prepared
from gemmlink.spec.contracts import Epilogue

if TYPE_CHECKING:
    from gemmlink.conformance.epilogues import EpilogueContract

_CHUNKS = 3
_ROWS = (0, 1, 7)
_K = 33


def run_everywhere(contract: EpilogueContract, desk: Desk, world: int) -> None:
    """Collective: every operation, form, result, number of buffers and completion."""
    group = _first(world, desk, contract.device)
    epilogue = cast(Epilogue, plugins.find("epilogue", contract.epilogue))
    for variant in asked.variants(epilogue, contract.operations):
        for options in _options(contract, epilogue, variant):
            if desk.rank < world:
                _run(contract, variant, options, group, world)
            desk.meet()  # each time, since ranks that have no part wait for a limited time only


def _first(world: int, desk: Desk, device: str) -> Any:
    if world == 1 and device == devices.HOST:  # a device's transport may need a group of torch's
        return SELF
    return dist.group.WORLD if world == desk.world else dist.new_group(list(range(world)))


def _options(
    contract: EpilogueContract, epilogue: Epilogue, variant: Variant
) -> list[dict[str, Any]]:
    every = list(_every_option(contract, epilogue, variant))
    if variant.operation == "all_gather" and not variant.plain:
        return every
    return [options for options in every if _is_one_of_half(epilogue, options)] or every


def _is_one_of_half(epilogue: Epilogue, options: Mapping[str, Any]) -> bool:
    """An even number of options that are not the plainest; as many lanes as buffers."""
    odd = (
        (options["result"] == "view")
        ^ (options["buffers"] == 2)
        ^ (options["completion"] == "receive_and_send")
    )
    return not odd and (not epilogue.needs.lanes or options["lanes"] == options["buffers"])


def _every_option(
    contract: EpilogueContract, epilogue: Epilogue, variant: Variant
) -> Iterator[dict[str, Any]]:
    own: dict[str, Any] = {"keep_product": True} if variant.keep else {}
    if "wire" in variant.options:
        own["wire_dtype"] = variant.options["wire"]
    first = variant.of(2).phases[0].name in epilogue.phases
    for fused, result, buffers, completion, lanes in itertools.product(
        epilogue.forms() if first else epilogue.forms()[:1],
        contract.results if epilogue.needs.window and not variant.plain else ("copy",),
        contract.buffers[:1] if variant.plain else contract.buffers,
        contract.completions[:1] if variant.plain else contract.completions,
        (1, 2) if epilogue.needs.lanes else (1,),
    ):
        yield {
            "epilogue": _mode(contract, epilogue, variant, fused),
            "result": result,
            "buffers": buffers,
            "completion": completion,
            "lanes": lanes,
            **own,
        }


def _as_plan(options: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "view": options["result"] == "view",
        "buffers": options["buffers"],
        "send_complete": options["completion"] == "receive_and_send",
        "common": False,
    }


def _mode(contract: EpilogueContract, epilogue: Epilogue, variant: Variant, fused: bool) -> str:
    """The epilogue's own name in this form, or the pair with the one that has the other phase."""
    other = asked.companion(epilogue)
    kinds = [phase.name for phase in variant.of(2).phases]
    names = [contract.epilogue if kind in epilogue.phases else other for kind in kinds]
    mode = "+".join(dict.fromkeys(names))
    return f"{'fused' if fused else 'split'}-{mode}" if kinds[0] in epilogue.phases else mode


def _run(
    contract: EpilogueContract,
    variant: Variant,
    options: Mapping[str, Any],
    group: Any,
    world: int,
) -> None:
    """All patterns of rows through one operation."""
    case = Case(
        (), asked.N, _K, torch.bfloat16, torch.float32,
        operation=variant.operation, extent=variant.options.get("extent"),
    )  # fmt: skip
    operation = trials.operation_for(
        case, max(_ROWS), group=group, transport=contract.transport, backend=contract.backend,
        chunks=_CHUNKS, timeout_s=LIMIT_S, device=contract.device, **options,
    )  # fmt: skip
    what = f"{variant}, " + ", ".join(f"{name} {value}" for name, value in options.items())
    try:
        with _quiet():
            operation.prepare()
    except Unsupported:
        epilogue = cast(Epilogue, plugins.find("epilogue", contract.epilogue))
        require(not asked.is_owed(epilogue, variant, _as_plan(options)), f"{what} is refused")
        return
    with operation:
        _call_all(operation, case, options, world, what)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without the warning that a wire dtype rounds."""
    log = logging.getLogger("gemmlink")
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(before)


def _call_all(
    operation: Prepared, case: Case, options: Mapping[str, Any], world: int, what: str
) -> None:
    view = options["result"] == "view"
    kept: list[trials.Part] = []
    for turn, rows in enumerate(_patterns(world, case.operation)):
        now = replace(case, rows=rows, seed=turn)
        found = trials.called(
            operation, now, rows=rows if view else None, wire_dtype=options.get("wire_dtype")
        )
        for part in found:
            _compare(part, f"{what}, call {turn + 1} with rows {rows}")
        if view and options["completion"] == "receive_and_send":
            found[0].got.fill_(torch.nan)  # allowed, and must not reach anybody
        kept += found[view:]
    for part in kept:
        _compare(part, f"{what}, what was kept over later calls")


def _patterns(world: int, operation: str) -> Iterator[tuple[int, ...]]:
    """The same M everywhere, growing and shrinking, then every mix; twice, so slots are reused."""
    for _ in range(2 if operation == "all_gather" else 1):
        for rows in (7, 1, 7, 0, 7):
            yield (rows,) * world
        for shift in range(3 if operation in trials.RAGGED else 0):
            yield tuple(_ROWS[(rank + shift) % 3] for rank in range(world))


def _compare(part: trials.Part, what: str) -> None:
    wrong = part.wrong()
    require(wrong is None, f"{what}: {wrong}")
