"""Compiles a case: every action of every strand of every call, with the cells that it touches.

This is done once; a run with a seed only walks what is compiled. What each rank must get is looked
up here, too, and that all of its result is looked at.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from gemmlink.conformance.adversary import values
from gemmlink.conformance.adversary.case import Case
from gemmlink.conformance.adversary.cells import Cells
from gemmlink.conformance.adversary.values import Value
from gemmlink.spec.lowered import (
    Acquire,
    Action,
    Add,
    Announce,
    Barrier,
    Convert,
    Elect,
    Fetch,
    Look,
    Lowered,
    Make,
    Post,
    Put,
    Release,
    Retire,
    Show,
    Strand,
    Tile,
)
from gemmlink.spec.operations import band_rows
from gemmlink.spec.schedule import LOCAL, Collective, Copy, Join, Region, Wait, Word

#: What a machine does, and with what; see ``machine``.
Op = tuple[str, Any]


@dataclass(frozen=True)
class Code:
    """A strand in one call. ``agent`` walks it; ``places``: of each op the actions, half open."""

    strand: Strand
    agent: int
    ops: tuple[Op, ...]
    places: tuple[tuple[int, int], ...]

    def text(self, op: int) -> str:
        """An op in words."""
        return "; ".join(str(action) for action in self.strand.actions[slice(*self.places[op])])


@dataclass
class Program:
    """A compiled case. ``codes[rank][n]``: the strands of call n + 1."""

    case: Case
    cells: Cells
    words: list[tuple[Word, int]]
    #: Of each agent: what it is called, its rank, its device.
    agents: list[tuple[str, int, int]]
    codes: list[list[list[Code]]]
    #: How many agents of one kernel add to a counter: counters are numbered.
    counters: list[tuple[int, Any]]


def compile_case(case: Case) -> Program:
    """Compile all calls of all ranks."""
    return _Compiler(case).run()


class _Compiler:
    def __init__(self, case: Case) -> None:
        self._case = case
        self._cells = Cells(case.lowered[0], case.capacity)
        self._words: dict[tuple[Word, int], int] = {}
        self._agents: dict[tuple[int, Any], int] = {(-1, "nobody"): 0}
        self._told: list[tuple[str, int, int]] = [("nobody", -1, -1)]
        self._counters: dict[tuple[int, Any], int] = {}

    def run(self) -> Program:
        case = self._case
        calls = range(1, len(case.rows) + 1)
        codes = [[self._call(rank, call) for call in calls] for rank in range(case.world)]
        return Program(
            case, self._cells, list(self._words), self._told, codes, list(self._counters)
        )

    def _call(self, rank: int, call: int) -> list[Code]:
        case = self._case
        lowered, number, rows = case.doing(rank, call), case.number(rank, call), case.rows[call - 1]
        strands = lowered.strands if number else ()
        return [_Strand(self, lowered, each, (call, number), rows).code() for each in strands]

    # Numbers.

    @property
    def cells(self) -> Cells:
        return self._cells

    def word(self, word: Word, at: int) -> int:
        return self._words.setdefault((word, at), len(self._words))

    def counter(self, rank: int, counter: Any) -> int:
        return self._counters.setdefault((rank, counter), len(self._counters))

    def agent(self, rank: int, strand: Strand) -> int:
        """A queue is one agent in all phases, and a device of its own."""
        queue = strand.lane is not None
        key = (rank, strand.lane if queue else strand.name)
        if key not in self._agents:
            number = self._agents[key] = len(self._agents)
            device = -1 - number if queue else rank
            self._told.append((strand.name, rank, device))
        return self._agents[key]


class _Strand:
    """Compiles one strand for one call: the how manieth, and what number the rank gives to it."""

    def __init__(
        self,
        owner: _Compiler,
        lowered: Lowered,
        strand: Strand,
        call: tuple[int, int],
        rows: Sequence[int],
    ) -> None:
        self._owner = owner
        self._lowered = lowered
        self._strand = strand
        self._call, self._number = call
        self._rows = rows
        self._rank = lowered.rank
        self._shown: set[tuple[int, int]] = set()

    def code(self) -> Code:
        ops: list[Op] = []
        places: list[tuple[int, int]] = []
        actions, index = self._strand.actions, 0
        while index < len(actions):
            taken, op = self._op(actions, index)
            ops.append(op)
            places.append((index, index + taken))
            index += taken
        self._check_shown()
        agent = self._owner.agent(self._rank, self._strand)
        return Code(self._strand, agent, tuple(ops), tuple(places))

    def _op(self, actions: Sequence[Action], index: int) -> tuple[int, Op]:
        """What the action at ``index`` compiles to, together with those that follow."""
        action = actions[index]
        if isinstance(action, Wait):
            return self._wait(action, actions, index)
        if isinstance(action, Announce):
            last = not _is(actions, index + 1, Announce)
            return 1, ("announce", (*self._words(action), last))
        if isinstance(action, Retire) and _is(actions, index + 1, Barrier):
            third = actions[index + 2] if index + 2 < len(actions) else None
            if isinstance(third, Release):
                return 3, ("publish", third.scope)
        return 1, self._single(action)

    def _wait(self, action: Wait, actions: Sequence[Action], index: int) -> tuple[int, Op]:
        """Waits that follow each other are one turn, if they need not wait."""
        word, wanted = self._owner.word(action.word, self._rank), self._number - action.lag
        following = actions[index + 1] if index + 1 < len(actions) else None
        if isinstance(following, Acquire):
            last = not _is(actions, index + 2, Wait)
            return 2, ("wait", (word, wanted, following.scope, last))
        return 1, ("wait", (word, wanted, None, True))

    def _words(self, action: Announce) -> tuple[Any, ...]:
        by = None if action.by is None else self._owner.counter(self._rank, action.by)
        word = self._owner.word(action.word, action.at)
        return word, self._number - action.lag, action.scope, by

    def _single(self, action: Action) -> Op:
        if isinstance(action, Make):
            found = self._owner.cells.elements(action.tile, self._rows)
            return "make", [values.product(self._call, self._rank, *place) for place in found]
        if isinstance(action, Fetch | Put):
            name = "fetch" if isinstance(action, Fetch) else "put"
            return name, self._find(action.tile, action.at, action.area)
        if isinstance(action, Add):
            return "add", self._terms(action)
        if isinstance(action, Convert):
            return "convert", values.encode if action.way == "encode" else values.decode
        if isinstance(action, Copy):
            return "copy", self._pairs(action)
        if isinstance(action, Show):
            return "show", (self._expected(action), action.writes)
        return self._fence_or_word(action)

    def _fence_or_word(self, action: Action) -> Op:
        owner, rank = self._owner, self._rank
        if isinstance(action, Release | Acquire):
            return type(action).__name__.lower(), action.scope
        if isinstance(action, Retire | Barrier):
            return type(action).__name__.lower(), None
        if isinstance(action, Elect):
            return "elect", (owner.counter(rank, action.counter), action.of)
        if isinstance(action, Join):
            return "join", action.actor
        if isinstance(action, Post):
            peers = self._lowered.schedule.plan.peers
            cells = [owner.cells.record(peer, rank, self._number) for peer in peers]
            return "post", (cells, self._record(rank))
        if isinstance(action, Look):
            cell = owner.cells.record(rank, action.source, self._number)
            return "look", (cell, self._record(action.source))
        assert isinstance(action, Collective), f"an action that cannot be compiled: {action}"
        return "collective", (action.name, *self._library(action))

    def _record(self, rank: int) -> Value:
        return ("record", self._number, self._rows[rank])

    def _find(self, tile: Tile, at: int, area: Any) -> list[int]:
        return self._owner.cells.find(tile, at, area, self._rank, self._number, self._rows)

    def _terms(self, action: Add) -> list[list[int]]:
        """For each element the cells of its terms."""
        terms = []
        for source, (window, area) in enumerate(action.places):
            region = Region(source, *_place(action.tile.region))
            tile = Tile(region, action.tile.index, action.tile.of)
            terms.append(self._find(tile, window, area))
        return [list(each) for each in zip(*terms, strict=True)]

    def _pairs(self, action: Copy) -> list[tuple[int, int]]:
        tile = Tile(action.region, 0, 1)
        source = self._find(tile, self._rank, action.area)
        return list(zip(source, self._find(tile, action.to, "inbox"), strict=True))

    def _expected(self, action: Show) -> list[tuple[int, Value]]:
        cells = self._find(action.tile, action.at, action.area)
        if action.area == "product":
            found = self._owner.cells.elements(action.tile, self._rows)
            return [
                (cell, values.product(self._call, self._rank, *place))
                for cell, place in zip(cells, found, strict=True)
            ]
        places = [self._owner.cells.keys[cell][-2:] for cell in cells]
        self._shown.update(places)
        operation = self._lowered.operation
        return [
            (cell, values.expected(operation, self._rows, self._call, self._rank, *place))
            for cell, place in zip(cells, places, strict=True)
        ]

    def _check_shown(self) -> None:
        """A reader looks at all of the result and nothing else."""
        if not any(isinstance(action, Show) for action in self._strand.actions):
            return
        height, width = values.shape(self._lowered.operation, self._rows, self._rank)
        whole = {(row, col) for row in range(height) for col in range(width)}
        assert self._shown == whole, f"a reader looks at {self._shown} instead of {whole}"

    # The library, which is told by what it must do and not how.

    def _library(self, action: Collective) -> tuple[list[int], list[tuple[int, list[Any]]]]:
        """Cells that the rank gives, and each cell that it gets with the places of its terms.

        A place is a rank and the index of a cell among those that it gives.
        """
        takes = list(self._taken(action.name))
        given = self._given(action.name, self._rank)
        indices = [
            {place: index for index, place in enumerate(self._given_places(action.name, rank))}
            for rank in range(len(self._rows))
        ]
        return given, [
            (cell, [(rank, indices[rank][place]) for rank, place in terms]) for cell, terms in takes
        ]

    def _follows_sum(self, name: str) -> bool:
        return name == "all_gather" and self._lowered.operation.phases[-1].source == "sum"

    def _given_places(self, name: str, rank: int) -> list[tuple[int, int]]:
        """Rows and columns of a product (or of the sum) that ``rank`` gives to the library."""
        first, last = 0, self._rows[rank]
        if self._follows_sum(name):
            first, last = band_rows(last, len(self._rows), rank)
        routes = self._lowered.operation.phases[0].routes
        cols = sorted({col for route in routes if route.peers for col in range(*route.cols)})
        return [(row, col) for row in range(first, last) for col in cols]

    def _given(self, name: str, rank: int) -> list[int]:
        area = "scratch" if self._follows_sum(name) else "product"
        base = (LOCAL, (rank, 0 if area == "scratch" else self._number), area)
        cells = self._owner.cells
        return [cells.cell(*base, *place) for place in self._given_places(name, rank)]

    def _taken(self, name: str) -> Iterator[tuple[int, list[tuple[int, tuple[int, int]]]]]:
        world, rank, cells = len(self._rows), self._rank, self._owner.cells
        result = (LOCAL, (rank, self._number), "result")
        width = values.shape(self._lowered.operation, self._rows, rank)[1]
        if name == "reduce_scatter":
            first, last = band_rows(self._rows[rank], world, rank)
            follows = len(self._lowered.operation.phases) > 1
            base = (LOCAL, (rank, 0), "scratch") if follows else result
            shift = 0 if follows else first
            for row in range(first, last):
                for col in range(width):
                    terms = [(source, (row, col)) for source in range(world)]
                    yield cells.cell(*base, row - shift, col), terms
            return
        start, shift = 0, rank * width if name == "all_to_all" else 0
        for source in range(world):
            for row, col in self._given_places(name, source):
                if shift <= col < shift + width:
                    at = row if self._follows_sum(name) else start + row
                    yield cells.cell(*result, at, col - shift), [(source, (row, col))]
            start += self._rows[source]


def _place(region: Region) -> tuple[int, int, int]:
    return region.chunk, region.part, region.phase


def _is(actions: Sequence[Action], index: int, kind: type) -> bool:
    return index < len(actions) and isinstance(actions[index], kind)
