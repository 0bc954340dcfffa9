"""What the schedules of all ranks order, over several calls, and what they leave to chance.

Every action of every rank in calls 1 to 3 is a node. An edge says that one is known to happen
before the other: in the program of an actor, by ``Join``, by a word that is set and awaited, and
between the calls of one rank. Whatever two accesses to the same memory are not ordered by edges,
some machine will one day do in the wrong order.

Memory is judged for the worst case: within a call each region has a place of its own; from call to
call M changes, so that any region may lie over any other of the same set of slots.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from gemmlink.spec.schedule import (
    LOCAL,
    Action,
    Compute,
    Copy,
    Deliver,
    Join,
    Load,
    Program,
    Region,
    Schedule,
    Set,
    Store,
    Wait,
    Word,
)

CALLS = 3


@dataclass
class Node:
    """An action of one rank in one call; ``after`` are the nodes that are known to precede it."""

    rank: int
    call: int
    actor: str
    action: Action | None
    what: str
    after: list[Node] = field(default_factory=list)
    #: All nodes that precede it, as bits; filled in when the graph is sorted.
    past: int = 0
    bit: int = 0

    def __str__(self) -> str:
        return f"'{self.what}' of rank {self.rank} in call {self.call}"

    def follows(self, other: Node) -> bool:
        """Whether ``other`` is known to have happened before."""
        return bool(self.past & other.bit)


@dataclass(frozen=True)
class Access:
    """A node that reads or writes a region in the window of ``owner``."""

    node: Node
    owner: int
    region: Region
    writes: bool


class Graph:
    """The order of all actions of ``schedules``, one per rank in rank order."""

    def __init__(self, schedules: Sequence[Schedule]) -> None:
        self.schedules = schedules
        self.plan = schedules[0].plan
        self.nodes: list[Node] = []
        self.accesses: list[Access] = []
        self.begins: dict[tuple[int, int], Node] = {}
        self.ends: dict[tuple[int, int], Node] = {}
        self._sets: dict[tuple[Word, int], list[tuple[int, Node]]] = {}
        for rank, schedule in enumerate(schedules):
            _Unrolled(self, rank, schedule).run()
        self.unmet = list(self._link_words())
        self.circle = self._sort()

    def add(self, rank: int, call: int, actor: str, action: Action | None, what: str = "") -> Node:
        """A new node."""
        node = Node(rank, call, actor, action, what or str(action))
        node.bit = 1 << len(self.nodes)
        self.nodes.append(node)
        return node

    def announce(self, node: Node, action: Set) -> None:
        """Remember that ``node`` sets a word."""
        value = node.call - action.lag
        self._sets.setdefault((action.word, action.at), []).append((value, node))

    def _link_words(self) -> Iterator[Node]:
        """Order each wait behind the set that satisfies it; yield the waits that none does."""
        for node in self.nodes:
            if isinstance(node.action, Wait):
                wanted = node.call - node.action.lag
                found = self._sets.get((node.action.word, node.rank), [])
                enough = [(value, setter) for value, setter in found if value >= wanted]
                if wanted > 0 and enough:
                    # Values only grow: the one set first is the one that can be relied on.
                    node.after.append(min(enough, key=lambda pair: pair[0])[1])
                elif wanted > 0:
                    yield node

    def _sort(self) -> Node | None:
        """Fill in ``past``; a node that waits for itself, if there is one."""
        state: dict[int, int] = {}
        for root in self.nodes:
            stack = [root]
            while stack:
                node = stack[-1]
                if state.get(node.bit) == 2:
                    stack.pop()
                    continue
                waiting = [n for n in node.after if state.get(n.bit) != 2]
                if any(state.get(n.bit) == 1 for n in waiting):
                    return node
                if waiting:
                    state[node.bit] = 1
                    stack += waiting[:1]
                    continue
                state[node.bit] = 2
                for earlier in node.after:
                    node.past |= earlier.past | earlier.bit
                stack.pop()
        return None

    def touching(self) -> dict[tuple[int, int], list[Access]]:
        """Accesses by the window and the set of slots that they are in."""
        found: dict[tuple[int, int], list[Access]] = {}
        for access in self.accesses:
            place = (access.owner, access.node.call % self.plan.buffers)
            found.setdefault(place, []).append(access)
        return found


class _Unrolled:
    """Adds the nodes of one rank, call after call."""

    def __init__(self, graph: Graph, rank: int, schedule: Schedule) -> None:
        self._graph = graph
        self._rank = rank
        self._schedule = schedule
        self._lane_tails: dict[str, list[Node]] = {}
        self._loose: dict[str, list[Node]] = {}

    def run(self) -> None:
        """All calls."""
        last: Node | None = None
        for call in range(1, CALLS + 1):
            last = self._call(call, last)

    def _call(self, call: int, last: Node | None) -> Node:
        graph, rank = self._graph, self._rank
        begin = graph.begins[rank, call] = graph.add(rank, call, "", None, "begin")
        if last is not None:
            begin.after.append(last)
        ends: dict[str, list[Node]] = {}
        joins: list[tuple[Node, str]] = []
        for program in self._schedule.programs:
            ends[program.actor] = self._program(program, call, begin, joins)
        for node, actor in joins:
            node.after += ends.get(actor, [])
        end = graph.ends[rank, call] = graph.add(rank, call, "", None, "end")
        for program in self._schedule.programs:
            if program.lane is None:
                end.after += ends[program.actor]
        self._show_views(call)
        return graph.ends[rank, call]

    def _program(
        self, program: Program, call: int, begin: Node, joins: list[tuple[Node, str]]
    ) -> list[Node]:
        """Add a program; what must have happened for it to have ended."""
        previous = [begin, *self._lane_tails.get(program.actor, [])]
        overtaken = program.lane is not None and self._schedule.plan.lane_order == "after_drain"
        loose = self._loose.setdefault(program.actor, [])
        value: Region | None = None
        origin: int | None = None
        for action in program.actions:
            node = self._graph.add(self._rank, call, program.actor, action)
            node.after += previous
            if isinstance(action, Join):
                joins.append((node, action.actor))
            if isinstance(action, Set):
                self._graph.announce(node, action)
            if isinstance(action, Compute):
                value, origin = None, None
            elif isinstance(action, Load):
                value, origin = action.region, action.window
                self._touch(node, origin, value, writes=False)
            elif isinstance(action, Store):
                if origin is not None and value is not None:
                    self._touch(node, origin, value, writes=False)
                self._touch(node, action.to, action.region, writes=True)
                if origin is None:  # the product lies where it was stored first
                    value, origin = action.region, action.to
            elif isinstance(action, Copy):
                self._touch(node, self._rank, action.region, writes=False)
                self._touch(node, action.to, action.region, writes=True)
            elif isinstance(action, Deliver) and not self._schedule.plan.view:
                self._touch(node, action.window, action.region, writes=False)
            if overtaken and isinstance(action, Copy):
                loose.append(node)  # nothing but a join of the lane waits for it
            else:
                previous = [node]
        if program.lane is not None:
            self._lane_tails[program.actor] = previous
        return [*previous, *loose]

    def _touch(self, node: Node, owner: int, region: Region, writes: bool) -> None:
        if owner != LOCAL:
            owner = 0 if self._schedule.plan.common else owner
            self._graph.accesses.append(Access(node, owner, region, writes))

    def _show_views(self, call: int) -> None:
        """A view is read between the end of its call and the begin of the next."""
        if not self._schedule.plan.view:
            return
        shown = self._graph.add(self._rank, call, "", None, "the reading of the view")
        shown.after.append(self._graph.ends[self._rank, call])
        for action in self._schedule.actions():
            if isinstance(action, Deliver):
                self._touch(shown, action.window, action.region, writes=False)
        self._graph.ends[self._rank, call] = shown


def missing_data(graph: Graph) -> str | None:
    """A read that no write of the same call is known to precede, as a sentence."""
    writes: dict[tuple[int, int, Region], list[Node]] = {}
    for access in graph.accesses:
        if access.writes:
            key = (access.owner, access.node.call, access.region)
            writes.setdefault(key, []).append(access.node)
    for access in graph.accesses:
        if not access.writes:
            found = writes.get((access.owner, access.node.call, access.region), [])
            if not found:
                return f"{access.node} reads {access.region}, which nobody puts there"
            if not any(access.node.follows(writer) for writer in found):
                return f"{access.node} does not wait for {found[0]}"
    return None


def race(graph: Graph) -> str | None:
    """Two accesses to one place, one of them writing, in no known order, as a sentence."""
    for accesses in graph.touching().values():
        for writer in (access for access in accesses if access.writes):
            for other in accesses:
                if other.node is writer.node or _apart(writer, other):
                    continue
                if not (writer.node.follows(other.node) or other.node.follows(writer.node)):
                    return f"{writer.node} may overwrite what {other.node} uses, or the reverse"
    return None


def _apart(one: Access, other: Access) -> bool:
    return one.node.call == other.node.call and one.region != other.region


def unsent(graph: Graph) -> str | None:
    """An own slot that is still read when its call has ended, as a sentence."""
    for access in graph.accesses:
        node = access.node
        if access.writes or access.region.source != access.owner or node.action is None:
            continue
        if not graph.ends[access.owner, node.call].follows(node):
            return f"call {node.call} of rank {access.owner} may end before {node}"
    return None
