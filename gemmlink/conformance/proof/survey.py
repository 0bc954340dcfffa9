"""Proves many protocols, and tells which mistakes in them a proof notices."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any, Literal

from gemmlink.conformance.adversary.case import Case
from gemmlink.conformance.adversary.program import compile_case
from gemmlink.conformance.mistakes import OF_THE_CALLS, OF_THE_START
from gemmlink.conformance.mutate import NAMED, Mutant, deletions, narrowings, swaps
from gemmlink.conformance.proof.protocols import Mode, Protocol, protocols
from gemmlink.conformance.proof.prove import prove
from gemmlink.conformance.proof.resources import Device
from gemmlink.conformance.proof.verdict import Verdict

#: All protocols; those without pairs of epilogues; of these the plainest variants.
Which = Literal["all", "single", "plainest"]


@dataclass(frozen=True)
class Scope:
    """A world, the chunks of fused forms, and which protocols are looked at."""

    world: int
    chunks: int
    which: Which = "all"

    def protocols(self, only: str = "", modes: Sequence[Mode] | None = None) -> list[Protocol]:
        """Those whose name contains ``only``."""
        found = protocols(self.world, self.chunks, only, modes)
        if self.which == "all":
            return found
        single = [each for each in found if len(each.mode.epilogues) == 1]
        return [each for each in single if each.plainest or self.which == "single"]

    def __str__(self) -> str:
        extra = {
            "all": "",
            "single": ", without pairs of epilogues",
            "plainest": ", the plainest variant of each mode",
        }
        return f"{self.world} ranks, {self.chunks} chunks where fused{extra[self.which]}"


#: A device of a rank's own, with room for as many blocks as the smallest that gemmlink is made for
#: has multiprocessors (an H100; MI355X and MI300X have twice as many).
ROOMY = Device(slots=132)

#: What is proved where nobody says: a minute's worth.
USUAL = (Scope(2, 8), Scope(3, 2, "single"), Scope(8, 2, "plainest"))


@dataclass(frozen=True)
class Proof:
    """A protocol and what the proof says of it. ``seconds``: with all that comes before a proof."""

    protocol: Protocol
    verdict: Verdict
    seconds: float

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
            "seconds": round(self.seconds, 3),
            "reason": verdict.reason,
            "counterexample": list(verdict.counterexample),
        }

    def lines(self) -> list[str]:
        """For people: a line, and the counter-example if there is one."""
        request, verdict = self.protocol.request, self.verdict
        chunks = "1 chunk" if request.chunks == 1 else f"{request.chunks} chunks"
        where = f"{self.protocol.name}, {request.world} ranks, {chunks}"
        size = f"{verdict.nodes} nodes, {self.seconds:.2f} s"
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


def prove_all(wanted: Sequence[Protocol], device: Device = ROOMY) -> Iterator[Proof]:
    """A proof, or what refutes it, for one after the other, on ranks of such a ``device``.

    Where ranks share one, kernels have one block each: more must not wait there for other ranks.
    """
    for protocol in wanted:
        began = perf_counter()
        if device.shared:
            one = replace(protocol.request.grid, blocks=1)
            protocol = replace(protocol, request=replace(protocol.request, grid=one))
        verdict = prove(compile_case(protocol.case()), device)
        yield Proof(protocol, verdict, perf_counter() - began)


def mutate_all(wanted: Sequence[Protocol]) -> Iterator[Noticed]:
    """Every mutant of each of them that changes anything."""
    for protocol in wanted:
        case = protocol.case()
        for mutant in mutants(case):
            changed = mutant.of(case)
            if replace(changed, name=case.name) != case:
                yield Noticed(mutant.name, protocol.name, _verdict(changed))


def mutants(case: Case) -> list[Mutant]:
    """Mistakes with names, and every deletion, narrowing and swap."""
    first = case.lowered[0]
    named = (*NAMED, *OF_THE_START, *OF_THE_CALLS)
    return [*named, *deletions(first), *narrowings(first), *swaps(first)]


def _verdict(case: Case) -> Verdict:
    return prove(compile_case(case))
