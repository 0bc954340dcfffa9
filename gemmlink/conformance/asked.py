"""What an epilogue is asked for when it is judged: operations, options and the plans of all ranks.

An epilogue is asked for every operation in which it serves a phase. Where it does not serve all of
them, a built-in one has the other phase, as in a mode ``push+mine``.

Four operations are asked for in every way, and the rest, which differ from these in one respect, in
the plainest ways only.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch

from gemmlink import plugins
from gemmlink.conformance import served
from gemmlink.errors import Unsupported
from gemmlink.spec.contracts import Epilogue
from gemmlink.spec.operations import Operation, Phase
from gemmlink.spec.schedule import Plan, Schedule, chain

_WORLDS = (1, 2, 3)
_CHUNKS = 2
#: Columns, and how many of them travel in an all-to-all that leaves some: multiples of all worlds.
N = 12
_EXTENT = 6
#: Lanes to each peer and their order, from the plainest to the loosest.
_LANES = ((1, "in_order"), (2, "in_order"), (1, "after_drain"), (2, "after_drain"))


@dataclass(frozen=True)
class Variant:
    """An operation with its own options. ``plain``: asked for in the plainest ways only."""

    operation: str
    options: Mapping[str, Any] = field(default_factory=dict)
    keep: bool = False
    plain: bool = False

    def of(self, world: int) -> Operation:
        """The operation as phases."""
        return served.operation(self.operation, world, N, **self.options)

    def __str__(self) -> str:
        words = [f"{name} {value}" for name, value in self.options.items()]
        return ", ".join([self.operation, *words, *(["product kept"] if self.keep else [])])


_FLOAT8 = {"wire": torch.float8_e4m3fn}
VARIANTS = (
    Variant("all_gather"),
    Variant("all_gather", _FLOAT8, plain=True),
    Variant("all_to_all", {"extent": _EXTENT}),
    Variant("all_to_all", {"extent": _EXTENT}, keep=True, plain=True),
    Variant("all_to_all", {"extent": 0}, plain=True),
    Variant("all_to_all", plain=True),
    Variant("reduce_scatter"),
    Variant("all_reduce"),
    Variant("all_reduce", _FLOAT8, plain=True),
)


@dataclass(frozen=True)
class Asked:
    """One operation with one set of options: ``plans[phase][rank]``, ``epilogues[phase]``."""

    variant: Variant
    operation: Operation
    epilogue: Epilogue
    epilogues: tuple[Epilogue, ...]
    plans: tuple[tuple[Plan, ...], ...]
    #: The schedule of each rank, all phases of it.
    schedules: tuple[Schedule, ...]

    def own(self) -> Iterator[tuple[Phase, Plan]]:
        """What the epilogue that is judged is asked for itself."""
        for phase, epilogue, plans in zip(
            self.operation.phases, self.epilogues, self.plans, strict=True
        ):
            if epilogue is self.epilogue:
                yield from ((phase, plan) for plan in plans)

    def where(self, schedule: Schedule) -> str:
        """Whose schedule it is, for people."""
        plan = schedule.plan
        words = [
            "fused" if plan.fused else "split", "view" if plan.view else "copy",
            f"{plan.buffers} buffers", "send complete" if plan.send_complete else "",
            "common" if plan.common else "",
            "" if plan.lane_order == "in_order" else plan.lane_order,
            "" if plan.lanes == 1 else f"{plan.lanes} lanes",
        ]  # fmt: skip
        told = ", ".join(word for word in words if word)
        return f"{self.variant}: rank {plan.rank} of {plan.world} ({told})"


@dataclass(frozen=True)
class Wanted:
    """Operations, results, buffers and completions that must be served."""

    operations: Sequence[str]
    results: Sequence[str]
    buffers: Sequence[int]
    completions: Sequence[str]


def everything(epilogue: Epilogue, wanted: Wanted) -> Iterator[Asked]:
    """All that is asked of an epilogue. What it may refuse and does is left out."""
    for variant in variants(epilogue, wanted.operations):
        for world in _WORLDS:
            for options in _options(epilogue, wanted, variant, world):
                try:
                    asked = _one(epilogue, variant, world, options)
                except Unsupported:
                    if is_owed(epilogue, variant, options):
                        text = f"{variant} in world {world}: the plainest plan is refused"
                        raise AssertionError(text) from None
                    continue
                yield asked


def variants(epilogue: Epilogue, wanted: Sequence[str]) -> Iterator[Variant]:
    """Those of the operations in which the epilogue serves a phase."""
    for variant in VARIANTS:
        kinds = {phase.name for phase in variant.of(2).phases}
        if variant.operation in wanted and kinds & set(epilogue.phases):
            yield variant


def companion(epilogue: Epilogue) -> str:
    """The built-in epilogue that has the phases which this one does not serve."""
    return "push" if epilogue.needs.window else "collective"


def _one(epilogue: Epilogue, variant: Variant, world: int, options: dict[str, Any]) -> Asked:
    operation = variant.of(world)
    other = cast(Epilogue, plugins.find("epilogue", companion(epilogue)))
    epilogues = tuple(
        epilogue if phase.name in epilogue.phases else other for phase in operation.phases
    )
    first = {**options, "keep": variant.keep, "phases": len(operation.phases)}
    if options["fused"] not in epilogues[0].forms():
        first["fused"] = epilogues[0].forms()[0]
    plans = tuple(Plan(rank=rank, world=world, **first) for rank in range(world))
    # The form is chosen for the first phase; a later one has the first form of its epilogue.
    later = [
        tuple(replace(plan, phase=number, fused=each.forms()[0]) for plan in plans)
        for number, each in enumerate(epilogues[1:], start=1)
    ]
    all_plans = (plans, *later)
    schedules = tuple(
        _chained(operation, epilogues, of_rank) for of_rank in zip(*all_plans, strict=True)
    )
    return Asked(variant, operation, epilogue, epilogues, all_plans, schedules)


def _chained(
    operation: Operation, epilogues: Sequence[Epilogue], plans: Sequence[Plan]
) -> Schedule:
    made = zip(operation.phases, epilogues, plans, strict=True)
    return chain([epilogue.schedule(phase, plan) for phase, epilogue, plan in made])


def _options(
    epilogue: Epilogue, wanted: Wanted, variant: Variant, world: int
) -> Iterator[dict[str, Any]]:
    needs, operation = epilogue.needs, variant.of(2)
    gathers = len(operation.phases) == 1 and operation.phases[0].name == "gather"
    encoded = operation.phases[-1].wire is not None
    lanes = _LANES if needs.lanes and world > 1 else _LANES[:1]
    for fused, result, buffers, completion, (number, order), common in itertools.product(
        epilogue.forms(),
        wanted.results if needs.window and not encoded else ("copy",),
        wanted.buffers[:1] if variant.plain else wanted.buffers,
        wanted.completions[:1] if variant.plain else wanted.completions,
        lanes,
        (False, True) if needs.common and gathers else (False,),
    ):
        view, send = result == "view", completion == "receive_and_send"
        if common and (send or not view):
            continue
        if buffers > 1 and (number, order) in _LANES[1:-1]:
            continue  # what more buffers change has been seen with the plainest and the loosest
        yield {
            "chunks": _CHUNKS, "fused": fused, "view": view, "buffers": buffers,
            "send_complete": send, "common": common, "lanes": number, "lane_order": order,
        }  # fmt: skip


def is_owed(epilogue: Epilogue, variant: Variant, options: Mapping[str, Any]) -> bool:
    """Whether it may not be refused: an operation served alone, in its own dtype, plainly."""
    phases = variant.of(2).phases
    alone = all(phase.name in epilogue.phases and phase.wire is None for phase in phases)
    return alone and not (
        options["view"] or options["buffers"] > 1 or options["send_complete"] or options["common"]
    )
