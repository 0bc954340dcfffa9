"""Mistakes around what a rank does: how a case begins, how its calls follow each other or end.

The former are changes of a ``Case``, and a machine runs what comes of them like any other case. Of
what is done about calls that end badly (``adversary.recovery``) one step is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from gemmlink.conformance.adversary.case import Case, Start
from gemmlink.conformance.adversary.recovery import Steps
from gemmlink.conformance.mutate import Mutant, edited
from gemmlink.spec.lower import ENTRY, Grid, lower
from gemmlink.spec.lowered import Action, Announce, Counter, Elect, Lowered
from gemmlink.spec.schedule import Word

#: How many more tiles than in the others every second call has.
_MORE_TILES = 1


# What a window, and counters, hold when the first call begins.


def _set(case: Case) -> Iterator[tuple[Word, int]]:
    """Every word that is set, and the rank at which it lies."""
    for lowered in case.lowered:
        for action in lowered.actions():
            if isinstance(action, Announce):
                yield action.word, action.at


def left_over(kind: str, only_one: bool = False) -> Callable[[Case], Case]:
    """Words of a kind hold what the last call of a former life has left; or just one of them.

    The one that is left tells of a peer, and of its last chunk: the first ones may be empty.
    """

    def change(case: Case) -> Case:
        found = [each for each in dict.fromkeys(_set(case)) if each[0].kind == kind]
        if only_one:
            found = [each for each in found if each[0].source != each[1]][-1:]
        words = {each: len(case.rows) for each in found}
        return replace(case, start=replace(case.start, words={**case.start.words, **words}))

    return change


def counted_before(case: Case) -> Case:
    """Counters hold what a call that was broken off has left."""
    counters = {
        (lowered.rank, action.counter): 1
        for lowered in case.lowered
        for action in lowered.actions()
        if isinstance(action, Elect)
    }
    return replace(case, start=Start(case.start.words, counters))


# How calls follow each other.


def number_used_again(case: Case) -> Case:
    """Rank 1 refuses its second call and gives the number of it to its next one. Nobody hears."""
    calls = tuple(range(1, len(case.rows) + 1))
    again = (1, 0, *calls[1:-1])
    numbers = tuple(again if rank == 1 else calls for rank in range(case.world))
    return replace(case, numbers=numbers)


def two_shapes(shared: bool) -> Callable[[Case], Case]:
    """Every second call has more tiles. ``shared``: and counts them where the others do."""

    def change(case: Case) -> Case:
        others = tuple(_of_another_shape(lowered, shared) for lowered in case.lowered)
        return replace(case, shapes=(others,))

    return change


def _of_another_shape(lowered: Lowered, shared: bool) -> Lowered:
    entry = any(strand.actor == ENTRY for strand in lowered.strands)
    grid = Grid(tiles=Grid().tiles + _MORE_TILES)
    other = lower(lowered.operation, lowered.schedule, grid, entry)
    if shared:
        return other

    def own(counter: Counter) -> Counter:
        return replace(counter, actor=f"{counter.actor} of more tiles")

    def one(action: Action) -> Action:
        if isinstance(action, Elect):
            return replace(action, counter=own(action.counter))
        if isinstance(action, Announce) and action.by is not None:
            return replace(action, by=own(action.by))
        return action

    return edited(other, lambda strand: [one(action) for action in strand.actions])


#: Mistakes in how a case begins.
OF_THE_START: tuple[Mutant, ...] = (
    Mutant("arrivals of a former life", whole=left_over("arrive")),
    Mutant("one arrival of a former life", whole=left_over("arrive", only_one=True)),
    Mutant("gates of a former life", whole=left_over("free")),
    Mutant("chunks of a former life", whole=left_over("chunk")),
    Mutant("counters of a former life", whole=counted_before),
)

#: Mistakes in how calls follow each other.
OF_THE_CALLS: tuple[Mutant, ...] = (
    Mutant("number used again after an exception", whole=number_used_again),
    Mutant("counters shared by two shapes", whole=two_shapes(shared=True)),
)


@dataclass(frozen=True)
class Dropped:
    """A step that is left out where calls end badly; ``scenario``: one in which it is missed."""

    name: str
    steps: Steps
    scenario: str = "one"


OF_THE_RECOVERY: tuple[Dropped, ...] = (
    Dropped("unquiesced reset", Steps(quiesce=False)),
    Dropped("unquiesced reset after a failed copy", Steps(quiesce=False), "copy"),
    Dropped("stores not published before the reset", Steps(publish=False)),
    Dropped("highest completed instead of issued epoch", Steps(issued=False)),
    Dropped("counters not cleared in the reset", Steps(counters=False)),
    Dropped("first call after the reset before all have cleared", Steps(wait=False), "again"),
    Dropped("nobody is told of a failure", Steps(tell=False)),
    Dropped("nobody is told of a refusal", Steps(tell=False), "refused"),
    Dropped("nobody looks for who has left the call", Steps(depart=False), "refused"),
    Dropped("records trusted though their source has left", Steps(look=False), "refused"),
    Dropped("refused call not left", Steps(leave=False), "refused"),
    Dropped("counters not cleared after a refused call", Steps(recount=False), "refused"),
)
