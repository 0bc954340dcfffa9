"""Agreement between ranks while something is being set up.

``agree`` lets every rank do its part and tell the others how it went: either all ranks return the
records of all, or all ranks raise, naming who failed and why. It talks only through
``Group.all_gather`` and so works before any window exists.
"""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable, Iterable
from typing import Any

from gemmlink import errors
from gemmlink.errors import GemmlinkError, InvalidArgument
from gemmlink.spec.contracts import Group

Record = dict[str, Any]

_counters: weakref.WeakKeyDictionary[Group, dict[str, int]] = weakref.WeakKeyDictionary()


def next_key(group: Group, kind: str) -> str:
    """A key for the next exchange of ``kind``; equal on all ranks that call in the same order."""
    counts = _counters.setdefault(group, {})
    counts[kind] = counts.get(kind, 0) + 1
    return f"{kind}{counts[kind]}"


def agree(
    group: Group,
    key: str,
    part: Callable[[], Record],
    timeout_s: float,
    on_stall: Callable[[], None] | None = None,
) -> list[Record]:
    """Run ``part`` on every rank and return all ranks' records, in rank order.

    If ``part`` raises on some rank, that rank re-raises its own exception and the others raise one
    of the same type that names the rank.
    """
    failure: Exception | None = None
    record: Record = {}
    try:
        record = {"ok": part()}
    except Exception as error:  # told to the peers first, then raised again
        failure = error
        record = {"error": _describe(error)}
    texts = group.all_gather(
        json.dumps(record).encode(), key=key, timeout_s=timeout_s, on_stall=on_stall
    )
    if failure is not None:
        raise failure
    records: list[Record] = [json.loads(text) for text in texts]
    for rank, peer in enumerate(records):
        if "error" in peer:
            raise _revive(rank, peer["error"])
    return [peer["ok"] for peer in records]


def check_equal(records: Iterable[Record], fields: Iterable[str], what: str) -> None:
    """Raise ``InvalidArgument`` naming the first field that differs, with both values and ranks."""
    first, *others = list(records)
    for name in fields:
        for rank, other in enumerate(others, start=1):
            if other.get(name) != first.get(name):
                raise differ(what, name, 0, first.get(name), rank, other.get(name))


def differ(what: str, name: str, rank: int, value: Any, peer: int, other: Any) -> InvalidArgument:
    """The error for a value that two ranks do not share."""
    return InvalidArgument(
        f"{name} must be equal on all ranks of {what}",
        f"{value!r} on rank {rank} and {other!r} on rank {peer}",
        f"Pass the same {name} on every rank.",
    )


def _describe(error: Exception) -> Record:
    if isinstance(error, GemmlinkError):
        return {"type": type(error).__name__, "parts": [error.rule, error.came, error.fix]}
    return {"type": "GemmlinkError", "parts": [f"{type(error).__name__}: {error}", "", ""]}


def _revive(rank: int, record: Record) -> GemmlinkError:
    kind: type[GemmlinkError] = getattr(errors, record["type"], GemmlinkError)
    rule, came, fix = record["parts"]
    return kind(f"rank {rank} refused: {rule}", came, fix)
