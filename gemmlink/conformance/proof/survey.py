"""Proves many protocols, and tells which mistakes in them a proof notices."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from gemmlink.conformance.adversary.case import Case
from gemmlink.conformance.adversary.program import compile_case
from gemmlink.conformance.mutate import NAMED, Mutant, deletions, narrowings, swaps
from gemmlink.conformance.proof import prove
from gemmlink.conformance.proof.protocols import Mode, Protocol, protocols
from gemmlink.conformance.proof.verdict import Verdict


@dataclass(frozen=True)
class Scope:
    """A world, the chunks of fused forms, and whether pairs of epilogues are looked at, too."""

    world: int
    chunks: int
    pairs: bool = True

    def protocols(self, only: str = "", modes: Sequence[Mode] | None = None) -> list[Protocol]:
        """Those whose name contains ``only``."""
        found = protocols(self.world, self.chunks, only, modes)
        return [each for each in found if self.pairs or len(each.mode.epilogues) == 1]

    def __str__(self) -> str:
        pairs = "" if self.pairs else ", without pairs of epilogues"
        return f"{self.world} ranks, {self.chunks} chunks where fused{pairs}"


#: What is proved where nobody says: about a minute.
USUAL = (Scope(2, 2), Scope(3, 2, pairs=False))


@dataclass(frozen=True)
class Proof:
    """A protocol and what the proof says of it."""

    protocol: Protocol
    verdict: Verdict

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        request, verdict = self.protocol.request, self.verdict
        return {
            "name": self.protocol.name,
            "operation": request.operation,
            "epilogue": "+".join(epilogue.name for epilogue in request.epilogues),
            "fused": request.fused,
            "world": request.world,
            "chunks": request.chunks,
            "proved": verdict.proved,
            "nodes": verdict.nodes,
            "pairs": verdict.pairs,
            "seconds": round(verdict.seconds, 3),
            "reason": verdict.reason,
            "counterexample": list(verdict.counterexample),
        }

    def lines(self) -> list[str]:
        """For people: a line, and the counter-example if there is one."""
        request, verdict = self.protocol.request, self.verdict
        where = f"{self.protocol.name}, {request.world} ranks, {request.chunks} chunks"
        size = f"{verdict.nodes} nodes, {verdict.seconds:.2f} s"
        if verdict.proved:
            return [f"proved   {where}: {size}"]
        return [
            f"refuted  {where}: {verdict.reason}; {size}",
            *(f"         {line}" for line in verdict.counterexample),
        ]


@dataclass(frozen=True)
class Noticed:
    """Whether the proof of a protocol fails when a mistake is made in it, and why."""

    mutant: str
    protocol: str
    verdict: Verdict

    @property
    def result(self) -> Literal["caught", "equivalent"]:
        """``equivalent``: what is proved of the protocol is proved of the mutant, too."""
        return "equivalent" if self.verdict.proved else "caught"

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "mutant": self.mutant,
            "protocol": self.protocol,
            "result": self.result,
            "reason": self.verdict.reason,
        }

    def line(self) -> str:
        """For people."""
        why = "" if self.verdict.reason is None else f" ({self.verdict.reason})"
        return f"{self.result:<10} {self.protocol}: {self.mutant}{why}"


def plainest(wanted: Sequence[Protocol]) -> list[Protocol]:
    """The first variant of each operation in each mode; of pairs none."""
    first: dict[str, Protocol] = {}
    for protocol in wanted:
        if len(protocol.mode.epilogues) == 1:
            first.setdefault(protocol.name.rpartition("/")[0], protocol)
    return list(first.values())


def prove_all(wanted: Sequence[Protocol]) -> Iterator[Proof]:
    """A proof, or what refutes it, for one after the other."""
    for protocol in wanted:
        yield Proof(protocol, _verdict(protocol.case()))


def mutate_all(wanted: Sequence[Protocol]) -> Iterator[Noticed]:
    """Every mutant of each of them that changes anything."""
    for protocol in wanted:
        case = protocol.case()
        for mutant in mutants(case):
            changed = case.changed(mutant.name, mutant.change)
            if changed.lowered != case.lowered:
                yield Noticed(mutant.name, protocol.name, _verdict(changed))


def mutants(case: Case) -> list[Mutant]:
    """Mistakes with names, and every deletion, narrowing and swap."""
    first = case.lowered[0]
    return [*NAMED, *deletions(first), *narrowings(first), *swaps(first)]


def _verdict(case: Case) -> Verdict:
    return prove.prove(compile_case(case))
