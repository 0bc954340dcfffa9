"""Measures every contestant for a problem on all ranks at once.

Protocol
    - Contestants are made first (windows, contexts, buffers), for exactly this M, N and K, and the
      inputs lie ready: nothing is allocated or agreed on inside the timing.
    - A row says which mode *ran* (from the composition in force), not which was asked for.
    - Validation stands outside the timing. Before it: whole numbers, compared exactly (``exact``).
      After it: normal numbers that differ from those of the timed calls, compared by relative L2
      (``rel_l2``) with a limit derived from dtype and K. The output is filled with NaN before
      each, so what is not delivered shows as NaN, and what was left by an earlier call is wrong.
      ``ok`` needs both, with one exception: torch's own reduction of 16-bit sums may round in
      between and so err by more than our limit. It stays in the race, and its row says so.
    - Rounds are interleaved: in each round every contestant gets one burst, in an order that is
      random and equal on all ranks. Before a burst ranks meet in a barrier, outside the timing. A
      burst is one warm-up call and ``samples`` timed calls. Bare products meet before every call,
      as nothing else holds them together.
    - A call lasts as long as on its slowest rank. A round's time is the median of its calls, a
      contestant's the median over rounds. ``spread`` is the distance between the
      quartiles of the rounds over that median: one round that a neighbour spoiled does not count.
    - ``gemm_us``: the fastest product of this run (every torch spelling and the backend), all ranks
      multiplying at once. ``comm_us``: the fastest way to move the same bytes (the library, and
      stores into peers' windows; sums move unsummed). ``bound_us`` is the larger of the two.
      ``unfused_us``: the best torch spelling with the library's collective (see ``rivals``).
      ``best_split_us``: the fastest complete split mode other than ``collective``.
    - A contestant that fails on any rank is dropped on all, and its row gives the reason.

Traps, and what is done about them
    - A neighbour on the machine costs ten per cent and changes the ranking: hence interleaving, the
      spread, and a warning when the machine is not idle.
    - A hot cache: all calls of a shape use the same inputs, so operands that fit the last-level
      cache stay there, for every contestant alike. Weights are larger than that in real use.
    - A path that fell back to another: the label comes from what ran; an explicit choice never
      falls back.
    - More ranks than processors: moving and multiplying then compete for the same cores, products
      alone are slowed down too, and nothing can reach ``bound_us``. Ranks that run free drift
      apart, and the slowest looks slower than the same work in step: hence the extra meetings.
    - ``bound_us`` is measured, so a mode may lie below it by as much as the spreads say.
    - Conclusions from one M: measure the shapes that will be used.
"""

from __future__ import annotations

import json
import logging
import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.distributed as dist

from gemmlink import groups
from gemmlink.conformance.problems import Case, relative_l2
from gemmlink.core.compose import Choice
from gemmlink.errors import Unavailable, Unsupported
from gemmlink.perf.contestants import bare
from gemmlink.perf.field import Contestant, Field, Label, Role, Truth
from gemmlink.perf.modes import Mode, asked_label, modes_for
from gemmlink.rendezvous import next_key
from gemmlink.spec.problem import Problem

_log = logging.getLogger("gemmlink")

#: A reason that begins so means: not measured, for want of something; nothing was wrong.
SKIPPED = "skipped: "

_MEET_S = 300.0


@dataclass(frozen=True)
class Plan:
    """What to measure. Shapes are ``(M, N, K)`` with M rows on every rank.

    Where products are added, K is each rank's own. ``extent`` is for an all-to-all.
    """

    shapes: tuple[tuple[int, int, int], ...]
    dtype: torch.dtype
    out_dtype: torch.dtype
    epilogues: tuple[str, ...] = ("all",)
    transport: str = "auto"
    backend: str = "auto"
    chunks: tuple[int | None, ...] = (None,)
    results: tuple[str, ...] = ("copy",)
    rounds: int = 5
    samples: int = 5
    seed: int = 0
    operation: str = "all_gather"
    extent: int | None = None

    def problem(self, shape: tuple[int, int, int]) -> Problem:
        """The problem of one shape."""
        m, n, k = shape
        return Problem(n, k, m, self.dtype, self.out_dtype, torch.device("cpu"))

    def choices(self) -> list[Choice]:
        """Every combination of epilogue, chunks and result, in the order of the rows."""
        return [
            Choice(self.transport, name, self.backend, chunks, view=result == "view")
            for name in modes_for(self.epilogues)
            for chunks in self.chunks
            for result in self.results
        ]


@dataclass
class Measured:
    """One contestant on one rank. ``rounds_us``: for each round, the time of each timed call.

    ``note``: what must be said of it although it is right.
    """

    role: Role
    label: Label
    rounds_us: list[list[float]] = field(default_factory=list)
    rel_l2: float | None = None
    exact: bool = False
    reason: str | None = None
    note: str | None = None


def measure(plans: Sequence[Plan]) -> list[list[list[Measured]]]:
    """On every rank of the default group: for each plan a list for each shape.

    Orders are the same on all ranks.
    """
    return [[_Run(plan, shape).results() for shape in plan.shapes] for plan in plans]


@dataclass
class _Entrant:
    """A contestant, or what is known of one that could not be made, and its results so far."""

    measured: Measured
    contestant: Contestant | None

    @property
    def running(self) -> Contestant | None:
        """The contestant if nothing is wrong with it so far."""
        return self.contestant if self.measured.reason is None else None


