"""Who is measured, role by role.

| role | what | what it must hold afterwards | made in |
| --- | --- | --- | --- |
| ``mode`` | a prepared operation | the whole result | ``modes`` |
| ``unfused`` | a torch product, then the library's collective | the whole result | ``rivals`` |
| ``gemm`` | a product of this rank's rows, nothing sent | the own product | ``rivals`` |
| ``move`` | what is sent, ready, moved to where it is needed | what all ranks sent | ``movers`` |
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, cast

from gemmlink import plugins
from gemmlink.perf.field import Contestant, Field
from gemmlink.perf.modes import modes_for
from gemmlink.perf.movers import Library, Stores
from gemmlink.perf.rivals import WAYS, Multiply, Product, Unfused, spellings
from gemmlink.spec.contracts import Backend, Transport

__all__ = ["bare", "modes_for"]


def bare(field: Field, backend: Any, transport: Any) -> list[Callable[[], Contestant]]:
    """Makers of everything that is not a mode. Call them in this order on every rank."""
    makers: list[Callable[[], Contestant]] = []
    multiplies = dict(spellings(field.problem))
    for name, multiply in multiplies.items():
        makers += [partial(Unfused, field, name, multiply, way) for way in WAYS[field.name]]
    multiplies |= _backend_multiply(backend)
    for name, multiply in multiplies.items():
        makers.append(partial(Product, field, name, multiply))
    makers.append(partial(Library, field))
    makers.append(lambda: Stores(field, cast(Transport, _find("transport", transport, "shm"))))
    return makers


def _backend_multiply(choice: Any) -> dict[str, Multiply]:
    try:
        backend = cast(Backend, _find("backend", choice, "eager"))
    except Exception:  # told by the modes, which need it; torch's spellings do not
        return {}
    return {backend.name: backend.multiply}


def _find(kind: str, choice: Any, default: str) -> Any:
    return plugins.find(kind, default if choice == "auto" else choice)
