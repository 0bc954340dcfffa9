"""Memory that keeps no promise but those of the contract.

Every *cell* (one element, one field of a record) has a history of messages, the values that were
stored there in the order in which they got there: coherence of each cell is all that is granted.
A store is at first its block's secret. It becomes visible to the own device, and to the whole
system, when a release of that scope covers it - or earlier, if the adversary likes (``leak``).

What an agent knows is a clock: for each agent, how many of its releases precede. A load may return
any message that is not older than the newest one that the agent knows of. A message counts as known
when the release that covered it, *for the device of who looks*, is known: so a release of device
scope tells other devices nothing, whatever words say. A copy engine is a device of its own.

``strict`` memory also refuses what only could go wrong: a load that might return something else, a
store over what somebody may still read, two stores in no known order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random

from gemmlink.conformance.adversary.faults import Fault
from gemmlink.conformance.adversary.values import POISON, Value, say
from gemmlink.spec.schedule import Scope

#: The number of a release that has not happened.
NEVER = 1 << 40

#: How far a message has got: its block, its device, everywhere.
_BLOCK, _DEVICE, _SYSTEM = range(3)

#: What fences know of a store: in flight in some wave, or in the leader; retired; ready to be
#: covered by the leader's fence.
_FLYING, _LEADING, _RETIRED, _READY = range(4)

#: How a load chooses among what it may return, oldest first.
Taste = Callable[[Sequence["Message"]], "Message"]


class Message:
    """A value in a cell. ``near`` and ``far``: the releases that cover it for device and system."""

    __slots__ = ("agent", "call", "device", "far", "near", "reach", "state", "value")

    def __init__(self, value: Value, agent: Agent, state: int) -> None:
        self.value = value
        self.agent = agent.number
        self.device = agent.device
        self.call = agent.call
        self.near = NEVER
        self.far = NEVER
        self.reach = _BLOCK
        self.state = state


class Agent:
    """Whoever loads and stores: a block, a queue or a thread, over all calls."""

    __slots__ = (
        "call",
        "device",
        "know",
        "lagging",
        "loads",
        "name",
        "number",
        "open",
        "rank",
        "releases",
    )

    def __init__(self, number: int, name: str, rank: int, device: int, agents: int) -> None:
        self.number = number
        self.name = name
        self.rank = rank
        self.device = device
        self.call = 0
        #: The clock: how many releases of each agent precede what this one does next.
        self.know = [0] * agents
        self.releases = 0
        #: Own stores that no release covers.
        self.open: dict[int, Message] = {}
        #: Own stores that are released as far as the own device.
        self.lagging: list[tuple[int, Message]] = []
        #: Cells that waves other than the leader have loaded since the last barrier.
        self.loads: list[int] = []

    def learn(self, clock: Sequence[int]) -> None:
        """From now on all that ``clock`` tells of precedes."""
        self.know = latest(self.know, clock)

    def tick(self) -> int:
        """Release once more; the number of this release."""
        self.releases += 1
        self.know[self.number] = self.releases
        return self.releases


class Memory:
    """All cells of all ranks. Agent 0 is nobody, whose one store everybody knows of.

    ``private``: for each cell, whether only one device ever uses it. ``names`` tells where a cell
    is.
    """

    def __init__(
        self,
        private: Sequence[bool],
        agents: Sequence[Agent],
        taste: Taste,
        names: Callable[[int], str],
        strict: bool = True,
    ) -> None:
        nobody = Message(POISON, agents[0], _READY)
        nobody.near, nobody.far, nobody.reach = 0, 0, _SYSTEM
        self.history = [[nobody] for _ in private]
        #: What only the device of its agent sees, by cell.
        self._soft: dict[int, list[Message]] = {}
        self._readers: list[dict[int, int] | None] = [None] * len(private)
        self._loose: list[tuple[int, Message]] = []
        self._private = private
        self._agents = agents
        self._taste = taste
        self._names = names
        self._strict = strict

    # Loads and stores.

    def load(self, agent: Agent, cell: int, leader: bool = True) -> Value:
        """What ``agent`` finds in ``cell``. ``leader``: it is its leading wave that looks."""
        if agent.open:
            own = agent.open.get(cell)
            if own is not None:
                return own.value
        found = self.history[cell][-1]
        covered = found.near if found.device == agent.device else found.far
        if agent.know[found.agent] < covered or cell in self._soft:
            found = self._unsettled(agent, cell)
        readers = self._readers[cell]
        if readers is None:
            readers = self._readers[cell] = {}
        if leader:
            readers[agent.number] = agent.releases + 1
        else:
            readers[agent.number] = NEVER
            agent.loads.append(cell)
        return found.value

    def store(self, agent: Agent, cell: int, value: Value, leader: bool = True) -> None:
        """Put ``value`` into ``cell``, some time."""
        if self._strict:
            self._refuse_races(agent, cell)
        message = Message(value, agent, _LEADING if leader else _FLYING)
        agent.open[cell] = message
        self._loose.append((cell, message))

    # Fences.

    def retire(self, agent: Agent) -> None:
        """All waves wait for their stores to leave them."""
        for message in agent.open.values():
            if message.state < _RETIRED:
                message.state += _RETIRED  # of the leader it is ready at once

    def barrier(self, agent: Agent) -> None:
        """The waves wait for each other: the leader may speak for what they loaded and retired."""
        for message in agent.open.values():
            if message.state == _RETIRED:
                message.state = _READY
        for cell in agent.loads:
            readers = self._readers[cell]
            if readers is not None and agent.number in readers:
                readers[agent.number] = agent.releases + 1
        agent.loads.clear()

    def release(self, agent: Agent, scope: Scope) -> None:
        """The leader's fence."""
        number = agent.tick()
        for cell, message in list(agent.open.items()):
            if message.state == _READY:
                del agent.open[cell]
                self._near(agent, cell, message, number)
        if scope == "system":
            for cell, message in agent.lagging:
                message.far = number
                self._spread(cell, message, _SYSTEM)
            agent.lagging.clear()

    def publish(self, agent: Agent, scope: Scope) -> None:
        """``retire``, ``barrier`` and ``release`` in one."""
        if agent.loads:
            self.barrier(agent)
        if agent.lagging or scope == "device":
            for message in agent.open.values():
                message.state = _READY
            self.release(agent, scope)
            return
        number = agent.tick()
        for cell, message in agent.open.items():
            message.near = message.far = number
            self._spread(cell, message, _SYSTEM)
        agent.open.clear()

    def copy(self, agent: Agent, source: int, target: int) -> Message:
        """A copy engine moves a cell, past all caches. Nobody knows before ``copied``."""
        value = self.load(agent, source)
        readers = self._readers[source]
        assert readers is not None, "a load that left no trace"
        readers[agent.number] = NEVER
        if self._strict:
            self._refuse_races(agent, target)
        message = Message(value, agent, _READY)
        self._spread(target, message, _SYSTEM)
        return message

    def copied(self, agent: Agent, made: Sequence[tuple[int, Message]]) -> None:
        """Copies are done: (source, message) each. Whoever learns of it now, knows."""
        number = agent.tick()
        for source, message in made:
            message.near = message.far = number
            readers = self._readers[source]
            if readers is not None and agent.number in readers:
                readers[agent.number] = number

    def leak(self, random: Random) -> None:
        """Let some store become visible one step further than anybody has asked for yet."""
        while self._loose:
            index = int(random.random() * len(self._loose))
            cell, message = self._loose[index]
            if message.reach < _SYSTEM:
                self._spread(cell, message, message.reach + 1)
                return
            self._loose[index] = self._loose[-1]
            self._loose.pop()

    def _near(self, agent: Agent, cell: int, message: Message, number: int) -> None:
        message.near = number
        if self._private[cell]:
            self._spread(cell, message, _SYSTEM)  # there is nobody else
        else:
            self._spread(cell, message, _DEVICE)
            agent.lagging.append((cell, message))

    def _spread(self, cell: int, message: Message, reach: int) -> None:
        """Let a message become visible as far as ``reach``."""
        if message.reach >= reach:
            return
        if reach == _DEVICE:
            message.reach = reach
            self._soft.setdefault(cell, []).append(message)
            return
        waiting = self._soft.get(cell)
        if waiting:
            # Coherence: what the same device has stored there before gets there before.
            upto = waiting.index(message) if message in waiting else len(waiting)
            for earlier in [m for m in waiting[:upto] if m.device == message.device]:
                self._arrive(cell, earlier)
        self._arrive(cell, message)

    def _arrive(self, cell: int, message: Message) -> None:
        waiting = self._soft.get(cell)
        if waiting and message in waiting:
            waiting.remove(message)
            if not waiting:
                del self._soft[cell]
        self.history[cell].append(message)
        message.reach = _SYSTEM

    # What may be seen, and what is in the way.

    def _unsettled(self, agent: Agent, cell: int) -> Message:
        """A load that may have a choice."""
        soft = self._soft.get(cell, [])
        visible = [*self.history[cell], *(m for m in soft if m.device == agent.device)]
        first = len(visible) - 1
        while not self._knows(agent, visible[first]):
            first -= 1
        unseen = [m for m in soft if m.device != agent.device]
        if self._strict and (first < len(visible) - 1 or unseen):
            other = unseen[-1] if unseen else visible[-1]
            raise Fault("race", self._tell_load(agent, cell, visible[first], other))
        return self._taste(visible[first:])

    def _knows(self, agent: Agent, message: Message) -> bool:
        covered = message.near if message.device == agent.device else message.far
        return agent.know[message.agent] >= covered or message.agent == agent.number

    def _refuse_races(self, agent: Agent, cell: int) -> None:
        """Raise unless all that others did in ``cell`` is known to precede."""
        soft = self._soft.get(cell)
        last = soft[-1] if soft else self.history[cell][-1]
        if not self._knows(agent, last):
            raise Fault("race", self._tell_stores(agent, cell, last))
        readers = self._readers[cell]
        if readers:
            for number, release in readers.items():
                if agent.know[number] < release and number != agent.number:
                    raise Fault("race", self._tell_use(agent, cell, self._agents[number]))
            self._readers[cell] = None

    def _tell_load(self, agent: Agent, cell: int, old: Message, new: Message) -> str:
        return (
            f"{who(agent)} may still find {say(old.value)} in {self._names(cell)}: "
            f"{self._stored(new)}, which {_how(new)} and nothing orders before this load"
        )

    def _tell_stores(self, agent: Agent, cell: int, other: Message) -> str:
        return (
            f"{who(agent)} stores into {self._names(cell)}, where {self._stored(other)}, "
            f"which {_how(other)} and nothing orders before this store"
        )

    def _tell_use(self, agent: Agent, cell: int, reader: Agent) -> str:
        return (
            f"{who(agent)} overwrites {self._names(cell)}, which "
            f"{who(reader)} has read; nothing says that it has finished"
        )

    def _stored(self, message: Message) -> str:
        agent = self._agents[message.agent]
        if not agent.number:
            return "nobody has stored there"
        return (
            f"rank {agent.rank}'s {agent.name} stored {say(message.value)} in call {message.call}"
        )


def latest(one: Sequence[int], other: Sequence[int]) -> list[int]:
    """What both clocks tell of."""
    # Several times as fast as mapping max, and done a few hundred times in a run.
    return [a if a > b else b for a, b in zip(one, other, strict=True)]


def who(agent: Agent) -> str:
    """An agent in words."""
    return f"rank {agent.rank}'s {agent.name} in call {agent.call}"


def _how(message: Message) -> str:
    if message.near == NEVER:
        return "is not released"
    return "is released to its device only" if message.far == NEVER else "is released"
