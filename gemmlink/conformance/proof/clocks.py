"""What everybody knows at least, whatever happens; who uses which cell; what covers each use.

A clock is what it is in ``adversary.memory``: for each agent, how many of its releases precede. It
is computed along the graph, in any order that the graph allows, and is the least that an agent
knows in any execution:

- who waits for a word learns what the first value that satisfies it tells. Whoever sets a later
  value knows at least as much, so to have seen that one does no harm;
- who is elected knows what all who have come for the election knew, and what he himself knows; who
  he is is open, so a word that he sets tells what all who may be would tell;
- who has merely come for an election learns nothing for sure.

What a queue that does not work in order copies is not known to be done until the queue has drained.
So its copies in each call are those of an agent of their own, whose only release is that.

A use of cells, a load or a store, is covered by a release as the fences of the strand say.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise, product
from typing import Any

from gemmlink.conformance.adversary.memory import NEVER, latest
from gemmlink.conformance.proof.graph import Graph, Part, Refutation, Setting
from gemmlink.spec.schedule import Scope

#: What an agent knows.
Clock = Sequence[int]


class Use:
    """Loads or stores by one wave of an agent, in one op. ``know``: what the agent knows then.

    ``near`` and ``far``: the releases that cover it for its own device and for others.
    """

    __slots__ = ("agent", "device", "far", "know", "near", "node", "stores")

    def __init__(self, agent: int, device: int, node: int, know: Clock, stores: bool) -> None:
        self.agent = agent
        self.device = device
        self.node = node
        self.know = know
        self.stores = stores
        self.near = NEVER
        self.far = NEVER


class Fences:
    """An agent's uses of cells on their way to be covered, as ``adversary.memory`` has it.

    Loads by the leading wave need a release, stores by it must retire first; those by others need
    a barrier behind that. A release of any scope ends loads.
    """

    def __init__(self) -> None:
        self.releases = 0
        #: Stores that have left no wave, by the leader and by others; retired ones of others.
        self._leading: list[Use] = []
        self._flying: list[Use] = []
        self._retired: list[Use] = []
        #: Loads that the leader cannot speak for yet.
        self._loads: list[Use] = []
        #: What the next release covers, and stores that only the own device sees.
        self._ready: list[Use] = []
        self._lagging: list[Use] = []

    def use(self, use: Use, leader: bool) -> None:
        """A load or store begins."""
        if use.stores:
            (self._leading if leader else self._flying).append(use)
        else:
            (self._ready if leader else self._loads).append(use)

    def retire(self) -> None:
        """All waves wait until their stores have left."""
        self._ready += self._leading
        self._retired += self._flying
        self._leading, self._flying = [], []

    def barrier(self) -> None:
        """The waves wait for each other."""
        self._ready += [*self._retired, *self._loads]
        self._retired, self._loads = [], []

    def release(self, scope: Scope) -> int:
        """The leader's fence; its number."""
        self.releases += 1
        for use in self._ready:
            use.near = self.releases
            if use.stores:
                self._lagging.append(use)
            else:
                use.far = self.releases
        self._ready = []
        if scope == "system":
            for use in self._lagging:
                use.far = self.releases
            self._lagging = []
        return self.releases

    def publish(self, scope: Scope) -> int:
        """``retire``, ``barrier`` and ``release``."""
        self.retire()
        self.barrier()
        return self.release(scope)


class Agent:
    """A block, queue or thread over all calls: its fences, and what it knows."""

    def __init__(self, number: int, device: int, count: int) -> None:
        self.number = number
        self.device = device
        self.fences = Fences()
        self.know: Clock = [0] * count
        #: Waits since the last acquire.
        self.waited: list[int] = []
        #: Of each release its node.
        self.released: list[int] = []

    def learn(self, clock: Clock) -> None:
        """All that ``clock`` tells of precedes."""
        self.know = latest(self.know, clock)

    def tick(self, release: int, node: int) -> None:
        """A release has happened."""
        know = list(self.know)
        know[self.number] = release
        self.know = know
        self.released.append(node)


