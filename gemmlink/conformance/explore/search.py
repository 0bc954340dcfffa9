"""All executions of a program: those that differ in anything that anybody could notice."""

from __future__ import annotations

from dataclasses import dataclass

from gemmlink.conformance.adversary.faults import Fault
from gemmlink.conformance.adversary.program import Program
from gemmlink.conformance.explore.choices import every, settle
from gemmlink.conformance.explore.outline import Outline
from gemmlink.conformance.explore.walker import Key, Walker

#: What was chosen: the index of a turn among those that were ready, and of a copy in a flight.
_Choice = tuple[int, int]

#: The choices that lead somewhere, last one first; None where there were none.
_Path = tuple["_Path", _Choice] | None


@dataclass(frozen=True)
class Explored:
    """What came of it.

    ``states``: places where more than one thing had to be tried, each counted once. ``runs``: ways
    that led to the end, to a fault, or to where somebody had been before. ``complete``: nothing is
    left to try. ``fault``: the first one, and the ``story`` of how it comes about; ``kinds`` of all
    that were found.
    """

    case: str
    states: int
    runs: int
    complete: bool
    fault: Fault | None = None
    story: tuple[str, ...] = ()
    kinds: frozenset[str] = frozenset()

    def __str__(self) -> str:
        extent = "all" if self.complete else "not all"
        came = "right" if self.fault is None else str(self.fault)
        return f"{self.case}: {self.states} states, {self.runs} runs, {extent}: {came}"


def explore(
    program: Program, limit: int = 100_000, reduce: bool = True, stop: bool = True
) -> Explored:
    """Try all that may happen, until there are more than ``limit`` states.

    ``reduce``: leave out what makes no difference. Otherwise everybody who could be next is tried
    everywhere, which is only for tiny programs. ``stop`` at the first fault, or go on elsewhere.
    """
    return _Search(program, limit, reduce, stop).run()


class _Search:
    def __init__(self, program: Program, limit: int, reduce: bool, stop: bool) -> None:
        self._outline = Outline(program)
        self._limit = limit
        self._reduce = reduce
        self._stop = stop
        self._seen: set[Key] = set()
        self._runs = 0
        self._fault: Fault | None = None
        self._path: _Path = None
        self._kinds: set[str] = set()
        #: What is still to be tried: a walker, the way to it, and where it goes next.
        self._left: list[tuple[Walker, _Path, list[_Choice]]] = []

    def run(self) -> Explored:
        """Try everything."""
        self._go(Walker(self._outline), None)
        while self._left and len(self._seen) <= self._limit and not (self._stop and self._fault):
            walker, path, choices = self._left[-1]
            choice = choices.pop()
            if choices:
                walker = walker.fork()
            else:
                self._left.pop()
            self._go(walker, (path, choice))
        complete = not self._left or (self._stop and self._fault is not None)
        case = self._outline.program.case.name
        found = self._fault, self._story(), frozenset(self._kinds)
        return Explored(case, len(self._seen), self._runs, complete, *found)

    def _go(self, walker: Walker, path: _Path) -> None:
        """One step, and on to where the next choice is."""
        try:
            choices = self._walk(walker, path)
        except Fault as fault:
            self._kinds.add(fault.kind)
            if self._fault is None:
                self._fault, self._path = fault, path
            self._runs += 1
            return
        key = walker.key() if choices else ()
        if not choices or key in self._seen:
            self._runs += 1
            return
        self._seen.add(key)
        self._left.append((walker, path, choices))

    def _walk(self, walker: Walker, path: _Path) -> list[_Choice]:
        if path is not None:
            self._choose(walker, path[1])
        if self._reduce:
            turns = settle(walker)
            choices = [(walker.ready.index(turn), 0) for turn in turns]
        else:
            choices = list(every(walker))
        if not choices:
            walker.finish()
        return choices[::-1]

    def _choose(self, walker: Walker, choice: _Choice) -> None:
        index, which = choice
        walker.do(walker.ready[index], None if self._reduce else which)

    def _story(self) -> tuple[str, ...]:
        """What happens on the way to the fault."""
        if self._fault is None:
            return ()
        ways: list[_Path] = []
        path = self._path
        while path is not None:
            ways.append(path)
            path = path[0]
        told: list[str] = []
        walker = Walker(self._outline, told)
        try:
            for way in [None, *reversed(ways)]:
                self._walk(walker, way)
        except Fault:
            return tuple(told)
        raise AssertionError(f"the way to '{self._fault}' leads elsewhere")
