"""Certifying: the clauses of every part that is named, and the cells of what they compose to.

Every clause and cell becomes a row: ``passed``, ``failed``, ``gap`` (it fails, and the plugin's
file of gaps says so) or ``skipped`` (hardware or a library is missing). A declared gap that passes
is ``failed``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gemmlink.conformance import catalog, devices, gaps, parts, quick, served
from gemmlink.conformance.clauses import RankContract, failures, run_together
from gemmlink.conformance.contract import Contract
from gemmlink.conformance.parts import Mode, Part
from gemmlink.errors import InvalidArgument, Unsupported
from gemmlink.spawn import RankFailed
from gemmlink.spec.contracts import KINDS

#: Limit of a clause on a device, where a set-up takes several times as long, in seconds.
_DEVICE_LIMIT_S = 120.0

STATES = ("passed", "failed", "gap", "skipped")

#: ``on_ranks(world, function, *arguments)``: the values of all ranks.
OnRanks = Callable[..., Any]


@dataclass(frozen=True)
class Row:
    """The outcome of one clause or cell."""

    id: str
    state: str
    reason: str | None = None
    sentence: str = ""

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**asdict(self), "ok": self.state in ("passed", "gap")}

    def lines(self) -> list[str]:
        """For people: a failure shows all that is known of it."""
        first = f"{self.state:<8} {self.id}"
        if self.state == "failed":
            text = (self.reason or "").removeprefix(self.sentence).strip()
            told = [*filter(None, [self.sentence]), *filter(None, text.splitlines())]
            return [first, *(f"         {line}" for line in told)]
        return [f"{first}: {self.reason}" if self.reason else first]


@dataclass(frozen=True)
class Job:
    """What is to be certified: three parts, some of them by default, in these modes."""

    parts: tuple[Part, ...]
    modes: tuple[Mode, ...]
    gaps: Mapping[str, gaps.Gap]
    #: Of the tensors.
    device: str = devices.HOST

    def asked(self, kind: str) -> str:
        """How the part of this kind was named."""
        return next(part.asked for part in self.parts if part.kind == kind)

    @property
    def lacks(self) -> str | None:
        """What the first part that cannot be had needs, or else the tensors."""
        lacking = devices.lacking(self.device)
        return next((part.lacks for part in self.parts if part.lacks), lacking)


def plan(
    transport: str | None = None,
    epilogues: Sequence[str] = (),
    backend: str | None = None,
    file: Path | None = None,
    device: str | None = None,
) -> Job:
    """The job for the parts that are named; ``file`` in place of the plugins' own gaps.

    ``epilogues`` are modes of one epilogue, ``fused-mine`` and the like, or its name alone;
    ``device`` is by default one that the transport serves. Raises ``InvalidArgument`` for unknown
    names and gaps, ``Unsupported`` for what cannot compose.
    """
    where = device or devices.served_by(transport)
    found = (
        _part("transport", transport, where),
        _part("epilogue", _one_epilogue(epilogues), where),
        _part("backend", backend, where),
    )
    modes = _modes(found, epilogues)
    wanted = [part for part in found if part.named]
    return Job(found, modes, _declared(wanted, modes, file), where)


def run(job: Job, on_ranks: OnRanks) -> list[Row]:
    """Every row, clauses first."""
    return [*all_clauses([job])[0], *cells(job, on_ranks)]


def all_clauses(jobs: Sequence[Job]) -> list[list[Row]]:
    """For each job the contracts of the parts that were named, on one set of rank processes."""
    made = [
        [each for part in job.parts if part.named for each in _contracts(job, part)] for job in jobs
    ]
    ranked = [
        each
        for contracts in made
        for lacks, each in contracts
        if lacks is None and issubclass(each, RankContract)
    ]
    if ranked:
        run_together(*ranked)
    return [
        [_judged(row, job.gaps) for lacks, each in contracts for row in _told(each, lacks)]
        for job, contracts in zip(jobs, made, strict=True)
    ]


def cells(job: Job, on_ranks: OnRanks) -> list[Row]:
    """The composition in every mode, with every pair of dtypes, in every world."""
    if job.lacks is not None:
        names = catalog.cell_ids({mode.name: mode.operations for mode in job.modes})
        return [_judged(_row(name, None, job.lacks), job.gaps) for name in names]
    return [
        _judged(row, job.gaps)
        for world in catalog.WORLDS
        for row in _cells(job, list(job.modes), world, on_ranks)
    ]


def count(rows: Sequence[Row]) -> dict[str, int]:
    """Rows by state."""
    return {state: sum(row.state == state for row in rows) for state in STATES}


# What is to be done.


def _one_epilogue(asked: Sequence[str]) -> str | None:
    """Ids say nothing of which epilogue is meant, so a report is about one."""
    names = {served.bare(each)[0] for each in asked}
    if len(names) > 1:
        raise InvalidArgument(
            "one epilogue is certified at a time",
            ", ".join(sorted(names)),
            "Run the command for each, or with --quick for their cells alone.",
        )
    name = names.pop() if names else None
    if name is not None and "+" in name:
        raise InvalidArgument(
            "a part is certified alone",
            f"the pair {name!r}",
            f"Run its cells: --quick --epilogue {name}",
        )
    return name


def _part(kind: str, asked: str | None, device: str) -> Part:
    if asked is not None:
        return parts.describe(kind, asked, device=device)
    if kind == "epilogue":
        return parts.every_epilogue(device)
    return parts.describe(kind, parts.default(kind, device), named=False, device=device)


def _modes(found: Sequence[Part], asked: Sequence[str]) -> tuple[Mode, ...]:
    """Lanes are a capability: without them the modes that need them are not asked for."""
    transport, epilogue, _ = found
    _refuse_other_memory(transport)
    lanes = transport.capabilities.get("lanes") != "none"
    if epilogue.named:
        wanted = [] if epilogue.lacks else asked
        if transport.device != devices.HOST and not all(map(served.has_window, wanted)):
            raise Unsupported(
                "library collectives serve CPU tensors only, so far",
                f"epilogue {epilogue.name!r} on {transport.device}",
            )
        modes = [mode for each in wanted for mode in parts.modes_of(each)]
        if not lanes and any(mode.lanes for mode in modes):
            raise Unsupported(
                f"epilogue {epilogue.name!r} needs lanes",
                f"transport {transport.name!r} without any",
            )
        return tuple(dict.fromkeys(modes))
    names = parts.epilogues(transport.device)
    modes = [mode for name in names for mode in parts.modes_of(name)]
    return tuple(mode for mode in modes if lanes or not mode.lanes)


def _refuse_other_memory(transport: Part) -> None:
    memory = transport.capabilities.get("memory", transport.device)
    if transport.device not in memory.split(", "):
        raise Unsupported(
            f"transport {transport.name!r} serves {memory} tensors",
            f"tensors on {transport.device}",
            "Leave --device out, or name another transport.",
        )


def _declared(
    wanted: Sequence[Part], modes: Sequence[Mode], file: Path | None
) -> dict[str, gaps.Gap]:
    """The gaps of these parts by id: each file counts for its own part, and for cells."""
    found: dict[str, gaps.Gap] = {}
    for part in wanted:
        path = file or gaps.beside(part.module)
        if file is None and not path.is_file():
            continue
        lines = gaps.read(path).values()
        _refuse_unknown(lines, modes)
        for gap in lines:
            kind = gap.id.partition("/")[0]
            if kind in (part.kind, "cell"):
                _refuse_of_built_in(gap, part, wanted)
                found[gap.id] = gap
    return found


def _refuse_unknown(lines: Any, modes: Sequence[Mode]) -> None:
    built_in = [mode for e in parts.built_in("epilogue") for mode in parts.modes_of(e.name)]
    names = {mode.name: mode.operations for mode in (*built_in, *modes)}
    candidates = [*catalog.all_clause_ids(), *catalog.cell_ids(names)]
    gaps.refuse_unknown(lines, lambda name: catalog.is_known(name, names), candidates)


def _refuse_of_built_in(gap: gaps.Gap, part: Part, wanted: Sequence[Part]) -> None:
    cell = gap.id.startswith("cell/")
    if part.built_in and (not cell or all(other.built_in for other in wanted)):
        raise InvalidArgument(
            "a part that is built in has no gaps, except hardware or a library that is missing",
            f"{gap.id} at {gap.where}",
            "What is missing is noticed without a line.",
        )


# Running it.


def _contracts(job: Job, part: Part) -> list[tuple[str | None, type[Contract]]]:
    """Classes for the contracts of a part, each with what is lacking to run it."""
    values: dict[str, Any] = {kind: job.asked(kind) for kind in KINDS if kind != "epilogue"}
    values["__module__"] = __name__
    values["device"] = job.device
    if job.device != devices.HOST:
        values["clause_limit_s"] = _DEVICE_LIMIT_S
    if part.kind == "epilogue":
        values["epilogue"] = part.asked
    lacks = job.lacks if part.kind == "epilogue" else part.lacks or devices.lacking(job.device)
    made: list[tuple[str | None, type[Contract]]] = []
    for contract in catalog.CONTRACTS[part.kind]:
        if contract.section == "transport/lane" and part.capabilities.get("lanes") == "none":
            continue  # a capability, which the header tells
        made.append((lacks, type(f"{contract.__name__} of {part.asked}", (contract,), values)))
    return made


def _told(contract: type[Contract], lacks: str | None) -> list[Row]:
    failed = failures(contract) if lacks is None else {}
    return [
        _row(name, failed.get(method), lacks, catalog.sentence(contract, method))
        for name, method in catalog.clause_ids(contract).items()
    ]


def _cells(job: Job, modes: list[Mode], world: int, on_ranks: OnRanks) -> list[Row]:
    """The cells of these modes in one world, on one set of ranks unless that ends before its time.

    Then the modes run one by one, so that one of them costs the others nothing.
    """
    arguments = tuple(mode.argument for mode in modes)
    suite = quick.Suite(job.asked("transport"), arguments, job.asked("backend"), job.device)
    names = [
        catalog.cell_id(operation, mode.name, pair, world)
        for mode in modes
        for operation in mode.operations
        for pair in catalog.pairs()
    ]
    try:
        groups = quick.merge(world, on_ranks(world, quick.run, suite))
    except RankFailed as error:
        if len(modes) == 1:
            return [_row(name, str(error)) for name in names]
        return [row for mode in modes for row in _cells(job, [mode], world, on_ranks)]
    return [
        _row(name, None if group.unavailable else group.reason, group.unavailable)
        for name, group in zip(names, groups, strict=True)
    ]


def _row(name: str, failed: str | None, lacks: str | None = None, sentence: str = "") -> Row:
    if lacks is not None:
        return Row(name, "skipped", lacks, sentence)
    return Row(name, "passed" if failed is None else "failed", failed, sentence)


def _judged(row: Row, declared: Mapping[str, gaps.Gap]) -> Row:
    """A row in the light of the gaps."""
    gap = declared.get(row.id)
    if gap is None or row.state == "skipped":
        return row
    if row.state == "failed":
        return Row(row.id, "gap", gap.reason, row.sentence)
    return Row(row.id, "failed", gap.passes(), row.sentence)
