"""Walks a schedule on the host: binds its actions to memory once, then runs them for each call.

``HostProgram`` turns every action into a plain function at set-up, so that a call is a loop.
Nothing here knows an epilogue by name: what is executed is what the schedule says.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from gemmlink.core.flatten import Placed, flatten
from gemmlink.core.gather import last_of_together
from gemmlink.core.words import SLICE_S, setter, waiter
from gemmlink.errors import InvalidArgument, Unsupported
from gemmlink.spec.contracts import Backend, Lane, Window
from gemmlink.spec.problem import Problem, chunk_rows
from gemmlink.spec.schedule import (
    LOCAL,
    Action,
    Collective,
    Compute,
    Copy,
    Deliver,
    Join,
    Load,
    Region,
    Schedule,
    Set,
    Store,
    Wait,
    Word,
)
from gemmlink.spec.window import WindowLayout

#: Views of a window that a step keeps: calls of few sizes make few.
_PLACES = 64

#: Where a region lies: first and last row in its source's block, and these rows of a window.
Place = tuple[int, int, torch.Tensor]


class CallState(Protocol):
    """What a step may ask of the call that it belongs to."""

    epoch: int
    a: torch.Tensor
    b: torch.Tensor
    #: Rows of ``a``.
    m: int
    #: The region that the next stores copy, ``(rows, n)``.
    value: torch.Tensor
    #: What is copied out together, by source; see ``core.gather``.
    blocks: dict[int, torch.Tensor]
    #: First row of each source's block among the rows of a set of slots.
    firsts: Sequence[int]

    def wait_longer(self, word: Word, offset: int, at_least: int) -> None:
        """Go on waiting for a word that did not come within ``SLICE_S``, to the call's limit."""

    def drain(self, lane: Lane) -> None:
        """Wait until a lane has drained, within the limit of the call."""

    def rows_of(self, source: int) -> int:
        """M of ``source`` in this call."""

    def local(self) -> torch.Tensor:
        """The private buffer for the own product, ``(M, n)``."""

    def result(self) -> torch.Tensor:
        """The whole result; sizes it first."""

    def result_rows(self, source: int, first: int, last: int) -> torch.Tensor:
        """Rows ``first`` to ``last`` of what belongs to ``source`` in the result."""

    def all_gather(self) -> None:
        """Let the communication library gather the private buffers into the result."""


@dataclass
class Step:
    """An action and what it does. Tests wrap ``run`` to delay, stop or fail a rank there."""

    placed: Placed
    run: Callable[[CallState], None]


