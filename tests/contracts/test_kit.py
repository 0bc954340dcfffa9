"""The contract classes catch what they are for: each broken part fails the clause meant for it."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import pytest
import torch

from gemmlink import conformance
from gemmlink.conformance import (
    BackendContract,
    EpilogueContract,
    LaneContract,
    RankContract,
    TransportContract,
    WindowContract,
    WordsContract,
    failures,
    run_together,
)
from gemmlink.conformance.clauses import Desk, clause, require
from gemmlink.conformance.problems import Case
from gemmlink.conformance.trials import Part, called, operation_for
from gemmlink.groups import SELF
from tests.contracts.forked import Forked

_HERE = "tests.contracts"
#: What each broken transport fails: contract, name, clauses.
TRANSPORTS: list[tuple[type[RankContract], str, set[str]]] = [
    (TransportContract, "Careless", {"a_barrier_waits_for_every_rank", "a_barrier_is_bounded"}),
    (TransportContract, "Careless", {"a_living_peer_is_not_called_dead"}),
    (
        WindowContract,
        "NotZeroed",
        {"a_window_is_zero_at_first", "common_bytes_are_one_memory"},
    ),
    (
        WindowContract,
        "PrivateCopy",
        {
            "what_is_stored_in_a_peers_tensor_lies_in_its_memory",
            "what_a_peer_stores_at_home_shows_in_its_tensor",
        },
    ),
    (WindowContract, "FreeOnce", {"free_is_idempotent_and_waits_for_nobody"}),
    (WindowContract, "Selfish", {"a_failure_on_one_rank_raises_on_all_and_leaves_nothing"}),
    (WordsContract, "EarlyWord", {"a_word_announces_all_stores_before_it"}),
    (
        WordsContract,
        "RaisingWait",
        {
            "a_wait_in_vain_returns_the_smaller_value",
            "a_wait_is_bounded",
            "a_long_wait_costs_little",
        },
    ),
    (WordsContract, "DeafWait", {"a_wait_ends_when_the_word_comes"}),
    (WordsContract, "EndlessWait", {"a_wait_is_bounded"}),
    (WordsContract, "BusyWait", {"a_long_wait_costs_little"}),
    (WordsContract, "NarrowWords", {"a_word_is_a_signed_64_bit_number"}),
    (WordsContract, "ForgetfulSetter", {"bound_words_do_what_the_methods_do"}),
    (LaneContract, "HastyLane", {"a_copy_is_there_when_it_is_announced"}),
    (LaneContract, "NewLanes", {"a_lane_is_the_same_object_each_time"}),
    (LaneContract, "Killer", {"an_empty_lane_has_drained"}),
]


@cache
def _transport_failures() -> dict[str, dict[str, str]]:
    """All of them, on two sets of ranks: while a clause hangs on one, the other goes on."""
    made: dict[str, Any] = {}
    for contract, name, _ in TRANSPORTS:
        values = {
            "transport": f"{_HERE}.broken_transports:{name}",
            "world": 2,
            "clause_limit_s": 6.0,
            "rounds": 0 if name == "DeafWait" else 20,
            "__module__": __name__,
        }
        made[name] = type(name, (Forked, contract), values)
    contracts = [contract for name, contract in made.items() if name != "BusyWait"]
    with ThreadPoolExecutor(2) as threads:
        done = threads.map(lambda few: run_together(*few), (contracts[::2], contracts[1::2]))
    assert [*done] == [None, None]
    run_together(made["BusyWait"])  # alone: what it wastes is what others leave it
    return {name: failures(contract) for name, contract in made.items()}


@pytest.mark.parametrize(("name", "clauses"), [(n, c) for _, n, c in TRANSPORTS])
def test_a_broken_transport_fails_the_clause_meant_for_it(name: str, clauses: set[str]) -> None:
    found = {clause.removeprefix("test_") for clause in _transport_failures()[name]}
    assert clauses <= found, _transport_failures()[name]


@pytest.mark.parametrize("name", ["NotZeroed", "RaisingWait", "EndlessWait", "HastyLane", "Killer"])
def test_a_broken_transport_fails_no_other_clause(name: str) -> None:
    """What is broken in one place does not hide that the rest is right."""
    clauses = next(clauses for _, other, clauses in TRANSPORTS if other == name)
    found = {clause.removeprefix("test_") for clause in _transport_failures()[name]}
    assert found == clauses, _transport_failures()[name]


def test_a_failure_names_the_clause_and_the_rank() -> None:
    text = _transport_failures()["RaisingWait"]["test_a_wait_in_vain_returns_the_smaller_value"]
    assert text.startswith("``wait`` returns a smaller value once the time has passed")
    assert "rank 0: " in text
    assert "TimeoutError: the word did not come" in text


def test_a_rank_that_dies_is_charged_to_its_clause() -> None:
    """And the clauses behind it are run all the same."""
    found = _transport_failures()["Killer"]
    assert "died with exit code 7" in found["test_an_empty_lane_has_drained"]
    assert "test_lanes_end_with_the_window" not in found


def test_a_clause_that_hangs_is_given_up() -> None:
    text = _transport_failures()["EndlessWait"]["test_a_wait_is_bounded"]
    assert "still running after 6 s" in text


class Haunted(Forked):
    """Its first clause goes on in its thread when it has been given up."""

    world = 2
    clause_limit_s = 2.0

    @clause
    def test_a_hangs(self, desk: Desk) -> None:
        """This one does not end."""
        threading.Event().wait(60)

    @clause
    def test_b_is_alone(self, desk: Desk) -> None:
        """No thread of another clause runs beside this one."""
        names = [thread.name for thread in threading.enumerate()]
        require("test_a_hangs" not in names, f"{names}")


def test_a_clause_that_hangs_does_not_disturb_those_behind_it() -> None:
    assert set(failures(Haunted)) == {"test_a_hangs"}


#: Most that is broken goes wrong there, too.
_WORST = "it_is_right_on_the_worst_machine"

EPILOGUES = [
    ("NoGate", {"the_gate_stands_before_the_first_store"}),
    ("NoGate", {"nothing_is_overwritten_while_it_is_in_use"}),
    ("LateGate", {"the_gate_stands_before_the_first_store"}),
    ("NoFree", {"a_copied_result_sets_free_at_the_end", "no_rank_waits_in_a_circle"}),
    ("EarlyFree", {"a_copied_result_sets_free_at_the_end"}),
    ("Nearsighted", {_WORST}),
    ("MissingSet", {"each_word_awaited_is_set_once_by_its_source", "no_rank_waits_in_a_circle"}),
    ("DoubleSet", {"words_are_set_by_their_source"}),
    ("DeliversTwice", {"every_region_is_delivered_once"}),
    ("DeliversLess", {"every_region_is_delivered_once"}),
    ("Hasty", {"what_is_delivered_is_there"}),
    ("Unplaced", {"every_word_has_a_place"}),
    ("Polite", {"no_rank_waits_in_a_circle"}),
    ("Moody", {"schedules_are_pure"}),
    ("Boastful", {"needs_say_what_is_used"}),
    ("Forgetful", {"send_complete_means_that_nobody_reads_the_own_slot"}),
    ("Overtaking", {"what_is_delivered_is_there"}),
]

_LOST = "each_part_is_computed_once_and_stored"
_KEPT = "what_stays_is_stored_once"
_SUMS = "sums_are_of_every_source_in_order"
_ASTRAY = "parts_go_where_their_routes_lead"
_THERE = "what_is_delivered_is_there"
#: Those that are wrong for phases, in the operation in which it shows.
PHASES = [
    ("WrongPart", "all_to_all", {_ASTRAY}),
    ("WrongPart", "reduce_scatter", {_ASTRAY}),
    ("WrongBox", "all_to_all", {_ASTRAY}),
    ("WrongLoad", "all_to_all", {"a_store_puts_what_was_made_or_loaded"}),
    ("SkipsASource", "reduce_scatter", {_SUMS}),
    ("SumsTwice", "all_reduce", {_SUMS}),
    ("SumsElsewhere", "reduce_scatter", {_THERE}),
    ("EarlySum", "reduce_scatter", {_THERE}),
    ("EarlySum", "all_reduce", {_THERE}),
    ("NoTail", "all_to_all", {_LOST, _KEPT}),
    ("TailAtHome", "all_to_all", {_KEPT}),
    ("KeepsNothing", "all_to_all", {_KEPT}),
    ("Raw", "all_gather", {"what_travels_in_another_dtype_is_encoded"}),
    ("Raw", "all_reduce", {"what_travels_in_another_dtype_is_encoded"}),
    ("FreesAfterTheFirst", "all_reduce", {"a_copied_result_sets_free_at_the_end"}),
    ("ReadsAfterTheLast", "all_reduce", {"send_complete_means_that_nobody_reads_the_own_slot"}),
    ("OldWords", "all_reduce", {"words_are_set_by_their_source"}),
    ("OneChunkWord", "all_to_all", {"words_are_set_by_their_source"}),
    ("EarlyLane", "all_reduce", {_THERE}),
    ("WrongCall", "all_to_all", {"every_region_is_delivered_once"}),
    ("HastyCall", "reduce_scatter", {_THERE}),
    ("LosesASum", "reduce_scatter", {_LOST, _KEPT, _THERE}),
    ("Boundless", "all_gather", {"it_states_the_kinds_of_phase_it_serves"}),
    ("Reluctant", "all_to_all", {"schedules_are_for_the_plan_given"}),
]


@cache
def _epilogue_failures(name: str, operation: str = "") -> dict[str, str]:
    """Those of the clauses about schedules, which need no ranks."""
    module = "broken_phases" if operation else "broken_epilogues"
    asked = (operation or "all_gather",)
    values = {"epilogue": f"{_HERE}.{module}:{name}", "operations": asked}
    contract = type(name, (EpilogueContract,), values)
    return failures(contract, ranks=False)


@pytest.mark.parametrize(("name", "clauses"), EPILOGUES)
def test_a_broken_epilogue_fails_the_clause_meant_for_it(name: str, clauses: set[str]) -> None:
    found = {clause.removeprefix("test_") for clause in _epilogue_failures(name)}
    assert clauses <= found, _epilogue_failures(name)


@pytest.mark.parametrize(("name", "operation", "clauses"), PHASES)
def test_an_epilogue_that_is_wrong_for_a_phase_fails_the_clause_meant_for_it(
    name: str, operation: str, clauses: set[str]
) -> None:
    found = {clause.removeprefix("test_") for clause in _epilogue_failures(name, operation)}
    assert clauses <= found, _epilogue_failures(name, operation)


@pytest.mark.parametrize("name", ["SkipsASource", "SumsTwice", "KeepsNothing", "Raw", "WrongCall"])
def test_an_epilogue_that_is_wrong_for_a_phase_fails_no_other_clause(name: str) -> None:
    operation, clauses = next((o, clauses) for other, o, clauses in PHASES if other == name)
    found = {clause.removeprefix("test_") for clause in _epilogue_failures(name, operation)}
    assert found - {_WORST} == clauses, _epilogue_failures(name, operation)


@pytest.mark.parametrize("name", ["Gatherer", "Scatterer"])
def test_an_epilogue_may_serve_one_kind_of_phase(name: str) -> None:
    """And is judged beside a built-in one where an operation has phases of both kinds."""
    contract: Any = type(name, (EpilogueContract,), {"epilogue": f"{_HERE}.broken_phases:{name}"})
    assert failures(contract, ranks=False) == {}
    asked = {str(each.asked.variant) for each in contract()._all()}
    assert "all_reduce" in asked
    assert ("all_gather" in asked) == (name == "Gatherer")


@pytest.mark.parametrize("name", ["LateGate", "DeliversTwice", "Polite", "Boastful", "Forgetful"])
def test_a_broken_epilogue_fails_no_other_clause(name: str) -> None:
    clauses = next(clauses for other, clauses in EPILOGUES if other == name)
    found = {clause.removeprefix("test_") for clause in _epilogue_failures(name)}
    assert found - {_WORST} == clauses, _epilogue_failures(name)


def test_only_the_worst_machine_notices_a_word_of_too_narrow_scope() -> None:
    """On a host every rank is right: no other clause sees a difference."""
    values = {
        "epilogue": f"{_HERE}.broken_epilogues:Nearsighted",
        "operations": ("all_gather",),
        "world": 2,
        "__module__": __name__,
    }
    contract: Any = type("Nearsighted", (Forked, EpilogueContract), values)
    found = failures(contract)
    assert set(found) == {f"test_{_WORST}"}
    text = found[f"test_{_WORST}"]
    assert "all_gather split-broken" in text
    assert "nothing orders before this load" in text


def test_composing_what_an_epilogue_does_not_serve_fails_a_clause(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("gemmlink.conformance.epilogues.compose", lambda *arguments: None)
    values = {"epilogue": f"{_HERE}.broken_phases:Gatherer", "operations": ("all_gather",)}
    found = failures(type("Gatherer", (EpilogueContract,), values), ranks=False)
    assert set(found) == {"test_it_states_the_kinds_of_phase_it_serves"}
    assert "all_to_all, extent 6 is refused with 'nothing'" in str(found)


def test_parts_of_a_result_tell_how_they_differ() -> None:
    right = torch.ones(2, 3)
    assert Part("local", right, right.double()).wrong() is None
    assert Part("local", right[:1], right.double()).wrong() == "local has shape (1, 3), not (2, 3)"
    wrong = right.clone()
    wrong[1, 2] = torch.nan
    text = "1 of 6 elements differ in local, first at (1, 2): nan instead of 1.0"
    assert Part("local", wrong, right.double()).wrong() == text


@pytest.mark.parametrize(
    ("operation", "options"),
    [
        ("all_gather", {}),
        ("all_gather", {"wire_dtype": torch.float8_e4m3fn}),
        ("all_to_all", {"keep_product": True}),
        ("reduce_scatter", {}),
        ("all_reduce", {"wire_dtype": torch.float8_e4m3fn}),
    ],
)
def test_a_trial_notices_an_operation_that_is_wrong(
    operation: str, options: dict[str, Any]
) -> None:
    """And passes one that is right: every part of what it gives is compared."""
    case = Case(
        (7,), 6, 33, torch.float32, torch.float32, operation=operation,
        extent=4 if operation == "all_to_all" else None,
    )  # fmt: skip
    wire = options.get("wire_dtype")
    with operation_for(case, 7, group=SELF, **options) as made:
        assert [part.wrong() for part in called(made, case, wire_dtype=wire) if part.wrong()] == []
        found = called(made, case, wire_dtype=wire)
    assert [part.name for part in found] == (
        ["received", "local", "product"] if operation == "all_to_all" else ["the result"]
    )
    for part in found:
        part.got[3, 1] += 1
        assert f"elements differ in {part.name}" in str(part.wrong())


def test_an_epilogue_that_leaves_rows_out_is_not_exact() -> None:
    values = {
        "epilogue": f"{_HERE}.broken_epilogues:DeliversLess",
        "world": 2,
        "__module__": __name__,
    }
    contract: Any = type("Less", (Forked, EpilogueContract), values)
    found = failures(contract)
    assert "elements differ" in found["test_it_is_exact_alone"]
    assert "elements differ" in found["test_it_is_exact_on_all_ranks"]


BACKENDS = [
    ("Rounding", "sums_are_kept_in_float32"),
    ("Rounding", "small_terms_survive_beside_large_ones"),
    ("Rounding", "results_are_rounded_once"),
    ("Spilling", "nothing_is_written_beside_out"),
    ("Idle", "a_product_over_nothing_is_positive_zero"),
    ("Negative", "a_product_over_nothing_is_positive_zero"),
    ("Greedy", "inputs_are_left_alone"),
    ("Straight", "strides_are_arbitrary"),
    ("Choosy", "it_supports_every_pair_of_dtypes"),
]


@cache
def _backend_failures(name: str) -> dict[str, str]:
    values = {"backend": f"{_HERE}.broken_backends:{name}"}
    return failures(type(name, (BackendContract,), values))


@pytest.mark.parametrize(("name", "clause"), BACKENDS)
def test_a_broken_backend_fails_the_clause_meant_for_it(name: str, clause: str) -> None:
    found = _backend_failures(name)
    assert f"test_{clause}" in found, found


CONTRACTS = [name for name in conformance.__all__ if name.endswith("Contract")]


@pytest.mark.parametrize("name", CONTRACTS)
def test_every_clause_is_a_sentence(name: str) -> None:
    """A failure quotes it."""
    contract = getattr(conformance, name)
    for method in dir(contract):
        if method.startswith("test_"):
            text = (getattr(contract, method).__doc__ or "").strip()
            assert text.endswith("."), f"{name}.{method}: {text!r}"
