"""The values of a program without races, by going through it once.

Where all uses of a cell are ordered, each load returns what the last store before it put there, in
every execution. So any one order that the graph allows shows what all of them show, and memory may
be a plain one.
"""

from __future__ import annotations

from collections.abc import Sequence

from gemmlink.conformance.adversary import values
from gemmlink.conformance.adversary.faults import Fault
from gemmlink.conformance.adversary.machine import Machine
from gemmlink.conformance.adversary.memory import Agent, Memory, Message
from gemmlink.conformance.adversary.tasks import ON, Task
from gemmlink.conformance.adversary.values import Value
from gemmlink.conformance.proof.graph import Graph
from gemmlink.spec.schedule import Scope

#: Ops that move values; the rest is about their order.
_MOVES = ("make", "fetch", "add", "convert", "put", "show", "copy", "post", "look", "collective")


class _Plain(Memory):
    """Memory that does at once what it is told."""

    def __init__(self, cells: int) -> None:
        self.now: list[Value] = [values.POISON] * cells

    def load(self, agent: Agent, cell: int, leader: bool = True) -> Value:
        return self.now[cell]

    def store(self, agent: Agent, cell: int, value: Value, leader: bool = True) -> None:
        self.now[cell] = value

    def copy(self, agent: Agent, source: int, target: int) -> Message:
        self.now[target] = self.now[source]
        return Message(self.now[target], agent, 0)

    def copied(self, agent: Agent, made: Sequence[tuple[int, Message]]) -> None:
        pass

    def publish(self, agent: Agent, scope: Scope) -> None:
        pass


class Replay(Machine):
    """Does what moves values, in the order of the nodes it is given."""

    def __init__(self, graph: Graph) -> None:
        super().__init__(graph.program, seed=0)
        self._graph = graph
        self.plain = self.memory = _Plain(len(graph.program.cells.keys))
        self._tasks = [
            Task(part.code, self.agents[part.code.agent], part.call, part.index, 0.0)
            for part in graph.parts
        ]

    def through(self, nodes: Sequence[int]) -> None:
        """Go through ``nodes``. Raises ``Fault`` where somebody finds what he must not find."""
        for node in nodes:
            for entered in self._graph.library.get(node, [node]):
                self._pass(entered)

    def _pass(self, node: int) -> None:
        owner = self._graph.owner[node]
        part, task = self._graph.parts[owner], self._tasks[owner]
        if owner < 0 or not part.first < node < part.last:
            return
        name, argument = part.code.ops[node - part.first - 1]
        if name in _MOVES:
            task.agent.call = part.call
            self.table[name](task, argument)

    def _copy(self, task: Task, pairs: list[tuple[int, int]]) -> int:
        """At once, also on a queue that keeps no order."""
        for source, target in pairs:
            self.memory.copy(task.agent, source, target)
        return ON


def stored(graph: Graph, order: Sequence[int], node: int, cell: int) -> Value:
    """What is in ``cell`` right after ``node``, whatever else is wrong before."""
    replay = Replay(graph)
    for each in order[: order.index(node) + 1]:
        try:
            replay.through([each])
        except Fault:
            continue  # it is told by whoever looks for it
    return replay.plain.now[cell]
