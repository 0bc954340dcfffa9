"""Every built-in protocol, in every variant, under a short name: what proofs are made about.

A name is ``operation/mode/variant``, such as ``all_reduce/fused-lanes+pull/view-in_order``.

Three calls, M another in each. In the first every chunk of every block or band has rows; in the
second ranks or bands differ and most chunks are empty; in the third one rank has nothing, or no
band. So blocks move over places that others had, in the call before and in the one before that,
which used the same of two buffers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any, cast

import torch

from gemmlink import plugins
from gemmlink.conformance import served
from gemmlink.conformance.adversary.case import Case, Request, build, rows_of, schedule_of
from gemmlink.errors import InvalidArgument, Unsupported
from gemmlink.spec.contracts import Epilogue

OPERATIONS = ("all_gather", "all_to_all", "reduce_scatter", "all_reduce")

#: What lanes promise, from the plainest to the loosest: their order, and how many go to each peer.
_LANES = (("in_order", 1), ("after_drain", 2))


@dataclass(frozen=True)
class Mode:
    """How tiles travel: one epilogue for all phases or one for each, and the form of the first."""

    epilogues: tuple[Epilogue, ...]
    fused: bool

    @property
    def name(self) -> str:
        """As users write it, without a form where there is only one."""
        first = self.epilogues[0]
        form = f"{'fused' if self.fused else 'split'}-" if len(first.forms()) > 1 else ""
        return form + "+".join(epilogue.name for epilogue in self.epilogues)

    @property
    def lanes(self) -> bool:
        """Whether any of its epilogues copies by lanes."""
        return any(epilogue.needs.lanes for epilogue in self.epilogues)

    def serves(self, operation: str) -> bool:
        """Whether its epilogues have all phases of an operation. A pair is for two of them."""
        phases = served.operation(operation, 2, 2).phases
        found = self.epilogues * len(phases) if len(self.epilogues) == 1 else self.epilogues
        return len(found) == len(phases) and all(
            phase.name in epilogue.phases for epilogue, phase in zip(found, phases, strict=True)
        )


@dataclass(frozen=True)
class Protocol:
    """A variant: what is asked of the epilogues of ``mode``, and the calls.

    ``plainest``: the one of its operation and mode that all others add something to.
    """

    mode: Mode
    variant: str
    request: Request
    plainest: bool

    @property
    def name(self) -> str:
        """Operation, mode and variant."""
        return f"{self.request.operation}/{self.mode.name}/{self.variant}"

    def case(self) -> Case:
        """All ranks' schedules, lowered, under this name."""
        return replace(build(self.request), name=self.name)


@dataclass(frozen=True)
class _Variant:
    """``plan`` and ``options`` are those of a ``Request``. ``owed``: may not be refused."""

    name: str
    plan: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    entry: bool = False
    owed: bool = False


def protocols(
    world: int, chunks: int, only: str = "", modes: Iterable[Mode] | None = None
) -> list[Protocol]:
    """All of them at ``world`` ranks whose name contains ``only``; built-in modes by default.

    Fused forms have ``chunks`` chunks; split ones have one, or one for each lane to a peer. What an
    epilogue refuses is left out, unless it is the plainest: then its ``Unsupported`` is raised.
    """
    known = list(built_in() if modes is None else modes)
    return [
        protocol
        for operation in OPERATIONS
        for mode in known
        if mode.serves(operation)
        for protocol in _of(operation, mode, world, chunks, only)
    ]


def built_in() -> list[Mode]:
    """Every form of every built-in epilogue, and every pair of two that use windows."""
    entries = [entry for entry in plugins.BUILT_IN if entry.kind == "epilogue"]
    single = [cast(Epilogue, plugins.find("epilogue", entry.name)) for entry in entries]
    pairs = [
        (one, two)
        for one, two in product(single, single)
        if one is not two and one.needs.window and two.needs.window
    ]
    return [
        Mode(epilogues, fused)
        for epilogues in [*((each,) for each in single), *pairs]
        for fused in epilogues[0].forms()
    ]


def named(names: Sequence[str]) -> list[Mode]:
    """The modes that names stand for, as operations take them; ``all``: the built-in ones.

    A name without a form stands for every form. Raises ``InvalidArgument`` for a name that means
    nothing, ``Unsupported`` for a form that an epilogue has not and for parts that do not pair.
    """
    modes = [mode for name in names for mode in (built_in() if name == "all" else _named(name))]
    return list({mode.name: mode for mode in modes}.values())


