"""Known gaps: clauses and cells that a plugin does not keep yet, declared in a file of its own.

A file has one line for each gap, ``id: reason``; empty lines and lines that begin with ``#`` say
nothing. It lies beside the plugin's module and has its name, ``transport.gaps`` beside
``transport.py``, or is named. It is strict in both directions: a line whose id the kit does not
have is an error, and so is a gap that passes. What lacks hardware or a library is no gap.
"""

from __future__ import annotations

import difflib
import importlib.util
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from gemmlink.errors import InvalidArgument

SUFFIX = ".gaps"


@dataclass(frozen=True)
class Gap:
    """One line: what is not kept, why, and where that is written (``file:line``)."""

    id: str
    reason: str
    where: str

    def passes(self) -> str:
        """The failure of a gap that is none."""
        return f"it passes, and {self.where} declares it as a gap ({self.reason}): remove the line"


def read(path: Path) -> dict[str, Gap]:
    """The gaps of a file by id. ``InvalidArgument`` for a line that is not ``id: reason``."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise InvalidArgument("a file of gaps must be readable", str(error)) from error
    found: dict[str, Gap] = {}
    for number, line in enumerate(map(str.strip, lines), start=1):
        if not line or line.startswith("#"):
            continue
        gap = _parsed(line, f"{path}:{number}")
        if gap.id in found:
            raise InvalidArgument(
                "a gap must be declared once", f"{gap.id} at {found[gap.id].where} and {gap.where}"
            )
        found[gap.id] = gap
    return found


def _parsed(line: str, where: str) -> Gap:
    name, colon, reason = (part.strip() for part in line.partition(":"))
    if not (name and colon and reason):
        raise InvalidArgument("a line of a file of gaps must be 'id: reason'", f"{line!r}, {where}")
    return Gap(name, reason, where)


def refuse_unknown(
    gaps: Iterable[Gap], known: Callable[[str], bool], candidates: Iterable[str]
) -> None:
    """Raise ``InvalidArgument`` that lists every gap whose id nothing has."""
    names = list(candidates)
    lost = []
    for gap in gaps:
        if not known(gap.id):
            near = difflib.get_close_matches(gap.id, names, n=1)
            hint = f" (did you mean {near[0]}?)" if near else ""
            lost.append(f"{gap.id} at {gap.where}{hint}")
    if lost:
        raise InvalidArgument(
            "a gap must name a clause or a cell of the kit",
            ", ".join(lost),
            "gemmlink conformance prints the ids.",
        )


def beside(module: str) -> Path:
    """Where the gaps of a module are declared; there may be no such file."""
    origin = _origin(module)
    return Path() if origin is None else origin.with_suffix(SUFFIX)


def locate(text: str, folder: Path) -> Path:
    """The file that ``gaps = text`` names: a path, seen from ``folder``, or ``module:file``.

    The second is a file in the folder of that module, wherever that is installed.
    """
    module, colon, name = text.partition(":")
    if not colon:
        return folder / text
    origin = _origin(module)
    if origin is None:
        raise InvalidArgument("gaps must be a path or 'module:file'", f"{text!r}, no such module")
    return origin.parent / name


def _origin(module: str) -> Path | None:
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        return None
    return None if spec is None or spec.origin is None else Path(spec.origin)