class HostProgram:
    """A schedule bound to a window, a problem and a backend; ``run`` walks it once."""

    def __init__(
        self,
        schedule: Schedule,
        problem: Problem,
        backend: Backend,
        layout: WindowLayout,
        window: Window | None,
    ) -> None:
        self._plan = schedule.plan
        self._problem = problem
        self._backend = backend
        self._layout = layout
        self._window = window
        self._grids: dict[tuple[int, int], torch.Tensor] = {}
        self.lanes: dict[str, Lane] = {
            program.actor: self._peers().lane(*program.lane)
            for program in schedule.programs
            if program.lane is not None
        }
        placed = flatten(schedule)
        self._last_of_together = last_of_together(placed, schedule.plan, problem)
        self.steps = self._bind(placed)

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
        self._grids.clear()
        self._window = None

    def grid(self, owner: int, epoch: int) -> torch.Tensor:
        """All slots in ``owner``'s window that call ``epoch`` uses, ``(world * capacity, n)``."""
        key = (owner, epoch % self._layout.buffers)
        if key not in self._grids:
            problem, world = self._problem, self._plan.world
            first = self._layout.slots(epoch)
            raw = self._peers().tensor(owner)[first : first + world * problem.slot_bytes]
            shape = (world * problem.capacity, problem.n)
            # A view of another dtype that is made under inference_mode is read-only outside it.
            with torch.inference_mode(False):
                self._grids[key] = raw.view(problem.out_dtype).view(shape)
        return self._grids[key]

    def rows(self, epoch: int, count: int) -> torch.Tensor:
        """The first ``count`` rows of the own slots of call ``epoch``: a new view each time."""
        grid = self.grid(self._plan.rank, epoch)
        # Either shares the counter of writes with the grid; the former costs a third of the latter.
        return grid.detach() if count == grid.shape[0] else grid[:count]

    def _place(self, owner: int, region: Region) -> Callable[[CallState], Place]:
        """What finds ``region`` in ``owner``'s window, and remembers: making a view costs more."""
        self._peers()
        source, buffers = region.source, self._layout.buffers
        own = source == self._plan.rank
        known: dict[tuple[int, int, int], Place] = {}

        def find(call: CallState) -> Place:
            rows = call.m if own else call.rows_of(source)
            base = call.firsts[source]
            key = (call.epoch % buffers, base, rows)
            place = known.get(key)
            if place is None:
                if len(known) >= _PLACES:
                    known.clear()
                first, last = chunk_rows(rows, self._plan.chunks, region.chunk)
                grid = self.grid(owner, call.epoch)
                place = known[key] = (first, last, grid[base + first : base + last])
            return place

        return find

    def _local(self, region: Region) -> Callable[[CallState], Place]:
        def find(call: CallState) -> Place:
            first, last = self._rows(call, region)
            return first, last, call.local()[first:last]

        return find

    def _rows(self, call: CallState, region: Region) -> tuple[int, int]:
        rows = call.m if region.source == self._plan.rank else call.rows_of(region.source)
        return chunk_rows(rows, self._plan.chunks, region.chunk)

    def _peers(self) -> Window:
        if self._window is None:
            raise InvalidArgument(
                "an epilogue whose schedule uses peers' memory must say needs.window",
                "a schedule with stores, words or deliveries and no window",
            )
        return self._window

    # Binding.

    def _bind(self, placed: tuple[Placed, ...]) -> list[Step]:
        steps: list[Step] = []
        computing: Compute | None = None
        for item in placed:
            action = item.action
            if computing is not None and not isinstance(action, Store):
                raise _unstored(computing)
            if isinstance(action, Compute):
                computing = action
            elif isinstance(action, Store):
                run = self._copy_to(action) if computing is None else self._compute_into(action)
                computing = None
                steps.append(Step(item, run))
            else:
                steps.append(Step(item, self._other(action, item.actor)))
        if computing is not None:
            raise _unstored(computing)
        return steps

    def _other(self, action: Action, actor: str) -> Callable[[CallState], None]:
        if isinstance(action, Set):
            return (
                self._set(action) if actor not in self.lanes else self._set_in_lane(action, actor)
            )
        if isinstance(action, Copy) and actor in self.lanes:
            return self._copy_in_lane(action, actor)
        if isinstance(action, Wait):
            return self._wait(action)
        if isinstance(action, Load):
            return self._load(action)
        if isinstance(action, Deliver):
            return self._deliver(action)
        if isinstance(action, Join):
            return self._join(action)
        if isinstance(action, Collective):
            return self._collective(action)
        raise Unsupported("the host walks the actions of spec.schedule", f"'{action}'")

    def _target(self, store: Store) -> Callable[[CallState], Place]:
        if store.to == LOCAL:
            return self._local(store.region)
        return self._place(store.to, store.region)

    def _compute_into(self, store: Store) -> Callable[[CallState], None]:
        if store.region.source != self._plan.rank:
            raise InvalidArgument("a rank stores its own product", f"'{store}'")
        find, multiply = self._target(store), self._backend.multiply

        def step(call: CallState) -> None:
            first, last, target = find(call)
            call.value = target
            if last - first == call.m > 0:
                multiply(call.a, call.b, target)
            elif last > first:
                multiply(call.a[first:last], call.b, target)

        return step

    def _copy_to(self, store: Store) -> Callable[[CallState], None]:
        find = self._target(store)

        def step(call: CallState) -> None:
            first, last, target = find(call)
            if last > first:
                target.copy_(call.value)

        return step

    def _load(self, load: Load) -> Callable[[CallState], None]:
        find = self._place(load.window, load.region)

        def step(call: CallState) -> None:
            call.value = find(call)[2]

        return step

    def _set(self, action: Set) -> Callable[[CallState], None]:
        lag, place = action.lag, (action.at, self._layout.word(action.word))
        write = setter(self._peers().words, (place,))
        return lambda call: write(call.epoch - lag)

    def _set_in_lane(self, action: Set, actor: str) -> Callable[[CallState], None]:
        lane, offset, lag = self.lanes[actor], self._layout.word(action.word), action.lag
        return lambda call: lane.set(offset, call.epoch - lag)

    def _copy_in_lane(self, action: Copy, actor: str) -> Callable[[CallState], None]:
        lane, region, row = self.lanes[actor], action.region, self._problem.row_bytes

        def step(call: CallState) -> None:
            first, last = self._rows(call, region)
            start = call.firsts[region.source] + first
            offset = self._layout.slots(call.epoch) + start * row
            if last > first:
                lane.copy(offset, offset, (last - first) * row)

        return step

    def _wait(self, action: Wait) -> Callable[[CallState], None]:
        word, lag, offset = action.word, action.lag, self._layout.word(action.word)
        wait = waiter(self._peers().words, offset, SLICE_S)

        def step(call: CallState) -> None:
            wanted = call.epoch - lag
            if wait(wanted) < wanted:
                call.wait_longer(word, offset, wanted)

        return step

    def _deliver(self, action: Deliver) -> Callable[[CallState], None]:
        region, window = action.region, action.window
        find = self._place(window, region)
        if self._plan.view:
            if window != self._plan.rank:
                raise InvalidArgument("a view shows the own window", f"'{action}'")
            return lambda call: None
        source = region.source
        if self._last_of_together is not None:
            return self._deliver_together(find, source, action == self._last_of_together)

        def step(call: CallState) -> None:
            first, last, place = find(call)
            target = call.result_rows(source, first, last)
            if last > first:
                target.copy_(place)

        return step

    def _deliver_together(
        self, find: Callable[[CallState], Place], source: int, last: bool
    ) -> Callable[[CallState], None]:
        def step(call: CallState) -> None:
            # Sized before the next wait: a rank that finds its M too large then sends nothing.
            result = call.result()
            call.blocks[source] = find(call)[2]
            if last:
                torch.cat([call.blocks[rank] for rank in ranks], out=result)

        ranks = range(self._plan.world)
        return step

    def _collective(self, action: Collective) -> Callable[[CallState], None]:
        if action.name != "all_gather":
            raise Unsupported("the library collectives are: all_gather", action.name)
        return lambda call: call.all_gather()

    def _join(self, action: Join) -> Callable[[CallState], None]:
        lane = self.lanes.get(action.actor)
        if lane is None:
            return lambda call: None  # one thread: the joined actor has ended
        return lambda call: call.drain(lane)


def _unstored(action: Compute) -> InvalidArgument:
    return InvalidArgument(
        "a schedule must store each chunk right after computing it", f"{action} without a store"
    )
