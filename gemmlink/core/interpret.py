"""Walks a schedule on the host: binds its actions to memory once, then runs them for each call.

``HostProgram`` turns every action into a plain function at set-up, so that a call is a loop.
Nothing here knows an epilogue by name: what is executed is what the schedule says.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from gemmlink.core import wire
from gemmlink.core.collectives import COLLECTIVES
from gemmlink.core.flatten import Placed, flatten
from gemmlink.core.gather import last_of_together
from gemmlink.core.memory import Memory, Place, Rows
from gemmlink.core.products import Columns, Product, group
from gemmlink.core.sums import ordered_sum
from gemmlink.core.words import SLICE_S, setter, waiter
from gemmlink.errors import InvalidArgument, Unsupported
from gemmlink.spec.contracts import Backend, Lane
from gemmlink.spec.schedule import (
    LOCAL,
    Action,
    Collective,
    Copy,
    Deliver,
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


class CallState(Rows, Protocol):
    """What a step may ask of the call that it belongs to."""

    a: torch.Tensor
    b: torch.Tensor
    #: The region that the next stores copy, ``(rows, width)``.
    value: torch.Tensor
    #: What is copied out together, by source; see ``core.gather``.
    blocks: dict[int, torch.Tensor]
    #: First row of each source's block in the result; there once the result is.
    starts: Sequence[int]

    def wait_longer(self, word: Word, offset: int, at_least: int) -> None:
        """Go on waiting for a word that did not come within ``SLICE_S``, to the call's limit."""

    def drain(self, lane: Lane) -> None:
        """Wait until a lane has drained, within the limit of the call."""

    def result(self) -> torch.Tensor:
        """The result; the first time, it is sized from every rank's M."""

    def collective(self, name: str) -> None:
        """Let the communication library move the private buffers into the result."""


@dataclass
class Step:
    """An action and what it does. Tests wrap ``run`` to delay, stop or fail a rank there."""

    placed: Placed
    run: Callable[[CallState], None]


