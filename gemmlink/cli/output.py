"""What a command prints and returns.

With ``--json`` exactly one object goes to stdout: ``{"ok", "checked", "failed", "versions",
"rows"}``, and ``"parts"`` where parts are certified. Without it, text. Logs go to stderr in both
cases. Under a launcher only rank 0 prints.
"""

from __future__ import annotations

import json
import logging
import os
import platform
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import gemmlink
from gemmlink.errors import GemmlinkError, InvalidArgument, Unavailable, Unsupported

RIGHT, WRONG, USAGE, SKIPPED = 0, 1, 2, 3
#: What shells give for a process that Ctrl-C ended.
INTERRUPTED = 130


@dataclass(frozen=True)
class Outcome:
    """How a command ended. ``code`` is the exit code, ``text`` what people read instead of rows.

    ``more``: what the JSON object has besides the usual.
    """

    code: int
    checked: int
    failed: int
    rows: Sequence[Mapping[str, Any]] = field(default_factory=tuple)
    text: str = ""
    more: Mapping[str, Any] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """The JSON object."""
        return {
            "ok": self.code == RIGHT,
            "checked": self.checked,
            "failed": self.failed,
            "versions": versions(),
            "rows": list(self.rows),
            **self.more,
        }


def emit(outcome: Outcome, as_json: bool) -> int:
    """Print the outcome if this process speaks for the command; return its exit code."""
    if os.environ.get("RANK", "0") == "0":
        text = json.dumps(outcome.as_dict(), allow_nan=False) if as_json else outcome.text
        if text:
            print(text, flush=True)
    return outcome.code


def failure(command: str, error: GemmlinkError) -> Outcome:
    """The outcome of a command that could not do its work; says so on stderr."""
    print(f"gemmlink {command}: {error}", file=sys.stderr)
    code = WRONG
    if isinstance(error, InvalidArgument):
        code = USAGE
    elif isinstance(error, Unavailable | Unsupported):
        code = SKIPPED
    row = {"ok": False, "reason": f"{type(error).__name__}: {error}"}
    return Outcome(code, 0, int(code == WRONG), (row,))


def versions() -> dict[str, str]:
    """Of what decides about results and times."""
    import torch

    from gemmlink.transport import atomics

    return {
        "gemmlink": gemmlink.__version__,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "atomics": atomics.IMPLEMENTATION,
    }


def header() -> str:
    """Versions in a line."""
    named = ", ".join(f"{name} {version}" for name, version in versions().items())
    return f"{named}, {os.cpu_count()} cores"


@contextmanager
def logging_to_stderr() -> Iterator[None]:
    """The library's log goes to stderr, at the level of ``GEMMLINK_LOG``, and so does its doubt
    about names of settings."""
    logger = logging.getLogger("gemmlink")
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("gemmlink: %(message)s"))
    logger.addHandler(handler)
    before = logger.level
    try:
        logger.setLevel(_log_level(logger).upper())
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)


def _log_level(logger: logging.Logger) -> str:
    from gemmlink import settings

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            level = settings.current().log
        except GemmlinkError:  # the command itself will say what is wrong
            level = "warning"
    for warning in caught:
        logger.warning("%s", warning.message)
    return level
