"""Chooses transport, epilogue and backend, and checks that they fit together.

Every decision leaves a sentence in ``Composition.reasons``, which ``explain`` prints.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch

from gemmlink import plugins
from gemmlink.errors import InvalidArgument, Unavailable, Unsupported
from gemmlink.settings import MAX_CHUNKS, MAX_LANES
from gemmlink.spec.contracts import Backend, Capabilities, Epilogue, Transport
from gemmlink.spec.operations import Operation
from gemmlink.spec.problem import Problem

#: Other names of modes, as the kernels that came before this library call them.
ALIASES: Mapping[str, str] = {
    "split-rccl": "collective",
    "split-lsa-push": "split-push",
    "split-lsa-pull": "split-pull",
    "fused-lsa": "fused-push",
    "split-sdma": "split-lanes",
    "fused-sdma": "fused-lanes",
}

#: What ``auto`` takes for tensors of a kind of device: the first that can be had there.
AUTO_TRANSPORTS: Mapping[str, tuple[str, ...]] = {"cpu": ("shm",), "cuda": ("symm_mem", "ipc")}

# How a fused form cuts where nobody says: rows below which a chunk costs more (one more product,
# one more word per peer) than it can overlap. A 16-bit product may have to widen all of B again.
_CHUNK_ROWS = 128
_CHUNK_ROWS_16_BIT = 512
_DEFAULT_MAX_CHUNKS = 8


@dataclass(frozen=True)
class Choice:
    """What the user asked for.

    The parts are names, objects, ``"module:attribute"`` or ``"auto"``; ``chunks`` may be None. The
    rest is as in ``spec.schedule.Plan``.
    """

    transport: Any = "auto"
    epilogue: Any = "auto"
    backend: Any = "auto"
    chunks: int | None = None
    lanes: int = 1
    buffers: int = 1
    view: bool = False
    send_complete: bool = False
    keep_product: bool = False
    deterministic: bool = True
    bit_identical: bool = False

    def names(self) -> dict[str, Any]:
        """The choice as comparable text, for agreement between ranks."""
        return {
            "transport": name_of(self.transport),
            "epilogue": name_of(self.epilogue),
            "backend": name_of(self.backend),
            "chunks": self.chunks,
            "lanes": self.lanes,
            "buffers": self.buffers,
            "result": "view" if self.view else "copy",
            "completion": "receive_and_send" if self.send_complete else "receive",
            "keep_product": self.keep_product,
            "deterministic": self.deterministic,
            "bit_identical": self.bit_identical,
        }


@dataclass(frozen=True)
class Composition:
    """Three parts that fit, and why. ``transport`` is None if the epilogues need no window.

    ``epilogues`` has one for each phase; ``epilogue`` is the first.
    """

    transport: Transport | None
    epilogues: tuple[Epilogue, ...]
    backend: Backend
    fused: bool
    chunks: int
    reasons: tuple[str, ...]
    lane_order: str = "in_order"
    common: bool = False

    @property
    def epilogue(self) -> Epilogue:
        """That of the first phase, whose form is chosen."""
        return self.epilogues[0]

    @property
    def mode(self) -> str:
        """``fused-push``, ``split-push+pull``, ``collective``: one word for how tiles travel."""
        name = self.epilogue.name
        if len(self.epilogue.forms()) > 1:
            name = f"{'fused' if self.fused else 'split'}-{name}"
        second = self.epilogues[-1].name
        return name if second == self.epilogue.name else f"{name}+{second}"

    @property
    def transport_name(self) -> str:
        """Name of the transport, ``none`` without one."""
        return "none" if self.transport is None else self.transport.name


def name_of(choice: Any) -> str:
    """The name by which a choice is compared between ranks."""
    if isinstance(choice, str):
        return ALIASES.get(choice, choice)
    return str(getattr(choice, "name", repr(choice)))


def compose(problem: Problem, world: int, choice: Choice, operation: Operation) -> Composition:
    """Resolve ``choice`` for ``problem``. Raises an error of ours if the parts do not fit."""
    reasons: list[str] = []
    _check_device(problem, operation)
    backend = _backend(problem, choice, reasons)
    epilogues, fused = _epilogues(problem, world, choice, operation, reasons)
    transport = _transport(problem, choice, epilogues, reasons)
    chunks = _chunks(problem, choice, fused, reasons)
    _check_reuse(choice, epilogues, operation)
    order = _lane_order(transport, epilogues, reasons)
    common = _common(transport, epilogues, choice, operation, reasons)
    return Composition(transport, epilogues, backend, fused, chunks, tuple(reasons), order, common)


def _check_device(problem: Problem, operation: Operation) -> None:
    wires = [phase.wire for phase in operation.phases if phase.wire is not None]
    if problem.device.type != "cpu" and wires:
        raise Unsupported(
            "rows travel in another dtype on CPUs only, so far",
            f"wire_dtype={wires[0]} on {problem.device}",
            "Leave wire_dtype out.",
        )


def _common(
    transport: Transport | None,
    epilogues: tuple[Epilogue, ...],
    choice: Choice,
    operation: Operation,
    reasons: list[str],
) -> bool:
    """Whether all ranks may look at one memory: a result that is only looked at."""
    gathers = len(operation.phases) == 1 and operation.phases[0].name == "gather"
    if transport is None or not gathers or not epilogues[0].needs.common:
        return False
    if not choice.view or choice.send_complete:
        return False
    if transport.probe().common:
        reasons.append(f"common slots: a view over {transport.name} needs no copy at all")
        return True
    return False


def _check_reuse(choice: Choice, epilogues: tuple[Epilogue, ...], operation: Operation) -> None:
    if choice.buffers not in (1, 2):
        raise InvalidArgument("buffers must be 1 or 2", repr(choice.buffers))
    if not 1 <= choice.lanes <= MAX_LANES:
        raise InvalidArgument(f"lanes must be from 1 to {MAX_LANES}", repr(choice.lanes))
    if choice.view and not epilogues[-1].needs.window:
        raise Unsupported(
            "a view shows the own window",
            f"epilogue {epilogues[-1].name!r}, which has none",
            "Use result='copy', or another epilogue.",
        )
    if choice.view and operation.phases[-1].wire is not None:
        raise Unsupported(
            "what travels in another dtype is decoded into the caller's memory",
            "result='view' with a wire_dtype",
            "Use result='copy'.",
        )
    if choice.bit_identical and not choice.deterministic:
        raise InvalidArgument(
            "bit_identical results need sums in a fixed order",
            "bit_identical=True with deterministic=False",
        )


def _lane_order(
    transport: Transport | None, epilogues: tuple[Epilogue, ...], reasons: list[str]
) -> str:
    if transport is None or not any(epilogue.needs.lanes for epilogue in epilogues):
        return "in_order"
    order = transport.probe().lanes[0]
    reasons.append(f"lanes of {transport.name} announce {order.replace('_', ' ')}")
    return order


def _backend(problem: Problem, choice: Choice, reasons: list[str]) -> Backend:
    name = "eager" if choice.backend == "auto" else choice.backend
    backend = cast(Backend, plugins.find("backend", name))
    refusal = backend.supports(problem)
    if refusal is not None:
        raise Unsupported(
            f"backend {backend.name!r} must support the problem", refusal, _others("backend")
        )
    why = "the backend that runs everywhere" if choice.backend == "auto" else "asked for"
    reasons.append(f"backend {backend.name}: {why}")
    return backend


def _epilogues(
    problem: Problem, world: int, choice: Choice, operation: Operation, reasons: list[str]
) -> tuple[tuple[Epilogue, ...], bool]:
    """One epilogue for each phase, and the form of the first."""
    form: bool | None = None
    wanted: list[Any] = [choice.epilogue]
    if choice.epilogue == "auto" and world == 1:
        reasons.append("epilogue collective: world 1 has nothing to send")
        wanted = ["collective"]
    elif choice.epilogue == "auto" and problem.device.type != "cpu" and choice.view:
        wanted = ["push"]
        reasons.append("epilogue push: a view on a device, and one read serves all peers")
    elif choice.epilogue == "auto":
        wanted = ["pull"]
        reasons.append("epilogue pull: each block is copied once, by its reader, or not at all")
    elif isinstance(choice.epilogue, str):
        wanted, form = _split_mode(choice.epilogue)
        reasons.append(f"epilogue {choice.epilogue}: asked for")
    else:
        reasons.append(f"epilogue {name_of(choice.epilogue)}: passed as an object")
    found = [cast(Epilogue, plugins.find("epilogue", each)) for each in wanted]
    epilogues = _one_a_phase(found, choice, operation)
    _check_collective(problem, world, epilogues)
    for phase, epilogue in zip(operation.phases, epilogues, strict=True):
        if phase.name not in epilogue.phases:
            raise Unsupported(
                f"{operation.name} needs an epilogue for its {phase.name} phase",
                f"{epilogue.name!r}, which serves {', '.join(epilogue.phases)}",
            )
    return epilogues, _form(epilogues[0], form, problem, reasons)


def _check_collective(problem: Problem, world: int, epilogues: tuple[Epilogue, ...]) -> None:
    if problem.device.type != "cpu" and world > 1 and not epilogues[0].needs.window:
        raise Unsupported(
            "library collectives serve CPU tensors only, so far",
            f"epilogue {epilogues[0].name!r} for {world} ranks on {problem.device}",
            "Use epilogue='pull', 'push' or 'lanes'.",
        )


def _one_a_phase(
    found: list[Epilogue], choice: Choice, operation: Operation
) -> tuple[Epilogue, ...]:
    phases = len(operation.phases)
    if len(found) > phases:
        raise Unsupported(
            "a pair of epilogues is for operations of two phases",
            f"{choice.epilogue!r} for {operation.name}, which has {phases}",
            "Name one epilogue.",
        )
    epilogues = tuple(found[min(number, len(found) - 1)] for number in range(phases))
    if len({epilogue.needs.window for epilogue in epilogues}) > 1:
        raise Unsupported(
            "all phases of an operation use windows, or none does",
            f"{choice.epilogue!r}",
            "Pair epilogues that need a window.",
        )
    return epilogues


def _split_mode(name: str) -> tuple[list[str], bool | None]:
    """The names in a mode such as ``fused-lanes+pull``, and the form of the first."""
    first, *others = name.split("+")
    text = ALIASES.get(first, first)
    for prefix, fused in (("fused-", True), ("split-", False)):
        if text.startswith(prefix):
            return [text.removeprefix(prefix), *others], fused
    return [text, *others], None


def _form(epilogue: Epilogue, form: bool | None, problem: Problem, reasons: list[str]) -> bool:
    forms = epilogue.forms()
    if form is not None:
        if form not in forms:
            has = "fused" if True in forms else "split"
            raise Unsupported(
                f"epilogue {epilogue.name!r} has only a {has} form",
                f"{'fused' if form else 'split'}-{epilogue.name}",
            )
        return form
    if len(forms) == 1:
        return forms[0]
    if problem.device.type != "cpu":
        reasons.append("split: torch's product is one kernel; cut into chunks it takes longer")
        return False
    reasons.append(
        "split: on CPUs a rank's one thread multiplies and moves, so a fused form overlaps little "
        "and its chunks cost more"
    )
    return False


def _transport(
    problem: Problem, choice: Choice, epilogues: tuple[Epilogue, ...], reasons: list[str]
) -> Transport | None:
    if not epilogues[0].needs.window:
        reasons.append(f"transport none: epilogue {epilogues[0].name} needs no window")
        if choice.transport != "auto":
            plugins.find("transport", choice.transport)  # a wrong name is an error all the same
        return None
    on_cpu = problem.device.type == "cpu"
    transport, capabilities = _probed(problem, choice, reasons)
    if problem.device.type not in capabilities.memory:
        raise Unsupported(
            f"transport {transport.name!r} serves {', '.join(capabilities.memory)} tensors",
            f"tensors on {problem.device.type}",
            _others("transport"),
        )
    if not (capabilities.host_words and (capabilities.host_data or not on_cpu)):
        raise Unsupported(
            "the host must reach the words of a window, and on CPUs its data",
            f"transport {transport.name!r} with host_words={capabilities.host_words}, "
            f"host_data={capabilities.host_data}",
        )
    for epilogue in epilogues:
        if epilogue.needs.lanes and not capabilities.lanes:
            came = f"transport {transport.name!r} without any"
            raise Unsupported(f"epilogue {epilogue.name!r} needs lanes", came)
    reasons.append(f"transport {transport.name}: {_why(problem, choice)}")
    return transport


def _probed(problem: Problem, choice: Choice, reasons: list[str]) -> tuple[Transport, Capabilities]:
    """The transport asked for, or the first of ``auto``'s order that can be had here."""
    auto = choice.transport == "auto"
    names = AUTO_TRANSPORTS.get(problem.device.type, ()) if auto else (choice.transport,)
    for name in names:
        transport = cast(Transport, plugins.find("transport", name))
        try:
            return transport, transport.probe()
        except Unavailable as error:
            if name == names[-1]:
                raise
            reasons.append(f"transport {name}: passed over; {error}")
    raise Unsupported("no transport serves tensors of that device", str(problem.device))


