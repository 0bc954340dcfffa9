"""What the schedules of all ranks order, over several calls, and what they leave to chance.

Every action of every rank in calls 1 to 3 is a node. An edge says that one is known to happen
before the other: in the program of an actor, by ``Join``, by a word that is set and awaited, and
between the calls of one rank. Whatever two accesses to the same memory are not ordered by edges,
some machine will one day do in the wrong order.

Memory is judged for the worst case: within a call each region of an area has a place of its own;
from call to call M changes, so that any region may lie over any other of the same area. What is in
which area is told by ``touches``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from gemmlink.conformance import touches
from gemmlink.conformance.touches import PRIVATE, Touch, Touching
from gemmlink.spec.operations import Operation
from gemmlink.spec.schedule import (
    Action,
    Copy,
    Deliver,
    Join,
    Load,
    Program,
    Region,
    Schedule,
    Set,
    Sum,
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
        return f"'{self.what or self.action}' of rank {self.rank} in call {self.call}"

    def follows(self, other: Node) -> bool:
        """Whether ``other`` is known to have happened before."""
        return bool(self.past & other.bit)


@dataclass(frozen=True)
class Access:
    """A node that reads or writes something."""

    node: Node
    touch: Touch

    @property
    def memory(self) -> tuple[int, str, int]:
        """The memory of which it is a part: owner, area and phase."""
        return self.touch.owner, self.touch.area, self.touch.region.phase


class Graph:
    """The order of all actions of an operation's ``schedules``, one per rank in rank order."""

    def __init__(self, operation: Operation, schedules: Sequence[Schedule]) -> None:
        self.operation = operation
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
        node = Node(rank, call, actor, action, what)
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

    def touching(self) -> Iterable[list[Access]]:
        """Accesses by the memory that they are in. Private buffers are fresh in each call."""
        found: dict[tuple[tuple[int, str, int], int], list[Access]] = {}
        for access in self.accesses:
            call = access.node.call
            fresh = access.touch.area in PRIVATE
            place = (access.memory, call if fresh else call % self.plan.buffers)
            found.setdefault(place, []).append(access)
        return found.values()


class _Unrolled:
    """Adds the nodes of one rank, call after call."""

    def __init__(self, graph: Graph, rank: int, schedule: Schedule) -> None:
        self._graph = graph
        self._rank = rank
        self._schedule = schedule
        self._touching = touches.of_programs(graph.operation, schedule)
        #: By lane, which is one queue in all phases and calls.
        self._tails: dict[tuple[int, int], list[Node]] = {}
        self._loose: dict[tuple[int, int], list[Node]] = {}

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
        for program, touching in zip(self._schedule.programs, self._touching, strict=True):
            ends[program.actor] = self._program(program, touching, call, begin, joins)
        for node, actor in joins:
            node.after += ends.get(actor, [])
        end = graph.ends[rank, call] = graph.add(rank, call, "", None, "end")
        for program in self._schedule.programs:
            if program.lane is None:
                end.after += ends[program.actor]
        self._show_views(call)
        return graph.ends[rank, call]

    def _program(
        self,
        program: Program,
        touching: Iterable[Touching],
        call: int,
        begin: Node,
        joins: list[tuple[Node, str]],
    ) -> list[Node]:
        """Add a program; what must have happened for it to have ended."""
        lane = program.lane
        previous = [begin, *(self._tails.get(lane, []) if lane is not None else [])]
        loose = self._loose.setdefault(lane, []) if lane is not None else []
        overtaken = lane is not None and self._schedule.plan.lane_order == "after_drain"
        for action, touched in touching:
            node = self._graph.add(self._rank, call, program.actor, action)
            node.after += previous
            if isinstance(action, Join):
                joins.append((node, action.actor))
            if isinstance(action, Set):
                self._graph.announce(node, action)
            self._graph.accesses += [Access(node, touch) for touch in touched]
            if overtaken and isinstance(action, Copy):
                loose.append(node)  # nothing but a join of the lane waits for it
            else:
                previous = [node]
        if lane is not None:
            self._tails[lane] = previous
        return [*previous, *loose]

    def _show_views(self, call: int) -> None:
        """A view is read between the end of its call and the begin of the next."""
        if not self._schedule.plan.view:
            return
        shown = self._graph.add(self._rank, call, "", None, "the reading of the view")
        shown.after.append(self._graph.ends[self._rank, call])
        found = touches.shown(self._graph.operation, self._schedule)
        self._graph.accesses += [Access(shown, touch) for touch in found]
        self._graph.ends[self._rank, call] = shown


