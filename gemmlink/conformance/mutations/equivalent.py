"""Why a change that nobody notices is no mistake: what still orders all that it did, in words.

That it is none is proved elsewhere (``proof``), for the changed program as a whole. Here the reason
is looked up that a person would give. For a wait or join that is missing it is found in the graph
of the proof: what it had waited for may come before all the same, by way of something else. For
other changes it follows from what is changed and what stands behind it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from gemmlink.conformance.adversary.case import Case
from gemmlink.conformance.adversary.program import compile_case
from gemmlink.conformance.mutate import Mutant
from gemmlink.conformance.proof.graph import Graph, Part, graph
from gemmlink.spec.lowered import (
    Acquire,
    Action,
    Add,
    Announce,
    Barrier,
    Elect,
    Fetch,
    Make,
    Put,
    Release,
    Retire,
    Strand,
)
from gemmlink.spec.schedule import Copy, Join, Wait

#: The call that is looked at: one that comes after another, and before another.
_CALL = 2

_FENCES = (Retire, Barrier, Release)
_WORK = (Make, Fetch, Add, Put, Copy)


class Reasons:
    """Why mutants of ``case`` are none, in a few words that many share."""

    def __init__(self, case: Case) -> None:
        self._case = case

    def of(self, mutant: Mutant) -> str:
        """The reason for one that has been proved all the same."""
        if mutant.place is None:
            return "this protocol does not count on what is changed"
        strand, index = self._case.lowered[0].strands[mutant.place[0]], mutant.place[1]
        action = strand.actions[index]
        if mutant.kind == "exchanged":
            return _exchanged(action, strand.actions[index + 1])
        if mutant.kind.startswith("without") and isinstance(action, Wait | Join):
            return _still_ordered(self._graph, mutant.place)
        if isinstance(action, Announce):
            return _unsaid(self._case, action, strand.actions[index + 1 :])
        return _unfenced(self._case, strand, index)

    @cached_property
    def _graph(self) -> Graph:
        return graph(compile_case(self._case))


def _exchanged(one: Action, other: Action) -> str:
    pairs = {
        (True, False): "words that are set, or counted by, in either order",
        (False, True): "waits, and what they take over, in either order",
    }
    words = all(isinstance(each, Announce | Elect) for each in (one, other))
    waits = all(isinstance(each, Wait | Join | Acquire) for each in (one, other))
    if words or waits:
        return pairs[words, waits]
    if all(isinstance(each, _WORK) for each in (one, other)):
        return "stores of one tile in either order"
    if any(isinstance(each, _FENCES) for each in (one, other)):
        return "a fence that covers neither of them, or covers both all the same"
    return "two steps that count on nothing of each other"


def _unfenced(case: Case, strand: Strand, index: int) -> str:
    """Without an acquire or a fence, or for the own device only."""
    action, behind = strand.actions[index], strand.actions[index + 1 :]
    if isinstance(action, Acquire):
        before = strand.actions[index - 1] if index else None
        if isinstance(before, Wait) and before.word.source == case.lowered[0].rank:
            return "the word is the own rank's: no other device has stored what it tells of"
        return _not_acquired(behind)
    if isinstance(action, _FENCES):
        later = next((a for a in behind if isinstance(a, Release)), None)
        if later is not None:
            return "a later release of the same block covers it, before anybody needs it"
        return "the end of the kernel is a release for the own device, and nobody else looks"
    return "nobody counts on it"


def _unsaid(case: Case, action: Announce, behind: Sequence[Action]) -> str:
    """A word that is not set, or for the own device only."""
    if any(isinstance(each, Elect) and each.counter == action.by for each in behind):
        return "the block counts once more behind it, so it is never the last one here"
    waits = (each for each in case.lowered[action.at].actions() if isinstance(each, Wait))
    if not any(wait.word == action.word for wait in waits):
        return "nobody waits for the word"
    if action.at == action.word.source:
        return "the word is set and awaited on one device"
    return "who waits for the word learns the same from another, or finds nothing behind it"


def _not_acquired(behind: Sequence[Action]) -> str:
    for action in behind:
        if isinstance(action, Acquire):
            return "the next acquire of the same block takes it over, before it is needed"
        if isinstance(action, _WORK):
            break
    return "what follows in the block uses nothing that the word tells of"


# Waits and joins.


def _still_ordered(made: Graph, place: tuple[int, int]) -> str:
    """By what the awaited comes before the next steps of the strand, without the wait or join."""
    dropped = {node: _others(made, node) for node in _nodes(made, place)}
    part, node = _middle(made, place)
    awaited = dropped[node]
    if not awaited:
        return "it waits for what is there from the start"
    ops = range(part.first + 1, part.last)
    if _precedes(made, awaited, part.first, dropped):
        return "the call before has ended, and with it what is awaited"
    for other in ops:
        if other != node and _precedes(made, awaited, other, dropped):
            when = "already" if other < node else "in time"
            return f"{_by(made, other)} of the same block says as much {when}"
    return _nobody_needs(part, node)


def _by(made: Graph, node: int) -> str:
    part = made.part(node)
    first = part.code.strand.actions[part.code.places[node - part.first - 1][0]]
    return {Wait: "a word", Join: "a join"}.get(type(first), "another step")


def _nobody_needs(part: Part, node: int) -> str:
    behind = part.code.strand.actions[part.code.places[node - part.first - 1][1] :]
    if any(isinstance(action, _WORK) for action in behind):
        return "another block waits for it, and all that counts on it is behind that one, too"
    return "nothing that follows in the block counts on it"


def _nodes(made: Graph, place: tuple[int, int]) -> list[int]:
    """The node of an action, in all calls of all ranks."""
    strands = len(made.program.case.lowered[0].strands)
    return [
        part.first + 1 + op
        for number, part in enumerate(made.parts)
        if number % strands == place[0]
        for op, (first, last) in enumerate(part.code.places)
        if first <= place[1] < last
    ]


def _middle(made: Graph, place: tuple[int, int]) -> tuple[Part, int]:
    """Rank 0's strand in a call between others, and the node of the action in it."""
    found = [(made.part(node), node) for node in _nodes(made, place)]
    return next((p, n) for p, n in found if (p.rank, p.call) == (0, _CALL))


def _others(made: Graph, node: int) -> tuple[int, ...]:
    """What a node waits for, beside the step before it."""
    return tuple(other for other in made.before[node] if other != node - 1)


def _precedes(
    made: Graph, wanted: Sequence[int], node: int, dropped: dict[int, tuple[int, ...]]
) -> bool:
    """Whether all of ``wanted`` come before ``node`` though edges are ``dropped``."""
    seen, left = {node}, [node]
    while left:
        at = left.pop()
        gone = dropped.get(at, ())
        for other in made.before[at]:
            if other not in seen and other not in gone:
                seen.add(other)
                left.append(other)
    return set(wanted) <= seen
