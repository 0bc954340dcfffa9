"""A machine that goes where it is told, one action at a time; it can fork, and tell where it is."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from typing import Any, TypeVar

from gemmlink.conformance.adversary.machine import NAMES, Machine
from gemmlink.conformance.adversary.memory import Agent
from gemmlink.conformance.adversary.mood import Mood
from gemmlink.conformance.adversary.program import Op
from gemmlink.conformance.adversary.tasks import (
    BLOCKED,
    Delivery,
    Flight,
    Task,
    Turn,
    Written,
)
from gemmlink.conformance.explore.memory import OpenMemory
from gemmlink.conformance.explore.outline import Outline

#: Where a walker is. Two that are at the same place have the same before them.
Key = tuple[Any, ...]

_Tallies = tuple[
    dict[tuple[int, int, str], int], dict[tuple[int, int], int], dict[tuple[int, str], set[int]]
]
_T = TypeVar("_T", Agent, Task)


class _Told(Mood):
    """No mood at all: nothing is left to chance."""

    def weight(self) -> float:
        """Nobody presses."""
        return 0.0

    def among(self, count: int) -> int:
        """The first, for whoever wants another puts it there."""
        return 0


class Walker(Machine):
    """One run of the program of ``outline``. Whoever is blocked stays among those that are ready.

    ``story`` as in ``Machine``; it is of no use to forks.
    """

    memory: OpenMemory

    def __init__(self, outline: Outline, story: list[str] | None = None) -> None:
        program = outline.program
        super().__init__(program, 0, True, story, _Told(0, program.case.world))
        self.outline = outline
        self.memory = OpenMemory(program.cells.private(), self.agents, program.cells.name)
        for rank in range(program.case.world):
            self.begin(rank, 1, [0] * len(self.agents))

    # What may be next.

    def next_op(self, task: Task) -> Op:
        """What a strand does next; ``end`` if all is done."""
        ops = task.code.ops
        return ops[task.pc] if task.pc < len(ops) else ("end", None)

    def enabled(self, turn: Turn) -> bool:
        """Whether somebody who is ready would get anywhere."""
        if not isinstance(turn, Task):
            return True
        name, argument = self.next_op(turn)
        if name == "wait":
            word, wanted = argument[:2]
            return bool(self.words[word].value >= wanted)
        if name == "join":
            return not self._running.get((turn.rank, turn.call, argument), 1)
        return True

    def do(self, turn: Turn, which: int | None = None) -> None:
        """The next action of somebody who is enabled.

        Of a flight, the copy ``which``; without it, all copies are one action.
        """
        if self.story is not None:
            self.trace.append(turn.number)
        if isinstance(turn, Task):
            self._do_task(turn)
        elif not isinstance(turn, Flight):
            turn.turn(self)
            self.ready.remove(turn)
        elif not turn.left:
            self.ready.remove(turn)
            self.landed(turn)
        elif which is not None:
            turn.left.insert(0, turn.left.pop(which))
            turn.turn(self)
        else:
            while turn.left:
                turn.turn(self)

    def _do_task(self, task: Task) -> None:
        ops = task.code.ops
        task.start()
        if task.pc < len(ops):
            name, argument = ops[task.pc]
            if self.story is not None:
                self.tell(task, task.code.text(task.pc))
            if _ACTIONS[name](self, task, argument) == BLOCKED:
                assert name == "collective", f"a blocked {name} was said to be enabled"
                self.ready.remove(task)
                return
            task.pc += 1
        if task.pc == len(ops):
            self.ready.remove(task)
            self.ended(task)

    def finish(self) -> None:
        """Nobody is enabled. Raise if somebody still waits."""
        self.table = {name: getattr(self, f"_{name}") for name in NAMES}
        for task in self.ready:
            assert isinstance(task, Task), "a delivery that is not enabled"
            task.turn(self)
        self.ready.clear()
        self.refuse_stuck()

    # Forks.

    def tasks(self) -> list[Task]:
        """All strands that have begun and are not done."""
        found = {id(turn): turn for turn in self.ready if isinstance(turn, Task)}
        for some in (self.waiting, self.joining, self.at_library, self.queues):
            for tasks in some.values():
                found.update((id(task), task) for task in tasks)
        return list(found.values())

    def tallies(self) -> _Tallies:
        """Strands that have not ended, by actor and in all but queues, and who is at the library.

        The dictionaries are the caller's.
        """
        arrived = {key: set(given) for key, given in self._given.items()}
        return self._running.copy(), self._live.copy(), arrived

    def fork(self) -> Walker:
        """Another one at the same place."""
        other = object.__new__(Walker)
        other.__dict__.update(self.__dict__)
        other.agents = [_twin(agent) for agent in self.agents]
        for agent in other.agents:
            agent.know, agent.loads = agent.know.copy(), agent.loads.copy()
        flights = [turn for turn in self.ready if isinstance(turn, Flight)]
        flying = [message for flight in flights for _, message in flight.done]
        other.memory, fresh = self.memory.fork(other.agents, flying)
        new: dict[int, Any] = {id(task): _twin(task) for task in self.tasks()}
        for task in new.values():
            task.agent = other.agents[task.agent.number]
            task.heard, task.elected = task.heard.copy(), task.elected.copy()
        for flight in flights:
            twin = Flight(flight.number, new[id(flight.task)], 0.0, flight.left)
            twin.done = [(source, fresh[id(message)]) for source, message in flight.done]
            new[id(flight)] = twin
        other.ready = [new.get(id(turn), turn) for turn in self.ready]
        for name in ("waiting", "joining", "at_library", "queues"):
            found = getattr(self, name).items()
            setattr(other, name, {k: [new[id(task)] for task in tasks] for k, tasks in found})
        for name in _COPIED:
            setattr(other, name, copy(getattr(self, name)))
        other._given = {key: given.copy() for key, given in self._given.items()}
        return other

    # Keys.

    def key(self) -> Key:
        """Where this is. What nobody will ask for any more is not part of it."""
        tasks = self.tasks()
        # The others learn more than they know now before they do anything again.
        agents = {task.agent.number for task in tasks} | set(self.queues)
        calls = {(task.rank, task.call) for task in tasks}
        clocks = sorted(item for item in self._clocks.items() if item[0][:2] in calls)
        flights = [turn for turn in self.ready if isinstance(turn, Flight)]
        air = [turn for turn in self.ready if isinstance(turn, Delivery)]
        return (
            tuple(sorted(self._task_key(task) for task in tasks)),
            tuple(tuple(self.agents[number].know) for number in sorted(agents)),
            tuple(agent.releases for agent in self.agents),
            tuple(_written_key(written) for written in self.words),
            tuple(self.issued),
            tuple((count, tuple(clock)) for count, clock in self.counters),
            tuple(sorted((each.word, *_written_key(each.written)) for each in air)),
            tuple(sorted(_flight_key(flight) for flight in flights)),
            tuple((key, tuple(clock)) for key, clock in clocks),
            tuple(
                (key, tuple((rank, tuple(found)) for rank, found in sorted(given.items())))
                for key, given in sorted(self._given.items())
            ),
            self.memory.key(),
        )

    def _task_key(self, task: Task) -> Key:
        asked = self.outline.of(task.code).asks[task.pc]
        return (
            task.agent.number,
            task.call,
            task.pc,
            tuple(task.registers),
            tuple(_written_key(written) for written in task.heard),
            tuple(sorted(task.elected & asked)),
            task.flying,
            () if task.begun is None else tuple(task.begun),
        )


#: The actions, as functions: of methods every fork would need its own.
_ACTIONS: dict[str, Callable[[Walker, Task, Any], int]] = {
    name: getattr(Walker, f"_{name}") for name in NAMES
}

#: What a fork copies just so.
_COPIED = ("words", "issued", "counters", "trace", "_running", "_clocks", "_live")


def _written_key(written: Written) -> Key:
    return (written.value, tuple(written.clock), written.scope, written.device)


def _flight_key(flight: Flight) -> Key:
    return (flight.task.agent.number, flight.task.call, tuple(flight.left), len(flight.done))


def _twin(of: _T) -> _T:
    new = object.__new__(type(of))
    for name in of.__slots__:
        setattr(new, name, getattr(of, name))
    return new
