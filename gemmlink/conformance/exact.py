"""Runs an epilogue in every way it offers, on ranks, with whole numbers: results must be equal."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist

from gemmlink import plugins
from gemmlink.conformance.clauses import LIMIT_S, Desk, require
from gemmlink.conformance.problems import Case
from gemmlink.errors import Unsupported
from gemmlink.groups import SELF
from gemmlink.operators import GemmAllGather
from gemmlink.spec.contracts import Epilogue

if TYPE_CHECKING:
    from gemmlink.conformance.epilogues import EpilogueContract

_CHUNKS = 3
_ROWS = (0, 1, 7)
_CASE = Case((), 5, 33, torch.bfloat16, torch.float32)


def run_everywhere(contract: EpilogueContract, desk: Desk, world: int) -> None:
    """Collective: every form, result, number of buffers and completion on the first ranks."""
    group = _first(world, desk)
    if desk.rank < world:
        for options in _options(contract):
            _run(contract, options, group, world)
    desk.meet()


def _first(world: int, desk: Desk) -> Any:
    if world == 1:
        return SELF
    return dist.group.WORLD if world == desk.world else dist.new_group(list(range(world)))


def _options(contract: EpilogueContract) -> Iterator[dict[str, Any]]:
    epilogue = cast(Epilogue, plugins.find("epilogue", contract.epilogue))
    needs = epilogue.needs
    for fused, result, buffers, completion, lanes in itertools.product(
        epilogue.forms(),
        contract.results if needs.window else ("copy",),
        contract.buffers,
        contract.completions,
        (1, 2) if needs.lanes else (1,),
    ):
        yield {
            "epilogue": f"{'fused' if fused else 'split'}-{contract.epilogue}",
            "result": result,
            "buffers": buffers,
            "completion": completion,
            "lanes": lanes,
        }


def _run(contract: EpilogueContract, options: dict[str, Any], group: Any, world: int) -> None:
    """All patterns of rows through one operation."""
    operation = GemmAllGather(
        _CASE.n, _CASE.k, max(_ROWS), _CASE.dtype, _CASE.out_dtype, group=group,
        transport=contract.transport, backend=contract.backend, chunks=_CHUNKS,
        timeout_s=LIMIT_S, **options,
    )  # fmt: skip
    what = ", ".join(f"{name} {value}" for name, value in options.items())
    try:
        operation.prepare()
    except Unsupported:
        plain = options["result"] == "copy" and options["buffers"] == 1
        require(not plain or options["completion"] != "receive", f"{what} is refused")
        return
    with operation:
        kept: list[tuple[torch.Tensor, torch.Tensor]] = []
        for turn, rows in enumerate(_patterns(world)):
            case = replace(_CASE, rows=rows, seed=turn)
            view = options["result"] == "view"
            result = operation(case.a(operation.group.rank), case.b(), rows=rows if view else None)
            _compare(result, case.reference(), f"{what}, call {turn + 1} with rows {rows}")
            if view and options["completion"] == "receive_and_send":
                result.fill_(torch.nan)  # allowed, and must not reach anybody
            elif not view:
                kept.append((result, case.reference()))
        for result, reference in kept:
            _compare(result, reference, f"{what}, a result that was kept over later calls")


def _patterns(world: int) -> Iterator[tuple[int, ...]]:
    """The same M everywhere, growing and shrinking, then every mix; twice, so slots are reused."""
    for _ in range(2):
        for rows in (7, 1, 7, 0, 7):
            yield (rows,) * world
        for shift in range(3):
            yield tuple(_ROWS[(rank + shift) % 3] for rank in range(world))


def _compare(result: torch.Tensor, reference: torch.Tensor, what: str) -> None:
    require(result.shape == reference.shape, f"{what}: shape {tuple(result.shape)}")
    wrong = (result.double() != reference).nonzero()
    if len(wrong):
        at = tuple(wrong[0].tolist())
        raise AssertionError(
            f"{what}: {len(wrong)} of {result.numel()} elements differ, first at {at}: "
            f"{result[at].item()} instead of {reference[at].item()}"
        )
