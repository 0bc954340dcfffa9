"""Runs cases under seeds and tells what came of it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from gemmlink.conformance.adversary.case import Case
from gemmlink.conformance.adversary.faults import Fault
from gemmlink.conformance.adversary.machine import Machine
from gemmlink.conformance.adversary.program import Program, compile_case


@dataclass(frozen=True)
class Outcome:
    """What came of a run: the hash of its trace, its length in turns, what went wrong."""

    case: str
    seed: int
    trace: str
    turns: int
    fault: Fault | None = None

    def __str__(self) -> str:
        came = "right" if self.fault is None else str(self.fault)
        return f"{self.case}, seed {self.seed}, {self.turns} turns, trace {self.trace}: {came}"


def run(
    program: Program, seed: int, strict: bool = True, story: list[str] | None = None
) -> Outcome:
    """One run. ``story``: a list that is told, line by line, what happens."""
    machine = Machine(program, seed, strict, story)
    fault = None
    try:
        machine.run()
    except Fault as found:
        fault = found
    return Outcome(program.case.name, seed, machine.hash(), len(machine.trace), fault)


def first_fault(case: Case, seeds: Iterable[int], strict: bool = True) -> Outcome | None:
    """The first run that goes wrong, or None."""
    program = compile_case(case)
    for seed in seeds:
        outcome = run(program, seed, strict)
        if outcome.fault is not None:
            return outcome
    return None


def story(case: Case, seed: int, strict: bool = True) -> str:
    """A run, turn by turn, and what came of it."""
    lines: list[str] = []
    outcome = run(compile_case(case), seed, strict, lines)
    return "\n".join([*lines, str(outcome)])
