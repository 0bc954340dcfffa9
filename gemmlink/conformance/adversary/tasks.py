"""Who may have a turn in a run: strands, words on their way, copies that a queue has begun."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from gemmlink.conformance.adversary.memory import Agent, Message
from gemmlink.conformance.adversary.program import Code
from gemmlink.conformance.adversary.values import Value
from gemmlink.spec.schedule import Scope

if TYPE_CHECKING:
    from gemmlink.conformance.adversary.machine import Machine

#: What comes of an action: nobody noticed; others may; it cannot be done yet.
ON, TURN, BLOCKED = range(3)

#: The device of who wrote a value that has been there from the start, or since a reset.
NOBODY = -1

#: A clock that a word, a counter or an ended kernel carries.
Clock = list[int]


class Turn(Protocol):
    """Somebody who may have a turn."""

    weight: float
    number: int
    rank: int

    def turn(self, machine: Any, /) -> bool:
        """Do something; False when this was the last turn for now."""


class Task:
    """A strand in a call, as far as it has got."""

    __slots__ = (
        "agent",
        "begun",
        "call",
        "code",
        "elected",
        "flying",
        "heard",
        "number",
        "pc",
        "rank",
        "registers",
        "waits_for",
        "weight",
    )

    def __init__(self, code: Code, agent: Agent, call: int, number: int, weight: float) -> None:
        self.code = code
        self.agent = agent
        self.rank = agent.rank
        self.call = call
        self.number = number
        self.weight = weight
        #: What its first action knows of: a queue may still be busy when this strand is queued, and
        #: what it does until then is not behind the end of the call before.
        self.begun: Clock | None = None
        self.pc = 0
        self.registers: list[Value] = []
        self.heard: list[Written] = []
        self.elected: set[int] = set()
        #: Copies that it has begun and that are not done.
        self.flying = 0
        #: A word and a value, or an actor.
        self.waits_for: tuple[int, int] | str | None = None

    def start(self) -> None:
        """Before the first action."""
        if self.begun is not None:
            self.agent.learn(self.begun)
            self.begun = None

    def turn(self, machine: Machine) -> bool:
        """Go on; False when it stops being ready."""
        ops, pc, table = self.code.ops, self.pc, machine.table
        self.start()
        while pc < len(ops):
            name, argument = ops[pc]
            if machine.story is not None:
                machine.tell(self, self.code.text(pc))
            came = table[name](self, argument)
            if came == BLOCKED:
                self.pc = pc
                return False
            pc += 1
            if came == TURN:
                break
        self.pc = pc
        if pc < len(ops):
            return True
        machine.ended(self)
        return False


class Written:
    """A value of a word, and what it carries."""

    __slots__ = ("clock", "device", "scope", "value")

    def __init__(self, value: int, clock: Clock, scope: Scope, device: int) -> None:
        self.value = value
        self.clock = clock
        self.scope = scope
        self.device = device


class Delivery:
    """A value on its way to a word."""

    __slots__ = ("number", "rank", "weight", "word", "written")

    def __init__(self, number: int, rank: int, weight: float, word: int, written: Written) -> None:
        self.number = number
        self.rank = rank
        self.weight = weight
        self.word = word
        self.written = written

    def turn(self, machine: Machine) -> bool:
        """Arrive."""
        machine.deliver(self.word, self.written)
        return False


class Flight:
    """Copies that a queue has begun and makes when it pleases."""

    __slots__ = ("done", "left", "number", "rank", "task", "weight")

    def __init__(
        self, number: int, task: Task, weight: float, pairs: Sequence[tuple[int, int]]
    ) -> None:
        self.number = number
        self.task = task
        self.rank = task.rank
        self.weight = weight
        self.left = list(pairs)
        self.done: list[tuple[int, Message]] = []

    def turn(self, machine: Machine) -> bool:
        """Move one element, any."""
        if self.left:
            index = machine.mood.among(len(self.left))
            source, target = self.left.pop(index)
            self.done.append((source, machine.memory.copy(self.task.agent, source, target)))
            return True
        machine.landed(self)
        return False
