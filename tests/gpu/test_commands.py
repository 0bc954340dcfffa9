"""The commands on a machine with a device, each in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from gemmlink.cli.devices import STEPS


def _run(*argv: str) -> tuple[int, dict[str, Any]]:
    command = [sys.executable, "-m", "gemmlink", *argv, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.stdout, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return done.returncode, found


def test_doctor_walks_to_the_end() -> None:
    code, found = _run("doctor")
    rows = {row["name"]: row for row in found["rows"] if row["name"].startswith("symm_mem ")}
    assert list(rows) == [f"symm_mem {name}" for name, _ in STEPS], rows
    assert all(row["ok"] for row in rows.values()), rows
    assert "bytes and words moved between" in rows["symm_mem window"]["value"]
    assert code == 0, found


def test_explain_tells_what_auto_takes() -> None:
    code, found = _run("explain", "--shape", "8,8,8", "--device", "cuda")
    text = found["rows"][0]["text"]
    assert code == 0, found
    assert "for these auto takes symm_mem, then ipc" in text
    assert "split-pull" in text


def test_the_kit_certifies_a_mode_on_the_device() -> None:
    """Its clauses on schedules, on ranks, and its cells, all with CUDA tensors."""
    code, found = _run(
        "conformance", "--transport", "symm_mem", "--world", "2", "--epilogue", "split-pull"
    )
    assert code == 0, [row for row in found["rows"] if not row["ok"]]
    assert {row["transport"] for row in found["rows"]} == {"symm_mem"}
