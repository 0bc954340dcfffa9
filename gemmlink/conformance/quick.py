"""The self-test: small whole-number problems in every mode, compared exactly on every rank.

A *group* is one operation in one mode with one pair of dtypes in one world; its *cases* vary N, K
and the rows of each rank: none anywhere, one, seven, and where ranks may differ a mix; an
all-to-all also how many columns travel. Every prepared operation runs all row patterns one after
the other with fresh inputs, into an output full of NaN, so that what is not delivered and what an
earlier call left behind both show.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from gemmlink import groups
from gemmlink.conformance import devices, served, trials
from gemmlink.conformance.problems import Case
from gemmlink.core.compose import Choice, compose
from gemmlink.errors import InvalidArgument, Unavailable, Unsupported
from gemmlink.perf.contestants import modes_for
from gemmlink.prepared import Prepared
from gemmlink.spec.places import result_shape
from gemmlink.spec.problem import INPUT_DTYPES, Problem, dtype_name

_ROWS = (0, 1, 7)
_CHUNKS = 3
_TIMEOUT_S = 30.0


@dataclass(frozen=True)
class Suite:
    """What to test: epilogues (``all`` for every one), with one transport and one backend.

    Each in every operation that it serves; a pair, ``lanes+pull``, in those of two phases.
    ``device``: of the tensors; library collectives serve those of CPUs only.
    """

    transport: str = "auto"
    epilogues: tuple[str, ...] = ("all",)
    backend: str = "auto"
    device: str = devices.HOST

    def choices(self) -> list[Choice]:
        """Every mode. Three chunks, so that some are empty and some are not."""
        names = modes_for(self.epilogues)
        if self.device != devices.HOST and "all" in self.epilogues:
            names = [name for name in names if served.has_window(name)]
        return [Choice(self.transport, name, self.backend, _CHUNKS) for name in names]


@dataclass(frozen=True)
class Group:
    """The cases of an operation in one mode and world with one pair of dtypes.

    ``reason`` is the first failure's.
    ``unavailable``: what hardware or library is missing, where that is the reason.
    """

    world: int
    operation: str
    mode: str
    transport: str
    backend: str
    dtype: str
    out_dtype: str
    passed: int
    failed: int
    reason: str | None = None
    unavailable: str | None = None

    @property
    def skipped(self) -> bool:
        """Nothing could run, for want of hardware, a library or a form."""
        return not self.passed and not self.failed

    def as_dict(self) -> dict[str, Any]:
        """The row."""
        return {**asdict(self), "skipped": self.skipped, "ok": not self.failed and not self.skipped}

    def line(self) -> str:
        """The row as text."""
        state = f"{self.passed} passed"
        if self.failed:
            state += f", {self.failed} FAILED: {self.reason}"
        if self.skipped:
            state = f"skipped: {self.reason}"
        return (
            f"world {self.world}  {self.operation:<14} {self.mode:<16} "
            f"{self.transport:<8} {self.backend:<8} "
            f"{self.dtype:>8} -> {self.out_dtype:<8}  {state}"
        )


def run(suite: Suite) -> list[Group]:
    """On every rank of the default group: its own view of all groups, in the same order."""
    devices.take(suite.device, groups.resolve(None).rank)
    return [
        _tested(suite, choice, operation, dtype, out_dtype)
        for choice in suite.choices()
        for operation in served.served_by(choice.epilogue)
        for dtype, out_dtype in dtype_pairs()
    ]


def merge(world: int, values: Sequence[Sequence[Group]]) -> list[Group]:
    """Groups of a world: a case has passed if it passed on every rank."""
    return [_worst(world, each) for each in zip(*values, strict=True)]


def refuse_nonsense(suite: Suite, world: int) -> None:
    """Raise ``InvalidArgument`` for names that mean nothing; what cannot be had is a row."""
    problem = Problem(world, 1, 1, torch.float32, torch.float32, torch.device(suite.device))
    for choice in suite.choices():
        names = served.served_by(choice.epilogue)
        if not names:
            raise InvalidArgument(
                "a mode must serve an operation; a pair serves those of two phases",
                str(choice.epilogue),
            )
        for name in names:
            try:
                compose(problem, world, choice, served.operation(name, world, problem.n))
            except (Unavailable, Unsupported):
                continue


def sizes(operation: str, world: int) -> list[tuple[int, int, int | None]]:
    """N, K and the extent of the problems of an operation."""
    if operation != "all_to_all":
        return [(5, 33, None), (8, 0, None)]
    return [(2 * world, 33, None), (2 * world + 1, 33, 2 * world), (3, 33, 0)]


def row_patterns(world: int, operation: str = "all_gather") -> list[tuple[int, ...]]:
    """The M of each rank: all none, all one, all seven, and a mix with every kind of neighbour."""
    same = [(rows,) * world for rows in _ROWS]
    if operation not in trials.RAGGED:
        return same
    mixed = [tuple(_ROWS[(rank + shift) % 3] for rank in range(world)) for shift in (1, 2)]
    return [*same, *mixed]


def dtype_pairs() -> Iterator[tuple[torch.dtype, torch.dtype]]:
    """Every pair of the dtype of the inputs and that of the output."""
    for dtype in INPUT_DTYPES:
        for out_dtype in dict.fromkeys((dtype, torch.float32)):
            yield dtype, out_dtype


def _worst(world: int, ranks: Sequence[Group]) -> Group:
    worst = max(ranks, key=lambda group: group.failed)
    return replace(worst, world=world)


def _tested(
    suite: Suite, choice: Choice, operation: str, dtype: torch.dtype, out_dtype: torch.dtype
) -> Group:
    group = Group(
        0,
        operation,
        str(choice.epilogue),
        str(choice.transport),
        str(choice.backend),
        dtype_name(dtype),
        dtype_name(out_dtype),
        0,
        0,
    )
    world = groups.resolve(None).world
    for n, k, extent in sizes(operation, world):
        case = Case((), n, k, dtype, out_dtype, operation=operation, extent=extent)
        group = _with_size(group, suite, choice, case)
        if group.reason is not None:
            break
    return group


def _with_size(group: Group, suite: Suite, choice: Choice, case: Case) -> Group:
    """``group`` after all row patterns of one N and K through one prepared operation."""
    operation = trials.operation_for(
        case,
        max(_ROWS),
        transport=choice.transport,
        epilogue=choice.epilogue,
        backend=choice.backend,
        chunks=choice.chunks,
        timeout_s=_TIMEOUT_S,
        device=suite.device,
    )
    patterns = row_patterns(operation.group.world, case.operation)
    cases = [replace(case, rows=rows, seed=seed) for seed, rows in enumerate(patterns)]
    try:
        with operation:
            group = _named(group, operation)
            for each in cases:
                _compare(operation, each)
                group = replace(group, passed=group.passed + 1)
    except (Unavailable, Unsupported) as error:
        if not group.passed:
            missing = str(error) if isinstance(error, Unavailable) else None
            return replace(group, reason=str(error), unavailable=missing)
        return _failed(group, cases, error)
    except Exception as error:  # a failure of one mode must not keep the others from being tested
        return _failed(group, cases, error)
    return group


def _named(group: Group, operation: Prepared) -> Group:
    parts = operation.launch.parts
    return replace(
        group, mode=parts.mode, transport=parts.transport_name, backend=parts.backend.name
    )


def _failed(group: Group, cases: Sequence[Case], error: Exception) -> Group:
    """The rest of an operation's cases cannot be trusted after one of them: all count as failed."""
    left = len(cases) - group.passed % len(cases)
    return replace(group, failed=group.failed + left, reason=f"{type(error).__name__}: {error}")


def _compare(operation: Prepared, case: Case) -> None:
    shape, where = _shape(case, operation.group.rank), operation.launch.problem.device
    out = torch.full(shape, torch.nan, dtype=case.out_dtype, device=where)
    found = trials.called(operation, case, out=out)
    if found[0].got is not out:
        raise ValueError("out must be returned")
    for part in found:
        wrong = part.wrong()
        if wrong is not None:
            raise ValueError(f"with rows {case.rows}: {wrong}")


def _shape(case: Case, rank: int) -> tuple[int, int]:
    return result_shape(case.phases(), rank, len(case.rows), case.rows)
