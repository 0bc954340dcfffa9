"""Of a program only that by which strands notice each other: what to look at when looking ahead."""

from __future__ import annotations

from typing import Any, NamedTuple

from gemmlink.conformance.adversary.program import Code, Program

#: Ops that concern more than one strand. Loads and stores are not among them: see ``memory``.
NOTICED = ("wait", "join", "announce", "elect", "collective", "copy")


class Event(NamedTuple):
    """One of those ops: its name, and what it is compiled to."""

    name: str
    argument: Any


class Lines(NamedTuple):
    """A strand in a call. ``first[pc]``: the index of the first event at ``pc`` or behind it.

    ``asks[pc]``: counters of which it matters at ``pc`` whether the strand was elected by them.
    """

    events: tuple[Event, ...]
    first: tuple[int, ...]
    asks: tuple[frozenset[int], ...]


class Outline:
    """Lines for all strands of ``program``, and the words that several strands may set.

    Such words matter if what they are set to may depend on who is first.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        self._lines: dict[int, Lines] = {}
        setters: dict[int, set[tuple[int, int]]] = {}
        queues = set()
        for rank in program.codes:
            for call, codes in enumerate(rank):
                for code in codes:
                    self._lines[id(code)] = lines = _lines(code)
                    for name, argument in lines.events:
                        if name == "announce":
                            lag = argument[1] - call
                            setters.setdefault(argument[0], set()).add((code.agent, lag))
                    if code.strand.kind == "queue":
                        queues.add(code.agent)
        self.contended = frozenset(
            word for word, found in setters.items() if _contended(found, queues)
        )

    def of(self, code: Code) -> Lines:
        """The lines of a strand in a call."""
        return self._lines[id(code)]


def _contended(setters: set[tuple[int, int]], queues: set[int]) -> bool:
    """Whether two agents may set a word to different values at a time.

    Blocks of one call do so only if they count from different calls; a queue may be calls behind.
    """
    agents = {agent for agent, _ in setters}
    lags = {lag for _, lag in setters}
    return len(agents) > 1 and (len(lags) > 1 or bool(agents & queues))


def _lines(code: Code) -> Lines:
    events: list[Event] = []
    first = []
    for name, argument in code.ops:
        first.append(len(events))
        if name in NOTICED:
            events.append(Event(name, argument))
    first.append(len(events))
    asked: frozenset[int] = frozenset()
    asks = [asked]
    for name, argument in reversed(code.ops):
        if name == "announce" and argument[3] is not None:
            asked |= {argument[3]}
        elif name == "elect":
            asked -= {argument[0]}
        asks.append(asked)
    return Lines(tuple(events), tuple(first), tuple(reversed(asks)))
