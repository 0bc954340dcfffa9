"""Tells why some nodes of a graph cannot happen: who waits for whom, until it is a circle."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gemmlink.conformance.proof.graph import Graph, Part, Refutation

#: Nodes that need more than those before them: what in words, and who has it.
Taken = Mapping[int, tuple[str, Sequence[Part]]]


def deadlock(graph: Graph, order: Sequence[int]) -> Refutation | None:
    """Refute a graph in which only the nodes of ``order`` can happen, unless that is all."""
    if len(order) == len(graph.before):
        return None
    done = [False] * len(graph.before)
    for node in order:
        done[node] = True
    return Refutation("deadlock", waits_in_a_circle(graph, done, {}))


def waits_in_a_circle(graph: Graph, done: Sequence[bool], taken: Taken) -> tuple[str, ...]:
    """From somebody who is stuck to whom he waits for, and so on, until there is nobody new.

    ``done``: of each node, whether it has happened.
    """
    return _Chain(graph, done, taken).lines()


class _Chain:
    def __init__(self, graph: Graph, done: Sequence[bool], taken: Taken) -> None:
        self._graph = graph
        self._done = done
        self._taken = taken

    def lines(self) -> tuple[str, ...]:
        """Line by line; what leads into a circle is left out."""
        first = next(part for part in self._graph.parts if not self._done[part.last])
        node: int | None = self._stuck(first)
        met: dict[int, int] = {}
        told: list[str] = []
        while node is not None and node not in met:
            met[node] = len(told)
            line, node = self._step(node)
            told.append(line)
        if node is None:
            return tuple(told)
        return (*told[met[node] :], f"and so on: {self._graph.who(node)} is where this began")

    def _stuck(self, part: Part) -> int:
        """The first node of a part that cannot happen."""
        return next(n for n in range(part.first, part.last + 1) if not self._done[n])

    def _step(self, node: int) -> tuple[str, int | None]:
        """Who waits for what, and the node at which who owes it is stuck."""
        graph = self._graph
        part = graph.part(node)
        if node in graph.never:
            return f"{part}: {graph.text(node)}, {graph.never[node]}", None
        missing = [other for other in graph.before[node] if not self._done[other]]
        if not missing:
            text, holders = self._taken[node]
            return f"{part}{text}", self._stuck(holders[0])
        owed, why = self._owed(missing[0])
        if owed is None:
            return f"{part}: {graph.text(node)}, {why}", None
        return f"{part}{self._waits(node, owed)}", self._stuck(owed)

    def _owed(self, node: int) -> tuple[Part | None, str]:
        """Whose part ``node`` needs next, seen through events that are nobody's."""
        graph = self._graph
        while graph.owner[node] < 0:
            if node in graph.never:
                return None, graph.never[node]
            node = next(other for other in graph.before[node] if not self._done[other])
        return graph.part(node), ""

    def _waits(self, node: int, owed: Part) -> str:
        part = self._graph.part(node)
        if node == part.first:
            if part.queue and owed.code.agent == part.code.agent:
                return f" comes behind {owed}, which is the same queue"
            return f" begins when call {part.call - 1} has ended, and with it {owed}"
        if node == part.last:
            return f" has drained when {owed} has"
        text, name = self._graph.text(node), part.code.ops[node - part.first - 1][0]
        if name == "wait":
            return f": {text}, which {owed} must set"
        if name == "join":
            return f": {text}, which is not done before {owed} has ended"
        return f": {text}, which {owed} must enter, too"