def _why(problem: Problem, choice: Choice) -> str:
    if choice.transport != "auto":
        return "asked for"
    kind = problem.device.type
    where = "CPUs" if kind == "cpu" else "CUDA devices"
    order = ", then ".join(AUTO_TRANSPORTS[kind])
    return f"all ranks compute on {where} of one host; for these auto takes {order}"


def _chunks(problem: Problem, choice: Choice, fused: bool, reasons: list[str]) -> int:
    if choice.chunks is not None:
        # True is an int too, and no number of chunks.
        if type(choice.chunks) is not int or not 1 <= choice.chunks <= MAX_CHUNKS:
            raise InvalidArgument(
                f"chunks must be a whole number from 1 to {MAX_CHUNKS}", repr(choice.chunks)
            )
        reasons.append(f"chunks {choice.chunks}: asked for")
        return choice.chunks
    if choice.bit_identical:
        reasons.append("chunks 1: cut alike in every mode")
        return 1
    if not fused:
        reasons.append("chunks 1: a split form sends when everything is computed")
        return 1
    rows = _chunk_rows(problem)
    chunks = min(_DEFAULT_MAX_CHUNKS, max(2, problem.capacity // rows))
    reasons.append(f"chunks {chunks}: {problem.capacity} rows, at least {rows} a chunk if possible")
    return chunks


def _chunk_rows(problem: Problem) -> int:
    return _CHUNK_ROWS if problem.dtype.itemsize > 2 else _CHUNK_ROWS_16_BIT


def _others(kind: str) -> str:
    names = ", ".join(sorted(entry.name for entry in plugins.entries(kind)))
    return f"Known {kind}s: {names}."


def without_window(composition: Composition, error: Exception) -> Composition:
    """The same problem through the library collective, because no window can be had."""
    collective = cast(Epilogue, plugins.find("epilogue", "collective"))
    reason = f"epilogue collective: {composition.transport_name} could not serve ({error})"
    epilogues = (collective,) * len(composition.epilogues)
    return Composition(
        None, epilogues, composition.backend, False, 1, (*composition.reasons, reason)
    )


def may_fall_back(choice: Choice, error: Exception, device: torch.device) -> bool:
    """Whether a failed set-up may be answered with ``collective``: only where all was left open.

    On devices there is no ``collective`` to fall back on, so far.
    """
    if device.type != "cpu":
        return False
    open_choice = choice.transport == "auto" and choice.epilogue == "auto" and not choice.view
    return open_choice and isinstance(error, Unavailable | Unsupported)