class Clocks:
    """The clocks and uses of ``graph``, all of whose nodes are in ``order``.

    ``uses``: of each cell those who use it, in an order that the graph allows. ``at``: what is
    known at the nodes where somebody else learns it.
    """

    def __init__(self, graph: Graph, order: Sequence[int]) -> None:
        program = graph.program
        self.graph = graph
        #: Agents beyond these are copies of one call that no order is kept among.
        self.kept = len(program.agents)
        loose = [part.index for part in graph.parts if part.queue and not part.code.strand.in_order]
        self._loose = {index: self.kept + number for number, index in enumerate(loose)}
        count = self.kept + len(loose)
        self.agents = [Agent(n, device, count) for n, (_, _, device) in enumerate(program.agents)]
        self._nothing: Clock = [0] * count
        self.at: dict[int, Clock] = {}
        self.uses: list[list[Use]] = [[] for _ in program.cells.keys]
        self._table: dict[str, Callable[[Agent, int, Any], None]] = {
            name: getattr(self, f"_{name}") for name in _NAMES
        }
        self._settings = {s.node: s for each in graph.settings for s in each if s.ops != (s.node,)}
        for node in order:
            self._pass(node)

    def drained(self, use: Use) -> Part:
        """The strand whose end says that ``use``, which no order is kept for, is done."""
        return next(self.graph.parts[i] for i, n in self._loose.items() if n == use.agent)

    def _pass(self, node: int) -> None:
        graph = self.graph
        owner = graph.owner[node]
        if owner < 0:
            self._event(node)
            return
        part = graph.parts[owner]
        agent = self.agents[part.code.agent]
        if node == part.last:
            self._end(agent, part)
            return
        if node == part.first:
            agent.learn(self.at[graph.calls[part.rank, part.call]])
            agent.waited = []
        else:
            name, argument = part.code.ops[node - part.first - 1]
            if name in self._table:
                self._table[name](agent, node, argument)
        if part.queue and node == part.last - 1:
            self.at[node] = agent.know

    def _event(self, node: int) -> None:
        """Something that is nobody's own."""
        setting = self._settings.get(node)
        if setting is not None:
            self.at[node] = self._said(setting)
            return
        if node in self.graph.library:
            return  # the library tells nobody what else a rank has done
        clock = self._nothing
        for other in self.graph.before[node]:
            clock = latest(clock, self.at[other])
        self.at[node] = clock

    def _said(self, setting: Setting) -> Clock:
        """What a word tells that is set by whoever is elected."""
        assert setting.elected is not None, "nobody is elected"
        clocks = [self.would_know(setting, op) for op in setting.ops]
        return [min(each) for each in zip(*clocks, strict=True)]

    def would_know(self, setting: Setting, op: int) -> Clock:
        """What who makes announcement ``op`` knows if he does."""
        if setting.elected is None:
            return self.at[op]
        return latest(self.at[op], self.at[setting.elected])

    def _end(self, agent: Agent, part: Part) -> None:
        if not part.queue:
            agent.tick(agent.fences.publish("device"), part.last)
            self.at[part.last] = agent.know
            return
        # The queue may have gone on by now; what it learned there is not for who joins this.
        clock = list(self.at[part.last - 1])
        if part.behind is not None:
            clock = latest(clock, self.at[self.graph.parts[part.behind].last])
        if part.index in self._loose:
            clock[self._loose[part.index]] = 1
        self.at[part.last] = clock

    # Uses of cells. Every other element of a tile is another wave's.

    def _use(
        self, agent: Agent, node: int, cells: Sequence[int], stores: bool, leader: bool
    ) -> None:
        if cells:
            agent.fences.use(self._used(agent, node, cells, stores), leader)

    def _used(self, agent: Agent, node: int, cells: Sequence[int], stores: bool) -> Use:
        use = Use(agent.number, agent.device, node, agent.know, stores)
        for cell in cells:
            self.uses[cell].append(use)
        return use

    def _in_waves(self, agent: Agent, node: int, cells: Sequence[int], stores: bool) -> None:
        for wave in (0, 1):
            self._use(agent, node, cells[wave::2], stores, leader=wave == 1)

    def _fetch(self, agent: Agent, node: int, cells: list[int]) -> None:
        self._in_waves(agent, node, cells, stores=False)

    def _put(self, agent: Agent, node: int, cells: list[int]) -> None:
        self._in_waves(agent, node, cells, stores=True)

    def _add(self, agent: Agent, node: int, terms: list[list[int]]) -> None:
        for wave in (0, 1):
            cells = [cell for each in terms[wave::2] for cell in each]
            self._use(agent, node, cells, stores=False, leader=wave == 1)

    def _show(self, agent: Agent, node: int, argument: tuple[list[tuple[int, Any]], bool]) -> None:
        wanted, writes = argument
        cells = [cell for cell, _ in wanted]
        self._use(agent, node, cells, stores=False, leader=True)
        if writes:
            self._use(agent, node, cells, stores=True, leader=True)
            agent.tick(agent.fences.publish("system"), node)

    def _post(self, agent: Agent, node: int, argument: tuple[list[int], Any]) -> None:
        self._use(agent, node, argument[0], stores=True, leader=True)

    def _look(self, agent: Agent, node: int, argument: tuple[int, Any]) -> None:
        self._use(agent, node, [argument[0]], stores=False, leader=True)

    def _collective(self, agent: Agent, node: int, argument: tuple[str, list[int], Any]) -> None:
        _, given, taken = argument
        self._use(agent, node, given, stores=False, leader=True)
        self._use(agent, node, [cell for cell, _ in taken], stores=True, leader=True)

    def _copy(self, agent: Agent, node: int, pairs: list[tuple[int, int]]) -> None:
        loaded = self._used(agent, node, [source for source, _ in pairs], stores=False)
        stored = self._used(agent, node, [target for _, target in pairs], stores=True)
        loose = self._loose.get(self.graph.owner[node])
        number = 1
        if loose is None:
            number = agent.fences.release("system")
            agent.tick(number, node)
        for use in (loaded, stored):
            use.agent = agent.number if loose is None else loose
            use.near = use.far = number

    # Fences.

    def _retire(self, agent: Agent, _: int, __: None) -> None:
        agent.fences.retire()

    def _barrier(self, agent: Agent, _: int, __: None) -> None:
        agent.fences.barrier()

    def _release(self, agent: Agent, node: int, scope: Scope) -> None:
        agent.tick(agent.fences.release(scope), node)

    def _publish(self, agent: Agent, node: int, scope: Scope) -> None:
        agent.tick(agent.fences.publish(scope), node)

    # Words.

    def _elect(self, agent: Agent, node: int, _: Any) -> None:
        self.at[node] = agent.know

    def _announce(self, agent: Agent, node: int, _: Any) -> None:
        self.at[node] = agent.know

    def _wait(self, agent: Agent, node: int, argument: tuple[int, int, Scope | None, bool]) -> None:
        agent.waited.append(node)
        if argument[2] is not None:
            self._acquire(agent, node, argument[2])

    def _acquire(self, agent: Agent, _: int, scope: Scope) -> None:
        for node in agent.waited:
            heard = self.graph.heard.get(node, ())
            if heard and all(reaches(each, agent.device, scope) for each in heard):
                agent.learn(self.at[heard[0].node])
        agent.waited = []

    def _join(self, agent: Agent, node: int, _: str) -> None:
        for other in self.graph.before[node]:
            if other != node - 1:
                agent.learn(self.at[other])


