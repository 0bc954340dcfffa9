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
    phases: tuple[str, ...] = ("gather", "scatter")

    def forms(self) -> tuple[bool, ...]:
        return (True,)

    def schedule(self, phase: Phase, plan: s.Plan) -> s.Schedule:
        make = common.enter(plan)  # the gate: peers may still read what this rank keeps for them
        for chunk, part in common.in_turn(phase, plan):
            make += common.keep(phase, plan, chunk, part)
            make += common.announce(phase, plan, chunk, part)
        make += common.rest(phase, plan)
        take = _summed(phase, plan) if phase.sums else _taken(phase, plan)
        take.append(s.Join("producer"))  # what stays with this rank is not announced by a word
        if plan.send_complete and plan.is_last:  # the call ends when nobody reads from here
            take += [s.Set(s.Word("read", plan.rank), at=peer) for peer in plan.peers]
            take += [s.Wait(s.Word("read", peer)) for peer in plan.peers]
        # What stays here is computed last, and no word tells of it.
        take += [s.Join("producer"), *common.leave(plan)]
        programs = (s.Program("producer", tuple(make)), s.Program("consumer", tuple(take)))
        return s.Schedule(phase, plan, programs)


def _partners(plan: s.Plan) -> list[int]:
    steps = range(1 << (plan.world - 1).bit_length())
    return [plan.rank ^ step for step in steps if plan.rank ^ step < plan.world]


def _place(phase: Phase, plan: s.Plan, source: int) -> tuple[int, s.Area]:
    """Where a source keeps what it has for this rank."""
    if source == plan.rank:
        return source, common.home(phase, plan, plan.rank)
    return source, "inbox" if phase.name == "gather" else "outbox"


def _taken(phase: Phase, plan: s.Plan) -> list[s.Action]:
    """A result of blocks, copied out or shown in the own window."""
    taken: list[s.Action] = []
    for source in _partners(plan):
        for chunk in range(plan.chunks):
            region, place = common.theirs(phase, plan, source, chunk), _place(phase, plan, source)
            taken.append(common.arrived(plan, source, chunk))
            if plan.view and source != plan.rank:
                taken += [s.Load(region, *place), s.Store(region, to=plan.rank)]
                place = plan.rank, "inbox"
            taken.append(s.Deliver(region, *place))
    return taken


def _summed(phase: Phase, plan: s.Plan) -> list[s.Action]:
    """The own band: what all have for it, in the order of the ranks."""
    taken: list[s.Action] = []
    places = tuple(_place(phase, plan, source) for source in range(plan.world))
    for chunk in range(plan.chunks):
        taken += [common.arrived(plan, source, chunk) for source in _partners(plan)]
        taken.append(s.Sum(common.theirs(phase, plan, plan.rank, chunk), places))
    return taken
