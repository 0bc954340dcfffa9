"""Programs by hand, smaller than anything that is lowered: a few agents, cells and words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from gemmlink.conformance.adversary.case import Case
from gemmlink.conformance.adversary.program import Code, Op, Program
from gemmlink.conformance.adversary.values import Value
from gemmlink.spec.lowered import Kind, Strand
from gemmlink.spec.schedule import Scope, Word

NEW: Value = ("C", 1, 0, 0, 0)
NEWER: Value = ("C", 2, 0, 0, 0)


@dataclass(frozen=True)
class Does:
    """What ``actor`` of ``rank`` does in a call. ``index``: which of its blocks."""

    actor: str
    rank: int
    ops: Sequence[Op]
    kind: Kind = "block"
    index: int = 0
    call: int = 1
    in_order: bool = True

    def strand(self) -> Strand:
        """The same without what it was compiled to."""
        actions: Any = tuple(f"{name} {argument}" for name, argument in self.ops)
        lane = (1, 0) if self.kind == "queue" else None
        return Strand(self.actor, self.index, self.kind, actions, lane, self.in_order)


def program(*does: Does, words: Sequence[tuple[int, int]] = ((0, 1),), cells: int = 4) -> Program:
    """A program of two ranks. ``words``: the source of each, and whose view it is."""
    names = sorted({(each.rank, each.strand().name, each.kind) for each in does})
    agents = [("nobody", -1, -1)]
    for number, (rank, name, kind) in enumerate(names, start=1):
        agents.append((name, rank, -1 - number if kind == "queue" else rank))
    codes: list[list[list[Code]]] = [[[] for _ in range(max(d.call for d in does))] for _ in "01"]
    for each in does:
        number = 1 + names.index((each.rank, each.strand().name, each.kind))
        places = tuple((at, at + 1) for at in range(len(each.ops)))
        code = Code(each.strand(), number, tuple(each.ops), places)
        codes[each.rank][each.call - 1].append(code)
    space: Any = SimpleNamespace(
        keys=[(0, at) for at in range(cells)],
        name="cell {}".format,
        private=lambda: [False] * cells,
    )
    of: Any = (None, None)
    rows = tuple((1, 1) for _ in codes[0])
    told = [(Word("free", source), at) for source, at in words]
    return Program(Case("tiny", of, rows), space, told, agents, codes, [(0, "count")])


# Ops, as they are compiled.


def make(*values: Value) -> Op:
    """Values into the registers."""
    return "make", list(values)


def put(*cells: int) -> Op:
    """Registers into cells; the leading wave stores every other one, beginning with the second."""
    return "put", list(cells)


def fetch(*cells: int) -> Op:
    """Cells into the registers."""
    return "fetch", list(cells)


def publish(scope: Scope = "system") -> Op:
    """Retire, barrier and release."""
    return "publish", scope


def say(word: int = 0, value: int = 1, scope: Scope = "system", by: int | None = None) -> Op:
    """Set a word."""
    return "announce", (word, value, scope, by, True)


def wait(word: int = 0, value: int = 1, scope: Scope | None = "system") -> Op:
    """Wait for a word, and acquire if there is a scope."""
    return "wait", (word, value, scope, True)


def elect(of: int = 2) -> Op:
    """Come for an election."""
    return "elect", (0, of)


def copy(source: int, target: int) -> Op:
    """A copy engine moves a cell."""
    return "copy", [(source, target)]


def join(actor: str) -> Op:
    """Until an actor has ended."""
    return "join", actor
