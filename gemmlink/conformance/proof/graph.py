"""What comes before what: everything that happens in a program's calls, as a graph.

Nodes are the ops of all strands in all calls, the beginning and the end of each strand, and events
that are nobody's: a rank begins a call, all that must come for an election have come, a word is set
by whoever was elected, all ranks have entered a call of the library.

An edge means that one cannot happen before the other has, *whatever* happens. It comes from

- a strand, which does one thing after the other, and a queue, which does so over all calls;
- a call, which begins when all strands of the one before, queues apart, have ended;
- a join, and a call of the library;
- a wait, which cannot end before the *first* of the values that satisfy it was set. Words grow, and
  who sets one is ordered behind whoever set it before (``clocks`` checks both), so no later value
  can come first.

Who is elected is not known. A word that is set by whoever that is counts as set when *all* who may
be have come to set it, which is the latest that it can be. That every count comes out as it must
is checked here, too: all ``of`` in each call, all by blocks, whose calls are ordered.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from gemmlink.conformance.adversary.program import Code, Program
from gemmlink.conformance.proof.verdict import Reason
from gemmlink.spec.schedule import Scope


@dataclass(frozen=True)
class Refutation:
    """Why something cannot be proved, line by line."""

    reason: Reason
    lines: tuple[str, ...]


@dataclass(frozen=True)
class Part:
    """A strand in one call: nodes ``first`` (it begins), one for each op, ``last`` (it has ended).

    ``behind``: the index of the part that the same queue works off before, if it is a queue.
    """

    index: int
    code: Code
    rank: int
    call: int
    first: int
    behind: int | None = None

    @property
    def last(self) -> int:
        """The node of its end."""
        return self.first + len(self.code.ops) + 1

    @property
    def queue(self) -> bool:
        """Whether it outlives its call."""
        return self.code.strand.kind == "queue"

    @property
    def block(self) -> bool:
        """Whether it is a block of a kernel."""
        return self.code.strand.kind == "block"

    def __str__(self) -> str:
        return f"rank {self.rank}'s {self.code.strand.name} in call {self.call}"


@dataclass(frozen=True)
class Setting:
    """A word gets a value, at ``node``, by one of the announcements ``ops``.

    ``elected``: the node of the election, if there is one. ``sure``: whoever is elected does it.
    ``device``: of who does it.
    """

    word: int
    value: int
    node: int
    ops: tuple[int, ...]
    scope: Scope
    device: int
    elected: int | None = None
    sure: bool = True


@dataclass
class Graph:
    """The nodes of ``program``. ``before``: of each node, those without which it cannot happen.

    ``owner``: of each node, the index of its part, or -1. ``never``: nodes that cannot happen at
    all, and why. ``heard``: of each wait, the settings that may satisfy it, the first one first.
    ``refutations``: what is wrong whatever the order.
    """

    program: Program
    parts: list[Part] = field(default_factory=list)
    before: list[list[int]] = field(default_factory=list)
    owner: list[int] = field(default_factory=list)
    calls: dict[tuple[int, int], int] = field(default_factory=dict)
    elections: dict[int, tuple[int, ...]] = field(default_factory=dict)
    settings: list[list[Setting]] = field(default_factory=list)
    heard: dict[int, tuple[Setting, ...]] = field(default_factory=dict)
    library: dict[int, list[int]] = field(default_factory=dict)
    never: dict[int, str] = field(default_factory=dict)
    refutations: list[Refutation] = field(default_factory=list)

    def part(self, node: int) -> Part:
        """Whose ``node`` is."""
        return self.parts[self.owner[node]]

    def ops(self, wanted: str) -> Iterator[tuple[int, Part, Any]]:
        """Node, part and argument of all ops of this name."""
        for part in self.parts:
            for number, (name, argument) in enumerate(part.code.ops):
                if name == wanted:
                    yield part.first + 1 + number, part, argument

    def text(self, node: int) -> str:
        """An op in words."""
        part = self.part(node)
        return part.code.text(node - part.first - 1)

    def who(self, node: int) -> str:
        """Whose op it is, and in which call."""
        return str(self.part(node))

    def add(self, before: Sequence[int], owner: int = -1) -> int:
        """A new node."""
        self.before.append(list(before))
        self.owner.append(owner)
        return len(self.owner) - 1

    def order(self) -> list[int]:
        """All nodes that can happen, each behind those that come before it."""
        after: list[list[int]] = [[] for _ in self.before]
        missing = [len(before) for before in self.before]
        for node, before in enumerate(self.before):
            for other in before:
                after[other].append(node)
        for node in self.never:
            missing[node] += 1
        order = [node for node, count in enumerate(missing) if not count]
        for node in order:
            for other in after[node]:
                missing[other] -= 1
                if not missing[other]:
                    order.append(other)
        return order


def graph(program: Program) -> Graph:
    """The graph of all calls of ``program``."""
    found = Graph(program)
    _strands(found)
    _calls(found)
    elections = _elections(found)
    _settings(found, elections)
    _waits(found)
    _joins(found)
    _library(found)
    return found


def _strands(graph: Graph) -> None:
    queues: dict[int, int] = {}
    for rank, calls in enumerate(graph.program.codes):
        for call, codes in enumerate(calls, start=1):
            for code in codes:
                index, queue = len(graph.parts), code.strand.kind == "queue"
                behind = queues.get(code.agent) if queue else None
                first = graph.add([], index)
                graph.parts.append(Part(index, code, rank, call, first, behind))
                for node in range(first, first + len(code.ops) + 1):
                    graph.add([node], index)
                if queue:
                    queues[code.agent] = index


def _calls(graph: Graph) -> None:
    """Calls and queues: what is between one strand and the next."""
    ends: dict[tuple[int, int], list[int]] = {}
    for part in graph.parts:
        if not part.queue:
            ends.setdefault((part.rank, part.call), []).append(part.last)
    for part in graph.parts:
        key = (part.rank, part.call)
        if key not in graph.calls:
            graph.calls[key] = graph.add(ends.get((part.rank, part.call - 1), ()))
        graph.before[part.first].append(graph.calls[key])
        if part.behind is not None:
            behind = graph.parts[part.behind]
            # It goes on when that has begun all it had to do, and is done when that is.
            graph.before[part.first].append(behind.last - 1)
            graph.before[part.last].append(behind.last)


# Elections. Those of a counter in a call are named by (counter, call).


def _elections(graph: Graph) -> dict[tuple[int, int], int]:
    """The nodes where all have come for an election."""
    found: dict[tuple[int, int], list[int]] = {}
    counts: dict[tuple[int, int], set[int]] = {}
    for node, part, argument in graph.ops("elect"):
        counter, of = argument
        found.setdefault((counter, part.call), []).append(node)
        counts.setdefault((counter, part.call), set()).add(of)
    nodes = {}
    for key, elects in found.items():
        _check_count(graph, key, elects, counts[key])
        nodes[key] = graph.add(elects)
        graph.elections[nodes[key]] = tuple(elects)
    return nodes


def _check_count(graph: Graph, key: tuple[int, int], elects: list[int], counts: set[int]) -> None:
    rank, counter = graph.program.counters[key[0]]
    text = f"rank {rank}'s counter {counter} in call {key[1]}"
    if counts != {len(elects)}:
        wanted = " or ".join(str(of) for of in sorted(counts))
        elect = [f"{graph.who(node)} does '{graph.text(node)}'" for node in elects]
        lines = (f"{text} elects the last of {wanted}, and {len(elects)} come:", *elect)
        graph.refutations.append(Refutation("count", lines))
    outside = [node for node in elects if graph.part(node).queue]
    if outside:
        lines = (
            f"{text} counts on {graph.who(outside[0])},",
            "which may come before all have come in the call before, or after the call has ended",
        )
        graph.refutations.append(Refutation("count", lines))


# Words.


def _settings(graph: Graph, elections: dict[tuple[int, int], int]) -> None:
    graph.settings = [[] for _ in graph.program.words]
    last = _last_elects(graph, elections)
    #: Announcements by whoever is elected: of (election, word, value, which time), who does it.
    made: dict[tuple[int, int, int, int], list[int]] = {}
    times: dict[tuple[int, int, int], int] = {}
    for node, part, argument in graph.ops("announce"):
        word, value, scope, by, _last = argument
        _check_source(graph, node, word)
        if by is None:
            device = graph.program.agents[part.code.agent][2]
            graph.settings[word].append(Setting(word, value, node, (node,), scope, device))
            continue
        election = elections.get((by, part.call), -1)
        if node < last.get((election, part.index), node + 1):
            continue  # it is not elected yet, and when it is, this is behind it
        times[part.index, word, value] = time = times.get((part.index, word, value), -1) + 1
        made.setdefault((election, word, value, time), []).append(node)
    for (election, word, value, _), ops in made.items():
        electors = {graph.owner[node] for node in graph.elections[election]}
        _elected(graph, election, (word, value), ops, len(ops) == len(electors))
    for settings in graph.settings:
        settings.sort(key=lambda setting: (setting.value, graph.part(setting.ops[0]).call))


def _last_elects(graph: Graph, elections: dict[tuple[int, int], int]) -> dict[tuple[int, int], int]:
    """By election and part the last elect, the only one that may make it the elected one."""
    last: dict[tuple[int, int], int] = {}
    for election in elections.values():
        for node in graph.elections[election]:
            key = (election, graph.owner[node])
            last[key] = max(node, last.get(key, node))
    return last


def _elected(
    graph: Graph, election: int, what: tuple[int, int], ops: Sequence[int], sure: bool
) -> None:
    word, value = what
    arguments = [_argument(graph, node) for node in ops]
    scope: Scope = "system" if all(each[2] == "system" for each in arguments) else "device"
    device = graph.program.agents[graph.part(ops[0]).code.agent][2]
    node = graph.add([election, *ops])
    setting = Setting(word, value, node, tuple(ops), scope, device, election, sure)
    graph.settings[word].append(setting)


def _argument(graph: Graph, node: int) -> tuple[int, int, Scope, int | None, bool]:
    part = graph.part(node)
    argument: tuple[int, int, Scope, int | None, bool] = part.code.ops[node - part.first - 1][1]
    return argument


def _check_source(graph: Graph, node: int, number: int) -> None:
    word, at = graph.program.words[number]
    if word.source != graph.part(node).rank:
        lines = (f"{graph.who(node)} sets {word} at rank {at}, which is rank {word.source}'s",)
        graph.refutations.append(Refutation("word", lines))


def _waits(graph: Graph) -> None:
    for node, _, argument in graph.ops("wait"):
        word, wanted, _, _ = argument
        if wanted <= 0:
            continue  # satisfied from the start
        heard = tuple(s for s in graph.settings[word] if s.value >= wanted)
        sure = next((setting for setting in heard if setting.sure), None)
        if sure is not None:
            graph.before[node].append(sure.node)
            graph.heard[node] = heard
        else:
            graph.never[node] = _nobody(graph, word, heard)


def _nobody(graph: Graph, number: int, heard: Sequence[Setting]) -> str:
    word, at = graph.program.words[number]
    if heard:
        names = " or ".join(graph.who(op) for op in heard[0].ops)
        return f"which only {names} sets, and another may be elected"
    values = sorted({setting.value for setting in graph.settings[number]})
    told = f"only {', '.join(map(str, values))}" if values else "nothing"
    return f"and rank {word.source} sets {word} at rank {at} to {told}"


# Joins and the library.


def _joins(graph: Graph) -> None:
    ends: dict[tuple[int, int, str], list[int]] = {}
    for part in graph.parts:
        ends.setdefault((part.rank, part.call, part.code.strand.actor), []).append(part.last)
    for node, part, actor in graph.ops("join"):
        joined = ends.get((part.rank, part.call, str(actor)))
        if joined is None:
            graph.never[node] = f"and no {actor} is in that call"
        else:
            graph.before[node] += joined


def _library(graph: Graph) -> None:
    calls: dict[tuple[int, str], list[int]] = {}
    for node, part, argument in graph.ops("collective"):
        calls.setdefault((part.call, argument[0]), []).append(node)
    for (_, name), nodes in calls.items():
        entered = graph.add([node - 1 for node in nodes])
        graph.library[entered] = nodes
        ranks = {graph.part(node).rank for node in nodes}
        absent = sorted(set(range(graph.program.case.world)) - ranks)
        if absent:
            graph.never[entered] = f"the library's {name}, which rank {absent[0]} never enters"
        for node in nodes:
            graph.before[node].append(entered)
