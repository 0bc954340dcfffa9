"""Turns a schedule into a flat list of steps and walks it on the host.

``flatten`` orders the programs of one rank for a single thread: actors run in the order in which
the schedule lists them, and a ``Join`` must name one that has already ended. ``HostProgram`` then
binds every action to addresses once, at set-up, so that a call is a loop over plain functions.

Nothing here knows an epilogue by name: what is executed is what the schedule says.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from gemmlink.errors import InvalidArgument, Unsupported
from gemmlink.spec.contracts import Backend, Window
from gemmlink.spec.problem import Problem, chunk_rows
from gemmlink.spec.schedule import (
    LOCAL,
    Action,
    Collective,
    Compute,
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


class CallState(Protocol):
    """What a step may ask of the call that it belongs to."""

    epoch: int
    a: torch.Tensor
    b: torch.Tensor
    #: The computed region that the next stores copy, ``(rows, n)``.
    value: torch.Tensor

    def wait(self, word: Word, offset: int, at_least: int) -> None:
        """Wait for a word of the own window, within the limit of the call."""

    def local(self) -> torch.Tensor:
        """The private buffer for the own product, ``(M, n)``."""

    def result_rows(self, source: int) -> torch.Tensor:
        """The rows of the result that belong to ``source``, ``(M of source, n)``."""

    def all_gather(self) -> None:
        """Let the communication library gather the private buffers into the result."""


Step = Callable[[CallState], None]


def flatten(schedule: Schedule) -> tuple[Action, ...]:
    """All actions of the schedule, in an order that one thread can execute.

    Raises ``InvalidArgument`` if an actor joins one that has not ended by then.
    """
    ended: set[str] = set()
    actions: list[Action] = []
    for program in schedule.programs:
        for action in program.actions:
            if isinstance(action, Join) and action.actor not in ended:
                raise InvalidArgument(
                    "a schedule must list an actor after those that it joins",
                    f"{program.actor} joins {action.actor}",
                )
            actions.append(action)
        ended.add(program.actor)
    return tuple(actions)


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
        self._rank = schedule.plan.rank
        self._chunks = schedule.plan.chunks
        self._problem = problem
        self._backend = backend
        self._layout = layout
        self._window = window
        self._slots: dict[tuple[int, int], torch.Tensor] = {}
        self._steps = self._bind(flatten(schedule))

    def run(self, call: CallState) -> None:
        """Execute every action for ``call``."""
        for step in self._steps:
            step(call)

    def slot(self, owner: int, source: int) -> torch.Tensor:
        """The slot for ``source`` in the window of ``owner``, shape ``(capacity, n)``."""
        key = (owner, source)
        if key not in self._slots:
            problem = self._problem
            first = self._layout.slot(source)
            raw = self._peer_window().tensor(owner)[first : first + problem.slot_bytes]
            shape = (problem.capacity, problem.n)
            self._slots[key] = raw.view(problem.out_dtype).view(shape)
        return self._slots[key]

    def _bind(self, actions: tuple[Action, ...]) -> list[Step]:
        steps: list[Step] = []
        computing: Compute | None = None
        for action in actions:
            if computing is not None and not isinstance(action, Store):
                raise _unstored(computing)
            if isinstance(action, Compute):
                computing = action
            elif isinstance(action, Store):
                steps.append(self._store(action, computed=computing is None))
                computing = None
            else:
                steps.extend(self._other(action))
        if computing is not None:
            raise _unstored(computing)
        return steps

    def _other(self, action: Action) -> list[Step]:
        if isinstance(action, Set):
            return [self._set(action)]
        if isinstance(action, Wait):
            return [self._wait(action)]
        if isinstance(action, Load):
            return [self._load(action)]
        if isinstance(action, Deliver):
            return [self._deliver(action)]
        if isinstance(action, Collective):
            return [self._collective(action)]
        if isinstance(action, Join):
            return []  # one thread: the joined actor has ended
        raise Unsupported("the host interpreter knows the actions of spec.schedule", repr(action))

    def _peer_window(self) -> Window:
        if self._window is None:
            raise InvalidArgument(
                "an epilogue whose schedule uses peers' memory must say needs.window",
                "a schedule with stores, words or deliveries and no window",
            )
        return self._window

    def _place(self, store: Store) -> Callable[[CallState], torch.Tensor]:
        if store.to == LOCAL:
            return lambda call: call.local()
        slot = self.slot(store.to, store.region.source)
        return lambda _: slot

    def _store(self, store: Store, computed: bool) -> Step:
        place = self._place(store)
        chunk, chunks, multiply = store.region.chunk, self._chunks, self._backend.multiply
        if store.region.source != self._rank:
            raise InvalidArgument("a rank stores its own product", str(store))

        def compute(call: CallState) -> None:
            first, last = chunk_rows(call.a.shape[0], chunks, chunk)
            call.value = place(call)[first:last]
            if last > first:
                multiply(call.a[first:last], call.b, call.value)

        def copy(call: CallState) -> None:
            first, last = chunk_rows(call.a.shape[0], chunks, chunk)
            if last > first:
                place(call)[first:last].copy_(call.value)

        return copy if computed else compute

    def _load(self, load: Load) -> Step:
        slot = self.slot(self._rank, load.region.source)
        chunk, chunks = load.region.chunk, self._chunks

        def step(call: CallState) -> None:
            first, last = chunk_rows(call.a.shape[0], chunks, chunk)
            call.value = slot[first:last]

        return step

    def _set(self, action: Set) -> Step:
        words, at, lag = self._peer_window().words, action.at, action.lag
        offset = self._layout.word(action.word)

        def step(call: CallState) -> None:
            words.set(at, offset, call.epoch - lag)

        return step

    def _wait(self, action: Wait) -> Step:
        self._peer_window()
        word, lag = action.word, action.lag
        offset = self._layout.word(word)

        def step(call: CallState) -> None:
            call.wait(word, offset, call.epoch - lag)

        return step

    def _deliver(self, action: Deliver) -> Step:
        region: Region = action.region
        slot = self.slot(self._rank, region.source)
        source, chunk, chunks = region.source, region.chunk, self._chunks

        def step(call: CallState) -> None:
            rows = call.result_rows(source)
            first, last = chunk_rows(rows.shape[0], chunks, chunk)
            if last > first:
                rows[first:last].copy_(slot[first:last])

        return step

    def _collective(self, action: Collective) -> Step:
        if action.name != "all_gather":
            raise Unsupported("the library collectives are: all_gather", action.name)
        return lambda call: call.all_gather()


def _unstored(action: Compute) -> InvalidArgument:
    return InvalidArgument(
        "a schedule must store each chunk right after computing it", f"{action} without a store"
    )
