"""``gemmlink plugins``: the strategies that can be chosen by name, and whether each can be had."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from gemmlink.cli import arguments as words
from gemmlink.cli import output

if TYPE_CHECKING:
    from gemmlink.plugins import Entry


def add(parsers: words.Parsers) -> None:
    """Describe the command."""
    words.command(parsers, "plugins", run, "List transports, epilogues and backends.")


def run(arguments: argparse.Namespace) -> output.Outcome:
    """List and load. A strategy that wants a library is no failure; a broken plugin is."""
    rows = [*strategies(), *broken()]
    failed = sum(row["kind"] == "plugin" for row in rows)
    lines = [_line(row) for row in rows]
    code = output.WRONG if failed else output.RIGHT
    return output.Outcome(code, len(rows), failed, rows, "\n".join(lines))


def strategies() -> list[dict[str, Any]]:
    """A row for each registered strategy: ``ok`` if it loads and, for a transport, probes."""
    from gemmlink import plugins
    from gemmlink.spec.contracts import KINDS

    order = list(KINDS)
    known = sorted(plugins.entries(), key=lambda entry: (order.index(entry.kind), entry.name))
    return [_row(entry) for entry in known]


def broken() -> list[dict[str, Any]]:
    """A row for each entry point that could not be loaded."""
    from gemmlink import plugins

    return [
        {
            "name": name,
            "kind": "plugin",
            "target": "",
            "origin": "entry point",
            "ok": False,
            "reason": f"{type(error).__name__}: {error}",
            "details": {},
        }
        for name, error in plugins.failures().items()
    ]


def _row(entry: Entry) -> dict[str, Any]:
    reason, details = None, {}
    try:
        details = _details(entry)
    except Exception as error:  # whatever a stranger's code raises is its answer
        reason = f"{type(error).__name__}: {error}"
        if entry.install_hint and entry.install_hint not in reason:
            reason += f" Install it: {entry.install_hint}"
    return {
        "name": entry.name,
        "kind": entry.kind,
        "target": entry.target,
        "origin": entry.origin,
        "ok": reason is None,
        "reason": reason,
        "details": details,
    }


def _details(entry: Entry) -> dict[str, str]:
    from gemmlink import plugins

    found: Any = plugins.find(entry.kind, entry.name)
    if entry.kind != "transport":
        return {}
    return {str(name): str(value) for name, value in found.probe().details.items()}


def _line(row: dict[str, Any]) -> str:
    state = "ok" if row["ok"] else f"not available: {row['reason']}"
    return f"{row['kind']:<10} {row['name']:<14} {row['origin']:<14} {row['target']}  {state}"
