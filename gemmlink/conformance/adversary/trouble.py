"""What goes wrong in a run, drawn from its seed: who fails or refuses, in which call, and how.

A *life* is all between two resets. Every rank comes to the reset at the end of the last call of a
life, if nothing has brought it there before; the last life has no such end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from gemmlink.conformance.adversary.program import Program
from gemmlink.spec.lower import ENTRY

#: ``fails``: in the middle of a call. ``refuses``: before any data moves. ``copy``: a copy of a
#: lane fails, the lane stops, and the rank notices some time later.
Kind = Literal["fails", "refuses", "copy"]

#: Turns of anybody, at most, until a rank fails in a call or notices that a lane has stopped.
_PATIENCE = 150

#: A draw of a number below the one given.
Draw = Callable[[int], int]


@dataclass
class Trouble:
    """What ``rank`` meets in the ``nth`` call of a life, ``patience`` turns after it has begun."""

    kind: Kind
    rank: int
    nth: int
    patience: int
    life: int = 0
    over: bool = False


@dataclass(frozen=True)
class Script:
    """The troubles of a run, and the last call of each life but the last."""

    troubles: tuple[Trouble, ...]
    stops: tuple[int, ...]


def fitting(program: Program, before: int) -> list[str]:
    """The scenarios that make sense for a program.

    Only ranks that leave entry records may refuse a call and go on: a rank that has refused call n
    stores again in call n + 1 when all others have entered call n, and so have left those before.
    """
    strands = program.case.lowered[0].strands
    names = ["one", "two"]
    if len(program.case.rows) >= before + 2:
        names.append("again")
    if any(strand.lane is not None for strand in strands):
        names.append("copy")
    if any(strand.actor == ENTRY for strand in strands):
        names += ["refused", "refused and failed"]
    return names


def script(name: str, world: int, before: int, draw: Draw) -> Script:
    """What happens in a scenario whose first life has at most ``before`` calls."""

    def trouble(kind: Kind, calls: int = before, life: int = 0) -> Trouble:
        return Trouble(kind, draw(world), 1 + draw(calls), 1 + draw(_PATIENCE), life)

    if name == "one":
        return Script((trouble("fails"),), (before,))
    if name == "two":
        one, other = trouble("fails"), trouble("fails")
        other.rank = (one.rank + 1 + draw(world - 1)) % world
        return Script((one, other), (before,))
    if name == "again":
        return Script((trouble("fails"), trouble("fails", 1, life=1)), (before, before + 1))
    if name == "copy":
        return Script((trouble("copy"),), (before,))
    if name == "refused":
        return Script(tuple(trouble("refuses") for _ in range(1 + draw(2))), ())
    assert name == "refused and failed", f"no scenario {name!r}"
    return Script((trouble("refuses"), trouble("fails")), (before,))


def drawing(random: Callable[[], float]) -> Draw:
    """Draws from a stream of random numbers between 0 and 1."""
    return lambda below: int(random() * below)


def drawn(names: Sequence[str], draw: Draw) -> str:
    """One of the scenarios."""
    return names[draw(len(names))]
