"""Runs the schedules of all ranks on *names* of elements, in any order that the schedules allow.

Memory holds a number that says which element of which call lies there. Every actor of every rank
is a thread of its own; who goes on next is drawn at random. Whoever reads finds out whether what he
should find lies there, in this very call; whoever writes leaves a mark. So a wait too few, a write
into another's slot, two writers or a forgotten element each show in some order.

It knows the actions of ``spec.schedule`` and the arithmetic of ``spec.places``, and shares nothing
with the interpreter of the library.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from gemmlink.core.compose import Choice, compose
from gemmlink.core.prepare import Request, schedule_for
from gemmlink.spec.operations import Operation
from gemmlink.spec.places import Places, result_shape, sums_into
from gemmlink.spec.problem import Problem
from gemmlink.spec.schedule import (
    LOCAL,
    Action,
    Area,
    Compute,
    Copy,
    Deliver,
    Encode,
    Join,
    Load,
    Region,
    Schedule,
    Set,
    Store,
    Sum,
    Wait,
    Word,
)

_ROWS = 64  # more than any M


@dataclass(frozen=True)
class Setup:
    """What is run: an operation in one mode, and the M of every rank in each call."""

    request: Request
    world: int
    calls: tuple[tuple[int, ...], ...]
    lane_order: str = "in_order"

    @property
    def choice(self) -> Choice:
        return self.request.choice

    @property
    def problem(self) -> Problem:
        return self.request.problem

    def operation(self) -> Operation:
        return self.request.for_world(self.world)

    def schedules(self) -> list[Schedule]:
        """The schedule of every rank."""
        parts = compose(self.problem, self.world, self.choice, self.operation())
        if self.lane_order != parts.lane_order:
            parts = type(parts)(**{**vars(parts), "lane_order": self.lane_order})
        return [schedule_for(self.request, parts, rank, self.world) for rank in range(self.world)]


Key = tuple[int, int, Area, int]  # owner, phase, area, which set of areas


@dataclass
class _Actor:
    """A queue of actions. A lane has one for all calls, any other actor one for each call."""

    rank: int
    todo: list[tuple[int, str, Action | None]]  # call, program, action (None: the program ends)
    value: torch.Tensor = field(default_factory=lambda: torch.empty(0))


class Simulator:
    """``run`` goes through all calls; it raises ``AssertionError`` at the first thing wrong."""

    def __init__(
        self, setup: Setup, seed: int, schedules: Sequence[Schedule] | None = None
    ) -> None:
        self.setup = setup
        self.world, self.n = setup.world, setup.problem.n
        self.operation = setup.operation()
        self.schedules = schedules or setup.schedules()
        self.plan = self.schedules[0].plan
        self.places = [
            Places(phase, self.world, self.plan.chunks, setup.problem.capacity)
            for phase in self.operation.phases
        ]
        self.windows: dict[Key, torch.Tensor] = {}
        #: How often each cell was written and read in a call.
        self.writes: dict[tuple[Key, int], torch.Tensor] = {}
        self.reads: dict[tuple[Key, int], torch.Tensor] = {}
        self.results: dict[tuple[int, int], torch.Tensor] = {}
        self.local: dict[tuple[int, int], torch.Tensor] = {}
        self._local_writes: dict[tuple[int, int], torch.Tensor] = {}
        self._scratch: dict[int, torch.Tensor] = {}
        self._words: dict[tuple[int, Word], int] = defaultdict(int)
        self._ended: set[tuple[int, int, str]] = set()
        self._begun = [0] * self.world
        self._actors: list[_Actor] = []
        self._random = random.Random(seed)

    # Names of elements.

    def names(self, call: int, source: int, rows: range, cols: range) -> torch.Tensor:
        """Elements of ``source``'s product, or of the sum where that is ``world``."""
        first = (call * (self.world + 1) + source) * _ROWS
        row = torch.arange(first + rows.start, first + rows.stop).view(-1, 1)
        return row * self.n + torch.arange(cols.start, cols.stop) + 1

    def named(self, number: int) -> tuple[int, int, int, int]:
        """Call, source, row and column of an element."""
        rows, col = divmod(number - 1, self.n)
        who, row = divmod(rows, _ROWS)
        return *divmod(who, self.world + 1), row, col

    def _names_of(self, region: Region, call: int) -> torch.Tensor:
        phase = self.operation.phases[region.phase]
        rows = self.places[region.phase].product_rows(region, self._rows(call, region.source))
        source = self.world if phase.source == "sum" else region.source
        return self.names(call, source, range(*rows), range(*phase.routes[region.part].cols))

    # Memory.

    def firsts(self, call: int) -> list[int]:
        """First row of each block in an inbox of whole blocks."""
        rows = self.setup.calls[call - 1]
        apart = [rank * self.setup.problem.capacity for rank in range(self.world)]
        return [sum(rows[:rank]) for rank in range(self.world)] if self.plan.view else apart

    def _rows(self, call: int, source: int) -> int:
        return self.setup.calls[call - 1][source]

    def key(self, owner: int, phase: int, area: Area, call: int) -> Key:
        """Where an area lies; one for all ranks where the slots of all windows are one memory."""
        return 0 if self.plan.common else owner, phase, area, call % self.plan.buffers

    def _area(self, key: Key) -> torch.Tensor:
        if key not in self.windows:
            places = self.places[key[1]]
            shape = places.height(key[2]), places.width
            self.windows[key] = torch.zeros(shape, dtype=torch.int64)
        return self.windows[key]

    def _place(self, owner: int, area: Area, region: Region, call: int) -> tuple[Key, slice]:
        places, rows = self.places[region.phase], self._rows(call, region.source)
        first, last = places.product_rows(region, rows)
        at = places.first_row(region, area, rows, self.firsts(call))
        key = self.key(owner, region.phase, area, call)
        end = at + last - first
        assert first == last or 0 <= at <= end <= places.height(area), f"{region} at row {at}"
        return key, slice(at, end) if last > first else slice(0, 0)

    def _mark(
        self, marks: dict[tuple[Key, int], torch.Tensor], key: Key, call: int, rows: slice
    ) -> None:
        if (key, call) not in marks:
            marks[key, call] = torch.zeros_like(self._area(key))
        marks[key, call][rows] += 1

    def _write(
        self, owner: int, area: Area, region: Region, call: int, value: torch.Tensor
    ) -> None:
        key, rows = self._place(owner, area, region, call)
        wanted = self._names_of(region, call)
        assert torch.equal(value, wanted), f"{region} stored from something else"
        self._area(key)[rows] = value
        self._mark(self.writes, key, call, rows)

    def _read(self, owner: int, area: Area, region: Region, call: int) -> torch.Tensor:
        key, rows = self._place(owner, area, region, call)
        found = self._area(key)[rows].clone()
        wanted = self._names_of(region, call)
        assert torch.equal(found, wanted), f"call {call}: {region} is not in {area} of {owner}"
        self._mark(self.reads, key, call, rows)
        return found

    # Who does what, and when.

    def run(self) -> None:
        """All calls of all ranks; whoever can go on may be the next."""
        lanes: dict[tuple[int, tuple[int, int]], _Actor] = {}
        while True:
            self._begin_calls(lanes)
            able = [actor for actor in self._actors if self._can_go_on(actor)]
            if not able:
                break
            actor = self._random.choice(able)
            for _ in range(self._random.choice((1, 2, 8))):
                if self._can_go_on(actor):
                    self._step(actor)
        left = [str(actor.todo[0][2]) for actor in self._actors if actor.todo]
        assert not left, f"nobody can go on: {left}"
        assert self._begun == [len(self.setup.calls)] * self.world, f"begun: {self._begun}"
        for rank in range(self.world):
            self._look_at_result(rank, len(self.setup.calls))

    def _begin_calls(self, lanes: dict[tuple[int, tuple[int, int]], _Actor]) -> None:
        for rank in range(self.world):
            call = self._begun[rank] + 1
            if call <= len(self.setup.calls) and self._may_begin(rank, call):
                if call > 1:
                    self._look_at_result(rank, call - 1)
                self._begun[rank] = call
                self._enqueue(rank, call, lanes)

    def _may_begin(self, rank: int, call: int) -> bool:
        """Its last call is over, and every peer has entered that one: so does the core."""
        over = all(
            (rank, call - 1, program.actor) in self._ended
            for program in self.schedules[rank].programs
            if program.lane is None
        )
        return (over or call == 1) and min(self._begun) >= call - 1

    def _enqueue(
        self, rank: int, call: int, lanes: dict[tuple[int, tuple[int, int]], _Actor]
    ) -> None:
        for program in self.schedules[rank].programs:
            todo = [(call, program.actor, action) for action in (*program.actions, None)]
            if program.lane is not None and (rank, program.lane) in lanes:
                lanes[rank, program.lane].todo += todo
                continue
            actor = _Actor(rank, todo)
            self._actors.append(actor)
            if program.lane is not None:
                lanes[rank, program.lane] = actor

    def _can_go_on(self, actor: _Actor) -> bool:
        if not actor.todo:
            return False
        call, _, action = actor.todo[0]
        if isinstance(action, Wait):
            return self._words[actor.rank, action.word] >= call - action.lag
        if isinstance(action, Join):
            return (actor.rank, call, action.actor) in self._ended
        return True

    def _step(self, actor: _Actor) -> None:
        call, program, action = actor.todo.pop(0)
        if action is None:
            self._ended.add((actor.rank, call, program))
        elif isinstance(action, Set):
            self._set(actor.rank, call, action)
        else:
            self._move(actor, call, action)

    def _set(self, rank: int, call: int, action: Set) -> None:
        word = (action.at, action.word)
        assert action.word.source == rank, f"rank {rank}: '{action}' is another's word"
        assert self._words[word] <= call - action.lag, f"'{action}' lowers a word"
        self._words[word] = call - action.lag

    def _move(self, actor: _Actor, call: int, action: Action) -> None:
        rank = actor.rank
        if isinstance(action, Compute):
            actor.value = self._names_of(Region(rank, action.chunk, action.part), call)
        elif isinstance(action, Encode):
            if self.operation.phases[action.region.phase].source == "sum":
                actor.value = self._summed(rank, action.region, call)
        elif isinstance(action, Store):
            self._store(actor, call, action)
        elif isinstance(action, Load):
            actor.value = self._read(action.window, action.area, action.region, call)
        elif isinstance(action, Copy):
            found = self._read(rank, action.area, action.region, call)
            self._write(action.to, "inbox", action.region, call, found)
        elif isinstance(action, Deliver):
            self._deliver(rank, call, action)
        elif isinstance(action, Sum):
            self._sum(rank, call, action)

    def _store(self, actor: _Actor, call: int, action: Store) -> None:
        if action.to != LOCAL:
            self._write(action.to, action.area, action.region, call, actor.value)
            return
        key, region = (actor.rank, call), action.region
        if key not in self.local:
            shape = self._rows(call, actor.rank), self.n
            self.local[key] = torch.zeros(shape, dtype=torch.int64)
            self._local_writes[key] = torch.zeros(shape, dtype=torch.int64)
        first, last = self.places[region.phase].product_rows(region, self._rows(call, actor.rank))
        low, high = self.operation.phases[region.phase].routes[region.part].cols
        self.local[key][first:last, low:high] = actor.value
        self._local_writes[key][first:last, low:high] += 1

    def _deliver(self, rank: int, call: int, action: Deliver) -> None:
        found = self._read(action.window, action.area, action.region, call)
        if self.plan.view:
            assert (action.window, action.area) == (rank, "inbox"), f"'{action}' of a view"
            return
        self._put(rank, call, action.region, found)

    def _put(self, rank: int, call: int, region: Region, found: torch.Tensor) -> None:
        rows = self.setup.calls[call - 1]
        if (rank, call) not in self.results:
            shape = result_shape(self.operation, rank, self.world, rows)
            self.results[rank, call] = torch.zeros(shape, dtype=torch.int64)
        starts = [sum(rows[:source]) for source in range(self.world)]
        at = self.places[region.phase].result_row(region, rows[region.source], starts)
        target = self.results[rank, call][at : at + len(found)]
        assert target.shape == found.shape, f"{region} beyond the result"
        assert not target.any(), f"{region} is delivered twice"
        target.copy_(found)

    def _sum(self, rank: int, call: int, action: Sum) -> None:
        assert action.region.source == rank, f"rank {rank}: '{action}'"
        assert len(action.places) == self.world, f"'{action}' does not add up all"
        for source, (window, area) in enumerate(action.places):
            self._read(window, area, action.of(source), call)
        places = self.places[action.region.phase]
        first, last = places.product_rows(action.region, self._rows(call, rank))
        summed = self.names(call, self.world, range(first, last), range(self.n))
        self._leave_sum(rank, call, action.region, summed, first)

    def _leave_sum(
        self, rank: int, call: int, region: Region, summed: torch.Tensor, first: int
    ) -> None:
        into = sums_into(self.operation, self.plan)
        if into is None and len(self.operation.phases) == 1:
            self._put(rank, call, region, summed)
        elif into is None:
            if rank not in self._scratch:
                self._scratch[rank] = torch.zeros(_ROWS, self.n, dtype=torch.int64)
            self._scratch[rank][first : first + len(summed)] = summed
        elif into == (0, "sum"):
            key, rows = self._place(rank, "sum", region, call)
            self._area(key)[rows] = summed
            self._mark(self.writes, key, call, rows)
        else:
            self._write(rank, into[1], Region(rank, region.chunk, 0, into[0]), call, summed)

    def _summed(self, rank: int, region: Region, call: int) -> torch.Tensor:
        first, last = self.places[region.phase].product_rows(region, self._rows(call, rank))
        return self._scratch[rank][first:last].clone()

    # What a rank holds in the end, and until its next call.

    def _look_at_result(self, rank: int, call: int) -> None:
        wanted = self.wanted(rank, call)
        if self.plan.view:
            key = self.shown(rank, call)
            got = self._area(key)[: len(wanted)]
            self._mark(self.reads, key, call, slice(0, len(wanted)))
        else:
            got = self.results.get((rank, call), torch.zeros_like(wanted))
        assert torch.equal(got, wanted), f"rank {rank}, call {call}: the result\n{got}\n{wanted}"
        if self.plan.view and self.plan.send_complete:
            got.fill_(-1)  # allowed, and nobody else's business

    def shown(self, rank: int, call: int) -> Key:
        """The area that a result which is a view begins with."""
        last = len(self.operation.phases) - 1
        return self.key(rank, last, "sum" if self.operation.phases[last].sums else "inbox", call)

    def wanted(self, rank: int, call: int) -> torch.Tensor:
        """The result by its closed form."""
        return wanted(self, rank, self.setup.calls[call - 1], call)

    def local_writes(self, rank: int, call: int) -> torch.Tensor:
        """How often each element of the own product was put into the private buffer."""
        shape = self.setup.calls[call - 1][rank], self.n
        return self._local_writes.get((rank, call), torch.zeros(shape, dtype=torch.int64))


def wanted(run: Simulator, rank: int, rows: Sequence[int], call: int) -> torch.Tensor:
    """What ``rank`` must get, from the definition of the operation alone."""
    world, n, name = run.world, run.n, run.operation.name
    every = range(n)
    if name == "all_gather":
        return torch.cat([run.names(call, s, range(rows[s]), every) for s in range(world)])
    if name == "all_to_all":
        extent = run.setup.request.options["extent"]
        shard = (n if extent is None else extent) // world
        mine = range(rank * shard, (rank + 1) * shard)
        return torch.cat([run.names(call, s, range(rows[s]), mine) for s in range(world)])
    if name == "all_reduce":
        return run.names(call, world, range(rows[rank]), every)
    return run.names(call, world, band(rows[rank], world, rank), every)


def band(rows: int, world: int, rank: int) -> range:
    """The rows that ``rank`` owns of a sum of ``rows`` rows: the first ones have one more."""
    quotient, rest = divmod(rows, world)
    sizes = [quotient + 1] * rest + [quotient] * (world - rest)
    return range(sum(sizes[:rank]), sum(sizes[: rank + 1]))
