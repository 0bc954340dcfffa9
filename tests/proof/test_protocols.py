"""The list of protocols has all of them; what is drawn and written about them is what they do."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gemmlink.conformance.adversary.case import schedule_of
from gemmlink.conformance.proof import drawing, page, survey
from gemmlink.conformance.proof.protocols import OPERATIONS, Mode, Protocol, built_in, named
from gemmlink.conformance.proof.protocols import protocols as listed
from gemmlink.conformance.proof.survey import Proof, Scope, mutate_all, prove_all
from gemmlink.conformance.proof.verdict import Verdict
from gemmlink.epilogues.pull import Pull
from gemmlink.epilogues.push import Push
from gemmlink.errors import InvalidArgument, Unsupported
from gemmlink.spec.operations import Phase, band_rows
from gemmlink.spec.problem import chunk_rows
from gemmlink.spec.schedule import Collective, Plan, Schedule, Set, Wait, Word

PAGE = Path(__file__).parents[2] / "docs" / "protocols.md"
SINGLE = {f"{form}-{name}" for form in ("split", "fused") for name in ("push", "pull", "lanes")}
PAIRS = {
    f"{one}+{two}"
    for one in SINGLE
    for two in ("push", "pull", "lanes")
    if not one.endswith(two)
}  # fmt: skip


def schedules(protocol: Protocol) -> list[Schedule]:
    """Those of all ranks."""
    request = protocol.request
    return [schedule_of(request, request.made(), rank) for rank in range(request.world)]


# The list.


def test_every_operation_is_there_in_every_mode() -> None:
    found = listed(2, 2)
    for operation in OPERATIONS:
        modes = {each.mode.name for each in found if each.request.operation == operation}
        assert modes == SINGLE | {"collective"} | (PAIRS if operation == "all_reduce" else set())


def test_a_name_means_one_protocol() -> None:
    names = [each.name for each in listed(2, 8)]
    assert len(set(names)) == len(names)
    assert [each.name for each in listed(3, 8)] == names
    assert [each.name for each in listed(2, 8, "lanes+pull/view")] == [
        name for name in names if "lanes+pull/view" in name
    ]


def test_variants_are_every_combination() -> None:
    combined = {
        f"{result}{buffers}{complete}"
        for result in ("copy", "view")
        for buffers in ("", "-two_buffers")
        for complete in ("", "-complete")
    }
    found = {each.variant for each in listed(2, 2, "all_gather/fused-pull/")}
    common = {"common", "common-two_buffers"}
    assert found == combined | common | {"copy-float8", "copy-entry"}
    found = {each.variant for each in listed(2, 2, "all_to_all/fused-lanes/")}
    lanes = {f"{each}-{order}" for each in combined for order in ("in_order", "after_drain")}
    other = {"copy-in_order-two_lanes", "copy-after_drain-one_lane"}
    assert found == lanes | other | {"copy-in_order-kept", "copy-in_order-entry"}


def test_a_variant_is_what_its_name_says() -> None:
    for protocol in listed(2, 8):
        plan, words = protocol.request.plan, protocol.variant.split("-")
        assert bool(plan.get("view")) == (words[0] in ("view", "common"))
        assert bool(plan.get("common")) == (words[0] == "common")
        assert (plan.get("buffers", 1) == 2) == ("two_buffers" in words)
        assert bool(plan.get("send_complete")) == ("complete" in words)
        orders = [word for word in words if word in ("in_order", "after_drain")]
        assert orders == ([plan["lane_order"]] if protocol.mode.lanes else [])
        assert bool(plan.get("keep")) == ("kept" in words)
        assert ("wire" in protocol.request.options) == ("float8" in words)
        assert protocol.request.entry == ("entry" in words)


@pytest.mark.parametrize("world", [2, 3, 8])
@pytest.mark.parametrize("chunks", [1, 8])
def test_every_chunk_has_rows_once_and_none_another_time(world: int, chunks: int) -> None:
    for protocol in listed(world, chunks):
        request = protocol.request
        sums = request.operation in ("reduce_scatter", "all_reduce")
        blocks = [
            [high - low for low, high in (band_rows(call[0], world, r) for r in range(world))]
            if sums
            else list(call)
            for call in request.rows
        ]
        assert len(set(map(tuple, blocks))) == 3, "M is another in each call"
        even, ragged, empty = blocks
        cut = [chunk_rows(rows, request.chunks, c) for rows in even for c in range(request.chunks)]
        assert all(low < high for low, high in cut), protocol.name
        assert len(set(ragged)) > 1
        assert empty.count(0) == 1
        if sums:
            assert all(len(set(call)) == 1 for call in request.rows)
        if request.chunks > 2:
            assert min(ragged) < request.chunks, "no chunk is empty"


def test_forms_have_their_chunks() -> None:
    for protocol in listed(2, 8):
        lanes = protocol.request.plan.get("lanes", 1)
        assert protocol.request.chunks == (8 if protocol.mode.fused else lanes)


# Names of modes.


def test_a_mode_is_named_as_operations_take_it() -> None:
    assert [mode.name for mode in named(["split-sdma", "push"])] == [
        "split-lanes", "split-push", "fused-push"
    ]  # fmt: skip
    assert [mode.name for mode in named(["fused-lanes+pull"])] == ["fused-lanes+pull"]
    assert [mode.name for mode in named(["all"])] == [mode.name for mode in built_in()]
    (mode,) = named(["gemmlink.epilogues.collective:LibraryCollective"])
    assert mode.name == "collective"


def test_a_mode_that_cannot_be_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="Did you mean 'push'"):
        named(["psh"])
    with pytest.raises(Unsupported, match="must have the form asked for"):
        named(["fused-collective"])
    with pytest.raises(Unsupported, match="use windows, or none does"):
        named(["push+collective"])
    with pytest.raises(InvalidArgument, match="serve the phases of an operation"):
        named(["push+pull+push"])


class Picky(Push):
    """Serves one buffer only; nothing at all where ``refuses`` is ``all``."""

    name = "picky"
    refuses = "some"

    def schedule(self, phase: Phase, plan: Plan) -> Schedule:
        if plan.buffers > 1 or self.refuses == "all":
            raise Unsupported("buffers must be 1", "2")
        return super().schedule(phase, plan)


def test_what_an_epilogue_refuses_is_left_out() -> None:
    found = {each.variant for each in listed(2, 2, "all_gather", [Mode((Picky(),), True)])}
    plain = {each.variant for each in listed(2, 2, "all_gather/fused-push/")}
    assert found == {variant for variant in plain if "two_buffers" not in variant}


def test_the_plainest_may_not_be_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Picky, "refuses", "all")
    wanted = listed(2, 2, "all_gather/fused-picky/", [Mode((Picky(),), True)])
    assert [each.variant for each in wanted] == ["copy"]
    with pytest.raises(Unsupported, match="buffers must be 1"):
        list(prove_all(wanted))


# Proofs of them.


def test_scopes_are_parts_of_each_other() -> None:
    names = [each.name for each in Scope(2, 2).protocols()]
    single = [each.name for each in Scope(2, 2, "single").protocols()]
    assert single == [name for name in names if "+" not in name]
    found = [each.name for each in Scope(2, 2, "plainest").protocols()]
    assert len(found) == len(OPERATIONS) * 7
    assert all(re.fullmatch(r".*/copy(-in_order)?", name) for name in found), found


@pytest.mark.parametrize("world", [2, 3])
def test_the_plainest_are_proved(world: int) -> None:
    for proof in prove_all(Scope(world, 2, "plainest").protocols()):
        assert proof.verdict.proved, "\n".join(proof.lines())
        assert proof.verdict.case == proof.protocol.name


class Gateless(Pull):
    """Forgets to wait until its own slot has been read."""

    name = "gateless"

    def schedule(self, phase: Phase, plan: Plan) -> Schedule:
        made = super().schedule(phase, plan)
        programs = tuple(
            replace(
                program,
                actions=tuple(
                    action
                    for action in program.actions
                    if not (isinstance(action, Wait) and action.word.kind == "free")
                ),
            )
            for program in made.programs
        )
        return replace(made, programs=programs)


def test_what_is_wrong_is_refuted_and_told() -> None:
    (proof,) = prove_all(listed(2, 2, "all_gather/fused-gateless/copy-complete", _GATELESS))
    assert proof.verdict.proved, "peers that say that they have read need no gate"
    (proof,) = list(prove_all(listed(2, 2, "all_gather/fused-gateless/copy", _GATELESS)))[:1]
    row = proof.as_dict()
    assert (row["proved"], row["reason"], row["world"], row["chunks"]) == (False, "race", 2, 2)
    assert len(proof.lines()) == 1 + len(row["counterexample"]) > 3
    assert proof.lines()[0].startswith("refuted  all_gather/fused-gateless/copy, 2 ranks, 2 chunks")


_GATELESS = [Mode((Gateless(),), True)]


def test_mistakes_are_caught_and_what_changes_nothing_is_left_out() -> None:
    found = list(mutate_all(listed(2, 1, "all_gather/split-push/copy-two_buffers")[:1]))
    results = {each.mutant: each.result for each in found}
    assert results["nobody releases"] == "caught"
    assert results["without 'join mover (device)' in consumer#0"] == "equivalent"
    assert "no gate" not in results, "with two buffers there is none"
    assert "one of several lanes drained" not in results


# Drawings and words.


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_drawing_has_an_arrow_from_each_word_to_who_waits(operation: str) -> None:
    for protocol in listed(2, 2, f"{operation}/"):
        made = schedules(protocol)
        waits: Counter[tuple[int, Word]] = Counter()
        told: list[tuple[int, Word]] = []
        for rank, schedule in enumerate(made):
            for action in schedule.actions():
                if isinstance(action, Wait):
                    waits[rank, action.word] += 1
                elif isinstance(action, Set):
                    told.append((action.at, action.word))
        lines = drawing.diagram(made).splitlines()
        arrows = [line for line in lines if "->>" in line and "-->>" not in line]
        assert len(arrows) == sum(waits[each] for each in told), protocol.name
        calls = sum("library collective" in line for line in lines)
        assert calls == sum(isinstance(a, Collective) for s in made for a in s.actions())


def test_a_drawing_tells_things_in_an_order_that_can_be() -> None:
    (protocol,) = listed(2, 2, "all_gather/fused-lanes/copy-in_order-two_lanes")
    lines = drawing.diagram(schedules(protocol)).splitlines()
    for chunk in range(2):
        order = [
            f"compute chunk {chunk}",
            f": chunk[0,chunk {chunk}] = n",
            f"copy chunk {chunk} of rank 0 to window 1",
            f"r0a{1 + chunk}->>r1a3: arrive[0,chunk {chunk}] = n",
            f"deliver chunk {chunk} of rank 0 from window 1",
            "r1a3->>r0a0: free[1] = n, for call n+1",
        ]
        places = [next(i for i, line in enumerate(lines) if text in line) for text in order]
        assert places == sorted(places), lines


def test_ranks_that_wait_in_a_circle_are_not_drawn() -> None:
    made = schedules(listed(2, 1, "all_gather/split-push/copy")[0])
    silent = [
        replace(
            schedule,
            programs=tuple(
                replace(p, actions=tuple(a for a in p.actions if not isinstance(a, Set)))
                for p in schedule.programs
            ),
        )
        for schedule in made
    ]
    with pytest.raises(AssertionError, match="wait in a circle"):
        drawing.diagram(silent)


def test_words_are_told_by_who_sets_and_awaits_them() -> None:
    (lanes,) = listed(2, 2, "all_to_all/fused-lanes/copy-in_order-kept")
    rows = {row.name: row for row in drawing.words(schedules(lanes))}
    assert list(rows) == ["free[s]", "chunk[s,chunk c,part p]", "arrive[s,chunk c]"]
    assert rows["free[s]"].written == "consumer of s, at each peer"
    assert rows["arrive[s,chunk c]"].written == "producer of s, at s; lane of s, at each peer"
    assert rows["chunk[s,chunk c,part p]"].read == "lane of s"
    assert "is in the reader's window" in rows["arrive[s,chunk c]"].meaning
    pull = listed(2, 2, "all_reduce/fused-pull/copy-complete")[0]
    found = drawing.words(schedules(pull))
    assert [row.name for row in found] == [
        "free[s]", "arrive[s,chunk c]", "arrive[s,chunk c,phase 1]", "read[s]"
    ]  # fmt: skip
    assert all("may be loaded" in row.meaning for row in found if "arrive" in row.name)
    assert all(row.meaning for row in found)


# The page.


@pytest.fixture
def verdict(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Every proof says this; it is not made."""
    told: dict[str, Any] = {}

    def all_of_them(wanted: list[Protocol]) -> list[Proof]:
        return [
            Proof(each, Verdict(each.name, 1, 0, 0.0, **(told.get(each.name) or {})), 0.0)
            for each in wanted
        ]

    monkeypatch.setattr(page, "prove_all", all_of_them)
    return told


