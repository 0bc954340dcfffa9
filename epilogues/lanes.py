"""Lanes: copy engines carry what a rank keeps to the peers, one ordered queue or several to each.

Fused, a lane may copy a chunk as soon as the producer has raised the local word ``chunk`` for it.
Split, it starts when the producer has ended. Chunks are dealt to the lanes of a peer in turn.

How arrival is announced depends on what lanes promise (``Plan.lane_order``). ``in_order``: the lane
sets ``arrive[me, c]`` behind its copy. ``after_drain``: a word could overtake the data, so it is
set only after *every* lane to that peer has drained - one that is not waited for is one whose
chunks may be missing.

A copy engine reads the own memory after the producer has left it, so a call is send-complete when
all lanes have drained.
"""

from __future__ import annotations

from gemmlink.epilogues import common
from gemmlink.spec.contracts import INTERFACE, Needs
from gemmlink.spec.operations import Phase
from gemmlink.spec.schedule import (
    Action,
    Area,
    Copy,
    Join,
    Plan,
    Program,
    Schedule,
    Set,
    Wait,
    Word,
)


class Lanes:
    """Copies by lanes, announced by ``arrive[source, chunk]`` at each peer."""

    name = "lanes"
    interface = INTERFACE
    needs = Needs(window=True, lanes=True)
    complete = True
    phases: tuple[str, ...] = ("gather", "scatter")

    def forms(self) -> tuple[bool, ...]:
        """Split and fused."""
        return (False, True)

    def schedule(self, phase: Phase, plan: Plan) -> Schedule:
        """See the module's docstring."""
        lanes = tuple(
            _lane(phase, plan, peer, index) for peer in plan.peers for index in range(plan.lanes)
        )
        programs = [Program("producer", tuple(_producer(phase, plan))), *lanes]
        if plan.lane_order == "after_drain":
            programs.append(Program("mover", tuple(_after_drain(plan))))
        programs.append(Program("consumer", tuple(_consumer(phase, plan))))
        return Schedule(phase, plan, tuple(programs))


def lane_name(peer: int, index: int) -> str:
    """The actor name of a lane."""
    return f"lane[{peer},{index}]"


def _producer(phase: Phase, plan: Plan) -> list[Action]:
    actions = common.enter(plan)
    if not plan.fused:
        actions += common.keep_all(phase, plan)
    else:
        for chunk, part in common.in_turn(phase, plan):
            actions += common.keep(phase, plan, chunk, part)
            if common.receivers(phase, plan, part) != [plan.rank]:
                actions.append(Set(_kept(plan, chunk, part), at=plan.rank))
        actions += common.rest(phase, plan)
    for chunk in range(plan.chunks):
        actions.append(Set(_arrive(plan, chunk), at=plan.rank))
    return actions


def _lane(phase: Phase, plan: Plan, peer: int, index: int) -> Program:
    part = phase.part_for(peer)
    actions: list[Action] = [] if plan.fused else [Join("producer", scope="system")]
    for chunk in range(index, plan.chunks, plan.lanes):
        if plan.fused:
            actions.append(Wait(_kept(plan, chunk, part)))
        region = common.own(plan, chunk, part)
        actions.append(Copy(region, to=peer, area=common.home(phase, plan, part)))
        if plan.lane_order == "in_order":
            actions.append(Set(_arrive(plan, chunk), at=peer))
    return Program(lane_name(peer, index), tuple(actions), lane=(peer, index))


def _after_drain(plan: Plan) -> list[Action]:
    actions: list[Action] = []
    for peer in plan.peers:
        actions += [Join(lane_name(peer, index), scope="system") for index in range(plan.lanes)]
        actions += [Set(_arrive(plan, chunk), at=peer) for chunk in range(plan.chunks)]
    return actions


def _consumer(phase: Phase, plan: Plan) -> list[Action]:
    def place(source: int) -> tuple[int, Area]:
        here = source == plan.rank
        return plan.rank, common.home(phase, plan, plan.rank) if here else "inbox"

    actions = common.receive(phase, plan, place)
    if plan.send_complete:
        actions += [Join(lane_name(p, i)) for p in plan.peers for i in range(plan.lanes)]
    actions.append(Join("producer"))
    return [*actions, *common.leave(plan)]


def _arrive(plan: Plan, chunk: int) -> Word:
    return Word("arrive", plan.rank, chunk, phase=plan.phase)


def _kept(plan: Plan, chunk: int, part: int) -> Word:
    return Word("chunk", plan.rank, chunk, part, plan.phase)
