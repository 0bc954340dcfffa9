"""A rank fails in the middle of a call, all ranks hear of it, reset, and go on.

A rank that fails drops what its kernels were doing. When its lanes have come to rest it tells its
peers (``abort``); whoever waits for a word in that call or a later one, or is about to begin one,
then fails as well. A call that ends all the same must end right. Every rank, whether it has failed
or done all its calls, comes to the reset, which takes the four steps of ``core.reset``:

1. nothing of this rank moves any more, and all it has stored is where it belongs;
2. all ranks have told the last call that they have *begun*; what they have written has arrived;
3. each rank sets its own view of ``enter``, ``free`` and ``read``, its counters and failure words;
4. all ranks have done so.

``Steps`` can leave each of them out, to see what it is for.
"""

from __future__ import annotations

from dataclasses import dataclass

from gemmlink.conformance.adversary.faults import Fault
from gemmlink.conformance.adversary.machine import Machine
from gemmlink.conformance.adversary.program import Program
from gemmlink.conformance.adversary.run import Outcome
from gemmlink.conformance.adversary.tasks import (
    NOBODY,
    TURN,
    Clock,
    Delivery,
    Flight,
    Task,
    Written,
)

#: Words of which a rank sets its own view when it resets.
_VIEWED = ("enter", "free", "read")

#: Turns after which nothing will come of a run any more.
_LIMIT = 20_000


@dataclass(frozen=True)
class Steps:
    """The reset as it is, or with something left out.

    ``quiesce``: step 1; ``publish``: that part of it which is about what kernels had stored.
    ``issued``: step 2 agrees on the last call that was begun, not on the last one done.
    ``counters``: step 3 clears them. ``wait``: step 4.
    """

    quiesce: bool = True
    publish: bool = True
    issued: bool = True
    counters: bool = True
    wait: bool = True


class Notice:
    """A failure record on its way to ``rank``."""

    def __init__(self, number: int, rank: int, weight: float, source: int, call: int) -> None:
        self.number = number
        self.rank = rank
        self.weight = weight
        self._source = source
        self._call = call

    def turn(self, machine: Recovery) -> bool:
        """Arrive."""
        machine.hear(self.rank, self._source, self._call)
        return False


class Reset:
    """A rank on its way through the reset."""

    def __init__(self, number: int, rank: int) -> None:
        self.number = number
        self.rank = rank
        #: It waits for others most of the time, so it does not press.
        self.weight = 0.0
        self._steps = iter(("rest", "come", "clear", "go"))
        self._step = next(self._steps)

    def turn(self, machine: Recovery) -> bool:
        """Take the next step if it can be taken."""
        if getattr(machine, self._step)(self.rank):
            following = next(self._steps, None)
            if following is None:
                return False
            self._step = following
        return True