def _without_nodes(text: str) -> str:
    """Lines are filled anew when a number gets shorter."""
    return " ".join(re.sub(r"\d+( to \d+)?\s+nodes", "nodes", text).split())


def test_the_page_in_docs_is_for_what_is_built_in(verdict: dict[str, Any]) -> None:
    """But for the number of nodes, which CI compares, too."""
    assert _without_nodes(page.build().text()) == _without_nodes(PAGE.read_text())


def test_the_page_in_docs_has_a_section_and_a_proof_for_each_mode() -> None:
    text = PAGE.read_text()
    sections = text.split("\n## ")[1:]
    assert len(sections) == len(OPERATIONS) * 7 + 1
    assert all(section.count("**Proved**") == 1 for section in sections[:-1])
    assert sections[-1].count("**Proved**") == len(PAIRS)
    assert "Refuted" not in text
    worlds = {scope.world for scope in survey.USUAL}
    assert set(re.findall(r"at (\d) ranks", " ".join(sections[0].split()))) == set(map(str, worlds))


def test_the_page_says_what_is_refuted(verdict: dict[str, Any]) -> None:
    name = "all_gather/fused-push/view"
    verdict[name] = {"reason": "race", "counterexample": ("who",)}
    text = page.build([Scope(2, 2)]).text()
    assert text.count("Refuted") == 1
    section = text[text.index("## all_gather, fused-push") :].split("\n## ")[0]
    assert f"**Refuted**: `{name}`." in section
    assert "**Proved**" not in section
