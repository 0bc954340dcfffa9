"""Collective: multiply, then let the communication library move the result.

The unfused way, as one of the modes: it needs no transport, works at any scale, and is what the
others are measured against.
"""

from __future__ import annotations

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
    Region,
    Schedule,
    Store,
)

#: Library collective for each kind of phase.
_CALLS = {"gather": "all_gather"}


class LibraryCollective:
    """The whole product into a private buffer, then one call of the communication library."""

    name = "collective"
    interface = INTERFACE
    needs = Needs(window=False)
    complete = True

    def forms(self) -> tuple[bool, ...]:
        """Split only."""
        return (False,)

    def schedule(self, phase: Phase, plan: Plan) -> Schedule:
        """See the module's docstring."""
        actions: list[Action] = []
        for chunk in range(plan.chunks):
            region = Region(plan.rank, chunk)
            actions += [Compute(chunk), Store(region, to=LOCAL, scope="device")]
        return Schedule(
            phase,
            plan,
            (
                Program("producer", tuple(actions)),
                Program("host", (Join("producer"), Collective(_CALLS[phase.name]))),
                Program("consumer", (Join("host"),)),
            ),
        )
