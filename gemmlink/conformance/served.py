"""Which operations a mode serves: an epilogue's name, with a form or without, or a pair of them."""

from __future__ import annotations

from typing import Any, cast

from gemmlink import plugins
from gemmlink.conformance.trials import OPERATIONS
from gemmlink.core.compose import ALIASES
from gemmlink.errors import InvalidArgument
from gemmlink.spec import operations
from gemmlink.spec.contracts import Epilogue
from gemmlink.spec.operations import Operation


def bare(epilogue: str) -> tuple[str, bool | None]:
    """An epilogue's name without its form, and the form: fused, split or (None) not said."""
    name = ALIASES.get(epilogue, epilogue)
    for prefix, fused in (("fused-", True), ("split-", False)):
        if name.startswith(prefix):
            return name.removeprefix(prefix), fused
    return name, None


def has_window(mode: str) -> bool:
    """Whether all epilogues of a mode work in windows; so, too, if one cannot be had."""
    first, *others = mode.split("+")
    try:
        found = [plugins.find("epilogue", name) for name in (bare(first)[0], *others)]
    except Exception:  # told by whoever tries it
        return True
    return all(cast(Epilogue, epilogue).needs.window for epilogue in found)


def operation(name: str, world: int, n: int, **options: Any) -> Operation:
    """An operation by its name, as phases."""
    made: Operation = getattr(operations, name)(world, n, **options)
    return made


def served_by(mode: str) -> tuple[str, ...]:
    """The operations all of whose phases this mode serves.

    A pair serves those of two phases, its first epilogue the first. Of an epilogue that cannot be
    had all are named, so that whoever tries them tells why. Raises ``InvalidArgument`` for a name
    that means nothing.
    """
    first, *others = mode.split("+")
    try:
        names = [bare(first)[0], *others]
        found = [cast(Epilogue, plugins.find("epilogue", name)) for name in names]
    except InvalidArgument:
        raise
    except Exception:  # told by whoever tries it
        return OPERATIONS
    return tuple(name for name in OPERATIONS if _serve(found, operation(name, 2, 2)))


def _serve(epilogues: list[Epilogue], operation: Operation) -> bool:
    if len(epilogues) == 1:
        epilogues = epilogues * len(operation.phases)
    return len(epilogues) == len(operation.phases) and all(
        phase.name in epilogue.phases
        for epilogue, phase in zip(epilogues, operation.phases, strict=True)
    )