def missing_data(graph: Graph) -> str | None:
    """A read that no write of the same call is known to precede, as a sentence."""
    writes: dict[tuple[int, str, Region, int], list[Node]] = {}
    for access in graph.accesses:
        if access.touch.writes:
            writes.setdefault(_datum(access), []).append(access.node)
    for access in graph.accesses:
        if not access.touch.writes:
            found = writes.get(_datum(access), [])
            if not found:
                return f"{access.node} reads {_name(access.touch)}, which nobody puts there"
            if not any(access.node.follows(writer) for writer in found):
                return f"{access.node} does not wait for {found[0]}"
    return None


def _datum(access: Access) -> tuple[int, str, Region, int]:
    touch = access.touch
    return touch.owner, touch.area, touch.region, access.node.call


def _name(touch: Touch) -> str:
    return f"{touch.region} in the {touch.area} of rank {touch.owner}"


def race(graph: Graph) -> str | None:
    """Two accesses to one place, one of them writing, in no known order, as a sentence."""
    for accesses in graph.touching():
        for writer in (access for access in accesses if access.touch.writes):
            for other in accesses:
                if other.node is writer.node or _apart(writer, other):
                    continue
                if not (writer.node.follows(other.node) or other.node.follows(writer.node)):
                    return f"{writer.node} may overwrite what {other.node} uses, or the reverse"
    return None


def _apart(one: Access, other: Access) -> bool:
    """Whether they cannot meet: another slot of the area, or another chunk of the same part.

    An inbox has a slot for each source, whatever part it is put there; an outbox one for each part.
    """
    if one.node.call != other.node.call:
        return False
    a, b = one.touch.region, other.touch.region
    if one.touch.area == "inbox" and a.source != b.source:
        return True
    if one.touch.area in ("outbox", "local") and a.part != b.part:
        return True
    return (a.source, a.part) == (b.source, b.part) and a.chunk != b.chunk


def unsent(graph: Graph) -> str | None:
    """A window that others or lanes still read when its call has ended, as a sentence."""
    for access in graph.accesses:
        node, owner = access.node, access.touch.owner
        if access.touch.writes or access.touch.area in PRIVATE or node.action is None:
            continue
        if not graph.ends[owner, node.call].follows(node):
            return f"call {node.call} of rank {owner} may end before {node}"
    return None


def ungated(graph: Graph) -> str | None:
    """A store, copy or sum that does not wait until every peer has finished reading."""
    gates: dict[int, dict[int, Node]] = {}
    for node in graph.nodes:
        action = node.action
        if node.call == 1 and isinstance(action, Wait) and action.word.kind == "free":
            gates.setdefault(node.rank, {})[action.word.source] = node
    for access in graph.accesses:
        node = access.node
        if node.call == 1 and access.touch.writes and access.touch.area not in PRIVATE:
            for peer in graph.schedules[node.rank].plan.peers:
                gate = gates.get(node.rank, {}).get(peer)
                if gate is None or not node.follows(gate):
                    return f"{node} does not wait for free[{peer}]"
    return None


def unfreed(graph: Graph) -> str | None:
    """A rank that does not say, once and after its last reading, that it has finished reading."""
    lag = 1 if graph.plan.view else 0
    for schedule in graph.schedules:
        rank = schedule.plan.rank
        mine = [node for node in graph.nodes if (node.rank, node.call) == (rank, 1)]
        said = [node for node in mine if _frees(node, rank, lag)]
        told = sorted(node.action.at for node in said if isinstance(node.action, Set))
        if told != sorted(schedule.plan.peers):
            return f"rank {rank} sets free (= n{f'-{lag}' if lag else ''}) at ranks {told}"
        for node in mine if not graph.plan.view else ():
            early = [other for other in said if _takes(node, rank) and not other.follows(node)]
            if early:
                return f"{early[0]} does not come after {node}"
    return None


def _takes(node: Node, rank: int) -> bool:
    """Whether it reads what others have put somewhere for this rank."""
    action = node.action
    return isinstance(action, Deliver | Sum) or (isinstance(action, Load) and action.window != rank)


def _frees(node: Node, rank: int, lag: int) -> bool:
    action = node.action
    return isinstance(action, Set) and action.word == Word("free", rank) and action.lag == lag
