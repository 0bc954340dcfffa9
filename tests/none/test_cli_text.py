"""Rows, table and verdict: pure parts of the commands that measure."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from gemmlink.cli import bench, demo, output
from gemmlink.perf import table
from gemmlink.perf.bench import Measured, Plan, Wrong, judged
from gemmlink.perf.field import Label
from gemmlink.perf.rows import FIELDS, Row, combine, fastest_mode

PROMISED = (
    "op", "world", "m", "n", "k", "dtype", "out_dtype", "transport", "epilogue", "fused",
    "backend", "mode", "chunks", "complete", "us", "unfused_us", "gemm_us", "comm_us", "bound_us",
    "best_split_us", "rel_l2", "exact", "ok",
)  # fmt: skip
ADDED = ("ratio_unfused", "ratio_bound", "spread", "reason", "result", "extent", "note")

PLAN = Plan(((8, 16, 32),), torch.bfloat16, torch.float32)


def label(mode: str, **changes: Any) -> Label:
    epilogue = mode.removeprefix("split-").removeprefix("fused-")
    found = Label(mode, epilogue, mode.startswith("fused"), "shm", "eager", 1, True)
    return replace(found, **changes)


def measured(role: Any, mode: str, *rounds_us: float, **changes: Any) -> Measured:
    named = label(mode, **changes.pop("label", {}))
    found = Measured(role, named, [[us] for us in rounds_us], rel_l2=1e-7, exact=True)
    return replace(found, **changes)


def a_run(push_us: float = 300.0) -> list[Measured]:
    """What one rank measured in three rounds."""
    return [
        measured("unfused", "unfused", 500.0, 510.0, 490.0, label={"backend": "slow"}),
        measured("unfused", "unfused", 400.0, 410.0, 390.0, label={"backend": "fast"}),
        measured("gemm", "gemm-only", 200.0, 210.0, 190.0, label={"complete": False}),
        measured("move", "comm-library", 150.0, 150.0, 150.0),
        measured("move", "comm-stores", 100.0, 100.0, 100.0),
        measured("mode", "split-push", push_us, push_us + 10, push_us - 10),
        measured("mode", "fused-push", 320.0, 320.0, 320.0),
        measured("mode", "collective", 350.0, 350.0, 350.0),
    ]


def rows_of(*ranks: list[Measured]) -> list[Row]:
    return combine(PLAN, len(ranks), [[rank] for rank in ranks])


def test_a_row_has_the_promised_fields_in_order() -> None:
    assert FIELDS == PROMISED + ADDED


def test_times_are_medians_over_rounds_of_the_slowest_rank() -> None:
    slower = a_run(push_us=330.0)
    row = next(row for row in rows_of(a_run(), slower) if row.mode == "split-push")
    assert row.us == 330.0
    assert row.best_split_us == 330.0
    assert row.spread == pytest.approx(10 / 330)


def test_a_call_lasts_as_long_as_on_its_slowest_rank() -> None:
    """Also where each rank is the slow one in turn; a rank's own median would not show that."""
    ranks = [a_run(), a_run()]
    for rank, each in enumerate(ranks):
        each[5].rounds_us = [[100.0, 900.0, 120.0, 900.0, 110.0][rank:][:4]] * 3
    row = next(row for row in rows_of(*ranks) if row.mode == "split-push")
    assert row.us == 900.0


def test_reference_rows_are_the_fastest_right_spellings() -> None:
    unfused, gemm, *_ = rows_of(a_run())
    assert (unfused.mode, unfused.backend, unfused.us) == ("unfused", "fast", 400.0)
    assert (gemm.mode, gemm.complete, gemm.us) == ("gemm-only", False, 200.0)
    assert (gemm.comm_us, gemm.bound_us) == (100.0, 200.0)
    wrong = a_run()
    wrong[1].reason = "wrong result"
    assert rows_of(wrong)[0].backend == "slow"


def test_a_row_that_failed_has_no_time_and_gives_its_reason() -> None:
    run = a_run()
    run[5].reason = "PeerTimeout: nothing came"
    row = next(row for row in rows_of(run, run) if row.mode == "split-push")
    assert (row.us, row.ratio_unfused, row.ok) == (None, None, False)
    assert row.best_split_us is None
    assert "WRONG: PeerTimeout: nothing came" in table.render([row])


