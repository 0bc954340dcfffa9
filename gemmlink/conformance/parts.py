"""The parts under test, for the header of a report: what, from where, and what it can do here."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, cast

import torch

import gemmlink
from gemmlink import plugins
from gemmlink.conformance import devices, served, trials
from gemmlink.conformance.quick import dtype_pairs
from gemmlink.errors import Unavailable, Unsupported
from gemmlink.spec.contracts import Backend, Capabilities, Epilogue, Transport
from gemmlink.spec.problem import Problem, dtype_name

#: What is taken where no part of a kind is named, for CPU tensors.
DEFAULTS = {"transport": "shm", "epilogue": "all", "backend": "eager"}


@dataclass(frozen=True)
class Part:
    """One part. ``asked`` is how it was named, ``lacks`` what it needs and this machine has not."""

    kind: str
    asked: str
    named: bool
    name: str
    target: str
    origin: str
    built_in: bool
    device: str
    capabilities: Mapping[str, str]
    lacks: str | None = None

    @property
    def module(self) -> str:
        """Where its code lies."""
        return self.target.partition(":")[0]

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)

    def lines(self) -> list[str]:
        """For people."""
        how = "" if self.named else " (default)"
        first = f"{self.kind:<9} {self.name}{how}, {self.target}, {self.origin}, on {self.device}"
        told = "; ".join(f"{name}: {value}" for name, value in self.capabilities.items())
        return [first, f"          {self.lacks or told}"]


@dataclass(frozen=True)
class Mode:
    """An epilogue in one form: as operations take it, and as reports call it.

    ``operations``: those that it serves.
    """

    argument: str
    name: str
    lanes: bool
    operations: tuple[str, ...] = trials.OPERATIONS


def default(kind: str, device: str = devices.HOST) -> str:
    """What is taken where no part of this kind is named."""
    return devices.default_transport(device) if kind == "transport" else DEFAULTS[kind]


def describe(kind: str, asked: str, named: bool = True, device: str = devices.HOST) -> Part:
    """What is known of a part. Raises ``InvalidArgument`` for a name that means nothing."""
    entry = _entry(kind, asked)
    name, capabilities, lacks = asked, {}, None
    try:
        found: Any = plugins.find(kind, asked)
        name, capabilities = found.name, _told(kind, found, device)
    except Unavailable as error:
        lacks = str(error)
    built_in = entry.origin == "built-in"
    origin = entry.origin if entry.origin else _origin(entry.target.partition(":")[0])
    return Part(
        kind, asked, named, name, entry.target,
        f"gemmlink {gemmlink.__version__}" if built_in else origin,
        built_in, device, capabilities, lacks,
    )  # fmt: skip


def every_epilogue(device: str = devices.HOST) -> Part:
    """Stands for all built-in ones, where none was named."""
    names = ", ".join(epilogues(device))
    origin = f"gemmlink {gemmlink.__version__}"
    return Part(
        "epilogue", "all", False, "all", "gemmlink.epilogues", origin, True, device,
        {"names": names},
    )  # fmt: skip


def built_in(kind: str) -> list[plugins.Entry]:
    """The parts of one kind that come with gemmlink."""
    return [entry for entry in plugins.BUILT_IN if entry.kind == kind]


def epilogues(device: str) -> list[str]:
    """The built-in epilogues that serve tensors of a device: collectives do on CPUs only."""
    names = [entry.name for entry in built_in("epilogue")]
    return [name for name in names if device == devices.HOST or served.has_window(name)]


def modes_of(asked: str) -> list[Mode]:
    """The modes that a named epilogue stands for. Raises ``Unsupported`` for a form it has not."""
    name, wanted = served.bare(asked)
    epilogue = cast(Epilogue, plugins.find("epilogue", name))
    forms = epilogue.forms()
    if wanted is not None and wanted not in forms:
        raise Unsupported(f"epilogue {epilogue.name!r} must have the form asked for", asked)
    lanes, operations = epilogue.needs.lanes, served.served_by(name)
    if len(forms) == 1:
        return [Mode(name, epilogue.name, lanes, operations)]
    return [
        Mode(f"{form}-{name}", f"{form}-{epilogue.name}", lanes, operations)
        for form, fused in (("fused", True), ("split", False))
        if wanted in (None, fused) and fused in forms
    ]


def _entry(kind: str, asked: str) -> plugins.Entry:
    known = {entry.name: entry for entry in plugins.entries(kind)}
    if asked in known:
        return known[asked]
    targets = {entry.target: entry for entry in known.values()}
    return targets.get(asked) or plugins.Entry(asked, asked, kind)


def _told(kind: str, found: Any, device: str) -> dict[str, str]:
    try:
        told: dict[str, str] = _CAPABILITIES[kind](found, device)
    except Unavailable:
        raise
    except Exception as error:  # for the clauses to find
        return {"unknown": f"{type(error).__name__}: {error}"}
    return told


def _origin(module: str) -> str:
    """The distribution that a module comes from, or else its file."""
    top = module.partition(".")[0]
    for name in importlib.metadata.packages_distributions().get(top, ()):
        return f"{name} {importlib.metadata.version(name)}"
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        spec = None
    return str(spec.origin) if spec is not None else "unknown"


def _of_transport(transport: Transport, device: str) -> dict[str, str]:
    found: Capabilities = transport.probe()
    plain = {
        "memory": ", ".join(found.memory),
        "host words": _yes(found.host_words),
        "host data": _yes(found.host_data),
        "lanes": ", ".join(found.lanes) or "none",
        "common slots": _yes(found.common),
        "one host": _yes(found.one_host),
    }
    return {**plain, **{str(name): str(value) for name, value in found.details.items()}}


def _of_epilogue(epilogue: Epilogue, device: str) -> dict[str, str]:
    needs = [name for name in ("window", "lanes", "common") if getattr(epilogue.needs, name)]
    forms = ["fused" if fused else "split" for fused in epilogue.forms()]
    return {
        "phases": ", ".join(epilogue.phases),
        "forms": ", ".join(forms),
        "needs": ", ".join(needs) or "nothing",
    }


def _of_backend(backend: Backend, device: str) -> dict[str, str]:
    served = [
        f"{dtype_name(dtype)}-{dtype_name(out)}"
        for dtype, out in dtype_pairs()
        if backend.supports(Problem(1, 1, 1, dtype, out, torch.device(device))) is None
    ]
    return {"dtypes": ", ".join(served) or "none"}


def _yes(holds: bool) -> str:
    return "yes" if holds else "no"


_CAPABILITIES: Mapping[str, Any] = {
    "transport": _of_transport,
    "epilogue": _of_epilogue,
    "backend": _of_backend,
}