def reaches(setting: Setting, device: int, scope: Scope) -> bool:
    """Whether who acquires on ``device`` learns for sure what a word tells."""
    near = setting.device == device
    return setting.sure and (near or scope == setting.scope == "system")


_NAMES = (
    "fetch",
    "put",
    "add",
    "show",
    "post",
    "look",
    "collective",
    "copy",
    "retire",
    "barrier",
    "release",
    "publish",
    "elect",
    "announce",
    "wait",
    "acquire",
    "join",
)


def words_in_order(clocks: Clocks) -> Refutation | None:
    """Refute words that are set in no known order, or to less than before."""
    for settings in clocks.graph.settings:
        for one, other in pairwise(settings):
            for x, y in product(one.ops, other.ops):
                if not _set_before(clocks, x, other, y):
                    falls = _set_before(clocks, y, one, x)
                    return _refuted(clocks.graph, (one, x), (other, y), falls)
    return None


def _set_before(clocks: Clocks, x: int, other: Setting, y: int) -> bool:
    """Whether announcement ``x`` precedes ``y``, which makes ``other``."""
    first, second = clocks.graph.part(x), clocks.graph.part(y)
    agent = first.code.agent
    if agent == second.code.agent:
        return (first.call, x) < (second.call, y)
    # The release that covers it is the next one.
    return clocks.would_know(other, y)[agent] > clocks.at[x][agent]


def _refuted(
    graph: Graph, one: tuple[Setting, int], other: tuple[Setting, int], falls: bool
) -> Refutation:
    word, at = graph.program.words[one[0].word]
    told = [
        f"{graph.who(op)} sets {word} at rank {at} to {setting.value}"
        for setting, op in ((other, one) if falls else (one, other))
    ]
    end = "and words only grow" if falls else "and nothing says that it happens in this order"
    return Refutation("word", (*told, end))
