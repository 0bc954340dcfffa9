"""Cases that several tests use."""

from __future__ import annotations

from typing import Any

from gemmlink.conformance.adversary.case import Case, Request, build
from gemmlink.conformance.adversary.sweep import requests


def find(world: int = 2, **wanted: Any) -> Request:
    """The first built-in variant that is as wanted: fields of a request or of its plan."""
    for request in requests(world):
        told = {
            "operation": request.operation,
            "mode": "+".join(epilogue.name for epilogue in request.epilogues),
            "fused": request.fused,
            "entry": request.entry,
            **request.plan,
        }
        if all(told.get(key) == value for key, value in wanted.items()):
            return request
    raise AssertionError(f"no variant with {wanted}")


def case(world: int = 2, **wanted: Any) -> Case:
    """The same, built."""
    return build(find(world, **wanted))
