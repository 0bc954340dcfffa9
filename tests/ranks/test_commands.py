"""Commands that run ranks: bench, demo, conformance; spawned, and under a launcher."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from gemmlink.cli import demo, main
from gemmlink.cli.arguments import OPERATIONS
from gemmlink.epilogues.push import Push
from gemmlink.spec.operations import Phase
from gemmlink.spec.problem import Problem
from gemmlink.spec.schedule import Plan, Program, Schedule, Store
from tests.conftest import Ranks
from tests.none.test_cli_local import run_json
from tests.none.test_cli_text import ADDED, PROMISED
from tests.refs import MODES

_ROOT = Path(__file__).parents[2]
_HERE = "tests.ranks.test_commands"
_SMALL = ("--shape", "6,8,40", "--rounds", "2", "--samples", "2")


class Forgetful(Push):
    """Push that announces its last chunk at its last peer without having stored it there."""

    name = "forgetful"

    def forms(self) -> tuple[bool, ...]:
        return (True,)

    def schedule(self, phase: Phase, plan: Plan) -> Schedule:
        right = super().schedule(phase, plan)
        programs = tuple(_without_last_store(program, plan) for program in right.programs)
        return replace(right, programs=programs)


def _without_last_store(program: Program, plan: Plan) -> Program:
    def dropped(action: object) -> bool:
        last = isinstance(action, Store) and action.region.chunk == plan.chunks - 1
        return last and action.to == plan.peers[-1]  # type: ignore[attr-defined]

    kept = tuple(action for action in program.actions if not dropped(action))
    return Program(program.actor, kept)


class Clumsy:
    """A backend that raises on one rank, in the middle of a call."""

    name = "clumsy"
    interface = 1

    def supports(self, problem: Problem) -> str | None:
        return None

    def multiply(self, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
        if torch.distributed.get_rank() == 1:
            raise ArithmeticError("dropped a digit")
        torch.mm(a, b.T, out=out)


def _call(rank: int, function: Callable[..., Any], *arguments: Any) -> Any:
    return function(*arguments)


@pytest.fixture(autouse=True)
def _pooled(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands use the tests' ranks, which run already, instead of spawning their own."""

    def on_ranks(
        world: int, function: Callable[..., Any], *arguments: Any, threads: int = 1
    ) -> Any:
        return ranks(world).run(_call, function, *arguments, timeout_s=60)

    monkeypatch.setattr("gemmlink.cli.ranks.on_ranks", on_ranks)