class _Run:
    """All contestants of one shape, on one rank."""

    def __init__(self, plan: Plan, shape: tuple[int, int, int]) -> None:
        self._plan = plan
        self._group = groups.resolve(None)
        self._field = Field(self._group, plan.problem(shape), plan.operation, plan.extent)
        self._entrants: list[_Entrant] = []

    def results(self) -> list[Measured]:
        """Make, check, time, check again."""
        case, seed = self._field.case, self._plan.seed * 10
        try:
            self._enter()
            self._check(case("integers", seed + 1))
            self._time(case("normal", seed + 2))
            self._check(case("normal", seed + 3))
        finally:
            for entrant in self._entrants:
                if entrant.contestant is not None:
                    entrant.contestant.close()
        return [entrant.measured for entrant in self._entrants]

    def _enter(self) -> None:
        plan, field = self._plan, self._field
        for choice in plan.choices():
            self._admit(partial(Mode, field, choice), "mode", asked_label(choice, field))
        for maker in bare(field, plan.backend, plan.transport):
            nobody = Label("", "none", False, "none", "none", 0, False)
            self._admit(maker, "move", nobody)

    def _admit(self, make: Callable[[], Contestant], role: Role, label: Label) -> None:
        made: list[Contestant] = []
        reason = self._anywhere(_attempt(lambda: made.append(make())))
        if made:
            role, label = made[0].role, made[0].label
        measured = Measured(role, label, reason=reason)
        self._entrants.append(_Entrant(measured, made[0] if made else None))

    # Checking.

    def _check(self, case: Case) -> None:
        truth = Truth(self._field, case)
        self._load(case, truth)
        for entrant in self._entrants:
            if entrant.running is not None:
                reason = _attempt(partial(self._check_one, entrant, case, truth))
                entrant.measured.reason = self._anywhere(reason)

    def _load(self, case: Case, truth: Truth | None) -> None:
        inputs = self._field.inputs(case, truth)
        for entrant in self._entrants:
            if entrant.running is not None:
                entrant.running.load(inputs)

    def _check_one(self, entrant: _Entrant, case: Case, truth: Truth) -> None:
        contestant, measured = entrant.contestant, entrant.measured
        assert contestant is not None, f"checking {measured.label.mode}, which was not made"
        contestant.poison()
        # A peer's store into this rank's window must not be overwritten by the poison.
        dist.barrier()
        contestant.run()
        held = contestant.held(truth)
        found = torch.cat([tensor.reshape(-1) for tensor, _ in held])
        wanted = torch.cat([exact.reshape(-1) for _, exact in held])
        if case.kind == "integers":
            measured.exact = torch.equal(found.double(), wanted)
            if not measured.exact:
                wrong = int((found.double() != wanted).sum())
                raise Wrong(f"{wrong} of {wanted.numel()} elements differ on whole numbers")
            return
        measured.rel_l2 = relative_l2(found, wanted)
        reduces = measured.role == "unfused" and self._field.operation.phases[0].sums
        limit = truth.limit(measured.role, wanted.numel())
        measured.note = judged(measured.rel_l2, limit, self._group.world if reduces else 1)

    # Timing.

    def _time(self, case: Case) -> None:
        self._load(case, None)
        for number in range(self._plan.rounds):
            order = list(self._entrants)
            random.Random(f"{self._plan.seed}/{number}").shuffle(order)
            for entrant in order:
                if entrant.running is not None:
                    self._burst(entrant, entrant.running)
            self._drop_failed()

    def _burst(self, entrant: _Entrant, contestant: Contestant) -> None:
        samples: list[float] = []

        def burst() -> None:
            contestant.run()
            for _ in range(self._plan.samples):
                if contestant.role == "gemm":  # the others wait for their peers in every call
                    dist.barrier()
                start = time.perf_counter_ns()
                contestant.run()
                samples.append((time.perf_counter_ns() - start) / 1000)

        dist.barrier()
        entrant.measured.reason = _attempt(burst)
        if entrant.measured.reason is None:
            entrant.measured.rounds_us.append(samples)

    def _drop_failed(self) -> None:
        reasons = [entrant.measured.reason for entrant in self._entrants]
        for entrant, reason in zip(self._entrants, self._anywhere_each(reasons), strict=True):
            entrant.measured.reason = reason

    # Agreeing.

    def _anywhere(self, reason: str | None) -> str | None:
        return self._anywhere_each([reason])[0]

    def _anywhere_each(self, reasons: list[str | None]) -> list[str | None]:
        """For each position the first reason that any rank has, so that all ranks go on alike."""
        key = next_key(self._group, "bench")
        texts = self._group.all_gather(json.dumps(reasons).encode(), key=key, timeout_s=_MEET_S)
        columns = zip(*(json.loads(text) for text in texts), strict=True)
        return [next((reason for reason in column if reason), None) for column in columns]


class Wrong(Exception):
    """A contestant's result is not what it must be."""


def judged(rel_l2: float, limit: float, roundings: int) -> str | None:
    """None if the error is within the limit, or what must be said of a reduction that rounds more.

    A reduction of the library may round each partial sum, so up to ``roundings`` times where our
    limit has one. Raises ``Wrong`` for everything else, an error that is not a number included.
    """
    if rel_l2 <= limit:
        return None
    said = f"relative L2 {rel_l2:.2e} is above {limit:.2e}"
    if math.isfinite(rel_l2) and rel_l2 <= limit * roundings:
        return f"{said}: the library rounds in between"
    raise Wrong(said)


def _attempt(action: Callable[[], object]) -> str | None:
    """Run ``action``; None, or why it failed: a bench goes on without what fails."""
    try:
        action()
    except (Unavailable, Unsupported) as error:
        return f"{SKIPPED}{error}"
    except Wrong as error:
        return f"wrong result: {error}"
    except Exception as error:
        _log.debug("a contestant failed", exc_info=True)
        return f"{type(error).__name__}: {error}"
    return None