def _named(name: str) -> list[Mode]:
    first, *others = name.split("+")
    bare, wanted = served.bare(first)
    found = [cast(Epilogue, plugins.find("epilogue", each)) for each in (bare, *others)]
    forms = found[0].forms()
    if wanted is not None and wanted not in forms:
        raise Unsupported(f"epilogue {found[0].name!r} must have the form asked for", name)
    if len({epilogue.needs.window for epilogue in found}) > 1:
        raise Unsupported("all phases of an operation use windows, or none does", repr(name))
    modes = [Mode(tuple(found), fused) for fused in forms if wanted in (None, fused)]
    if not any(mode.serves(operation) for mode in modes for operation in OPERATIONS):
        raise InvalidArgument("a mode must serve the phases of an operation", repr(name))
    return modes


def _of(operation: str, mode: Mode, world: int, chunks: int, only: str) -> Iterator[Protocol]:
    n, options = _columns(operation, world)
    for number, variant in enumerate(_variants(operation, mode)):
        cut = chunks if mode.fused else variant.plan.get("lanes", 1)
        request = Request(
            operation,
            mode.epilogues,
            mode.fused,
            rows(operation, world, cut),
            variant.plan,
            {**options, **variant.options},
            n,
            cut,
            entry=variant.entry,
        )
        protocol = Protocol(mode, variant.name, request, plainest=number == 0)
        if only in protocol.name and (variant.owed or _is_served(request)):
            yield protocol


def rows(operation: str, world: int, chunks: int) -> tuple[tuple[int, ...], ...]:
    """M of every rank in each of three calls; see above."""
    if not served.operation(operation, world, world).ragged:
        return rows_of([(m,) * world for m in (world * chunks, world + 1, world - 1)])
    even = max(2, chunks)
    ragged = [1 + rank % 2 for rank in range(world)]
    return rows_of([(even,) * world, ragged, (0, *(2,) * (world - 1))])


def _columns(operation: str, world: int) -> tuple[int, dict[str, Any]]:
    """N and options. Two columns a part, one for each tile; of an all-to-all one column stays."""
    if operation == "all_to_all":
        return 2 * world + 1, {"extent": 2 * world}
    return 2, {}


def _variants(operation: str, mode: Mode) -> Iterator[_Variant]:
    """Every combination of what changes the order of events, then what changes something else."""
    if not mode.epilogues[0].needs.window:
        yield from _plain_ones(operation, {}, "copy")
        return
    orders = _LANES if mode.lanes else (("", 1),)
    for view, buffers, complete, (order, lanes) in product(
        (False, True), (1, 2), (False, True), orders
    ):
        plan: dict[str, Any] = {"view": view, "buffers": buffers, "send_complete": complete}
        words = ["view" if view else "copy", "two_buffers" if buffers > 1 else ""]
        words += ["complete" if complete else "", order]
        name = "-".join(word for word in words if word)
        plan |= {"lane_order": order, "lanes": lanes} if order else {}
        yield _Variant(name, plan, owed=not (view or buffers > 1 or complete))
    if operation == "all_gather" and len(mode.epilogues) == 1 and mode.epilogues[0].needs.common:
        yield _Variant("common", {"view": True, "common": True})
        yield _Variant("common-two_buffers", {"view": True, "common": True, "buffers": 2})
    yield from _extra(operation, mode)


def _extra(operation: str, mode: Mode) -> Iterator[_Variant]:
    """What is seen with copied results, one buffer and completion on the receiving side alone."""
    order, lanes = _LANES[0]
    plan = {"lane_order": order, "lanes": lanes} if mode.lanes else {}
    name = f"copy-{order}" if mode.lanes else "copy"
    yield from list(_plain_ones(operation, plan, name))[1:]
    yield _Variant(f"{name}-entry", plan, entry=True)
    if mode.lanes:
        yield _Variant("copy-in_order-two_lanes", {"lane_order": "in_order", "lanes": 2})
        yield _Variant("copy-after_drain-one_lane", {"lane_order": "after_drain", "lanes": 1})


def _plain_ones(operation: str, plan: Mapping[str, Any], name: str) -> Iterator[_Variant]:
    """The plainest, one in the dtype of a wire, and one that keeps the whole product."""
    yield _Variant(name, plan, owed=True)
    if operation in ("all_gather", "all_reduce"):
        yield _Variant(f"{name}-float8", plan, {"wire": torch.float8_e4m3fn})
    if operation == "all_to_all":
        yield _Variant(f"{name}-kept", {**plan, "keep": True})


def _is_served(request: Request) -> bool:
    try:
        schedule_of(request, request.made(), 0)
    except Unsupported:
        return False
    return True