def test_what_could_not_be_measured_is_skipped_and_not_wrong() -> None:
    run = a_run()
    run[5].reason = "skipped: needs a library"
    found = rows_of(run)
    assert bench.outcome(PLAN, found).code == output.RIGHT
    named = replace(PLAN, epilogues=("split-push",))
    assert bench.outcome(named, found).code == output.SKIPPED
    run[6].reason = "wrong result: 3 of 4"
    outcome = bench.outcome(named, rows_of(run))
    assert (outcome.code, outcome.failed) == (output.WRONG, 1)


def test_a_reduction_that_rounds_in_between_stays_a_rival_and_says_so() -> None:
    assert judged(1e-3, 1e-3, 1) is None
    note = judged(2e-3, 1e-3, 4)
    assert note is not None
    assert "2.00e-03 is above 1.00e-03" in note
    run = a_run()
    run[1].note = note
    row = rows_of(a_run(), run)[0]
    assert (row.ok, row.us, row.note) == (True, 400.0, note)
    assert table.render([row]).splitlines()[2].endswith(f"exact, {note}")


@pytest.mark.parametrize("error", [2e-3, float("nan"), float("inf")])
def test_an_error_above_the_limit_is_wrong_for_everybody_else(error: float) -> None:
    with pytest.raises(Wrong, match="above"):
        judged(error, 1e-3, 1)


@pytest.mark.parametrize("error", [5e-3, float("nan"), float("inf")])
def test_a_reduction_may_not_err_by_more_than_its_roundings(error: float) -> None:
    with pytest.raises(Wrong, match="above"):
        judged(error, 1e-3, 4)


def test_a_block_names_the_operation_and_its_extent() -> None:
    plan = replace(PLAN, operation="all_to_all", extent=8)
    found = combine(plan, 1, [[a_run()]])
    assert {(row.op, row.extent) for row in found} == {("all_to_all", 8)}
    assert "all_to_all, 1 ranks" in table.render(found)
    assert "K = 32, extent 8, bfloat16" in table.render(found)


def test_an_incomplete_mode_never_wins() -> None:
    run = a_run()
    run[5] = measured("mode", "split-push", 1.0, label={"complete": False})
    best = fastest_mode(rows_of(run))
    assert best is not None
    assert best.mode == "fused-push"
    assert best.best_split_us is None


def test_verdict_of_a_win_names_the_mode_the_factor_and_where_time_goes() -> None:
    text = " ".join(demo.verdict(rows_of(a_run()), cores=1).split())
    assert "split-push is the fastest mode, 300.0 us a call" in text
    assert "1.33 times as fast as unfused (400.0 us)" in text
    assert "50.0 us of the gain are the product's, and 50.0 us come from how" in text
    assert "the product alone takes 200.0 us, moving the result alone 100.0 us" in text
    assert "at most 33.3%" in text
    assert "share" not in text


def test_verdict_of_a_loss_says_so() -> None:
    run = a_run(push_us=800.0)
    del run[6:]
    text = " ".join(demo.verdict(rows_of(run, run), cores=1).split())
    assert "It loses: 2.00 times the time of unfused (400.0 us)" in text
    assert "as fast as" not in text
    assert "2 ranks share 1 cores" in text


def test_verdict_within_the_noise_is_a_tie() -> None:
    run = a_run(push_us=395.0)
    del run[6:]
    assert "that is a tie" in " ".join(demo.verdict(rows_of(run), cores=1).split())


def test_one_round_has_no_spread_and_the_verdict_says_so() -> None:
    run = [replace(each, rounds_us=each.rounds_us[:1]) for each in a_run()]
    assert all(row.spread is None for row in rows_of(run))
    assert "nothing about noise" in " ".join(demo.verdict(rows_of(run), cores=1).split())


def test_verdict_without_a_right_mode_compares_nothing() -> None:
    assert "no mode gave a right result" in demo.verdict(rows_of(a_run()[:5]), cores=1)


def test_table_has_a_line_for_each_row_and_the_bound() -> None:
    text = table.render(rows_of(a_run()))
    assert text.splitlines()[0].startswith("all_gather, 1 ranks, 8 rows a rank, N = 16, K = 32")
    assert len(text.splitlines()) == 2 + 5 + 1
    assert text.splitlines()[-1].endswith("bound 200.0 us")
    assert table.duration(8200.0) == "8.20 ms"
