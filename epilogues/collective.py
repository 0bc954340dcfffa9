"""Collective: multiply, then let the communication library move the result.

The unfused way, as one of the modes: it needs no transport, works at any scale, and is what the
others are measured against.
"""

from __future__ import annotations

from gemmlink.epilogues import common
from gemmlink.spec.contracts import INTERFACE, Needs
from gemmlink.spec.operations import Phase
from gemmlink.spec.schedule import (
    LOCAL,
    Action,
    Collective,
    Compute,
    Join,
    Plan,
    Program,
    Schedule,
    Store,
)


class LibraryCollective:
    """The whole product into a private buffer, then one call of the communication library."""

    name = "collective"
    interface = INTERFACE
    needs = Needs(window=False)
    complete = True
    phases: tuple[str, ...] = ("gather", "scatter")

    def forms(self) -> tuple[bool, ...]:
        """Split only."""
        return (False,)

    def schedule(self, phase: Phase, plan: Plan) -> Schedule:
        """See the module's docstring."""
        host: list[Action] = [Collective(_call(phase))]
        programs = [Program("consumer", (Join("host"),))]
        if phase.source == "sum":
            return Schedule(phase, plan, (Program("host", tuple(host)), *programs))
        producer = Program("producer", tuple(_producer(phase, plan)))
        return Schedule(
            phase, plan, (producer, Program("host", (Join("producer"), *host)), *programs)
        )


def _producer(phase: Phase, plan: Plan) -> list[Action]:
    actions: list[Action] = []
    for part in phase.sent():
        for chunk in range(plan.chunks):
            store = Store(common.own(plan, chunk, part), to=LOCAL, scope="device")
            actions += [Compute(chunk, part), store]
    return [*actions, *common.rest(phase, plan)]


def _call(phase: Phase) -> str:
    """The library collective that serves a phase."""
    if phase.name == "gather":
        return "all_gather"
    return "reduce_scatter" if phase.sums else "all_to_all"
