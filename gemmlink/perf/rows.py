"""Rows: what a bench prints, made of what all ranks measured."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from gemmlink.perf.bench import SKIPPED, Measured, Plan
from gemmlink.spec.problem import dtype_name


@dataclass(frozen=True)
class Row:
    """One mode on one problem. Times are microseconds of a call; None where not measured.

    m is rows per rank. ``ratio_unfused`` is ``us / unfused_us`` (below 1: faster than unfused),
    ``ratio_bound`` is ``us / bound_us``; ``spread`` is the distance between the
    quartiles of the rounds, as a share of ``us`` (None for one round). ``backend`` of
    ``unfused`` and ``gemm-only`` is the spelling that was fastest. ``reason`` says why not ``ok``.
    ``result``: whether the mode hands out a copy or a view of the window. ``extent``: that of an
    all-to-all (None: all columns). ``note``: what must be said although the row is right.
    """

    op: str
    world: int
    m: int
    n: int
    k: int
    dtype: str
    out_dtype: str
    transport: str
    epilogue: str
    fused: bool
    backend: str
    mode: str
    chunks: int
    complete: bool
    us: float | None
    unfused_us: float | None
    gemm_us: float | None
    comm_us: float | None
    bound_us: float | None
    best_split_us: float | None
    rel_l2: float | None
    exact: bool
    ok: bool
    ratio_unfused: float | None = None
    ratio_bound: float | None = None
    spread: float | None = None
    reason: str | None = None
    result: str = "copy"
    extent: int | None = None
    note: str | None = None

    @property
    def skipped(self) -> bool:
        """Not measured for want of hardware, a library or a form; nothing was wrong."""
        return (self.reason or "").startswith(SKIPPED)

    def as_dict(self) -> dict[str, Any]:
        """The fields, in order, as JSON knows them."""
        return asdict(self)


FIELDS = tuple(item.name for item in fields(Row))


@dataclass(frozen=True)
class _Merged:
    """A contestant over all ranks."""

    measured: Measured
    us: float | None
    spread: float | None
    rel_l2: float | None
    exact: bool
    ok: bool
    note: str | None


def combine(plan: Plan, world: int, values: Sequence[list[list[Measured]]]) -> list[Row]:
    """Rows of all shapes. ``values[r]`` is what ``bench.measure`` has for this plan on rank r."""
    found: list[Row] = []
    for index, shape in enumerate(plan.shapes):
        merged = [_merge(each) for each in zip(*(value[index] for value in values), strict=True)]
        found += _rows(plan, world, shape, merged)
    return found


def _merge(ranks: Sequence[Measured]) -> _Merged:
    first = ranks[0]
    rounds = [_round(each) for each in zip(*(rank.rounds_us for rank in ranks), strict=False)]
    middle = statistics.median(rounds) if rounds else None
    errors = [rank.rel_l2 for rank in ranks if rank.rel_l2 is not None]
    finite = len(errors) == len(ranks) and all(math.isfinite(error) for error in errors)
    return _Merged(
        measured=first,
        us=middle if first.reason is None else None,
        spread=_quartile_distance(rounds) / middle if middle and len(rounds) > 1 else None,
        rel_l2=max(errors) if finite else None,
        exact=all(rank.exact for rank in ranks),
        ok=all(rank.reason is None for rank in ranks),
        note=next((rank.note for rank in ranks if rank.note), None),
    )


def _round(ranks: Sequence[Sequence[float]]) -> float:
    # Each call as long as on its slowest rank: one that ends on all ranks together, as a mode does,
    # shows that by itself; a bare product would look faster than ranks can be in step.
    slowest: list[float] = [max(call) for call in zip(*ranks, strict=True)]
    return statistics.median(slowest)


def _quartile_distance(rounds: Sequence[float]) -> float:
    low, _, high = statistics.quantiles(rounds, n=4, method="inclusive")
    return high - low


def _rows(
    plan: Plan, world: int, shape: tuple[int, int, int], merged: Sequence[_Merged]
) -> list[Row]:
    m, n, k = shape
    unfused, gemm = _fastest(merged, "unfused"), _fastest(merged, "gemm")
    modes = [each for each in merged if each.measured.role == "mode"]
    gemm_us, comm_us = _time_of(gemm), _time_of(_fastest(merged, "move"))
    common = _Common(
        world=world,
        unfused_us=_time_of(unfused),
        gemm_us=gemm_us,
        comm_us=comm_us,
        bound_us=max(gemm_us, comm_us) if gemm_us is not None and comm_us is not None else None,
        best_split_us=_time_of(_best(modes, _is_split)),
    )
    shown = [each for each in (unfused, gemm, *modes) if each is not None]
    named = {
        "op": plan.operation,
        "m": m,
        "n": n,
        "k": k,
        "dtype": dtype_name(plan.dtype),
        "out_dtype": dtype_name(plan.out_dtype),
        "extent": plan.extent,
    }
    return [_row(each, named, common) for each in shown]


@dataclass(frozen=True)
class _Common:
    """The values that all rows of a problem share."""

    world: int
    unfused_us: float | None
    gemm_us: float | None
    comm_us: float | None
    bound_us: float | None
    best_split_us: float | None


def _row(each: _Merged, named: dict[str, Any], common: _Common) -> Row:
    return Row(
        **named,
        **asdict(each.measured.label),
        **asdict(common),
        us=each.us,
        rel_l2=each.rel_l2,
        exact=each.exact,
        ok=each.ok,
        ratio_unfused=_ratio(each.us, common.unfused_us),
        ratio_bound=_ratio(each.us, common.bound_us),
        spread=each.spread,
        reason=each.measured.reason,
        note=each.note,
    )


def _is_split(each: _Merged) -> bool:
    label = each.measured.label
    return label.complete and not label.fused and label.epilogue != "collective"


def _best(merged: Sequence[_Merged], fits: Callable[[_Merged], bool]) -> _Merged | None:
    timed = [each for each in merged if each.ok and each.us is not None and fits(each)]
    return min(timed, key=lambda each: each.us or 0.0, default=None)


def _fastest(merged: Sequence[_Merged], role: str) -> _Merged | None:
    """The fastest right contestant of a role; if none is right, the first, with its reason."""
    those = [each for each in merged if each.measured.role == role]
    return _best(those, lambda _: True) or (those[0] if those else None)


def _time_of(each: _Merged | None) -> float | None:
    return each.us if each is not None and each.ok else None


def _ratio(us: float | None, base: float | None) -> float | None:
    return us / base if us is not None and base else None


def fastest_mode(rows: Sequence[Row]) -> Row | None:
    """The fastest right and complete row that is a mode of this library."""
    modes = [
        row
        for row in rows
        if row.ok and row.complete and row.us is not None and row.mode != "unfused"
    ]
    return min(modes, key=lambda row: row.us or 0.0, default=None)


def rounded(row: Row) -> Row:
    """The row with times to a nanosecond and ratios to four digits, for printing."""
    changes: dict[str, Any] = {}
    for name in FIELDS:
        value = getattr(row, name)
        if isinstance(value, float) and name != "rel_l2":
            changes[name] = round(value, 3 if name.endswith("us") else 4)
    return replace(row, **changes)
