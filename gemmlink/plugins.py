"""Where transports, epilogues and backends come from.

Three sources, all ending in one table of ``Entry`` per kind and name: built-ins (named here), other
distributions (entry-point group ``gemmlink``), and ``register``. Listing imports no strategy; an
entry is loaded when it is chosen. pluggy collects entries; a launch calls plain objects only.

A plugin is a module or object with any of the three hooks::

    from gemmlink.plugins import Entry, hookimpl

    @hookimpl
    def gemmlink_transports():
        return [Entry("mine", "mine.transport:Mine", "transport", "pip install mine")]
"""

from __future__ import annotations

import difflib
import importlib
import importlib.metadata
import logging
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import pluggy

from gemmlink import settings
from gemmlink.errors import InvalidArgument, Unavailable
from gemmlink.spec.contracts import INTERFACE, KINDS, Strategy

_log = logging.getLogger("gemmlink")
_NAME = "gemmlink"

hookspec = pluggy.HookspecMarker(_NAME)
hookimpl = pluggy.HookimplMarker(_NAME)


@dataclass(frozen=True)
class Entry:
    """A strategy that can be chosen by name.

    ``target`` is ``"module:attribute"``; the attribute is an object, or a class or function that
    makes one without arguments. ``kind`` is ``transport``, ``epilogue`` or ``backend``.
    ``install_hint`` is the line that provides what the import needs. ``origin`` is filled in by the
    registry (``built-in``, a distribution's name and version, or ``register``).
    """

    name: str
    target: str
    kind: str
    install_hint: str = ""
    origin: str = field(default="", compare=False)


class Hooks:
    """Hook specifications. Each hook returns entries of its kind."""

    @hookspec
    def gemmlink_transports(self) -> list[Entry]:  # type: ignore[empty-body]
        """Entries with ``kind="transport"``."""

    @hookspec
    def gemmlink_epilogues(self) -> list[Entry]:  # type: ignore[empty-body]
        """Entries with ``kind="epilogue"``."""

    @hookspec
    def gemmlink_backends(self) -> list[Entry]:  # type: ignore[empty-body]
        """Entries with ``kind="backend"``."""


BUILT_IN = (
    Entry("shm", "gemmlink.transport.shm:SharedMemory", "transport"),
    Entry("symm_mem", "gemmlink.transport.symm_mem:SymmetricMemory", "transport"),
    Entry("ipc", "gemmlink.transport.ipc:Ipc", "transport"),
    Entry("push", "gemmlink.epilogues.push:Push", "epilogue"),
    Entry("pull", "gemmlink.epilogues.pull:Pull", "epilogue"),
    Entry("lanes", "gemmlink.epilogues.lanes:Lanes", "epilogue"),
    Entry("collective", "gemmlink.epilogues.collective:LibraryCollective", "epilogue"),
    Entry("eager", "gemmlink.backends.eager:Eager", "backend"),
)


