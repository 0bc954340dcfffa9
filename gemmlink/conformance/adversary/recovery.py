"""Calls that end badly: ranks fail in them or refuse them, all hear of it, and go on.

A call that ends badly drops what the rank's kernels were doing. When its lanes have come to rest
the rank tells its peers (``abort``: it has refused or failed in call n). Whoever waits for a word
in that call, begins it, or looks up an entry record of it, then ends it badly as well; so does
whoever waits in an *earlier* call for a word of that rank, which has left it. A call that ends all
the same must end right. ``trouble`` draws who fails when.

*Refused* calls need no reset. The rank, and each that has heard of it, says that it reads nothing
of the call any more (``free``, ``enter``), clears its counters and goes on with the next number.

After a *failure* every rank, whether it has failed or done all its calls, comes to the reset,
which takes the four steps of ``core.reset``:

1. nothing of this rank moves any more, and all it has stored is where it belongs;
2. all ranks have told the last call that they have *begun*; what they have written has arrived;
3. each rank sets its own view of ``enter``, ``free`` and ``read``, its counters and failure words;
4. all ranks have done so.

``Steps`` can leave each of them out, to see what it is for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from gemmlink.conformance.adversary import trouble
from gemmlink.conformance.adversary.faults import Fault
from gemmlink.conformance.adversary.machine import Machine
from gemmlink.conformance.adversary.memory import Agent, Message, latest
from gemmlink.conformance.adversary.program import Program
from gemmlink.conformance.adversary.run import Outcome
from gemmlink.conformance.adversary.tasks import (
    BLOCKED,
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
#: Words by which a rank says that it has left a call.
_LEAVING = ("free", "enter")

#: Turns after which nothing will come of a run any more.
_LIMIT = 20_000

#: How a call ends badly.
Why = Literal["fails", "refuses"]


@dataclass(frozen=True)
class Steps:
    """What is done about a call that ends badly, or that with something left out.

    ``quiesce``: step 1, also of a rank that only leaves a refused call; ``publish``: that part of
    it which is about what kernels had stored. ``issued``: step 2 agrees on the last call that was
    begun, not on the last one done. ``counters``: step 3 clears them. ``wait``: step 4.

    ``tell``: peers are told. ``depart``: whoever waits looks for ranks that are further and have
    left its own call. ``look``: whoever looks up a record asks first whether its source has left.
    ``leave``: a rank says that it has left a refused call. ``recount``: clears its counters then.
    """

    quiesce: bool = True
    publish: bool = True
    issued: bool = True
    counters: bool = True
    wait: bool = True
    tell: bool = True
    depart: bool = True
    look: bool = True
    leave: bool = True
    recount: bool = True


@dataclass
class _Rank:
    """How far a rank has got. ``first``: the first call of its life. ``why``: its call must end."""

    issued: int = 0
    done: int = 0
    life: int = 0
    first: int = 1
    why: Why | None = None
    #: It has dropped its call and is on its way to the next one, or to the reset.
    out: bool = False
    #: The last call that each peer has refused or failed in, as far as is known.
    heard: dict[int, tuple[int, Why]] = field(default_factory=dict)
    #: What a lane that has stopped had copied, if one has.
    torn: list[tuple[Agent, list[tuple[int, Message]]]] = field(default_factory=list)

    def nth(self, call: int) -> int:
        """The how manieth call of this life it is."""
        return call - self.first + 1


@dataclass
class _Life:
    """What ranks have agreed on in the reset at its end."""

    told: dict[int, int] = field(default_factory=dict)
    cleared: set[int] = field(default_factory=set)
    known: Clock = field(default_factory=list)


class Notice:
    """A failure record on its way to ``rank``. Who knows of ``tick`` of ``agent`` has it."""

    def __init__(
        self, number: int, rank: int, weight: float, source: Agent, call: int, why: Why
    ) -> None:
        self.number = number
        self.rank = rank
        self.weight = weight
        self.agent = source
        self.tick = source.releases
        self.call = call
        self.why = why

    def turn(self, machine: Recovery) -> bool:
        """Arrive."""
        machine.hear(self)
        return False


class Walk:
    """A rank on its way through the steps of a reset, or out of a call."""

    def __init__(self, number: int, rank: int, steps: Sequence[str]) -> None:
        self.number = number
        self.rank = rank
        #: It waits for others most of the time, so it does not press.
        self.weight = 0.0
        self._steps = iter(steps)
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
    """A run in which calls end badly, the first ones in one of the first ``before`` calls.

    ``program`` has at least one call more than that. ``scenario``: one of those that ``trouble``
    knows; None for any.
    """

    def __init__(
        self,
        program: Program,
        seed: int,
        before: int,
        steps: Steps | None = None,
        strict: bool = True,
        story: list[str] | None = None,
        scenario: str | None = None,
    ) -> None:
        super().__init__(program, seed, strict, story)
        world, draw = program.case.world, trouble.drawing(self.mood.random.random)
        name = scenario or trouble.drawn(trouble.fitting(program, before), draw)
        self.script = trouble.script(name, world, before, draw)
        self._steps = steps or Steps()
        self._ranks = [_Rank() for _ in range(world)]
        self._lives = [_Life() for _ in range(len(self.script.stops) + 1)]

    def run(self) -> str:
        """Run all calls and resets; the hash of the trace. Raises ``Fault``."""
        came = super().run()
        done, last = [state.done for state in self._ranks], len(self.program.case.rows)
        if done != [last] * len(done):
            raise Fault("deadlock", f"calls done in the end: {done}, must be {last}")
        return came

    def going(self) -> bool:
        """Whether anybody can go on; calls that must end badly do so now."""
        for each in self.script.troubles:
            self._press(each, at_once=not self.ready)
        for rank, state in enumerate(self._ranks):
            if state.why is not None and not state.out:
                self._end_badly(rank, state.why)
        return super().going()

    def turn(self) -> None:
        """Somebody's turn."""
        if len(self.trace) > _LIMIT:
            self.refuse_stuck()
            raise Fault("deadlock", f"no end after {_LIMIT} turns")
        super().turn()

    def _press(self, it: trouble.Trouble, at_once: bool) -> None:
        """Let time pass for a trouble; all of it if nothing else happens any more."""
        state = self._ranks[it.rank]
        if it.over or it.kind == "refuses" or state.out or state.life != it.life:
            return
        if it.kind == "copy" and not state.torn:
            return
        if it.kind == "fails" and state.nth(state.issued) != it.nth:
            return
        it.patience = 0 if at_once else it.patience - 1
        if it.patience <= 0:
            it.over = True
            if it.kind == "copy" or state.done < state.issued:
                state.why = "fails"

    # Calls.

    def begin(self, rank: int, call: int, clock: Clock) -> None:
        """Begin a call, perhaps one whose number was used before, unless that is refused."""
        state = self._ranks[rank]
        if any(why == "fails" and when < call for when, why in state.heard.values()):
            self._end_badly(rank, None)
            return
        state.issued = call
        self.forget(rank, call)
        why = self._refusal(rank) or self._why(rank, call, clock)
        if why is not None:
            for agent in self._agents_of(rank):
                agent.learn(clock)
            self._end_badly(rank, why)
            return
        super().begin(rank, call, clock)

    def _refusal(self, rank: int) -> Why | None:
        """Whether the rank itself refuses the call that it has just begun."""
        state = self._ranks[rank]
        for it in self.script.troubles:
            mine = (it.rank, it.life, it.nth) == (rank, state.life, state.nth(state.issued))
            if mine and it.kind == "refuses" and not it.over:
                it.over = True
                return "refuses"
        return None

    def call_ended(self, rank: int, call: int) -> None:
        """On to the next call, or to the reset."""
        state = self._ranks[rank]
        state.done = call
        if call not in self.script.stops[state.life : state.life + 1]:
            super().call_ended(rank, call)
        elif state.torn:
            self._end_badly(rank, "fails")
        else:
            self._end_badly(rank, None)

    def _end_badly(self, rank: int, why: Why | None) -> None:
        """Drop what the rank's kernels do. Its queues go on as far as they can.

        ``why`` is None for a rank that has nothing to tell: it only comes to the reset.
        """
        state = self._ranks[rank]
        state.why, state.out = why, True
        if self.story is not None and why is not None:
            self.story.append(f"{len(self.trace):4} rank {rank} {why} in call {state.issued}")
        self._drop(rank, queues=False)
        for agent in self._agents_of(rank):
            self.memory.publish(agent, "device")  # as kernels do when they end
        steps = ("rest", "leave") if why == "refuses" else ("rest", "come", "clear", "go")
        self.ready.append(Walk(self.number(), rank, steps))

    def _drop(self, rank: int, queues: bool) -> None:
        def stays(task: object) -> bool:
            mine = isinstance(task, Task) and task.rank == rank
            queue = isinstance(task, Task) and task.code.strand.kind == "queue"
            return not mine or (queue and not queues)

        for waiting in (self.waiting, self.joining, self.at_library):
            for tasks in waiting.values():
                tasks[:] = [task for task in tasks if stays(task)]
        self.ready[:] = [task for task in self.ready if stays(task)]

    # Actions that notice, or that go wrong.

    def _put(self, task: Task, cells: list[int]) -> int:
        """A turn may end, and a kernel be dropped, between a store and its release."""
        super()._put(task, cells)
        return TURN

    def _copy(self, task: Task, pairs: list[tuple[int, int]]) -> int:
        """A copy may fail half-way: then its queue stops for good."""
        state = self._ranks[task.rank]
        for it in self.script.troubles:
            mine = (it.rank, it.life, it.nth) == (task.rank, state.life, state.nth(task.call))
            if mine and it.kind == "copy" and not it.over and not state.torn:
                half = pairs[: len(pairs) // 2]
                made = [(source, self.memory.copy(task.agent, source, to)) for source, to in half]
                state.torn.append((task.agent, made))
                return BLOCKED
        return super()._copy(task, pairs)

    def _look(self, task: Task, argument: tuple[int, Any]) -> int:
        """A rank that has left a call may have left no record of it."""
        why = self._why(task.rank, task.call, task.agent.know) if self._steps.look else None
        if why is None:
            return super()._look(task, argument)
        self._ranks[task.rank].why = why
        return BLOCKED

    # Failure records.

    def hear(self, notice: Notice) -> None:
        """A failure record arrives, behind all that its source has set before it."""
        rank, source = notice.rank, notice.agent.rank
        for each in [each for each in self.ready if isinstance(each, Delivery)]:
            word, at = self.program.words[each.word]
            if (word.source, at) == (source, rank) and each.number < notice.number:
                self.ready.remove(each)
                self.deliver(each.word, each.written)
        heard = self._ranks[rank].heard
        if notice.call >= heard.get(source, (0, notice.why))[0]:  # else it was overtaken
            heard[source] = (notice.call, notice.why)
        for tasks in list(self.waiting.values()):
            for task in tasks:
                if task.rank == rank:
                    self.stalled(task)

    def stalled(self, task: Task) -> None:
        """Whoever waits looks for failures; queues do not."""
        if task.code.strand.kind == "queue" or not isinstance(task.waits_for, tuple):
            return
        awaited = self.program.words[task.waits_for[0]][0].source
        why = self._why(task.rank, task.call, task.agent.know, awaited)
        if why is not None and not self._ranks[task.rank].out:
            self._ranks[task.rank].why = why

    def _why(self, rank: int, call: int, know: Clock, awaited: int | None = None) -> Why | None:
        """Why a rank must end a call badly. ``awaited``: of whom it waits for a word."""
        notices = [each for each in self.ready if isinstance(each, Notice) and each.rank == rank]
        for each in notices:
            if know[each.agent.number] >= each.tick:  # it knows of what came after
                self.ready.remove(each)
                self.hear(each)
        found: Why | None = None
        for source, (when, why) in self._ranks[rank].heard.items():
            left = when > call and source == awaited and self._steps.depart
            if left or when == call or (when < call and why == "fails"):
                found = why if found != "fails" else found
        return found

    # The steps out of a call, and of a reset. Each returns whether it was taken.

    def rest(self, rank: int) -> bool:
        """Nothing of this rank moves, and what it has stored is published; then peers may know."""
        state = self._ranks[rank]
        if self._steps.quiesce:
            if any(isinstance(t, Flight | Task) and t.rank == rank for t in self.ready):
                return False
            self._drop(rank, queues=True)
            for agent, made in state.torn:
                self.memory.copied(agent, made)
            for agent in self._agents_of(rank):
                self.queues.pop(agent.number, None)
                self.memory.publish(agent, "system" if self._steps.publish else "device")
        state.torn.clear()
        if state.why is not None and self._steps.tell:
            self._tell_peers(rank, state.why)
        return True

    def _tell_peers(self, rank: int, why: Why) -> None:
        host = next(iter(self._agents_of(rank)))
        host.learn(self._known_to(self._agents_of(rank)))
        host.tick()
        for peer in range(len(self._ranks)):
            if peer != rank:
                weight = self.mood.weight()
                call = self._ranks[rank].issued
                self.ready.append(Notice(self.number(), peer, weight, host, call, why))

    def leave(self, rank: int) -> bool:
        """Say that nothing of a refused call is read here any more, and go on."""
        state, know = self._ranks[rank], self._known_to(self._agents_of(rank))
        call = state.issued
        for number, (word, at) in enumerate(self.program.words):
            if word.source == rank and word.kind in _LEAVING and self._steps.leave:
                self.issued[number] = call
                written = Written(call, know, "system", rank)
                weight = self.mood.weight()
                self.ready.append(Delivery(self.number(), at, weight, number, written))
        if self._steps.recount:
            self._clear_counters(rank, know)
        state.why, state.out, state.done = None, False, call
        if call in self.script.stops[state.life : state.life + 1]:
            self._end_badly(rank, None)
        elif call < len(self.program.case.rows):
            self.begin(rank, call + 1, know)
        return True

    def come(self, rank: int) -> bool:
        """Come to the exchange; with the last rank, all that was written before has arrived."""
        state, life = self._ranks[rank], self._lives[self._ranks[rank].life]
        life.told[rank] = state.issued if self._steps.issued else state.done
        if len(life.told) == len(self._ranks):
            on_their_way = [t for t in self.ready if isinstance(t, Delivery)]
            self.ready[:] = [t for t in self.ready if not isinstance(t, Delivery | Notice)]
            for delivery in on_their_way:
                self.deliver(delivery.word, delivery.written)
            life.known = self._known_to(self.agents)
        return True

    def clear(self, rank: int) -> bool:
        """Once all have told: as if everybody had just finished the last call."""
        life = self._lives[self._ranks[rank].life]
        if len(life.told) < len(self._ranks):
            return False
        epoch = max(life.told.values())
        for number, (word, at) in enumerate(self.program.words):
            if at == rank and word.kind in _VIEWED:
                self.words[number] = Written(epoch, life.known, "system", NOBODY)
        if self._steps.counters:
            self._clear_counters(rank, life.known)
        self._ranks[rank].heard.clear()
        life.cleared.add(rank)
        return True

    def go(self, rank: int) -> bool:
        """Once all have cleared: on with the next call."""
        state, life = self._ranks[rank], self._lives[self._ranks[rank].life]
        if self._steps.wait and len(life.cleared) < len(self._ranks):
            return False
        state.life, state.first = state.life + 1, max(life.told.values()) + 1
        state.why, state.out = None, False
        self.begin(rank, state.first, life.known)
        return True

    def _clear_counters(self, rank: int, know: Clock) -> None:
        for number, (owner, _) in enumerate(self.program.counters):
            if owner == rank:
                self.counters[number] = (0, know)

    def _agents_of(self, rank: int) -> list[Agent]:
        return [agent for agent in self.agents if agent.rank == rank]

    def _known_to(self, agents: Sequence[Agent]) -> Clock:
        clock = [0] * len(self.agents)
        for agent in agents:
            clock = latest(clock, agent.know)
        return clock


def recover(
    program: Program,
    seed: int,
    before: int,
    steps: Steps | None = None,
    story: list[str] | None = None,
    scenario: str | None = None,
) -> Outcome:
    """One run in which calls end badly."""
    machine = Recovery(program, seed, before, steps, story=story, scenario=scenario)
    fault = None
    try:
        machine.run()
    except Fault as found:
        fault = found
    return Outcome(program.case.name, seed, machine.hash(), len(machine.trace), fault)