def test_bench_prints_rows_with_exactly_the_promised_fields(
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, found = run_json(capsys, "bench", *_SMALL, "--dtype", "bf16", "--out-dtype", "fp32")
    assert code == 0
    assert all(tuple(row) == PROMISED + ADDED for row in found["rows"])
    by_mode = {row["mode"]: row for row in found["rows"]}
    assert {"unfused", "gemm-only", "split-push", "fused-push", "collective"} <= set(by_mode)
    assert all(row["ok"] and row["exact"] and row["us"] > 0 for row in found["rows"])
    split = by_mode["split-push"]
    assert (split["world"], split["m"], split["n"], split["k"]) == (2, 6, 8, 40)
    assert split["bound_us"] == max(split["gemm_us"], split["comm_us"])
    splits = [by_mode[f"split-{name}"]["us"] for name in ("push", "pull", "lanes")]
    assert split["best_split_us"] == min(splits)


def test_bench_measures_every_shape_and_chunk_count(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ("--shape", "2,3,4", "--epilogue", "fused-push", "--chunks", "1,3")
    code, found = run_json(capsys, "bench", *_SMALL, *argv)
    assert code == 0
    fused = [row for row in found["rows"] if row["mode"] == "fused-push"]
    assert [(row["m"], row["chunks"]) for row in fused] == [(6, 1), (6, 3), (2, 1), (2, 3)]


def test_bench_measures_every_operation(capsys: pytest.CaptureFixture[str]) -> None:
    code, found = run_json(capsys, "bench", *_SMALL, "--op", "all", "--dtype", "bf16")
    assert code == 0
    rows = found["rows"]
    assert list(dict.fromkeys(row["op"] for row in rows)) == list(OPERATIONS)
    for name in OPERATIONS:
        by_mode = {row["mode"]: row for row in rows if row["op"] == name}
        assert {"unfused", "gemm-only", *MODES} == set(by_mode)
        assert all(row["ok"] and row["exact"] and row["us"] > 0 for row in by_mode.values())
        first = by_mode["unfused"]
        assert first["bound_us"] == max(first["gemm_us"], first["comm_us"])


def test_columns_that_stay_are_measured_and_checked(capsys: pytest.CaptureFixture[str]) -> None:
    argv = (*_SMALL, "--op", "all_to_all", "--extent", "4", "--result", "copy,view")
    code, found = run_json(capsys, "bench", *argv, "--epilogue", "split-push,fused-pull")
    assert code == 0
    assert all(row["exact"] and row["extent"] == 4 for row in found["rows"])
    assert {row["result"] for row in found["rows"] if row["mode"] == "fused-pull"} == {
        "copy",
        "view",
    }


def test_a_phase_may_have_an_epilogue_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    argv = (*_SMALL, "--op", "all_reduce", "--epilogue", "lanes+pull,fused-push+lanes")
    code, found = run_json(capsys, "bench", *argv)
    assert code == 0
    named = [(row["mode"], row["epilogue"]) for row in found["rows"][2:]]
    assert named == [("split-lanes+pull", "lanes+pull"), ("fused-push+lanes", "push+lanes")]


def test_bands_of_unequal_size_have_a_rival_and_a_bound_all_the_same(
    capsys: pytest.CaptureFixture[str],
) -> None:
    argv = ("bench", "--shape", "5,8,40", "--rounds", "1", "--epilogue", "pull")
    code, found = run_json(capsys, *argv, "--op", "reduce_scatter,all_reduce")
    assert code == 0
    assert all(row["ok"] and row["unfused_us"] and row["bound_us"] for row in found["rows"])
    assert found["rows"][0]["backend"] == "torch.mm, all_reduce"  # the other needs equal bands


def test_an_epilogue_that_forgets_a_chunk_is_wrong_and_the_rest_goes_on(
    capsys: pytest.CaptureFixture[str],
) -> None:
    epilogues = f"{_HERE}:Forgetful,split-push"
    code, found = run_json(capsys, "bench", *_SMALL, "--epilogue", epilogues)
    assert (code, found["failed"]) == (1, 1)
    by_mode = {row["mode"]: row for row in found["rows"]}
    wrong = by_mode["forgetful"]
    assert (wrong["ok"], wrong["exact"], wrong["us"]) == (False, False, None)
    assert "elements differ" in wrong["reason"]
    assert by_mode["split-push"]["ok"]


def test_a_backend_that_raises_on_one_rank_costs_its_rows_only(
    capsys: pytest.CaptureFixture[str],
) -> None:
    argv = (*_SMALL, "--backend", f"{_HERE}:Clumsy", "--epilogue", "split-push")
    code, found = run_json(capsys, "bench", *argv)
    assert code == 1
    by_mode = {row["mode"]: row for row in found["rows"]}
    assert not by_mode["split-push"]["ok"]
    assert by_mode["unfused"]["ok"]
    assert by_mode["gemm-only"]["backend"] == "torch.mm"


def test_a_form_that_does_not_exist_is_skipped(capsys: pytest.CaptureFixture[str]) -> None:
    code, found = run_json(capsys, "bench", *_SMALL, "--epilogue", "fused-collective")
    assert (code, found["failed"]) == (3, 0)
    row = found["rows"][-1]
    assert row["reason"].startswith("skipped: ")
    assert row["us"] is None


def test_demo_prints_table_checks_and_verdict(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "_SHAPE", (4, 32, 64))
    monkeypatch.setattr(demo, "_WORLD", 2)
    assert main(["demo", "--rounds", "2"]) == 0
    text = capsys.readouterr().out
    assert "atomics " in text.splitlines()[0]
    assert "bfloat16 -> float32" in text
    rows = 2 + len(MODES)  # unfused and the product alone, then every mode
    assert f"Checked: {rows} of {rows} rows are right" in text
    assert "Verdict:" in text


def test_conformance_passes_for_what_is_built_in(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["conformance", "--world", "2"]) == 0
    # 5 pairs of dtypes, both forms of the call, 5 sets of M.
    assert capsys.readouterr().out.splitlines()[-1] == f"{185 * len(MODES)} passed, 0 failed"


def test_conformance_fails_for_an_epilogue_that_forgets_a_chunk(
    capsys: pytest.CaptureFixture[str],
) -> None:
    argv = ("conformance", "--world", "2", "--epilogue", f"{_HERE}:Forgetful")
    code, found = run_json(capsys, *argv)
    assert code == 1
    assert found["failed"] > 0
    assert all(not row["ok"] and row["reason"] for row in found["rows"])


@pytest.fixture(scope="module")
def spawned() -> subprocess.CompletedProcess[str]:
    """A command on ranks of its own, with a variable that is misspelt."""
    argv = [sys.executable, "-m", "gemmlink", "bench", "--shape", "2,3,4", "--rounds", "1"]
    return subprocess.run(
        [*argv, "--json"],
        cwd=_ROOT,
        env={**os.environ, "GEMMLINK_TRANPORT": "shm"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def test_a_command_spawns_its_own_ranks(spawned: subprocess.CompletedProcess[str]) -> None:
    assert spawned.returncode == 0, spawned.stderr
    found = json.loads(spawned.stdout)
    assert found["ok"]
    assert found["rows"][0]["world"] > 1


def test_a_command_uses_the_ranks_of_a_launcher() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    where = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    argv = [sys.executable, "-m", "gemmlink", "bench", "--shape", "2,3,4", "--rounds", "1"]
    processes = [
        subprocess.Popen(
            [*argv, "--json"],
            env={**os.environ, **where, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
            cwd=_ROOT,
        )
        for rank in range(2)
    ]
    texts = [process.communicate(timeout=90)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert json.loads(texts[0])["rows"][0]["world"] == 2
    assert texts[1] == ""


def test_loopback_is_brought_up_in_a_fresh_network_namespace() -> None:
    unshare = [shutil.which("unshare") or "unshare", "-rn"]
    if shutil.which("unshare") is None or subprocess.run([*unshare, "true"]).returncode:
        pytest.skip("network namespaces cannot be made here")
    code = (
        "import socket; from gemmlink.spawn import ensure_loopback; "
        "ensure_loopback(); ensure_loopback(); server = socket.create_server(('127.0.0.1', 0)); "
        "socket.create_connection(server.getsockname(), timeout=5)"
    )
    done = subprocess.run(
        [*unshare, sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=90,
        cwd=_ROOT,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("brought it up") == 1


def test_an_unknown_variable_is_one_line_without_a_place_in_the_code(
    spawned: subprocess.CompletedProcess[str],
) -> None:
    """Neither the ranks of a command repeat it, nor is a line of the library anybody's mistake."""
    lines = [line for line in spawned.stderr.splitlines() if "TRANPORT" in line]
    text = "GEMMLINK_TRANPORT is not a setting of gemmlink; did you mean GEMMLINK_TRANSPORT?"
    assert lines == [f"gemmlink: {text}"]
