"""Commands that need no ranks: help, explain, check, doctor, plugins; and exit codes."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from gemmlink import plugins
from gemmlink.cli import arguments, main, ranks
from gemmlink.errors import InvalidArgument
from gemmlink.perf import modes, rivals

KEYS = ["ok", "checked", "failed", "versions", "rows"]


def run_json(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, dict[str, Any]]:
    """Exit code and the one object on stdout."""
    code = main([*argv, "--json"])
    text = capsys.readouterr().out
    assert len(text.splitlines()) == 1
    found: dict[str, Any] = json.loads(text)
    assert list(found) == KEYS
    assert found["ok"] == (code == 0)
    return code, found


def test_help_imports_no_torch() -> None:
    code = (
        "import sys; from gemmlink.cli import main; "
        "assert main(['--help']) == 0; assert main(['bench', '--help']) == 0; "
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)


@pytest.mark.parametrize(
    "argv",
    [
        [],
        ["brew"],
        ["bench"],
        ["bench", "--shape", "1,2"],
        ["bench", "--shape", "1,2,x"],
        ["bench", "--shape", "1,2,3", "--world", "0"],
        ["bench", "--shape", "1,2,3", "--dtype", "int8"],
        ["bench", "--shape", "1,2,3", "--epilogue", "psh"],
        ["bench", "--shape", "1,2,3", "--chunks", "65"],
        ["bench", "--shape", "1,2,3", "4,5,6", "--result", "vew"],
        ["bench", "--shape", "1,2,3", "--dtype", "fp32", "--out-dtype", "bf16"],
        ["bench", "--shape", "1,2,3", "--op", "all_gathr"],
        ["bench", "--shape", "1,2,3", "--extent", "2"],
        ["bench", "--shape", "1,2,3", "--op", "all_to_all", "--extent", "1"],
        ["bench", "--shape", "1,2,3", "--op", "all_to_all", "--extent", "4"],
        ["explain", "--shape", "1,2,3", "--rank", "2"],
        ["explain", "--shape", "1,2,3", "--op", "all_reduce", "--extent", "2"],
        ["conformance", "--transport", "smh"],
        ["check"],
        ["check", "protcol"],
        ["check", "protocol", "--world", "1"],
        ["check", "protocol", "--chunks", "0"],
        ["check", "protocol", "--only", "all_gathr"],
        ["check", "protocol", "--epilogue", "psh"],
        ["check", "protocol", "--mutants", "--world", "3"],
        ["check", "protocol", "--write", "never-written.md", "--chunks", "2"],
        ["check", "protocol", "--write", "never-written.md", "--epilogue", "push"],
        ["check", "protocol", "--slots", "0"],
        ["check", "protocol", "--write", "never-written.md", "--slots", "8"],
        ["check", "protocol", "--write", "never-written.md", "--share", "2"],
    ],
)
def test_usage_errors_exit_2(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err


def test_an_error_with_json_is_still_one_object(capsys: pytest.CaptureFixture[str]) -> None:
    code, found = run_json(capsys, "bench", "--shape", "1,2,3", "--epilogue", "psh")
    assert code == 2
    assert "Did you mean 'push'?" in found["rows"][0]["reason"]


def test_what_is_not_installed_exits_3(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    code, found = run_json(capsys, "bench", "--shape", "1,2,3", "--plot", "never-written.png")
    assert code == 3
    assert "pip install 'gemmlink[bench]'" in found["rows"][0]["reason"]


def test_explain_prints_the_schedule_of_a_rank(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["explain", "--world", "3", "--rank", "1", "--shape", "8,4,2", "--epilogue"]
    assert main([*argv, "fused-push", "--chunks", "2"]) == 0
    text = capsys.readouterr().out
    assert "mode: fused-push over shm" in text
    assert "set arrive[1,chunk 1] = n at rank 0" in text
    code, found = run_json(capsys, *argv, "collective")
    assert (code, found["rows"][0]["rank"]) == (0, 1)


def test_explain_knows_every_operation(capsys: pytest.CaptureFixture[str]) -> None:
    for name in arguments.OPERATIONS:
        assert main(["explain", "--shape", "8,4,2", "--op", name]) == 0
        assert capsys.readouterr().out.startswith(f"{name}: M <= 8, N = 4, K = 2")
    argv = ["explain", "--shape", "8,4,2", "--op"]
    assert main([*argv, "all_reduce", "--epilogue", "lanes+pull"]) == 0
    assert "mode: split-lanes+pull over shm" in capsys.readouterr().out
    assert main([*argv, "all_to_all", "--extent", "2"]) == 0
    assert "store" in capsys.readouterr().out


def test_the_commands_and_the_bench_know_the_same_operations() -> None:
    assert arguments.OPERATIONS == modes.OPERATIONS == tuple(rivals.WAYS)
    assert arguments.operations("all") == arguments.OPERATIONS
    assert arguments.operations("all_reduce,all_gather") == ("all_reduce", "all_gather")


def test_check_protocol_proves_what_is_built_in(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["check", "protocol", "--only", "all_gather/fused-push/view-complete"]
    code, found = run_json(capsys, *argv)
    assert (code, found["checked"], found["failed"]) == (0, 2, 0)
    first, second = found["rows"]
    assert list(first) == [
        "name", "operation", "epilogue", "fused", "world", "chunks", "proved", "nodes", "pairs",
        "seconds", "reason", "counterexample",
    ]  # fmt: skip
    assert (first["world"], first["chunks"], second["world"], second["chunks"]) == (2, 8, 3, 2)
    assert first["proved"]
    assert second["nodes"] > 0 < first["pairs"]
    assert main([*argv, "--world", "2", "4", "--chunks", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in lines[1:3]] == [
        f"proved   all_gather/fused-push/view-complete, {world} ranks, 1 chunk" for world in (2, 4)
    ]
    assert "checked 1 at 4 ranks, 1 chunks where fused" in lines
    assert lines[-1].startswith("2 proved, 0 refuted; ")


def test_check_protocol_refutes_a_plugin(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["check", "protocol", "--epilogue", "tests.contracts.broken_epilogues:NoGate"]
    argv += ["--world", "2", "--only", "all_gather/fused-broken/copy-entry"]
    code, found = run_json(capsys, *argv)
    assert (code, found["checked"], found["failed"]) == (1, 1, 1)
    (row,) = found["rows"]
    assert (row["epilogue"], row["proved"], row["reason"]) == ("broken", False, "race")
    assert main(argv) == 1
    text = capsys.readouterr().out
    assert f"refuted  {row['name']}, 2 ranks, 8 chunks: race" in text
    assert all(f"         {line}\n" in text for line in row["counterexample"])
    assert "in call 2 stores" in text


def test_check_protocol_of_a_form_that_is_not_there_exits_3(
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, found = run_json(capsys, "check", "protocol", "--epilogue", "fused-collective")
    assert code == 3
    assert "must have the form asked for" in found["rows"][0]["reason"]


def test_check_protocol_counts_who_waits(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["check", "protocol", "--world", "2", "--only", "all_gather/split-push/copy-complete"]
    code, found = run_json(capsys, *argv, "--slots", "2")
    assert (code, found["rows"][0]["reason"]) == (1, "resources")
    assert "finds no slot: device 0 has 2" in found["rows"][0]["counterexample"][0]
    assert main([*argv, "--slots", "3"]) == 0
    # The kernels of ranks that share a device have one block each, or two ranks would need six.
    assert main([*argv, "--share", "2", "--slots", "4"]) == 0
    assert main([*argv, "--share", "2", "--slots", "1"]) == 1


def test_check_protocol_makes_mistakes(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["check", "protocol", "--mutants", "--only", "all_gather/split-push/view-two_buffers"]
    code, found = run_json(capsys, *argv, "--epilogue", "push")
    assert code == 0
    assert {row["protocol"] for row in found["rows"]} == {
        "all_gather/split-push/view-two_buffers",
        "all_gather/split-push/view-two_buffers-complete",
    }
    results = {(row["mutant"], row["protocol"][-8:]): row["result"] for row in found["rows"]}
    assert results["nobody acquires", "_buffers"] == "caught"
    assert set(results.values()) == {"caught", "equivalent"}
    assert {row["reason"] for row in found["rows"] if row["result"] == "equivalent"} == {None}


def test_no_mistake_is_looked_for_in_what_is_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["check", "protocol", "--epilogue", "tests.contracts.broken_epilogues:NoGate"]
    argv += ["--mutants", "--only", "all_gather/fused-broken/copy-entry"]
    assert main(argv) == 1
    text = capsys.readouterr().out
    assert "no mistake is looked for in what is wrong as it is" in text
    assert "caught" not in text


def test_doctor_names_an_unknown_variable(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GEMMLINK_TRANSPRT", "shm")
    code, found = run_json(capsys, "doctor")
    assert (code, found["failed"]) == (1, 1)
    row = next(row for row in found["rows"] if row["fails"])
    assert row["name"] == "GEMMLINK_TRANSPRT"
    assert "GEMMLINK_TRANSPORT" in row["value"]


def test_doctor_names_a_bad_value(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GEMMLINK_CHUNKS", "99")
    assert main(["doctor"]) == 1
    assert "BAD  settings" in capsys.readouterr().out


def test_doctor_is_content_here(capsys: pytest.CaptureFixture[str]) -> None:
    code, found = run_json(capsys, "doctor")
    assert code == 0
    names = {row["name"] for row in found["rows"]}
    assert {"cores", "atomics in use", "/dev/shm free", "transport shm", "settings file"} <= names


def test_plugins_lists_what_loads_and_says_why_not(capsys: pytest.CaptureFixture[str]) -> None:
    absent = plugins.Entry("absent", "no_such_module:X", "backend", "pip install no-such-module")
    plugins.register(absent)
    try:
        code, found = run_json(capsys, "plugins")
    finally:
        plugins.unregister("absent")
    rows = {row["name"]: row for row in found["rows"]}
    assert code == 0
    assert rows["push"]["ok"]
    assert not rows["absent"]["ok"]
    assert "pip install no-such-module" in rows["absent"]["reason"]


def test_a_broken_plugin_is_a_failure(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plugins, "failures", lambda: {"theirs": ImportError("no such thing")})
    code, found = run_json(capsys, "plugins")
    assert (code, found["failed"]) == (1, 1)
    assert main(["doctor"]) == 0  # it reports, and judges settings only


def test_world_under_a_launcher_is_the_launchers(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ranks.world_for(None, 2) == 2
    assert ranks.world_for(3, 2) == 3
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert ranks.world_for(None, 2) == 4
    with pytest.raises(InvalidArgument, match="--world 3 with WORLD_SIZE=4"):
        ranks.world_for(3, 2)


def test_only_rank_0_of_a_launcher_prints(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["plugins"]) == 0
    assert capsys.readouterr().out == ""
