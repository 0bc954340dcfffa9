"""Every two uses of a cell, not both loads, are ordered - or it is told which are not.

``x`` comes before ``y`` if who does ``y`` knows the release that covers ``x``, for his device; or
if a store in between comes behind the one and before the other, for a cell's stores get nowhere in
another order than the one that is known.

Neighbours suffice. Take the uses of a cell in any order that the graph allows. If every store comes
behind the store before it and behind the loads since, and every load behind the store before it,
then any two of them are ordered by the stores between them. If two neighbours are not ordered, no
other use orders them: what the graph has behind the one and before the other lies between them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from gemmlink.conformance.adversary.memory import NEVER
from gemmlink.conformance.adversary.values import say
from gemmlink.conformance.proof.clocks import Clocks, Use
from gemmlink.conformance.proof.graph import Graph, Refutation
from gemmlink.conformance.proof.replay import stored


def neighbours(uses: Sequence[Use]) -> Iterator[tuple[Use, Use]]:
    """The pairs of a cell's uses that must be ordered."""
    last: Use | None = None
    loads: list[Use] = []
    for use in uses:
        if last is not None:
            yield last, use
        if use.stores:
            for load in loads:
                yield load, use
            last, loads = use, []
        else:
            loads.append(use)


def is_before(clocks: Clocks, x: Use, y: Use) -> bool:
    """Whether ``x`` is over, for who does ``y``."""
    if x.agent == y.agent and (x.agent < clocks.kept or x.node == y.node):
        return True
    return y.know[x.agent] >= (x.near if x.device == y.device else x.far)


def races(clocks: Clocks, order: Sequence[int]) -> tuple[int, Refutation | None]:
    """How many pairs there are, and the first one that is not ordered."""
    pairs = 0
    for cell, uses in enumerate(clocks.uses):
        for x, y in neighbours(uses):
            pairs += 1
            if not is_before(clocks, x, y):
                lines = _Story(clocks, order, cell).lines(x, y)
                return pairs, Refutation("race", lines)
    return pairs, None


class _Story:
    """Tells of two uses of ``cell`` that nothing orders."""

    def __init__(self, clocks: Clocks, order: Sequence[int], cell: int) -> None:
        self._clocks = clocks
        self._graph: Graph = clocks.graph
        self._order = order
        self._cell = cell

    def lines(self, x: Use, y: Use) -> tuple[str, ...]:
        """Line by line, the one of the earlier call first."""
        if self._graph.part(x.node).call > self._graph.part(y.node).call:
            x, y = y, x
        told = [f"{self._clocks.graph.program.cells.name(self._cell)}:"]
        told += [self._does(x), self._does(y), *self._why(x, y), self._waited(y)]
        return tuple(line for line in told if line)

    def _does(self, use: Use) -> str:
        graph = self._graph
        what = "reads it"
        if use.stores:
            what = f"stores {say(stored(graph, self._order, use.node, self._cell))}"
        return f"{graph.who(use.node)} {what} ('{graph.text(use.node)}')"

    def _why(self, x: Use, y: Use) -> Iterator[str]:
        """What is missing between them."""
        what = "store" if x.stores else "load"
        covered = x.near if x.device == y.device else x.far
        if covered < NEVER:
            yield f"the {what} is known to be done by {self._covering(x, covered)},"
            yield f"and nothing that {self._graph.who(y.node)} has waited for knows of that"
        elif x.near < NEVER:
            yield f"the store is released to its device only, by {self._covering(x, x.near)}"
        else:
            yield f"no release covers the {what}"

    def _covering(self, x: Use, number: int) -> str:
        clocks, graph = self._clocks, self._graph
        if x.agent >= clocks.kept:
            return f"the end of {clocks.drained(x)}, when it has drained"
        node = clocks.agents[x.agent].released[number - 1]
        part = graph.part(node)
        return f"the end of {part}" if node == part.last else f"'{graph.text(node)}' of {part}"

    def _waited(self, y: Use) -> str:
        """What who does ``y`` has waited for in that call."""
        graph = self._graph
        part = graph.part(y.node)
        waits = [
            graph.text(node)
            for node in range(part.first + 1, y.node)
            if part.code.ops[node - part.first - 1][0] in ("wait", "join")
        ]
        return f"it has waited for: {', '.join(waits)}" if waits else "it has waited for nothing"
