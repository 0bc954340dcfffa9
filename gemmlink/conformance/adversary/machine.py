"""Runs a compiled case: all strands of all ranks in one thread, interleaved as a mood decides.

A turn takes a task up to and including its next action that others can notice. Words are on their
way for a while, and so are the copies of a queue that does not work in order: both are tasks of
their own.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from hashlib import sha256
from typing import Any

from gemmlink.conformance.adversary import values
from gemmlink.conformance.adversary.faults import Fault
from gemmlink.conformance.adversary.memory import Agent, Memory, latest, who
from gemmlink.conformance.adversary.mood import Mood
from gemmlink.conformance.adversary.program import Program
from gemmlink.conformance.adversary.tasks import (
    BLOCKED,
    NOBODY,
    ON,
    TURN,
    Clock,
    Delivery,
    Flight,
    Task,
    Turn,
    Written,
)
from gemmlink.conformance.adversary.values import Value, say
from gemmlink.spec.lowered import Announce
from gemmlink.spec.schedule import Scope


class Machine:
    """One run of ``program`` under a seed. ``story`` is a list that is told what happens, or None.

    ``strict`` as in ``memory``. ``mood``: who chooses, if it is not the seed.
    """

    def __init__(
        self,
        program: Program,
        seed: int,
        strict: bool = True,
        story: list[str] | None = None,
        mood: Mood | None = None,
    ) -> None:
        self.program = program
        self.story = story
        self.mood = mood or Mood(seed, program.case.world)
        count = len(program.agents)
        self.agents = [
            Agent(number, name, rank, device, count)
            for number, (name, rank, device) in enumerate(program.agents)
        ]
        self.memory = Memory(
            program.cells.private(), self.agents, self.mood.pick, program.cells.name, strict
        )
        start = program.case.start
        self.words = [
            Written(start.words.get(word, 0), [0] * count, "system", NOBODY)
            for word in program.words
        ]
        self.issued = [0] * len(program.words)
        self.counters = [(start.counters.get(c, 0), [0] * count) for c in program.counters]
        self.ready: list[Turn] = []
        self.trace = array("q")
        self.table: dict[str, Callable[[Task, Any], int]] = {
            name: getattr(self, f"_{name}") for name in NAMES
        }
        self._count = 0
        self.waiting: dict[int, list[Task]] = {}
        self.joining: dict[tuple[int, int, str], list[Task]] = {}
        #: Strands of an actor that have not ended yet, and what those that have knew.
        self._running: dict[tuple[int, int, str], int] = {}
        self._clocks: dict[tuple[int, int, str], Clock] = {}
        self._live: dict[tuple[int, int], int] = {}
        #: Of each queue the strands that are not done, by agent.
        self.queues: dict[int, list[Task]] = {}
        self._given: dict[tuple[int, str], dict[int, list[Value]]] = {}
        self.at_library: dict[tuple[int, str], list[Task]] = {}

    def run(self) -> str:
        """Run all calls; the hash of the trace. Raises ``Fault``."""
        for rank in range(self.program.case.world):
            self.begin(rank, 1, [0] * len(self.agents))
        while self.going():
            self.turn()
        self.refuse_stuck()
        return self.hash()

    def going(self) -> bool:
        """Whether anybody can go on."""
        return bool(self.ready)

    def turn(self) -> None:
        """Somebody's turn."""
        ready = self.ready
        if self.mood.leaking():
            self.memory.leak(self.mood.random)
        index = self.mood.next(ready)
        task = ready[index]
        self.trace.append(task.number)
        # It is not among those who could be next while it has its turn, and others may come and go.
        ready[index] = ready[-1]
        ready.pop()
        if task.turn(self):
            ready.append(task)

    def number(self) -> int:
        """The number of somebody new."""
        self._count += 1
        return self._count

    def hash(self) -> str:
        """Sixteen hex digits of who had a turn when."""
        return sha256(self.trace.tobytes()).hexdigest()[:16]

    def tell(self, task: Task, text: str) -> None:
        """Add a line to the story."""
        assert self.story is not None, "a story that nobody wants to hear"
        self.story.append(f"{len(self.trace):4} {who(task.agent)}: {text}")

    # Calls and strands.

    def begin(self, rank: int, call: int, clock: Clock) -> None:
        """A rank begins a call, knowing what ``clock`` tells of."""
        codes = self.program.codes[rank][call - 1]
        self._live[rank, call] = sum(code.strand.kind != "queue" for code in codes)
        for code in codes:
            key = (rank, call, code.strand.actor)
            self._running[key] = self._running.get(key, 0) + 1
        for code in codes:
            agent = self.agents[code.agent]
            task = Task(code, agent, call, self.number(), self.mood.weight())
            task.begun = clock
            if code.strand.kind == "queue":
                queue = self.queues.setdefault(code.agent, [])
                idle = all(before.pc == len(before.code.ops) for before in queue)
                queue.append(task)
                if not idle:
                    continue
            agent.call = call
            self.ready.append(task)
        if not codes:
            self.call_ended(rank, call)

    def forget(self, rank: int, call: int) -> None:
        """Nothing is known of this call, though its number was used before."""
        for code in self.program.codes[rank][call - 1]:
            key = (rank, call, code.strand.actor)
            self._running.pop(key, None)
            self._clocks.pop(key, None)

    def ended(self, task: Task) -> None:
        """A strand has come to its end, which is a release of device scope."""
        agent = task.agent
        if task.code.strand.kind != "queue":
            self.memory.publish(agent, "device")
            self._closed(task)
            return
        # The queue goes on, though copies of this strand may not be done yet.
        queue = self.queues[agent.number]
        after = queue[queue.index(task) + 1 :]
        if after:
            agent.call = after[0].call
            self.ready.append(after[0])
        self._close_queue(agent)

    def landed(self, flight: Flight) -> None:
        """Copies of a queue are done."""
        self.memory.copied(flight.task.agent, flight.done)
        flight.task.flying -= 1
        self._close_queue(flight.task.agent)

    def _close_queue(self, agent: Agent) -> None:
        queue = self.queues[agent.number]
        while queue and not queue[0].flying and queue[0].pc == len(queue[0].code.ops):
            self._closed(queue.pop(0))

    def _closed(self, task: Task) -> None:
        key = (task.rank, task.call, task.code.strand.actor)
        known = self._clocks.get(key)
        clock = task.agent.know
        self._clocks[key] = list(clock) if known is None else latest(known, clock)
        self._running[key] -= 1
        if not self._running[key]:
            self.ready += self.joining.pop(key, [])
        if task.code.strand.kind == "queue":
            return
        live = (task.rank, task.call)
        self._live[live] -= 1
        if not self._live[live]:
            self.call_ended(task.rank, task.call)

    def call_ended(self, rank: int, call: int) -> None:
        """A rank has done a call; on to the next one."""
        if call < len(self.program.case.rows):
            self.begin(rank, call + 1, self.ends(rank, call))

    def ends(self, rank: int, call: int) -> Clock:
        """What is known when a call has ended: all that its strands did, queues apart.

        One in which the rank does nothing tells what is known since the call before.
        """
        if call > 1 and not self.program.codes[rank][call - 1]:
            return self.ends(rank, call - 1)
        clock = [0] * len(self.agents)
        for code in self.program.codes[rank][call - 1]:
            if code.strand.kind != "queue":
                clock = latest(clock, self._clocks[rank, call, code.strand.actor])
        return clock

    # Actions. Each takes the task and what the action was compiled to.

    def _make(self, task: Task, made: list[Value]) -> int:
        task.registers = made
        return ON

    def _fetch(self, task: Task, cells: list[int]) -> int:
        load, agent = self.memory.load, task.agent
        task.registers = [load(agent, cell, i & 1 == 1) for i, cell in enumerate(cells)]
        return TURN

    def _add(self, task: Task, terms: list[list[int]]) -> int:
        load, agent = self.memory.load, task.agent
        task.registers = [
            values.add([load(agent, cell, i & 1 == 1) for cell in cells])
            for i, cells in enumerate(terms)
        ]
        return TURN

    def _convert(self, task: Task, way: Callable[[Value], Value]) -> int:
        task.registers = [way(value) for value in task.registers]
        return ON

    def _put(self, task: Task, cells: list[int]) -> int:
        store, agent, registers = self.memory.store, task.agent, task.registers
        if len(registers) != len(cells):  # nobody made this tile
            registers = [values.POISON] * len(cells)
        # Every other element is another wave's.
        for index, cell in enumerate(cells):
            store(agent, cell, registers[index], index & 1 == 1)
        return ON

    def _show(self, task: Task, argument: tuple[list[tuple[int, Value]], bool]) -> int:
        wanted, writes = argument
        for cell, value in wanted:
            found = self.memory.load(task.agent, cell)
            if found != value:
                place = self.program.cells.name(cell)
                raise Fault(
                    "wrong",
                    f"{who(task.agent)} finds {say(found)} in {place}, must find {say(value)}",
                )
        if writes:
            for cell, _ in wanted:
                self.memory.store(task.agent, cell, values.SCRIBBLE)
            self.memory.publish(task.agent, "system")
        return TURN

    def _copy(self, task: Task, pairs: list[tuple[int, int]]) -> int:
        agent = task.agent
        if task.code.strand.in_order:
            done = [(source, self.memory.copy(agent, source, target)) for source, target in pairs]
            self.memory.copied(agent, done)
            return TURN
        task.flying += 1
        self.ready.append(Flight(self.number(), task, self.mood.weight(), pairs))
        return TURN

    def _retire(self, task: Task, _: None) -> int:
        self.memory.retire(task.agent)
        return ON

    def _barrier(self, task: Task, _: None) -> int:
        self.memory.barrier(task.agent)
        return ON

    def _release(self, task: Task, scope: Scope) -> int:
        self.memory.release(task.agent, scope)
        return TURN

    def _publish(self, task: Task, scope: Scope) -> int:
        self.memory.publish(task.agent, scope)
        return TURN

    def _elect(self, task: Task, argument: tuple[int, int]) -> int:
        number, of = argument
        count, clock = self.counters[number]
        task.agent.learn(clock)
        self.counters[number] = (count + 1, task.agent.know)
        task.elected.discard(number)
        if (count + 1) % of == 0:
            task.elected.add(number)
        # Nobody else may see or change the clock that the counter keeps.
        task.agent.know = list(task.agent.know)
        return ON

    def _announce(self, task: Task, argument: tuple[int, int, Scope, int | None, bool]) -> int:
        word, value, scope, by, last = argument
        if by is not None and by not in task.elected:
            return ON
        self._check_word(task, word, value)
        agent = task.agent
        written = Written(value, list(agent.know), scope, agent.device)
        at = self.program.words[word][1]
        self.ready.append(Delivery(self.number(), at, self.mood.weight(), word, written))
        return TURN if last else ON

    def _check_word(self, task: Task, number: int, value: int) -> None:
        word, at = self.program.words[number]
        if word.source != task.rank:
            raise Fault("word", f"{who(task.agent)} sets {word}, which is rank {word.source}'s")
        if value < self.issued[number]:
            raise Fault(
                "word",
                f"{who(task.agent)} sets {word} at rank {at} to {value} after "
                f"{self.issued[number]}; words only grow",
            )
        self.issued[number] = value

    def _wait(self, task: Task, argument: tuple[int, int, Scope | None, bool]) -> int:
        word, wanted, scope, last = argument
        written = self.words[word]
        if written.value < wanted:
            task.waits_for = (word, wanted)
            self.waiting.setdefault(word, []).append(task)
            self.stalled(task)
            return BLOCKED
        task.waits_for = None
        task.heard.append(written)
        if scope is not None:
            self._acquire(task, scope)
        return TURN if last else ON

    def _acquire(self, task: Task, scope: Scope) -> int:
        agent = task.agent
        for written in task.heard:
            if written.device == agent.device or scope == written.scope == "system":
                agent.learn(written.clock)
        task.heard.clear()
        return ON

    def _join(self, task: Task, actor: str) -> int:
        key = (task.rank, task.call, actor)
        if self._running.get(key, 1):
            task.waits_for = actor
            self.joining.setdefault(key, []).append(task)
            return BLOCKED
        task.waits_for = None
        task.agent.learn(self._clocks[key])
        return ON

    def _post(self, task: Task, argument: tuple[list[int], Value]) -> int:
        cells, record = argument
        for cell in cells:
            self.memory.store(task.agent, cell, record)
        return ON

    def _look(self, task: Task, argument: tuple[int, Value]) -> int:
        cell, record = argument
        found = self.memory.load(task.agent, cell)
        if found != record:
            raise Fault(
                "record",
                f"{who(task.agent)} finds {say(found)} in {self.program.cells.name(cell)}, "
                f"must find {say(record)}",
            )
        return TURN

    def _collective(self, task: Task, argument: tuple[str, list[int], list[Any]]) -> int:
        name, given, taken = argument
        key = (task.call, name)
        mine = self._given.setdefault(key, {})
        if task.rank not in mine:
            mine[task.rank] = [self.memory.load(task.agent, cell) for cell in given]
            if len(mine) == self.program.case.world:
                self.ready += self.at_library.pop(key, [])
        if len(mine) < self.program.case.world:
            task.waits_for = f"the library's {name}"
            self.at_library.setdefault(key, []).append(task)
            return BLOCKED
        task.waits_for = None
        last = self.program.case.lowered[0].operation.phases[-1]
        for cell, terms in taken:
            found = [mine[rank][index] for rank, index in terms]
            value = values.add(found) if name == "reduce_scatter" else found[0]
            if name == "all_gather" and last.wire is not None:
                value = values.decode(values.encode(value))
            self.memory.store(task.agent, cell, value)
        return TURN

    def deliver(self, word: int, written: Written) -> None:
        """A value arrives; one that was overtaken is of no interest.

        What nobody has written overtakes nothing, however great it is.
        """
        present = self.words[word]
        if written.value < present.value and present.device != NOBODY:
            return
        self.words[word] = written
        waiting = self.waiting.pop(word, None)
        if waiting:
            self.ready += waiting

    def stalled(self, task: Task) -> None:
        """A task waits for a word that is not there."""

    # When nobody can go on.

    def refuse_stuck(self) -> None:
        """Raise if somebody still waits, and say for what."""
        stuck = [task for tasks in self.waiting.values() for task in tasks]
        stuck += [task for tasks in self.joining.values() for task in tasks]
        stuck += [task for tasks in self.at_library.values() for task in tasks]
        if stuck:
            stuck.sort(key=lambda task: task.number)
            raise Fault("deadlock", "; ".join(self._tell_stuck(task) for task in stuck))

    def _tell_stuck(self, task: Task) -> str:
        if not isinstance(task.waits_for, tuple):
            return f"{who(task.agent)} waits for {task.waits_for}"
        number, wanted = task.waits_for
        word, at = self.program.words[number]
        seen = self.words[number].value
        setters = [
            strand.name
            for strand in self.program.case.lowered[word.source].strands
            for action in strand.actions
            if isinstance(action, Announce) and (action.word, action.at) == (word, at)
        ]
        names = " or ".join(dict.fromkeys(setters)) or "nobody"
        return (
            f"{who(task.agent)} waits for {word} >= {wanted} and sees {seen}; "
            f"rank {word.source}'s {names} must set it"
        )


#: Of every action what it is compiled to is called.
NAMES = (
    "make",
    "fetch",
    "add",
    "convert",
    "put",
    "show",
    "copy",
    "retire",
    "barrier",
    "release",
    "publish",
    "acquire",
    "elect",
    "announce",
    "wait",
    "join",
    "post",
    "look",
    "collective",
)
