"""Pieces that schedules share: the gate, the producer's side, the announcements, the two ends.

The reuse rule. Before the first store of call n to memory that a peer can read or write, the own
slot included, a rank waits until every peer has finished reading its result of call n-1 (``free``).
A rank that copies its result out says so at the end of the call; one that hands out a view says so
when it enters the next, and says it *before* it waits itself (the other way round, two ranks wait
for each other). With two buffers nobody waits: a rank that is in call n has heard from every peer
in call n-1, so that peer has finished call n-2, whose slots are used again.

In an operation of several phases the first one enters and the last one leaves.
"""

from __future__ import annotations

from collections.abc import Callable

from gemmlink.spec.operations import Phase
from gemmlink.spec.schedule import (
    LOCAL,
    Action,
    Area,
    Compute,
    Deliver,
    Encode,
    Plan,
    Region,
    Set,
    Store,
    Sum,
    Wait,
    Word,
)

#: What puts a chunk that has arrived from a source into the result, for a result of blocks.
Take = Callable[[Region], list[Action]]


def enter(plan: Plan) -> list[Action]:
    """What comes before the first store of a call: the end of the last view, then the gate."""
    if plan.buffers > 1 or plan.phase > 0:
        return []
    actions: list[Action] = []
    if plan.view:
        actions += [Set(Word("free", plan.rank), at=peer, lag=1) for peer in plan.peers]
    actions += [Wait(Word("free", peer), lag=1) for peer in plan.peers]
    return actions


def leave(plan: Plan) -> list[Action]:
    """What comes after the last read of a call whose result is copied out."""
    if plan.view or plan.buffers > 1 or not plan.is_last:
        return []
    return [Set(Word("free", plan.rank), at=peer) for peer in plan.peers]


def own(plan: Plan, chunk: int, part: int = 0) -> Region:
    """A region of this rank's own."""
    return Region(plan.rank, chunk, part, plan.phase)


def theirs(phase: Phase, plan: Plan, source: int, chunk: int) -> Region:
    """The region of ``source`` that is meant for this rank."""
    return Region(source, chunk, phase.part_for(plan.rank), plan.phase)


def home(phase: Phase, plan: Plan, part: int = 0) -> Area:
    """Where in its own window a rank keeps a part until it is fetched.

    What stays with the rank itself, and is shown as it lies, is at its place from the start.
    """
    shown = part == plan.rank and not phase.sums
    return "inbox" if phase.name == "gather" or shown else "outbox"


def receivers(phase: Phase, plan: Plan, part: int = 0) -> list[int]:
    """Ranks that need a part: this one first, then those behind it."""
    return [rank for rank in plan.everyone if rank in phase.routes[part].peers]


def make(phase: Phase, plan: Plan, chunk: int, part: int = 0) -> list[Action]:
    """What brings forth a region that the next store puts somewhere; see ``made_in_place``."""
    actions: list[Action] = [] if phase.source == "sum" else [Compute(chunk, part)]
    if plan.keep:
        actions.append(Store(own(plan, chunk, part), to=LOCAL, scope="device"))
    if phase.wire is not None:
        actions.append(Encode(own(plan, chunk, part)))
    return actions


def made_in_place(phase: Phase) -> bool:
    """Whether what this phase sends lies in the own slot already."""
    return phase.source == "sum" and phase.wire is None


def keep(phase: Phase, plan: Plan, chunk: int, part: int = 0) -> list[Action]:
    """Bring forth a region and put it where this rank keeps it."""
    if made_in_place(phase):
        return []
    area = home(phase, plan, part)
    store = Store(own(plan, chunk, part), to=plan.rank, area=area)
    return [*make(phase, plan, chunk, part), store]


def keep_all(phase: Phase, plan: Plan) -> list[Action]:
    """``keep`` everything that is sent, then what stays. Neighbouring rows follow each other."""
    actions: list[Action] = []
    for part in phase.sent():
        for chunk in range(plan.chunks):
            actions += keep(phase, plan, chunk, part)
    return [*actions, *rest(phase, plan)]


def in_turn(phase: Phase, plan: Plan) -> list[tuple[int, int]]:
    """Chunk and part of everything that is sent, in the order in which a fused form makes it.

    Peers' parts come before the own one, beginning behind this rank, so that not all ranks send to
    the same one.
    """
    parts = sorted(phase.sent(), key=lambda part: (part - plan.rank - 1) % plan.world)
    return [(chunk, part) for chunk in range(plan.chunks) for part in parts]


def rest(phase: Phase, plan: Plan) -> list[Action]:
    """What leads to nobody: computed last, into the private buffer."""
    actions: list[Action] = []
    for part in phase.kept():
        for chunk in range(plan.chunks):
            store = Store(own(plan, chunk, part), to=LOCAL, scope="device")
            actions += [Compute(chunk, part), store]
    return actions


def announce(phase: Phase, plan: Plan, chunk: int, part: int = 0) -> list[Action]:
    """Tell every rank that needs it, this one included, that a chunk of a part is there."""
    word = Word("arrive", plan.rank, chunk, phase=plan.phase)
    return [Set(word, at=rank) for rank in receivers(phase, plan, part)]


def arrived(plan: Plan, source: int, chunk: int) -> Wait:
    """Wait for a chunk of ``source``."""
    return Wait(Word("arrive", source, chunk, phase=plan.phase))


def receive(
    phase: Phase, plan: Plan, place: Callable[[int], tuple[int, Area]], take: Take | None = None
) -> list[Action]:
    """Wait for every chunk of every source, and deliver it or add it up.

    ``place(source)`` is the window and area where a source's chunks lie when they have arrived;
    ``take`` replaces a plain delivery from there. The own block first and then in the order of
    sending: by the time a late source is awaited, the others have been delivered. Sums need all.
    """
    actions: list[Action] = []
    if phase.sums:
        places = tuple(place(source) for source in range(plan.world))
        for chunk in range(plan.chunks):
            actions += [arrived(plan, source, chunk) for source in plan.everyone]
            actions.append(Sum(theirs(phase, plan, plan.rank, chunk), places))
        return actions
    for source in plan.everyone:
        for chunk in range(plan.chunks):
            region = theirs(phase, plan, source, chunk)
            actions.append(arrived(plan, source, chunk))
            actions += [Deliver(region, *place(source))] if take is None else take(region)
    return actions
