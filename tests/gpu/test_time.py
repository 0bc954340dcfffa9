"""What happens over many calls, in graphs, on several streams, and when something goes wrong."""

from __future__ import annotations

import pytest

from tests import device_cases
from tests.conftest import Ranks
from tests.gpu import cases

pytestmark = pytest.mark.filterwarnings("default")

MODES = ["split-push", "fused-push", "split-pull", "fused-pull", "split-lanes", "fused-lanes"]


@pytest.mark.parametrize("name", device_cases.OPERATIONS)
def test_a_graph_is_exact_each_time(ranks: Ranks, name: str) -> None:
    modes = MODES if name == "all_gather" else ["auto", "fused-lanes"]
    assert ranks(2).run(cases.replays, 2, name, modes, 100, timeout_s=90) == [0, 0]


def test_a_graph_of_four_ranks(ranks: Ranks) -> None:
    modes = ["split-push", "split-pull", "fused-lanes"]
    assert ranks(4).run(cases.replays, 4, "all_gather", modes, 100, timeout_s=90) == [0] * 4


def test_two_buffers_in_a_graph_are_refused(ranks: Ranks) -> None:
    for seen in ranks(2).run(cases.two_buffers_in_a_graph, 2, timeout_s=60):
        assert seen["type"] == "Unsupported", seen
        assert "buffers=2 under graph capture. Prepare with buffers=1." in seen["text"], seen


def test_the_function_form_in_a_graph(ranks: Ranks) -> None:
    ranks(2).run(cases.function_form_in_a_graph, 2, timeout_s=60)


def test_another_thread_and_inference_mode(ranks: Ranks) -> None:
    ranks(2).run(cases.another_thread_and_inference, 2, timeout_s=60)


def test_debugging_raises_in_the_call(ranks: Ranks) -> None:
    first, _ = ranks(2).run(cases.debug, 2, timeout_s=60, env={"GEMMLINK_DEBUG": "1"})
    assert (first["type"], first["peer"]) == ("PeerTimeout", 1), first


@pytest.mark.parametrize("name", ["reduce_scatter", "all_reduce", "all_to_all"])
def test_an_absent_peer_leaves_nan_in_every_operation(ranks: Ranks, name: str) -> None:
    first, _ = ranks(2).run(device_cases.absent_peer, 2, "cuda", "split-pull", name, timeout_s=60)
    assert first["nan"], first
    assert (first["epoch"], first["peer"]) == (2, 1), first


def test_streams_in_turn(ranks: Ranks) -> None:
    ranks(2).run(cases.streams, 2, timeout_s=60)


def test_two_calls_at_once_are_found_out(ranks: Ranks) -> None:
    first, second = ranks(2).run(cases.overlap, 2, timeout_s=60)
    assert first["type"] == "Overlap", (first, second)
    assert second["type"] in ("PeerLost", "Poisoned"), (first, second)


def test_graphs_of_failed_and_closed_operations_give_nan(ranks: Ranks) -> None:
    first, second = ranks(2).run(cases.replay_after_failure_and_close, 2, timeout_s=60)
    print(first, second)
    assert not first["first"]
    assert not second["first"]
    assert first["again"], first
    assert first["again_s"] < 0.5, first
    assert first["check"] == "PeerTimeout", first
    assert first["closed"], first
    assert second["closed"], second


@pytest.mark.parametrize("mode", ["split-push", "fused-push", "split-pull", "fused-lanes"])
def test_an_absent_peer_leaves_nan_and_a_name(ranks: Ranks, mode: str) -> None:
    *present, _ = ranks(4).run(device_cases.absent_peer, 4, "cuda", mode, timeout_s=60)
    for rank, seen in enumerate(present):
        assert seen["nan"], seen
        assert (seen["epoch"], seen["rank"], seen["peer"]) == (2, rank, 3), seen
        assert seen["again"] == "Poisoned", seen


def test_unequal_rows_are_refused_with_both_numbers(ranks: Ranks) -> None:
    seen = ranks(2).run(device_cases.unequal_rows, 2, "cuda", timeout_s=60)
    assert all(each["nan"] for each in seen), seen
    assert any("M=4 on rank 0" in each["text"] or "M=4 on rank 0" in each["text"] for each in seen)


def test_other_rows_on_another_rank_are_refused(ranks: Ranks) -> None:
    seen = ranks(2).run(device_cases.other_rows, 2, "cuda", timeout_s=60)
    assert all(each["nan"] for each in seen), seen
    assert {each["type"] for each in seen} <= {"InvalidArgument", "PeerLost"}, seen
    assert any("all ranks must pass the same rows= in call 1" in each["text"] for each in seen)


def test_a_refusal_reaches_the_peers(ranks: Ranks) -> None:
    refuser, other = ranks(2).run(device_cases.refused_by_one, 2, "cuda", timeout_s=60)
    assert refuser["type"] == "InvalidArgument", refuser
    assert other["nan"], other
    assert "rank 0 refused call 2" in other["text"], other


def test_too_many_rows_are_told(ranks: Ranks) -> None:
    large, other = ranks(2).run(device_cases.too_many_rows, 2, "cuda", timeout_s=60)
    for seen in (large, other):
        assert "M must be at most max_m=8" in seen["all"], seen
    assert "M=9 on some rank" in large["text"], large
    assert other["nan"], other
    assert "rank 0 refused call 3: M must be at most max_m=8" in other["text"], other


def test_a_mistake_of_all_ranks_leaves_the_operation_usable(ranks: Ranks) -> None:
    for types in ranks(2).run(device_cases.refused_by_all, 2, "cuda", timeout_s=60):
        assert types == ["InvalidArgument"] * 3


def test_operations_are_closed_in_any_order(ranks: Ranks) -> None:
    ranks(4).run(cases.closing_order, 4, timeout_s=60)


def test_an_operation_closed_while_it_waits_tells_its_peers(ranks: Ranks) -> None:
    first, second = ranks(2).run(cases.closed_while_waiting, 2, timeout_s=60)
    assert first["nan"], (first, second)
    assert first["took_s"] < 5, (first, second)
    assert second["nan"], (first, second)
    assert (second["type"], second["peer"]) == ("PeerLost", 0), (first, second)
    assert second["took_s"] < 5, (first, second)


@pytest.mark.parametrize("mode", ["split-push", "split-pull", "fused-lanes"])
def test_a_view_outlives_its_operation(ranks: Ranks, mode: str) -> None:
    ranks(2).run(cases.view_after_close, 2, mode, timeout_s=60)


def test_two_thousand_calls_take_no_memory(ranks: Ranks) -> None:
    for seen in ranks(2).run(cases.many_calls, 2, 2000, timeout_s=60):
        print(seen)
        assert seen["grown"] == [0, 0], seen


def test_a_killed_rank_is_named(ranks: Ranks) -> None:
    outcomes = ranks(3).outcomes(cases.killed, 3, timeout_s=60)
    for outcome in outcomes[:2]:
        assert outcome.failure is None, outcome
        seen = outcome.value
        assert seen["nan"], seen
        assert (seen["type"], seen["peer"]) == ("PeerLost", 2), seen
        assert seen["reset"] == "PeerLost", seen
