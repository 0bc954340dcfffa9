"""Lanes: copy engines carry the own slot to the peers, one ordered queue or several to each.

Fused, a lane may copy chunk c as soon as the producer has raised the local word ``chunk[c]``.
Split, it starts when the producer has ended. Chunks are dealt to the lanes of a peer in turn.

How arrival is announced depends on what lanes promise (``Plan.lane_order``). ``in_order``: the lane
sets ``arrive[me, c]`` behind its copy. ``after_drain``: a word could overtake the data, so it is
set only after *every* lane to that peer has drained - one that is not waited for is one whose
chunks may be missing.

A copy engine reads the own slot after the producer has left it, so a call is send-complete when all
lanes have drained.
"""

from __future__ import annotations

from gemmlink.epilogues.common import deliver_own_window, enter, leave
from gemmlink.spec.contracts import INTERFACE, Needs
from gemmlink.spec.operations import Phase
from gemmlink.spec.schedule import (
    Action,
    Compute,
    Copy,
    Join,
    Plan,
    Program,
    Region,
    Schedule,
    Set,
    Store,
    Wait,
    Word,
)


class Lanes:
    """Copies by lanes, announced by ``arrive[source, chunk]`` at each peer."""

    name = "lanes"
    interface = INTERFACE
    needs = Needs(window=True, lanes=True)
    complete = True

    def forms(self) -> tuple[bool, ...]:
        """Split and fused."""
        return (False, True)

    def schedule(self, phase: Phase, plan: Plan) -> Schedule:
        """See the module's docstring."""
        lanes = tuple(
            _lane(plan, peer, index) for peer in plan.peers for index in range(plan.lanes)
        )
        programs = [Program("producer", tuple(_producer(plan))), *lanes]
        if plan.lane_order == "after_drain":
            programs.append(Program("mover", tuple(_after_drain(plan))))
        programs.append(Program("consumer", tuple(_consumer(plan))))
        return Schedule(phase, plan, tuple(programs))


def lane_name(peer: int, index: int) -> str:
    """The actor name of a lane."""
    return f"lane[{peer},{index}]"


def _producer(plan: Plan) -> list[Action]:
    actions = enter(plan)
    for chunk in range(plan.chunks):
        actions += [Compute(chunk), Store(Region(plan.rank, chunk), to=plan.rank)]
        if plan.fused:
            actions.append(Set(Word("chunk", plan.rank, chunk), at=plan.rank))
    actions += [Set(Word("arrive", plan.rank, chunk), at=plan.rank) for chunk in range(plan.chunks)]
    return actions


def _lane(plan: Plan, peer: int, index: int) -> Program:
    actions: list[Action] = [] if plan.fused else [Join("producer", scope="system")]
    for chunk in range(index, plan.chunks, plan.lanes):
        if plan.fused:
            actions.append(Wait(Word("chunk", plan.rank, chunk)))
        actions.append(Copy(Region(plan.rank, chunk), to=peer))
        if plan.lane_order == "in_order":
            actions.append(Set(Word("arrive", plan.rank, chunk), at=peer))
    return Program(lane_name(peer, index), tuple(actions), lane=(peer, index))


def _after_drain(plan: Plan) -> list[Action]:
    actions: list[Action] = []
    for peer in plan.peers:
        actions += [Join(lane_name(peer, index), scope="system") for index in range(plan.lanes)]
        for chunk in range(plan.chunks):
            actions.append(Set(Word("arrive", plan.rank, chunk), at=peer))
    return actions


def _consumer(plan: Plan) -> list[Action]:
    actions = deliver_own_window(plan)
    if plan.send_complete:
        actions += [Join(lane_name(p, i)) for p in plan.peers for i in range(plan.lanes)]
    actions.append(Join("producer"))
    return [*actions, *leave(plan)]
