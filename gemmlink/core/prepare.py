"""Sets one operation up on all ranks of a group. Collective; the only part that may take long.

Order: every rank says what it was asked for and all compare; each composes and all compare again;
the transport opens and gives a window; the window is proved to move bytes. Whatever fails on one
rank is told to all, and all raise.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

import gemmlink
from gemmlink.core.compose import Choice, Composition, compose, may_fall_back, without_window
from gemmlink.core.interpret import HostProgram
from gemmlink.core.launch import Launch
from gemmlink.core.library import Gloo
from gemmlink.core.memory import Memory, areas_used
from gemmlink.core.prove import prove, reach
from gemmlink.groups import WatchedGroup
from gemmlink.rendezvous import agree, check_equal
from gemmlink.spec import operations
from gemmlink.spec.contracts import Group, Session, Window
from gemmlink.spec.operations import Operation
from gemmlink.spec.problem import Problem, dtype_name
from gemmlink.spec.schedule import Plan, Schedule, chain
from gemmlink.spec.window import WindowLayout
from gemmlink.transport.liveness import process

_Ways = tuple[Callable[..., HostProgram], type[Launch]]
#: ``_ways``, but for the window.
_FindsWays = Callable[[Window | None], _Ways]

_log = logging.getLogger("gemmlink")

_ASKED = (
    "version",
    "operation",
    "n",
    "k",
    "dtype",
    "out_dtype",
    "device",
    "transport",
    "epilogue",
    "backend",
    "chunks",
    "lanes",
    "buffers",
    "result",
    "completion",
    "extent",
    "wire_dtype",
    "keep_product",
    "deterministic",
    "bit_identical",
)
_COMPOSED = ("mode", "transport", "backend", "chunks", "schedule", "window bytes")


@dataclass(frozen=True)
class Request:
    """What one rank wants to set up. ``timeout_s`` limits each call, ``prepare_timeout_s`` this.

    ``options``: further arguments of the operation, as ``spec.operations`` takes them.
    """

    operation: str
    problem: Problem
    choice: Choice
    timeout_s: float
    prepare_timeout_s: float
    options: Mapping[str, Any] = field(default_factory=dict)

    def for_world(self, world: int) -> Operation:
        """The operation as phases. Raises ``InvalidArgument`` for options that make none."""
        made: Operation = getattr(operations, self.operation)(world, self.problem.n, **self.options)
        return made

    def record(self) -> dict[str, Any]:
        """The request as comparable values."""
        problem = self.problem
        return {
            "version": gemmlink.__version__,
            "operation": self.operation,
            "n": problem.n,
            "k": problem.k,
            "dtype": dtype_name(problem.dtype),
            "out_dtype": dtype_name(problem.out_dtype),
            "device": problem.device.type,
            "extent": self.options.get("extent"),
            "wire_dtype": str(self.options.get("wire")),
            **self.choice.names(),
            "capacity": problem.capacity,
        }


def prepare(
    group: Group, request: Request, key: str, on_stall: Callable[[], None] | None = None
) -> Launch:
    """Collective. All ranks get a ``Launch`` for the same composition, or all raise.

    The capacity becomes the largest that any rank asked for.
    """
    watched = WatchedGroup(group, on_stall)
    limit = request.prepare_timeout_s
    asked = agree(watched, f"{key}/ask", lambda: {**request.record(), **_context(request)}, limit)
    check_equal(asked, _ASKED, request.operation)
    capacity = max(int(record["capacity"]) for record in asked)
    request = replace(request, problem=replace(request.problem, capacity=capacity))
    ways = partial(_ways, request, forks=not _is_shared(asked, group.rank))
    parts = _composed(watched, request, key)
    try:
        return _open(group, watched, request, parts, ways, key)
    except Exception as error:
        if not may_fall_back(request.choice, error, request.problem.device):
            raise
        _log.warning("gemmlink falls back to the library collective: %s", error)
        parts = without_window(parts, error)
        return _open(group, watched, request, parts, ways, f"{key}/fallback")


def schedule_for(request: Request, parts: Composition, rank: int, world: int) -> Schedule:
    """The schedule of ``rank``, all phases of it."""
    choice, phases = request.choice, request.for_world(world).phases
    plan = Plan(
        rank,
        world,
        parts.chunks,
        parts.fused,
        view=choice.view,
        buffers=choice.buffers,
        send_complete=choice.send_complete,
        lanes=choice.lanes,
        lane_order=parts.lane_order,
        common=parts.common,
        keep=choice.keep_product,
        phases=len(phases),
    )
    made = []
    for number, (phase, epilogue) in enumerate(zip(phases, parts.epilogues, strict=True)):
        fused = parts.fused if number == 0 else epilogue.forms()[0]
        made.append(epilogue.schedule(phase, replace(plan, phase=number, fused=fused)))
    return chain(made)


def _composed(group: Group, request: Request, key: str) -> Composition:
    made: list[Composition] = []

    def part() -> dict[str, Any]:
        operation = request.for_world(group.world)
        made.append(compose(request.problem, group.world, request.choice, operation))
        parts = made[0]
        return {
            "mode": parts.mode,
            "transport": parts.transport_name,
            "backend": parts.backend.name,
            "chunks": parts.chunks,
            "schedule": schedule_for(request, parts, 0, group.world).digest(),
            "window bytes": _layout(request, parts, group.world).nbytes,
        }

    records = agree(group, f"{key}/compose", part, request.prepare_timeout_s)
    check_equal(records, _COMPOSED, request.operation)
    return made[0]


def _layout(request: Request, parts: Composition, world: int) -> WindowLayout:
    operation = request.for_world(world)
    schedules = [schedule_for(request, parts, rank, world) for rank in range(world)]
    return WindowLayout(
        world,
        parts.chunks,
        areas_used(operation, schedules, request.problem),
        request.choice.buffers,
        phases=len(operation.phases),
        parts=max(len(phase.routes) for phase in operation.phases),
    )


def _open(
    owner: Group, group: Group, request: Request, parts: Composition, ways: _FindsWays, key: str
) -> Launch:
    limit = request.prepare_timeout_s
    layout = _layout(request, parts, group.world)
    session: Session | None = None
    window: Window | None = None
    try:
        if parts.transport is not None:
            session = parts.transport.open(
                group, key=f"{key}/{parts.transport.name}", timeout_s=limit
            )
            window = _window(session, layout, parts.common)
            name = parts.transport.name
            agree(group, f"{key}/reach", lambda: _reached(window, name), limit)
            prove(
                group,
                session,
                window,
                layout,
                transport=name,
                common=parts.common,
                key=key,
                timeout_s=limit,
            )
        return _bind(owner, group, request, parts, ways, layout, session, window, key)
    except BaseException:
        if session is not None:
            session.close()
        raise


def _is_host(device: torch.device) -> bool:
    """Whether the host walks the schedule; elsewhere it is enqueued."""
    return device.type == "cpu"


def _window(session: Session, layout: WindowLayout, common: bool) -> Window:
    # Transports that share nothing need not know the second argument.
    return session.window(layout.nbytes, layout.data) if common else session.window(layout.nbytes)


def _reached(window: Window, transport: str) -> dict[str, Any]:
    reach(window, transport)
    return {}


def _bind(
    owner: Group,
    group: Group,
    request: Request,
    parts: Composition,
    ways: _FindsWays,
    layout: WindowLayout,
    session: Session | None,
    window: Window | None,
    key: str,
) -> Launch:
    schedule = schedule_for(request, parts, group.rank, group.world)
    operation = request.for_world(group.world)
    programs: list[HostProgram] = []
    program, make = ways(window)

    def bind() -> dict[str, Any]:
        memory = Memory(operation, schedule, request.problem, layout, window)
        merge = not request.choice.bit_identical
        programs.append(program(schedule, memory, parts.backend, merge))
        return {}

    agree(group, f"{key}/bind", bind, request.prepare_timeout_s)
    _log.info("%s as %s: %s", key, parts.mode, "; ".join(parts.reasons))
    library = Gloo(owner, f"{key}/gloo", request.timeout_s) if window is None else None
    launch = make(
        group=owner,
        request=request.record(),
        operation=operation,
        problem=request.problem,
        parts=parts,
        schedule=schedule,
        program=programs[0],
        layout=layout,
        session=session,
        window=window,
        library=library,
        channel=key,
        timeout_s=request.timeout_s,
    )
    if make is not Launch:  # on all ranks before any of them may call
        agree(group, f"{key}/rehearse", launch.rehearse, request.prepare_timeout_s)
    return launch


def _context(request: Request) -> dict[str, Any]:
    """What two ranks have in common if streams of theirs may stand in each other's way."""
    return {**process(), "index": request.problem.device.index}


def _is_shared(asked: list[dict[str, Any]], rank: int) -> bool:
    """Whether another rank is a thread of the same process, on the same device."""
    places = [[record[name] for name in ("pid", "pids", "index")] for record in asked]
    return places.count(places[rank]) > 1


def _ways(request: Request, window: Window | None, forks: bool) -> _Ways:
    """What binds a schedule and what calls it: a host walks it, for a device it is enqueued."""
    if window is None or _is_host(request.problem.device):
        return HostProgram, Launch
    from gemmlink.core.device.build import device_program
    from gemmlink.core.device.launch import DeviceLaunch

    return partial(device_program, timeout_s=request.timeout_s, forks=forks), DeviceLaunch
