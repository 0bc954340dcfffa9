"""The library's own modes as contestants: prepared operations in every form of every epilogue."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import torch

from gemmlink import operators, plugins
from gemmlink.core.compose import ALIASES, Choice, Composition, compose
from gemmlink.operators import AllToAllResult
from gemmlink.perf.field import Field, Held, Inputs, Label, Role, Truth
from gemmlink.prepared import Prepared

_FORMS: dict[str, Callable[..., Any]] = {
    "all_gather": operators.GemmAllGather,
    "all_to_all": operators.GemmAllToAll,
    "reduce_scatter": operators.GemmReduceScatter,
    "all_reduce": operators.GemmAllReduce,
}

#: Names of the operations, in the order in which they are listed.
OPERATIONS = tuple(_FORMS)


def prepared(field: Field, choice: Choice) -> Prepared:
    """The object form of the operation, not prepared yet."""
    problem = field.problem
    options = {"extent": field.extent} if field.name == "all_to_all" else {}
    made: Prepared = _FORMS[field.name](
        problem.n,
        problem.k,
        problem.capacity,
        problem.dtype,
        problem.out_dtype,
        problem.device,
        field.group,
        **options,
        transport=choice.transport,
        epilogue=choice.epilogue,
        backend=choice.backend,
        chunks=choice.chunks,
        result="view" if choice.view else "copy",
    )
    return made


class Mode:
    """A prepared operation. Making one is collective."""

    role: Role = "mode"

    def __init__(self, field: Field, choice: Choice) -> None:
        self._op = prepared(field, choice).prepare()
        # The subclasses' calls differ in what they return, and in ``rows``.
        self._call: Callable[..., Any] = cast(Any, self._op)
        self._view = choice.view
        # From the composition that runs, not from what was asked for: a row must not claim a mode
        # that was replaced on the way.
        self.label = _label(self._op.launch.parts, choice)
        self._out = field.empty(0 if self._view else field.rows, field.width)
        self._stays: torch.Tensor | None = None

    def load(self, inputs: Inputs) -> None:
        self._inputs = inputs.a, inputs.b

    def run(self) -> None:
        out = {} if self._view else {"out": self._out}
        found: Any = self._call(*self._inputs, **out)
        if isinstance(found, AllToAllResult):
            self._stays = found.local
            found = found.received
        if self._view:
            self._out = found

    def poison(self) -> None:
        """A view is filled behind torch's back, which would object. What stays is always fresh."""
        self._stays = None
        if self._view:
            ctypes.memset(self._out.data_ptr(), 0xFF, self._out.numel() * self._out.itemsize)
        else:
            self._out.fill_(torch.nan)

    def held(self, truth: Truth) -> Held:
        found = [(self._out, truth.result)]
        if self._stays is not None:
            found.append((self._stays, truth.stays))
        return found

    def close(self) -> None:
        self._op.close()


def modes_for(names: tuple[str, ...]) -> list[str]:
    """Epilogue arguments to measure; ``all`` stands for every registered epilogue in each form.

    An epilogue that cannot be loaded stays in the list: its row says why it was not measured.
    """
    found: list[str] = []
    for name in names:
        found += _registered_modes() if name == "all" else [name]
    return list(dict.fromkeys(found))


def _registered_modes() -> list[str]:
    found = []
    for entry in plugins.entries("epilogue"):
        try:
            forms = cast(Any, plugins.find("epilogue", entry.name)).forms()
        except Exception:  # told by its row
            forms = (False,)
        if len(forms) == 1:
            found.append(entry.name)
        else:
            found += [f"{'fused' if fused else 'split'}-{entry.name}" for fused in forms]
    return found


def asked_label(choice: Choice, field: Field) -> Label:
    """A label for a choice that may not compose: what is known of it before anything runs."""
    try:
        parts = compose(field.problem, field.group.world, choice, field.operation)
    except Exception:  # told by whoever tries to prepare it
        name = ALIASES.get(str(choice.epilogue), str(choice.epilogue))
        bare = name.removeprefix("fused-").removeprefix("split-")
        fused = name.startswith("fused-")
        asked = Label(name, bare, fused, choice.transport, choice.backend, 0, True)
        result = "view" if choice.view else "copy"
        return replace(asked, chunks=choice.chunks or 0, result=result)
    return _label(parts, choice)


def _label(parts: Composition, choice: Choice) -> Label:
    names = dict.fromkeys(epilogue.name for epilogue in parts.epilogues)
    return Label(
        parts.mode,
        "+".join(names),
        parts.fused,
        parts.transport_name,
        parts.backend.name,
        parts.chunks,
        all(epilogue.complete for epilogue in parts.epilogues),
        "view" if choice.view else "copy",
    )
