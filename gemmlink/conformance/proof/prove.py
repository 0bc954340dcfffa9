"""Proves a program, or refutes it: one look at its graph says what happens in every execution.

The steps, each of which counts on those before it:

0. ``premises``: words and counters begin as they must;
1. ``graph``: counters count what they should, words are set by their source;
2. the graph has no circle and nobody waits for what nobody sets: no deadlock;
3. ``clocks``: what is known at least, and words are set in a known order;
4. ``races``: all uses of a cell are ordered;
5. ``replay``: whoever looks at an element or a record finds the right one;
6. ``resources``, if a device is given: nobody who waits takes room that others need.

The calls are those of the case. A failure and the reset after it are not looked at here: they would
be another graph, whose first clocks and words are those that a reset leaves.
"""

from __future__ import annotations

from time import perf_counter
from typing import cast

from gemmlink.conformance.adversary.faults import Fault
from gemmlink.conformance.adversary.program import Program
from gemmlink.conformance.proof.clocks import Clocks, words_in_order
from gemmlink.conformance.proof.graph import Graph, Refutation, graph
from gemmlink.conformance.proof.premises import premises
from gemmlink.conformance.proof.races import races
from gemmlink.conformance.proof.replay import Replay
from gemmlink.conformance.proof.resources import Device, crowded
from gemmlink.conformance.proof.stuck import deadlock
from gemmlink.conformance.proof.verdict import Reason, Verdict


def prove(program: Program, device: Device | None = None) -> Verdict:
    """What can be said of all executions of ``program``.

    ``device``: what ranks run on, if there may not be room for all blocks at once.
    """
    began = perf_counter()
    made = graph(program)
    pairs, found = 0, premises(program)
    if found is None:
        pairs, found = _look(made)
    if found is None and device is not None:
        found = crowded(made, device)
    return Verdict(
        program.case.name,
        len(made.before),
        pairs,
        perf_counter() - began,
        None if found is None else found.reason,
        () if found is None else found.lines,
    )


def _look(made: Graph) -> tuple[int, Refutation | None]:
    """How many pairs were looked at, and the first thing that is wrong."""
    if made.refutations:
        return 0, made.refutations[0]
    order = made.order()
    stuck = deadlock(made, order)
    if stuck is not None:
        return 0, stuck
    clocks = Clocks(made, order)
    unordered = words_in_order(clocks)
    if unordered is not None:
        return 0, unordered
    pairs, race = races(clocks, order)
    return pairs, race or _values(made, order)


def _values(made: Graph, order: list[int]) -> Refutation | None:
    try:
        Replay(made).through(order)
    except Fault as fault:
        return Refutation(cast(Reason, fault.kind), (fault.text,))
    return None
