"""Pieces that schedules share: the gate, the announcements, the two ends of a call.

The reuse rule. Before the first store of call n to memory that a peer can read or write, the own
slot included, a rank waits until every peer has finished reading its result of call n-1 (``free``).
A rank that copies its result out says so at the end of the call; one that hands out a view says so
when it enters the next, and says it *before* it waits itself (the other way round, two ranks wait
for each other). With two buffers nobody waits: a rank that is in call n has heard from every peer
in call n-1, so that peer has finished call n-2, whose slots are used again.
"""

from __future__ import annotations

from gemmlink.spec.schedule import Action, Deliver, Plan, Region, Set, Wait, Word


def enter(plan: Plan) -> list[Action]:
    """What comes before the first store of a call: the end of the last view, then the gate."""
    if plan.buffers > 1:
        return []
    actions: list[Action] = []
    if plan.view:
        actions += [Set(Word("free", plan.rank), at=peer, lag=1) for peer in plan.peers]
    actions += [Wait(Word("free", peer), lag=1) for peer in plan.peers]
    return actions


def leave(plan: Plan) -> list[Action]:
    """What comes after the last read of a call whose result is copied out."""
    if plan.view or plan.buffers > 1:
        return []
    return [Set(Word("free", plan.rank), at=peer) for peer in plan.peers]


def announce(plan: Plan, chunk: int) -> list[Action]:
    """Tell every rank, this one included, that a chunk of the own product is there."""
    return [Set(Word("arrive", plan.rank, chunk), at=rank) for rank in plan.everyone]


def arrived(source: int, chunk: int) -> Wait:
    """Wait for a chunk of ``source``."""
    return Wait(Word("arrive", source, chunk))


def deliver_own_window(plan: Plan) -> list[Action]:
    """Wait for every chunk of every source and deliver it from the own window.

    The own block first and then in the order of sending: by the time a late source is awaited, the
    others have been delivered.
    """
    actions: list[Action] = []
    for source in plan.everyone:
        for chunk in range(plan.chunks):
            actions += [arrived(source, chunk), Deliver(Region(source, chunk), plan.rank)]
    return actions