class HostProgram:
    """A schedule bound to memory and a backend; ``run`` walks it once.

    ``merge``: neighbouring regions that a schedule computes one after the other, with nothing in
    between, may be one product.
    """

    def __init__(
        self, schedule: Schedule, memory: Memory, backend: Backend, merge: bool = True
    ) -> None:
        self._plan = schedule.plan
        self._phases = memory.phases
        self.memory = memory
        self._backend = backend
        self.lanes: dict[str, Lane] = {}
        self._open_lanes(schedule)
        placed = flatten(schedule)
        encoded = memory.phases[-1].wire is not None
        self._last_of_together = (
            None if encoded else last_of_together(placed, schedule.plan, memory.problem)
        )
        self.steps = self._bind(placed, merge)

    def run(self, call: CallState) -> None:
        """Execute every action for ``call``."""
        for step in self.steps:
            step.run(call)

    def release(self) -> None:
        """Let go of the window; the program cannot run any more.

        Steps refer to their program and so keep it, and with it the memory, until a collection.
        """
        self.steps = []
        self.lanes = {}
        self.memory.release()

    # Binding.

    def _open_lanes(self, schedule: Schedule) -> None:
        window = self.memory.window
        self.lanes = {
            program.actor: window().lane(*program.lane)
            for program in schedule.programs
            if program.lane is not None
        }

    def _bind(self, placed: tuple[Placed, ...], merge: bool) -> list[Step]:
        steps: list[Step] = []
        for found in group(placed, self._plan.chunks, self._phases if merge else None):
            if isinstance(found, Product):
                steps.append(Step(found.placed, self._produce(found)))
            elif isinstance(found, Columns):
                steps.append(Step(found.placed, self._produce_columns(found)))
            else:
                action, actor = found.action, found.actor
                in_lane = actor in self.lanes
                bind = self._in_lane(action, actor) if in_lane else self._other(action)
                steps.append(Step(found, bind))
        return steps

    def _in_lane(self, action: Action, actor: str) -> Callable[[CallState], None]:
        if isinstance(action, Set):
            return self._set_in_lane(action, actor)
        if isinstance(action, Copy):
            return self._copy_in_lane(action, actor)
        return self._other(action)

    def _other(self, action: Action) -> Callable[[CallState], None]:
        if isinstance(action, Set):
            return self._set(action)
        if isinstance(action, Wait):
            return self._wait(action)
        if isinstance(action, Store):
            return self._store(action)
        if isinstance(action, Load):
            return self._load(action)
        if isinstance(action, Deliver):
            return self._deliver(action)
        if isinstance(action, Sum):
            return self._sum(action)
        if isinstance(action, Join):
            return self._join(action)
        if isinstance(action, Collective):
            return self._collective(action)
        raise Unsupported("the host walks the actions of spec.schedule", f"'{action}'")

    def _produce(self, product: Product) -> Callable[[CallState], None]:
        """Multiply, or take what was summed; encode it where it travels so; put it in its place."""
        store = product.store
        self._check_own(product)
        find = self._span(product)
        low, high = self.memory.cols(store.region)
        whole = high - low == self.memory.problem.n
        multiply = self._backend.multiply if product.computed else None

        def make(call: CallState, first: int, last: int, target: torch.Tensor) -> None:
            if multiply is not None and last > first and high > low:
                a = call.a if last - first == call.m else call.a[first:last]
                multiply(a, call.b if whole else call.b[low:high], target)

        def plain(call: CallState) -> None:
            first, last, target = find(call)
            call.value = target
            make(call, first, last, target)

        def encoded(call: CallState) -> None:
            first, last, target = find(call)
            call.value = target
            if last > first:
                rows = self.memory.scratch()[first:last]
                make(call, first, last, rows)
                wire.encode(rows, target)

        return encoded if product.encoded else plain

    def _produce_columns(self, columns: Columns) -> Callable[[CallState], None]:
        """Multiply once; put each product's columns in their place, if they have places apart."""
        products = columns.products
        for product in products:
            self._check_own(product)
        finds = [self._span(product) for product in products]
        cols = [self.memory.cols(product.store.region) for product in products]
        low, high = cols[0][0], cols[-1][1]
        multiply, n = self._backend.multiply, self.memory.problem.n
        together = all(product.store.to == LOCAL for product in products)
        origin = self.memory.local_cols[0]

        def step(call: CallState) -> None:
            first, last, _ = finds[0](call)
            if last == first or low == high:
                return
            if together:
                rows = call.local()[first:last, low - origin : high - origin]
            else:
                rows = self.memory.scratch()[first:last, low:high]
            a = call.a if last - first == call.m else call.a[first:last]
            multiply(a, call.b if high - low == n else call.b[low:high], rows)
            if not together:
                for find, (begin, end) in zip(finds, cols, strict=True):
                    find(call)[2].copy_(rows[:, begin - low : end - low])

        return step

    def _check_own(self, product: Product) -> None:
        if product.store.region.source != self._plan.rank:
            raise InvalidArgument("a rank stores its own product", f"'{product.store}'")

    def _span(self, product: Product) -> Callable[[CallState], Place]:
        """What finds the rows of a product: of one region, or of the first to the last."""
        store = product.store
        find = self.memory.find(store.to, store.area, store.region)
        if product.last is None:
            return find
        find_last = self.memory.find(store.to, store.area, product.last)

        def span(call: CallState) -> Place:
            first, _, head = find(call)
            _, last, _ = find_last(call)
            shape = (last - first, head.shape[1])
            return first, last, head.as_strided(shape, head.stride())

        return span

    def _store(self, store: Store) -> Callable[[CallState], None]:
        find = self.memory.find(store.to, store.area, store.region)

        def step(call: CallState) -> None:
            first, last, target = find(call)
            if last > first:
                target.copy_(call.value)

        return step

    def _load(self, load: Load) -> Callable[[CallState], None]:
        find = self.memory.find(load.window, load.area, load.region)

        def step(call: CallState) -> None:
            call.value = find(call)[2]

        return step

    def _set(self, action: Set) -> Callable[[CallState], None]:
        lag, place = action.lag, (action.at, self.memory.layout.word(action.word))
        write = setter(self.memory.window().words, (place,))
        return lambda call: write(call.epoch - lag)

    def _set_in_lane(self, action: Set, actor: str) -> Callable[[CallState], None]:
        lane, lag = self.lanes[actor], action.lag
        offset = self.memory.layout.word(action.word)
        return lambda call: lane.set(offset, call.epoch - lag)

    def _copy_in_lane(self, action: Copy, actor: str) -> Callable[[CallState], None]:
        lane = self.lanes[actor]
        source = self.memory.offset(action.area, action.region)
        target = self.memory.offset("inbox", action.region)

        def step(call: CallState) -> None:
            start, nbytes = source(call)
            if nbytes:
                lane.copy(start, target(call)[0], nbytes)

        return step

    def _wait(self, action: Wait) -> Callable[[CallState], None]:
        word, lag, offset = action.word, action.lag, self.memory.layout.word(action.word)
        wait = waiter(self.memory.window().words, offset, SLICE_S)

        def step(call: CallState) -> None:
            wanted = call.epoch - lag
            if wait(wanted) < wanted:
                call.wait_longer(word, offset, wanted)

        return step

    def _deliver(self, action: Deliver) -> Callable[[CallState], None]:
        region, window, rank = action.region, action.window, self._plan.rank
        find = self.memory.find(window, action.area, region)
        if self._plan.view:
            if window != rank or action.area != "inbox":
                raise InvalidArgument("a view shows the own window's inbox", f"'{action}'")
            return lambda call: None
        if self._last_of_together is not None:
            return self._deliver_together(find, region.source, action == self._last_of_together)
        places, encoded = self.memory.places[region.phase], self._phases[region.phase].wire

        def step(call: CallState) -> None:
            first, last, place = find(call)
            result = call.result()
            if last > first:
                rows = call.m if region.source == rank else call.rows_of(region.source)
                start = places.result_row(region, rows, call.starts)
                target = result[start : start + last - first]
                if encoded is None:
                    target.copy_(place)
                else:
                    wire.decode(place, target)

        return step

    def _deliver_together(
        self, find: Callable[[CallState], Place], source: int, last: bool
    ) -> Callable[[CallState], None]:
        ranks = range(self._plan.world)

        def step(call: CallState) -> None:
            # Sized before the next block is awaited: a rank whose M is too large sends none.
            result = call.result()
            call.blocks[source] = find(call)[2]
            if last:
                torch.cat([call.blocks[rank] for rank in ranks], out=result)

        return step

    def _sum(self, action: Sum) -> Callable[[CallState], None]:
        memory, region = self.memory, action.region
        finds = [
            memory.find(window, area, action.of(source))
            for source, (window, area) in enumerate(action.places)
        ]
        target = self._sum_target(region)

        def step(call: CallState) -> None:
            first, last, own = target(call)
            if last > first:
                ordered_sum([find(call)[2] for find in finds], own)

        return step

    def _sum_target(self, region: Region) -> Callable[[CallState], Place]:
        memory, rank = self.memory, self._plan.rank
        into = memory.sums_into
        if into is not None:
            phase, area = into
            part = 0 if phase > region.phase else region.part
            return memory.find(rank, area, replace(region, phase=phase, part=part))
        places, follows = memory.places[region.phase], len(self._phases) > region.phase + 1

        def find(call: CallState) -> Place:
            first, last = places.product_rows(region, call.m)
            if follows:
                return first, last, memory.scratch()[first:last]
            start = places.result_row(region, call.m, call.starts)
            return first, last, call.result()[start : start + last - first]

        return find

    def _collective(self, action: Collective) -> Callable[[CallState], None]:
        if action.name not in COLLECTIVES:
            names = ", ".join(COLLECTIVES)
            raise Unsupported(f"the library collectives are: {names}", action.name)
        return lambda call: call.collective(action.name)

    def _join(self, action: Join) -> Callable[[CallState], None]:
        lane = self.lanes.get(action.actor)
        if lane is None:
            return lambda call: None  # one thread: the joined actor has ended
        return lambda call: call.drain(lane)
