"""Epilogue ``pairwise``: every rank pulls from its partners one after the other.

In step n the partner of rank r is ``r ^ n``, so that two ranks read from each other at a time.
"""

from __future__ import annotations

from gemmlink.epilogues import common
from gemmlink.spec import schedule as s
from gemmlink.spec.contracts import INTERFACE, Needs
from gemmlink.spec.operations import Phase


class Pairwise:
    """See the module's docstring."""

    name = "pairwise"
    interface = INTERFACE
    needs = Needs(window=True)
    complete = True

    def forms(self) -> tuple[bool, ...]:
        return (True,)

    def schedule(self, phase: Phase, plan: s.Plan) -> s.Schedule:
        make = common.enter(plan)  # the gate: peers may still read the own slot
        for chunk in range(plan.chunks):
            make += [s.Compute(chunk), s.Store(s.Region(plan.rank, chunk), to=plan.rank)]
            make += common.announce(plan, chunk)
        take = [action for source in _partners(plan) for action in _taken(plan, source)]
        if plan.send_complete:  # the call ends when nobody reads from here any more
            take += [s.Set(s.Word("read", plan.rank), at=peer) for peer in plan.peers]
            take += [s.Wait(s.Word("read", peer)) for peer in plan.peers]
        take += common.leave(plan)
        programs = (s.Program("producer", tuple(make)), s.Program("consumer", tuple(take)))
        return s.Schedule(phase, plan, programs)


def _partners(plan: s.Plan) -> list[int]:
    steps = range(1 << (plan.world - 1).bit_length())
    return [plan.rank ^ step for step in steps if plan.rank ^ step < plan.world]


def _taken(plan: s.Plan, source: int) -> list[s.Action]:
    taken: list[s.Action] = []
    for chunk in range(plan.chunks):
        region = s.Region(source, chunk)
        taken.append(common.arrived(source, chunk))
        if plan.view and source != plan.rank:
            taken += [s.Load(region, window=source), s.Store(region, to=plan.rank)]
        taken.append(s.Deliver(region, plan.rank if plan.view else source))
    return taken