class Recovery(Machine):
    """A run in which one rank fails in one of the first ``before`` calls; then all reset.

    ``program`` has at least one call more than that.
    """

    def __init__(
        self,
        program: Program,
        seed: int,
        before: int,
        steps: Steps | None = None,
        strict: bool = True,
        story: list[str] | None = None,
    ) -> None:
        super().__init__(program, seed, strict, story)
        world, draw = program.case.world, self.mood.random.random
        self._before = before
        self._steps = steps or Steps()
        self._victim = int(draw() * world)
        self._in_call = 1 + int(draw() * before)
        #: Turns of anybody until it fails, once it is in that call.
        self._patience = int(draw() * 150)
        self._issued = [0] * world
        self._done = [0] * world
        self._failed: set[int] = set()
        self._failing: set[int] = set()
        self._aborts: list[dict[int, int]] = [{} for _ in range(world)]
        self._told: dict[int, int] = {}
        self._cleared: set[int] = set()
        self._known: Clock = []

    def run(self) -> str:
        """Run all calls and the reset; the hash of the trace. Raises ``Fault``."""
        came = super().run()
        last = len(self.program.case.rows)
        if self._done != [last] * len(self._done):
            raise Fault("deadlock", f"calls done after the reset: {self._done}, must be {last}")
        return came

    def turn(self) -> None:
        """Somebody's turn, or the end of somebody's call."""
        if self._issued[self._victim] == self._in_call and self._victim not in self._told:
            self._patience -= 1
            if self._patience == 0 and self._done[self._victim] < self._in_call:
                self._failing.add(self._victim)
        for rank in sorted(self._failing - self._failed):
            self._fail(rank)
        if len(self.trace) > _LIMIT:
            self.refuse_stuck()
            raise Fault("deadlock", f"no end after {_LIMIT} turns; {self._told} have told")
        super().turn()

    # Calls.

    def begin(self, rank: int, call: int, clock: Clock) -> None:
        """Begin a call, perhaps one whose number was used before."""
        self._issued[rank] = call
        self.forget(rank, call)
        super().begin(rank, call, clock)

    def call_ended(self, rank: int, call: int) -> None:
        """On to the next call, if nothing is known that forbids it, or to the reset."""
        self._done[rank] = call
        if rank in self._cleared:
            super().call_ended(rank, call)
        elif self._aborts[rank]:
            self._fail(rank)
        elif call == self._before:
            self.ready.append(Reset(self.number(), rank))
        else:
            super().call_ended(rank, call)

    def _put(self, task: Task, cells: list[int]) -> int:
        """A turn may end, and a kernel be dropped, between a store and its release."""
        super()._put(task, cells)
        return TURN

    def stalled(self, task: Task) -> None:
        """Whoever waits looks for failures."""
        if any(call <= task.call for call in self._aborts[task.rank].values()):
            self._failing.add(task.rank)

    def hear(self, rank: int, source: int, call: int) -> None:
        """``rank`` gets the failure record of ``source``."""
        self._aborts[rank][source] = call
        for tasks in self.waiting.values():
            for task in tasks:
                if task.rank == rank and task.code.strand.kind != "queue":
                    self.stalled(task)

    def _fail(self, rank: int) -> None:
        """Drop what the rank's kernels do. Its queues go on as far as they can."""
        self._failed.add(rank)
        if self.story is not None:
            self.story.append(f"{len(self.trace):4} rank {rank} fails in call {self._issued[rank]}")
        self._drop(rank, queues=False)
        for agent in self.agents:
            if agent.rank == rank:
                self.memory.publish(agent, "device")  # as kernels do when they end
        self.ready.append(Reset(self.number(), rank))

    def _drop(self, rank: int, queues: bool) -> None:
        def stays(task: object) -> bool:
            mine = isinstance(task, Task) and task.rank == rank
            queue = isinstance(task, Task) and task.code.strand.kind == "queue"
            return not mine or (queue and not queues)

        for waiting in (self.waiting, self.joining, self.at_library):
            for tasks in waiting.values():
                tasks[:] = [task for task in tasks if stays(task)]
        self.ready[:] = [task for task in self.ready if stays(task)]

    # The steps of a reset. Each returns whether it was taken.

    def rest(self, rank: int) -> bool:
        """Nothing of this rank moves, and what it has stored is published; then peers may know."""
        if self._steps.quiesce:
            if any(isinstance(t, Flight | Task) and t.rank == rank for t in self.ready):
                return False
            self._drop(rank, queues=True)
            for agent in self.agents:
                if agent.rank == rank:
                    self.queues.pop(agent.number, None)
                    self.memory.publish(agent, "system" if self._steps.publish else "device")
        if rank in self._failed:
            call = self._issued[rank]
            for peer in range(len(self._done)):
                if peer != rank:
                    weight = self.mood.weight()
                    self.ready.append(Notice(self.number(), peer, weight, rank, call))
        return True

    def come(self, rank: int) -> bool:
        """Come to the exchange; with the last rank, all that was written before has arrived."""
        calls = self._issued if self._steps.issued else self._done
        self._told[rank] = calls[rank]
        if len(self._told) == len(self._done):
            on_their_way = [t for t in self.ready if isinstance(t, Delivery)]
            self.ready[:] = [t for t in self.ready if not isinstance(t, Delivery | Notice)]
            for delivery in on_their_way:
                self.deliver(delivery.word, delivery.written)
            self._known = self._all_known()
        return True

    def clear(self, rank: int) -> bool:
        """Once all have told: as if everybody had just finished the last call."""
        if len(self._told) < len(self._done):
            return False
        epoch = max(self._told.values())
        for number, (word, at) in enumerate(self.program.words):
            if at == rank and word.kind in _VIEWED:
                self.words[number] = Written(epoch, self._known, "system", NOBODY)
        for number, (owner, _) in enumerate(self.program.counters):
            if owner == rank and self._steps.counters:
                self.counters[number] = (0, self._known)
        self._aborts[rank].clear()
        self._cleared.add(rank)
        return True

    def go(self, rank: int) -> bool:
        """Once all have cleared: on with the next call."""
        if self._steps.wait and len(self._cleared) < len(self._done):
            return False
        self._failing.clear()
        self.begin(rank, max(self._told.values()) + 1, self._known)
        return True

    def _all_known(self) -> Clock:
        clock = [0] * len(self.agents)
        for agent in self.agents:
            clock = [max(one, other) for one, other in zip(clock, agent.know, strict=True)]
        return clock


def recover(
    program: Program,
    seed: int,
    before: int,
    steps: Steps | None = None,
    story: list[str] | None = None,
) -> Outcome:
    """One run with a failure and a reset."""
    machine = Recovery(program, seed, before, steps, story=story)
    fault = None
    try:
        machine.run()
    except Fault as found:
        fault = found
    return Outcome(program.case.name, seed, machine.hash(), len(machine.trace), fault)