class _Registry:
    """The table of entries, and plugins that failed to load."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.entries: dict[tuple[str, str], Entry] = {}
        self.objects: dict[tuple[str, str], Strategy] = {}
        self.failed: dict[str, BaseException] = {}
        self.changes = 0
        self.manager = pluggy.PluginManager(_NAME)
        self.manager.add_hookspecs(Hooks)
        for entry in BUILT_IN:
            self.add(entry, "built-in")
        self._load_entry_points(settings.current().plugins)

    def _load_entry_points(self, allowed: tuple[str, ...] | None) -> None:
        # Sorted: which of two clashing plugins comes first must not depend on the file system.
        points = sorted(
            importlib.metadata.entry_points(group=_NAME), key=lambda p: (p.name, p.value)
        )
        names = set(allowed or ())
        for point in points:
            if allowed is not None and point.name not in allowed:
                continue
            names.discard(point.name)
            dist = getattr(point, "dist", None)
            origin = f"{dist.name} {dist.version}" if dist is not None else point.value
            try:
                self.adopt(point.load(), point.name, origin)
            except Exception as error:
                if allowed is not None:
                    raise InvalidArgument(
                        "GEMMLINK_PLUGINS must name plugins that can be loaded",
                        f"{point.name!r} ({origin}), where {type(error).__name__}: {error}",
                        "Repair it, or leave it out.",
                    ) from error
                # One that nobody has named must not take the others with it.
                self.failed[point.name] = error
                _log.warning("plugin %s (%s) was not loaded: %s", point.name, origin, error)
        if names:
            known = ", ".join(point.name for point in points) or "none"
            raise InvalidArgument(
                "GEMMLINK_PLUGINS must name entry points of installed distributions",
                ", ".join(map(repr, sorted(names))),
                f"There are: {known}.",
            )

    def adopt(self, plugin: Any, name: str, origin: str) -> None:
        """Validate a hook-implementing plugin against the specifications and take its entries."""
        try:
            self.manager.register(plugin, name)
        except ValueError as error:
            raise InvalidArgument(
                "a plugin must be registered once, under a name of its own", f"{name!r} again"
            ) from error
        try:
            entries = self._entries_of(plugin)
            for entry in entries:
                self.check(entry, origin)
        except Exception:
            self.manager.unregister(name=name)
            raise
        for entry in entries:
            self.add(entry, origin)

    def _entries_of(self, plugin: Any) -> list[Entry]:
        found: list[Entry] = []
        for kind in KINDS:
            hook = getattr(self.manager.hook, f"gemmlink_{kind}s")
            for implementation in hook.get_hookimpls():
                if implementation.plugin is plugin:
                    found.extend(_checked(implementation.function(), kind, plugin))
        if not found:
            raise InvalidArgument(
                "a plugin must implement gemmlink_transports, gemmlink_epilogues or "
                "gemmlink_backends, marked with gemmlink.plugins.hookimpl",
                repr(plugin),
            )
        return found

    def check(self, entry: Entry, origin: str) -> None:
        """Raise ``InvalidArgument`` if the name is taken."""
        known = self.entries.get((entry.kind, entry.name))
        if known is not None:
            raise InvalidArgument(
                f"a {entry.kind} must have a name of its own",
                f"{entry.name!r} from {origin}, which {known.origin} has already",
                "Rename one, or leave one out with GEMMLINK_PLUGINS.",
            )

    def add(self, entry: Entry, origin: str) -> None:
        """Take an entry whose name is free."""
        self.check(entry, origin)
        self.entries[entry.kind, entry.name] = Entry(
            entry.name, entry.target, entry.kind, entry.install_hint, origin
        )


def _checked(entries: Iterable[Entry], kind: str, plugin: Any) -> list[Entry]:
    found = list(entries)
    for entry in found:
        if not isinstance(entry, Entry) or entry.kind != kind or ":" not in entry.target:
            raise InvalidArgument(
                f"gemmlink_{kind}s must return Entry objects of kind {kind!r} with a target "
                "'module:attribute'",
                f"{entry!r} from {plugin!r}",
            )
    return found


_registry: _Registry | None = None
_registry_lock = threading.Lock()


def _table() -> _Registry:
    global _registry
    with _registry_lock:
        if _registry is None:
            _registry = _Registry()
        return _registry


def register(plugin: Any) -> None:
    """Make a strategy available by name in this process.

    ``plugin`` is an ``Entry``, a strategy object (a transport, epilogue or backend), or a module or
    object with hooks. Every rank must register the same things. Raises ``InvalidArgument`` if a
    name is taken or the object breaks its contract's signature.
    """
    table = _table()
    with table.lock:
        table.changes += 1
        if isinstance(plugin, Entry):
            _checked([plugin], plugin.kind if plugin.kind in KINDS else "transport", plugin)
            table.add(plugin, "register")
        elif _kind_of(plugin) is not None:
            kind = str(_kind_of(plugin))
            _conforming(plugin, kind, repr(plugin))
            table.add(Entry(plugin.name, f"{type(plugin).__module__}:object", kind), "register")
            table.objects[kind, plugin.name] = plugin
        else:
            name = getattr(plugin, "__name__", type(plugin).__qualname__)
            table.adopt(plugin, name, f"register({name})")


def unregister(name: str) -> None:
    """Take back what ``register`` added under ``name``: a strategy's name, or a hook plugin's."""
    table = _table()
    with table.lock:
        table.changes += 1
        plugin = table.manager.get_plugin(name)
        origins = {f"register({name})"} if plugin is not None else set()
        keys = [
            key
            for key, entry in table.entries.items()
            if entry.origin in origins or (entry.origin == "register" and entry.name == name)
        ]
        if not keys:
            mine = sorted(e.name for e in table.entries.values() if e.origin.startswith("register"))
            raise InvalidArgument(
                "unregister takes a name that was registered",
                repr(name),
                f"Registered: {', '.join(mine) or 'nothing'}.",
            )
        for key in keys:
            del table.entries[key]
            table.objects.pop(key, None)
        if plugin is not None:
            table.manager.unregister(plugin)


def entries(kind: str | None = None) -> list[Entry]:
    """All known entries, of one kind or of all. Imports no strategy."""
    table = _table()
    return [e for e in table.entries.values() if kind is None or e.kind == kind]


def generation() -> int:
    """A number that changes whenever ``register`` or ``unregister`` is called."""
    return _table().changes


def failures() -> dict[str, BaseException]:
    """Entry points that could not be loaded, each with its exception."""
    return dict(_table().failed)


def find(kind: str, choice: Any) -> Strategy:
    """The strategy for an argument: an object, a registered name, or ``"module:attribute"``.

    Raises ``InvalidArgument`` for an unknown name (listing the known ones) and ``Unavailable`` with
    the install line, the import error chained, when loading fails.
    """
    if not isinstance(choice, str):
        return _conforming(choice, kind, repr(choice))
    table = _table()
    known = table.objects.get((kind, choice))
    if known is not None:
        return known
    entry = table.entries.get((kind, choice))
    if entry is not None:
        return _load(entry)
    if ":" in choice:
        return _load(Entry(choice, choice, kind, "Check that the module can be imported."))
    _refuse_unknown(table, kind, choice)
    raise AssertionError("unreachable")


def _refuse_unknown(table: _Registry, kind: str, choice: str) -> None:
    names = sorted(name for k, name in table.entries if k == kind)
    broken = table.failed.get(choice)
    if broken is not None:
        raise Unavailable(f"plugin {choice!r} could not be loaded", str(broken)) from broken
    near = difflib.get_close_matches(choice, names, n=1)
    hint = f"Did you mean {near[0]!r}? " if near else ""
    raise InvalidArgument(
        f"{kind} must be auto, {', '.join(names)} or 'module:attribute'",
        repr(choice),
        f"{hint}A plugin's name appears once its distribution is installed or registered.",
    )


def _load(entry: Entry) -> Strategy:
    module, _, attribute = entry.target.partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute)
        made = (
            found()
            if (callable(found) and _kind_of(found) is None) or isinstance(found, type)
            else found
        )
    except (ImportError, AttributeError, OSError) as error:
        raise Unavailable(
            f"{entry.kind} {entry.name!r} needs {entry.target}",
            f"{type(error).__name__}: {error}",
            entry.install_hint,
        ) from error
    return _conforming(made, entry.kind, entry.target)


def _kind_of(candidate: Any) -> str | None:
    if isinstance(candidate, type):
        return None
    return next((kind for kind, contract in KINDS.items() if isinstance(candidate, contract)), None)


def _conforming(candidate: Any, kind: str, what: str) -> Strategy:
    contract = KINDS[kind]
    if isinstance(candidate, type):  # which has the members of its objects, unbound
        raise InvalidArgument(
            f"a {kind} must be an object",
            what,
            f"Pass {candidate.__name__}() in place of the class.",
        )
    if not isinstance(candidate, contract):
        wanted = sorted(n for n in _members(contract) if not hasattr(candidate, n))
        raise InvalidArgument(
            f"a {kind} must fulfil gemmlink.spec.contracts.{contract.__name__}",
            f"{what}, which lacks {', '.join(wanted)}",
        )
    if candidate.interface != INTERFACE:
        raise InvalidArgument(
            f"{kind} {candidate.name!r} must be written for interface {INTERFACE}",
            f"interface {candidate.interface}",
            "Install versions of gemmlink and of the plugin that fit.",
        )
    return candidate  # type: ignore[no-any-return]


def _members(contract: Any) -> set[str]:
    methods = {name for name in vars(contract) if not name.startswith("_")}
    return methods | set(getattr(contract, "__annotations__", {}))
