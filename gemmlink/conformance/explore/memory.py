"""Memory for exploring: the adversary's, in which every store is seen at once, and which can fork.

A store that gets on by itself as soon as it is made is one of the things that the adversary may do,
and for strict memory the worst: no later use of the cell can overlook it. So each two uses of one
cell, not both loads, are compared when the second one comes, whichever that is, and found to be
ordered or not by what the second agent knows. Two that nothing orders are a race in either order,
and that is why nobody need try both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from copy import copy

from gemmlink.conformance.adversary.memory import Agent, Memory, Message
from gemmlink.conformance.adversary.values import Value

#: How a message is told from others, and readers of a cell.
_Cell = tuple[int, int, int, int, Value, tuple[tuple[int, int], ...]]


class OpenMemory(Memory):
    """Lists of messages are never changed, only replaced: forks share them."""

    def __init__(
        self, private: Sequence[bool], agents: Sequence[Agent], names: Callable[[int], str]
    ) -> None:
        super().__init__(private, agents, _no_choice, names)

    def store(self, agent: Agent, cell: int, value: Value, leader: bool = True) -> None:
        """Put ``value`` into ``cell``, now."""
        super().store(agent, cell, value, leader)
        self._loose.clear()
        self._spread(cell, agent.open[cell], _SYSTEM)

    def _arrive(self, cell: int, message: Message) -> None:
        self.history[cell] = [*self.history[cell], message]
        message.reach = _SYSTEM

    def fork(
        self, agents: Sequence[Agent], flying: Iterable[Message]
    ) -> tuple[OpenMemory, dict[int, Message]]:
        """The same again for ``agents``, copies of the own ones.

        ``flying``: messages of copies that are not done. With it come, by the ids of the old ones,
        new messages for those that may still change.
        """
        other = copy(self)
        other._agents = agents
        other._soft, other._loose = {}, []
        fresh = {id(m): _copied(m) for m in (*self._changing(), *flying)}
        other.history = self.history.copy()
        if fresh:
            for cell, found in enumerate(other.history):
                new = fresh.get(id(found[-1]))
                if new is not None:
                    other.history[cell] = [*found[:-1], new]
        other._readers = [readers and readers.copy() for readers in self._readers]
        for agent in agents:
            agent.open = {cell: fresh[id(m)] for cell, m in agent.open.items()}
            agent.lagging = [(cell, fresh[id(m)]) for cell, m in agent.lagging]
        return other, fresh

    def _changing(self) -> Iterable[Message]:
        for agent in self._agents:
            yield from agent.open.values()
            for _, message in agent.lagging:
                yield message

    def key(self) -> tuple[_Cell, ...]:
        """What tells this memory from others, as far as anybody can notice."""
        found = []
        for history, readers in zip(self.history, self._readers, strict=True):
            last = history[-1]
            known = tuple(sorted(readers.items())) if readers else ()
            found.append((last.agent, last.near, last.far, last.state, last.value, known))
        return tuple(found)


#: As in ``adversary.memory``: a message has got everywhere.
_SYSTEM = 2


def _no_choice(messages: Sequence[Message]) -> Message:
    assert len(messages) == 1, "strict memory has no choice"
    return messages[0]


def _copied(message: Message) -> Message:
    new = object.__new__(Message)
    for name in Message.__slots__:
        setattr(new, name, getattr(message, name))
    return new
