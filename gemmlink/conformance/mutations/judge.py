"""Protocols, their mutants, and what comes of each: from the proof, and from the adversary."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain
from multiprocessing import get_context
from typing import Any

from gemmlink.conformance.adversary.case import Case, Request, build
from gemmlink.conformance.adversary.program import Program, compile_case
from gemmlink.conformance.adversary.run import run
from gemmlink.conformance.adversary.sweep import requests
from gemmlink.conformance.mistakes import OF_THE_CALLS, OF_THE_START
from gemmlink.conformance.mutate import NAMED, Mutant, deletions, narrowings, swaps
from gemmlink.conformance.mutations.equivalent import Reasons
from gemmlink.conformance.proof import prove

#: Calls of each protocol: the first, one that meets what it has left, and the one after that.
_CALLS = 3

#: The plan of a protocol, result and lanes apart: as plain as can be.
_PLAIN = {"buffers": 1, "send_complete": False}
_LANES = (("in_order", 1), ("after_drain", 2))

#: Operations whose results are looked at as views, too: one that gathers and one that adds.
_VIEWED = ("all_gather", "reduce_scatter")

#: What may come of a mutant. The last one must not: then the proof is wrong.
VERDICTS = ("adversary+proof", "proof only", "equivalent", "adversary only")


@dataclass(frozen=True)
class Judged:
    """What came of a mutant. ``proof``: the reason of the verdict, None if it is proved.

    ``seed``: the one under which the adversary noticed, or None. ``reason``: why an equivalent one
    is no mistake.
    """

    protocol: str
    kind: str
    name: str
    proof: str | None
    seed: int | None
    nodes: int
    pairs: int
    reason: str = ""

    @property
    def verdict(self) -> str:
        """One of ``VERDICTS``."""
        if self.proof is None:
            return "equivalent" if self.seed is None else "adversary only"
        return "proof only" if self.seed is None else "adversary+proof"


def protocols(only: str = "") -> dict[str, Request]:
    """The request of every protocol whose name contains ``only``."""
    found: dict[str, Request] = {}
    for request in requests(2):
        told: dict[str, Any] = {**request.plan}
        view = told.pop("view", False)
        lanes = (told.pop("lane_order", "in_order"), told.pop("lanes", 1))
        name = _name(request)
        if request.entry or request.options or len(request.epilogues) > 1 or name in found:
            continue
        if told != _PLAIN or lanes not in _LANES or (view and request.operation not in _VIEWED):
            continue
        if only in name:
            found[name] = replace(request, rows=request.rows[:_CALLS])
    return found


def _name(request: Request) -> str:
    form = "fused" if request.fused else "split"
    order = request.plan.get("lane_order")
    lanes = f" {order}" if order else ""
    result = "view" if request.plan.get("view") else "copy"
    return f"{request.operation} {form}-{request.epilogues[0].name}{lanes} {result}"


def mutants(case: Case) -> Iterator[Mutant]:
    """All that are made of a case. A named one is a kind of its own."""
    first = case.lowered[0]
    yield from chain(deletions(first), narrowings(first), swaps(first))
    for mutant in (*NAMED, *OF_THE_START, *OF_THE_CALLS):
        yield replace(mutant, kind=mutant.name)


def judged(name: str, request: Request, seeds: int) -> list[Judged]:
    """What comes of every mutant of a protocol that changes anything."""
    case, found = build(request), []
    reasons = Reasons(case)
    for mutant in mutants(case):
        changed = mutant.of(case)
        if replace(changed, name=case.name) != case:
            found.append(_judge(name, mutant, compile_case(changed), seeds, reasons))
    return found


def _judge(name: str, mutant: Mutant, program: Program, seeds: int, reasons: Reasons) -> Judged:
    verdict = prove(program)
    seed = _noticed(program, seeds)
    why = reasons.of(mutant) if verdict.proved and seed is None else ""
    return Judged(
        name, mutant.kind, mutant.name, verdict.reason, seed, verdict.nodes, verdict.pairs, why
    )


def _noticed(program: Program, seeds: int) -> int | None:
    return next((seed for seed in range(seeds) if run(program, seed).fault is not None), None)


def _one(told: tuple[str, Request, int]) -> list[Judged]:
    return judged(*told)


def table(only: str = "", seeds: int = 10, jobs: int = 1) -> list[Judged]:
    """All mutants of all protocols, each run under at most ``seeds`` seeds."""
    work = [(name, request, seeds) for name, request in protocols(only).items()]
    if jobs == 1:
        return [each for one in work for each in _one(one)]
    with get_context("fork").Pool(jobs) as pool:
        return [each for found in pool.imap(_one, work, chunksize=1) for each in found]
