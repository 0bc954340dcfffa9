"""Tells why some nodes of a graph can never happen: who waits for whom, until it is a circle."""

from __future__ import annotations

from collections.abc import Sequence

from gemmlink.conformance.proof.graph import Graph, Part, Refutation


def deadlock(graph: Graph, order: Sequence[int]) -> Refutation | None:
    """Refute a graph in which only the nodes of ``order`` can happen, unless that is all."""
    if len(order) == len(graph.before):
        return None
    return Refutation("deadlock", _Chain(graph, order).lines())


class _Chain:
    def __init__(self, graph: Graph, order: Sequence[int]) -> None:
        self._graph = graph
        self._done = [False] * len(graph.before)
        for node in order:
            self._done[node] = True

    def lines(self) -> tuple[str, ...]:
        """From somebody who is stuck to whom he waits for, until there is nobody new."""
        node: int | None = self._stuck(next(p for p in self._graph.parts if not self._done[p.last]))
        met: dict[int, int] = {}
        told: list[str] = []
        while node is not None and node not in met:
            met[node] = len(told)
            line, node = self._step(node)
            told.append(line)
        if node is None:
            return tuple(told)
        return (*told[met[node] :], f"and so on: {self._name(node)} is where this began")

    def _stuck(self, part: Part) -> int:
        """The first node of a part that cannot happen."""
        return next(n for n in range(part.first, part.last + 1) if not self._done[n])

    def _name(self, node: int) -> str:
        part = self._graph.part(node)
        return str(part)

    def _step(self, node: int) -> tuple[str, int | None]:
        """Who waits for what, and the node at which who owes it is stuck."""
        graph = self._graph
        part = graph.part(node)
        if node in graph.never:
            return f"{part}: {graph.text(node)}, {graph.never[node]}", None
        missing = next(other for other in graph.before[node] if not self._done[other])
        owed, why = self._owed(missing)
        if owed is None:
            return f"{part}: {why}", None
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
                return f" comes in the queue behind {owed}"
            return f" begins when call {part.call - 1} has ended, and with it {owed}"
        if node == part.last:
            return f" has drained when {owed} has"
        text, name = self._graph.text(node), part.code.ops[node - part.first - 1][0]
        if name == "wait":
            return f": {text}, which {owed} must set"
        if name == "join":
            return f": {text}, which is not done before {owed} has ended"
        return f": {text}, which {owed} must enter, too"
