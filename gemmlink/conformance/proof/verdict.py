"""What a proof says of a case: proved, or refuted with a counter-example that a person can read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

#: What refutes a protocol. ``deadlock``: waits that wait for each other, or for what nobody sets.
#: ``race``: two uses of one cell, not both reads, that nothing orders. ``wrong``: an element that
#: is not the one that must be there. ``word``: a word that falls, that another than its source
#: sets, or that is set in no known order. ``count``: a counter that does not count what it elects
#: by. ``record``: an entry record that is not of this call. ``resources``: a strand that waits
#: where it may keep those that it waits for from running.
Reason = Literal["deadlock", "race", "wrong", "word", "count", "record", "resources"]


@dataclass(frozen=True)
class Verdict:
    """``nodes`` events of all ranks and calls, ``pairs`` conflicting pairs that must be ordered.

    ``reason`` is None if it is proved; otherwise ``counterexample`` tells, line by line, who did
    what when, and what orders nothing between them.
    """

    case: str
    nodes: int
    pairs: int
    seconds: float
    reason: Reason | None = None
    counterexample: tuple[str, ...] = ()

    @property
    def proved(self) -> bool:
        """Whether nothing refutes it."""
        return self.reason is None

    def __str__(self) -> str:
        if self.proved:
            return f"{self.case}: proved, {self.nodes} nodes, {self.pairs} pairs"
        return "\n".join([f"{self.case}: {self.reason}", *self.counterexample])
