"""``gemmlink doctor``: what this machine offers, and settings that mean nothing.

Exits 1 for an unknown ``GEMMLINK_*`` name or a bad value, naming it; a strategy that wants a
library is reported and is no failure. The set-ups of ``symm_mem`` and ``ipc`` are walked as far
as they go.
"""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from dataclasses import asdict
from typing import Any

from gemmlink.cli import arguments as words
from gemmlink.cli import output
from gemmlink.cli import plugins as strategies
from gemmlink.errors import GemmlinkError

Row = dict[str, Any]

_MIB = 1 << 20


def add(parsers: words.Parsers) -> None:
    """Describe the command."""
    words.command(parsers, "doctor", run, "Look at this machine and at the settings.")


def run(arguments: argparse.Namespace) -> output.Outcome:
    """Look and tell."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # unknown names are rows here
        rows = [*_machine(), *_atomics(), *_launcher(), *_settings(), *_strategies()]
        rows += [*_symm_mem(), *_ipc()]
    failed = [row for row in rows if row["fails"]]
    code = output.WRONG if failed else output.RIGHT
    text = "\n".join(f"{_mark(row)} {row['name']:<24} {row['value']}" for row in rows)
    return output.Outcome(code, len(rows), len(failed), rows, text)


def _row(name: str, value: object, ok: bool = True, fails: bool = False) -> Row:
    return {"name": name, "value": str(value), "ok": ok, "fails": fails}


def _mark(row: Row) -> str:
    return "ok  " if row["ok"] else ("BAD " if row["fails"] else "-   ")


def _machine() -> list[Row]:
    from gemmlink.transport import segments

    versions = output.versions()
    return [
        *(_row(name, version) for name, version in versions.items() if name != "atomics"),
        _row("executable", sys.executable),
        _row("cores", f"{len(os.sched_getaffinity(0))} usable of {os.cpu_count()}"),
        _row("memory free", f"{segments.memory_free() // _MIB} MiB"),
        _row("/dev/shm free", f"{segments.shm_free() // _MIB} MiB"),
    ]


def _atomics() -> list[Row]:
    from gemmlink.transport import atomics

    rows = [_row("atomics in use", atomics.IMPLEMENTATION, atomics.IMPLEMENTATION != "none")]
    for name, reason in atomics.available().items():
        rows.append(_row(f"atomics {name}", reason or "available", reason is None))
    return rows


def _launcher() -> list[Row]:
    from gemmlink.groups import LAUNCHER_WORLD

    names = (*LAUNCHER_WORLD, "RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    found = [_row(f"launcher {name}", os.environ[name]) for name in names if name in os.environ]
    return found or [_row("launcher", "none")]


def _settings() -> list[Row]:
    from gemmlink import settings

    path = settings.config_file()
    rows = [_row("settings file", path if path.exists() else f"{path} (absent)")]
    for name, near in settings.unknown_names().items():
        hint = f"; did you mean {near}?" if near else ""
        rows.append(_row(name, f"not a setting of gemmlink{hint}", ok=False, fails=True))
    try:
        values = asdict(settings.read(os.environ))
    except GemmlinkError as error:
        return [*rows, _row("settings", error, ok=False, fails=True)]
    return [*rows, *(_row(f"setting {name}", value) for name, value in values.items())]


def _strategies() -> list[Row]:
    try:
        found = [*strategies.strategies(), *strategies.broken()]
    except GemmlinkError as error:  # a bad setting, which has a row that fails
        return [_row("strategies", f"not looked at: {error}", ok=False)]
    return [
        _row(f"{row['kind']} {row['name']}", row["reason"] or _origin(row), row["ok"])
        for row in found
    ]


def _symm_mem() -> list[Row]:
    """The steps of its set-up, up to the one that fails; what is missing is no failure."""
    from gemmlink.cli import devices

    return [_row(f"symm_mem {found.name}", found.text, found.ok) for found in devices.walk()]


def _ipc() -> list[Row]:
    """The same of ``ipc``."""
    from gemmlink.transport import ipc_steps

    return [_row(f"ipc {found.name}", found.text, found.ok) for found in ipc_steps.walk()]


def _origin(row: Row) -> str:
    details = ", ".join(f"{name}: {value}" for name, value in row["details"].items())
    return f"{row['origin']} ({details})" if details else row["origin"]
