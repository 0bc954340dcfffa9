"""What a proof takes for granted of a case, and refutes it by where it does not hold.

Words and counters are zero in the beginning, so that every value of a word has been set by
somebody, and a call counts from a multiple of what it elects by.
"""

from __future__ import annotations

from gemmlink.conformance.adversary.program import Program
from gemmlink.conformance.proof.graph import Refutation


def premises(program: Program) -> Refutation | None:
    """The first premise that does not hold."""
    return _left_over(program) or _uneven(program)


def _left_over(program: Program) -> Refutation | None:
    start = program.case.start
    for (word, at), value in start.words.items():
        if value:
            return Refutation("word", (f"{word} at rank {at} is {value} before the first call",))
    for (rank, counter), value in start.counters.items():
        if value:
            text = f"rank {rank}'s counter {counter} is {value} before the first call"
            return Refutation("count", (text,))
    return None


def _uneven(program: Program) -> Refutation | None:
    """A counter by which two calls elect the last of different numbers."""
    known: dict[int, tuple[int, int]] = {}
    for rank, calls in enumerate(program.codes):
        for call, codes in enumerate(calls, start=1):
            for name, argument in (op for code in codes for op in code.ops):
                if name != "elect":
                    continue
                counter, of = argument
                before, first = known.setdefault(counter, (of, call))
                if before != of:
                    text = f"rank {rank}'s counter {program.counters[counter][1]}"
                    lines = (
                        f"{text} elects the last of {before} in call {first}",
                        f"and the last of {of} in call {call}",
                    )
                    return Refutation("count", lines)
    return None
