"""Push: whoever has a finished tile stores it into every rank's window, then sets a word there.

Fused, the producer itself stores each chunk to all ranks as soon as it is computed. Split, it only
fills its own slot, and a mover sends the block afterwards.

The gate (``Wait free >= n-1`` for every peer) stands before the first store of call n to any memory
that a peer can read or write, the own slot included: a peer that still reads its result of call n-1
must not see it overwritten.
"""

from __future__ import annotations

from gemmlink.spec.contracts import INTERFACE, Needs
from gemmlink.spec.operations import Phase
from gemmlink.spec.schedule import (
    Action,
    Compute,
    Deliver,
    Join,
    Load,
    Plan,
    Program,
    Region,
    Schedule,
    Set,
    Store,
    Wait,
    Word,
)


class Push:
    """Stores to all peers, announced by ``arrive[source, chunk]`` at each of them."""

    name = "push"
    interface = INTERFACE
    needs = Needs(window=True)
    complete = True

    def forms(self) -> tuple[bool, ...]:
        """Split and fused."""
        return (False, True)

    def schedule(self, phase: Phase, plan: Plan) -> Schedule:
        """See the module's docstring."""
        senders = _fused(plan) if plan.fused else _split(plan)
        return Schedule(phase, plan, (*senders, _consumer(plan, last=senders[-1].actor)))


def _gate(plan: Plan) -> list[Action]:
    return [Wait(Word("free", peer), lag=1) for peer in plan.peers]


def _announce(plan: Plan, chunk: int) -> list[Action]:
    return [Set(Word("arrive", plan.rank, chunk), at=rank) for rank in plan.everyone]


def _fused(plan: Plan) -> tuple[Program, ...]:
    actions = _gate(plan)
    for chunk in range(plan.chunks):
        region = Region(plan.rank, chunk)
        actions.append(Compute(chunk))
        actions.extend(Store(region, to=rank) for rank in plan.everyone)
        actions.extend(_announce(plan, chunk))
    return (Program("producer", tuple(actions)),)


def _split(plan: Plan) -> tuple[Program, ...]:
    producer = _gate(plan)
    mover: list[Action] = [Join("producer")]
    for chunk in range(plan.chunks):
        region = Region(plan.rank, chunk)
        producer += [Compute(chunk), Store(region, to=plan.rank, scope="device")]
        mover.append(Load(region))
        mover.extend(Store(region, to=peer) for peer in plan.peers)
        mover.extend(_announce(plan, chunk))
    return (Program("producer", tuple(producer)), Program("mover", tuple(mover)))


def _consumer(plan: Plan, last: str) -> Program:
    actions: list[Action] = []
    # The own block first and then in the order of sending: by the time a late source is awaited,
    # the others have been delivered.
    for source in plan.everyone:
        for chunk in range(plan.chunks):
            actions.append(Wait(Word("arrive", source, chunk)))
            actions.append(Deliver(Region(source, chunk)))
    actions.append(Join(last))
    actions.extend(Set(Word("free", plan.rank), at=peer) for peer in plan.peers)
    return Program("consumer", tuple(actions))
