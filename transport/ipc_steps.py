"""The set-up of ``ipc``, one step after another, for ``gemmlink doctor``.

Each step needs the ones before it, so the walk ends at the first that fails: its text says what the
vendor's library answered and what helps. A second process really opens the memory of this one.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from gemmlink.errors import GemmlinkError, Unavailable
from gemmlink.transport import handles
from gemmlink.transport.site import Site, view

_SITE = "gemmlink.transport.site:Site"
_NBYTES = 4096
_HERE, _THERE = 90, 165
_CHILD_LIMIT_S = 120.0
_CHILD = "import sys; from gemmlink.transport.ipc_steps import answer; answer(*sys.argv[1:])"


@dataclass(frozen=True)
class Step:
    """One step: what it found, or why it failed and what helps."""

    name: str
    ok: bool
    text: str


def walk(site: str = _SITE) -> list[Step]:
    """All steps up to the first that fails. Uses the current device; gives all of it back.

    ``site``: ``"module:attribute"`` of the class of the place to look at.
    """
    walked, found = _Walk(site), []
    try:
        for name, part in walked.parts():
            try:
                found.append(Step(name, True, part()))
            except Exception as error:  # whatever it is, a doctor tells it
                found.append(Step(name, False, str(error) or type(error).__name__))
                break
    finally:
        walked.end()
    return found


class _Walk:
    """What the steps hand on to each other."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._kind = _load(name)
        self._base = 0
        self._record: handles.Record = {}
        self._site: Site

    def parts(self) -> Iterator[tuple[str, Callable[[], str]]]:
        yield "library", self._library
        yield "device", self._device
        yield "allocation", self._allocation
        yield "export", self._export
        yield "another process", self._child
        yield "peer access", self._peers

    def end(self) -> None:
        if self._base:
            with contextlib.suppress(Unavailable), self._site.selected():
                self._site.vendor.release(self._base)

    def _library(self) -> str:
        return ", ".join(f"{name}: {value}" for name, value in self._kind.probe().items())

    def _device(self) -> str:
        self._site = self._kind()
        vendor, index = self._site.vendor, self._site.index
        return f"ordinal {index} of {vendor.count()}, {vendor.bus(index)}"

    def _allocation(self) -> str:
        with self._site.selected():
            self._base = self._site.vendor.allocate(_NBYTES)
        return f"{_NBYTES} bytes, zeroed"

    def _export(self) -> str:
        with self._site.selected():
            self._record = handles.told(self._site.vendor, self._base, _NBYTES, with_handle=True)
        return f"a handle of {len(self._record['handle']) // 2} bytes"

    def _child(self) -> str:
        own = view(self._base, _NBYTES, self._site.device, None)
        own.fill_(_HERE)
        self._site.finish()
        bus = self._site.vendor.bus(self._site.index)
        seen = _ask([self._name, self._record["handle"], bus])
        left = int(own.min()), int(own.max())
        if seen != _HERE or left != (_THERE, _THERE):
            raise Unavailable(
                "another process must share memory that it has opened",
                f"{seen} there where {_HERE} was stored, {left} here where it stored {_THERE}",
                "The library reported success and moved nothing; look for a newer driver.",
            )
        return "opened it, read it and wrote it"

    def _peers(self) -> str:
        vendor, own = self._site.vendor, self._site.index
        others = [at for at in range(vendor.count()) if at != own]
        lacks = [
            f"{a} cannot access {b}"
            for other in others
            for a, b in ((own, other), (other, own))
            if not vendor.reaches(a, b)
        ]
        if lacks:
            raise Unavailable(
                "devices of one group must access each other's memory, both ways",
                "; ".join(lacks),
                "See nvidia-smi topo -p2p r, or rocm-smi --showtopoaccess.",
            )
        return f"{own} and {others} access each other" if others else "no other device is visible"


def answer(site: str, handle: str, bus: str) -> None:
    """The other process: open the memory, say what lies in it, leave something else there."""
    try:
        print(json.dumps({"seen": _visit(_load(site)(), bytes.fromhex(handle), bus)}))
    except GemmlinkError as error:
        print(json.dumps({"error": [error.rule, error.came, error.fix]}))


def _visit(site: Site, handle: bytes, bus: str) -> int:
    with site.vendor.on(site.vendor.find(bus) or 0):
        address = site.vendor.open(handle)
        shown = view(address, _NBYTES, site.device, None)
        seen = int(shown.max())
        shown.fill_(_THERE)
        site.finish()
        site.vendor.close(address)
    return seen


def _ask(arguments: list[str]) -> int:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    try:
        done = subprocess.run(
            [sys.executable, "-c", _CHILD, *arguments],
            env=environment,
            capture_output=True,
            text=True,
            timeout=_CHILD_LIMIT_S,
        )
        told = json.loads((done.stdout.splitlines() or [""])[-1])
    except (OSError, subprocess.TimeoutExpired, ValueError) as error:
        raise Unavailable(
            "another process must open this one's memory",
            f"a process that did not say that it has ({type(error).__name__})",
            "Run it again with the driver's logging on; the process may have been killed.",
        ) from error
    if "error" in told:
        raise Unavailable(*told["error"])
    return int(told["seen"])


def _load(name: str) -> type[Site]:
    module, _, attribute = name.partition(":")
    found: type[Site] = getattr(importlib.import_module(module), attribute)
    return found
