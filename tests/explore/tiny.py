"""Tiny programs at two ranks, drawn at random: most have a mistake, of whatever kind."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from random import Random

from gemmlink.conformance.adversary.case import Case
from gemmlink.conformance.adversary.program import Program, compile_case
from gemmlink.spec.lowered import (
    Acquire,
    Action,
    Announce,
    Barrier,
    Counter,
    Elect,
    Fetch,
    Lowered,
    Put,
    Release,
    Retire,
    Strand,
    Tile,
)
from gemmlink.spec.operations import all_gather
from gemmlink.spec.schedule import Area, Copy, Join, Plan, Region, Schedule, Scope, Wait, Word

OPERATION = all_gather(2, 1)


def tile(source: int) -> Tile:
    """All of what rank ``source`` has: one element."""
    return Tile(Region(source, 0), 0, 1)


def word(source: int, number: int = 0) -> Word:
    """One of the words of rank ``source``."""
    return Word("arrive", source, number)


def tiny(
    ranks: Sequence[Sequence[Strand]], rows: Sequence[tuple[int, int]], name: str = "tiny"
) -> Program:
    """The strands of both ranks as a program; ``rows`` as in a case."""
    made = []
    for rank, strands in enumerate(ranks):
        plan = Plan(rank, 2, 1, True)
        schedule = Schedule(OPERATION.phases[0], plan, ())
        made.append(Lowered(OPERATION, schedule, tuple(strands)))
    return compile_case(Case(name, tuple(made), tuple(rows)))


def block(actor: str, index: int, *actions: Action) -> Strand:
    """A block of a kernel."""
    return Strand(actor, index, "block", actions)


def publish(scope: Scope = "system") -> tuple[Action, ...]:
    """All that it takes."""
    return (Retire(), Barrier(), Release(scope))


#: A word, where it is set, and what whoever sets it has stored.
_Said = tuple[Word, int, list[tuple[int, Area]]]


class Draw:
    """Draws programs: blocks of both ranks store, publish and tell; others wait and look.

    Now and then something of it is left out, or comes to the wrong place. ``largest``: how many
    places its strands may be at, words apart.
    """

    def __init__(self, seed: int, largest: int = 500) -> None:
        self._random = Random(seed)
        self._seed = seed
        self._largest = largest
        self._said: list[_Said] = []
        self._numbers = 0
        self._errors = self._random.choice((0.0, 0.03, 0.1))

    def program(self) -> Program:
        """One more."""
        calls = 2 if self._likely(0.15) else 1
        gate = [Wait(word(rank, 9), lag=1) for rank in range(2)] if calls > 1 else []
        ranks = [self._writers(rank, gate[1 - rank :][:1]) for rank in range(2)]
        for rank in range(2):
            if self._likely(0.35):
                ranks[rank].append(self._queue(rank))
            if self._likely(0.6):
                ranks[rank] += self._readers(rank)
        while (program := self._compiled(ranks, calls)) is None:
            max(ranks, key=len).pop()
        return program

    def _compiled(self, ranks: Sequence[Sequence[Strand]], calls: int) -> Program | None:
        """None if it is too large for everything to be tried."""
        program = tiny(ranks, [(1, 1)] * calls, f"seed {self._seed}")
        codes = [code for rank in program.codes for code in rank[0]]
        places = prod(len(code.ops) + 1 for code in codes)
        return program if places <= self._largest else None

    def _likely(self, share: float) -> bool:
        return self._random.random() < share

    def _slips(self) -> bool:
        return self._likely(self._errors)

    def _writers(self, rank: int, gate: Sequence[Action]) -> list[Strand]:
        blocks = self._random.choice((1, 2, 2))
        cells: list[tuple[int, Area]] = [(0, "inbox"), (1, "inbox"), (0, "outbox"), (1, "outbox")]
        self._random.shuffle(cells)
        mine = cells[:blocks]
        told = [self._tell(rank, mine) for _ in range(2 if self._likely(0.4) else 1)]
        strands = []
        for index in range(blocks):
            actions = [*gate, Acquire("system")] if gate and not self._slips() else []
            actions += self._put(rank, *mine[0 if self._slips() else index])
            if blocks > 1:
                of = 1 if self._slips() else blocks
                actions += self._elected(told, Counter("a", 0), of)
                if self._likely(0.3):
                    actions += self._elected([self._tell(rank, mine)], Counter("a", 1), of)
            else:
                actions += [self._set(word, at) for word, at, _ in told]
            strands.append(block("a", index, *actions))
        return strands

    def _put(self, rank: int, at: int, area: Area) -> list[Action]:
        scope: Scope = "device" if self._slips() else "system"
        fences = () if self._slips() else publish(scope)
        return [Put(tile(rank), at, area), *fences]

    def _tell(self, rank: int, cells: list[tuple[int, Area]]) -> _Said:
        if not self._likely(0.2):
            self._numbers += 1
        said = (word(rank, self._numbers), self._random.randrange(2), cells)
        self._said.append(said)
        return said

    def _set(self, of: Word, at: int, by: Counter | None = None) -> Announce:
        return Announce(of, at, "device" if self._slips() else "system", int(self._slips()), by)

    def _elected(self, told: Sequence[_Said], counter: Counter, of: int) -> list[Action]:
        by = None if self._slips() else counter
        return [Elect(counter, of), *(self._set(word, at, by) for word, at, _ in told)]

    def _readers(self, rank: int) -> list[Strand]:
        strands = []
        for index in range(1 if self._likely(0.8) else 2):
            actions: list[Action] = []
            for _ in range(self._random.choice((1, 2))):
                actions += self._look(rank)
            if not self._slips():
                actions.append(Join("a"))
            actions += [*publish(), self._set(word(rank, 9), 1 - rank)]
            strands.append(block("b", index, *actions))
        return strands

    def _look(self, rank: int) -> list[Action]:
        heard = [said for said in self._said if said[1] == rank]
        if not heard:
            return []
        told, _, cells = self._random.choice(heard)
        at, area = self._random.choice(cells)
        fences = [] if self._slips() else [Acquire("system")]
        return [Wait(told), *fences, Fetch(tile(told.source), at, area)]

    def _queue(self, rank: int) -> Strand:
        actions: list[Action] = []
        heard = [told for told, at, _ in self._said if at == rank]
        areas: tuple[Area, ...] = ("inbox", "outbox")
        for area in areas[: self._random.choice((1, 2))]:
            first = [Wait(self._random.choice(heard)), Acquire("system")] if heard else [Join("a")]
            actions += [*first, Copy(Region(rank, 0), 1 - rank, area)]
            if self._likely(0.6):
                told, at, _ = self._tell(rank, [(1 - rank, "inbox")])
                actions.append(self._set(told, at))
        return Strand("lane", 0, "queue", tuple(actions), (1 - rank, 0), self._likely(0.5))
