"""Keeps ``torch.compile`` out of calls: traced, a call would be counted once and run many times.

A compiled function breaks its graph at such a call and runs it as it stands.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

_P = ParamSpec("_P")
_R = TypeVar("_R")


def untraced(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """``function``, which a compiler neither looks into nor inlines.

    ``torch.compiler.disable`` does that and loads the compiler, which takes seconds; here it is
    loaded only where somebody else has done so.
    """
    opaque: list[Callable[_P, _R]] = []

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        if "torch._dynamo" not in sys.modules:
            return function(*args, **kwargs)
        if not opaque:
            opaque.append(torch.compiler.disable(function))  # type: ignore[no-untyped-call]
        return opaque[0](*args, **kwargs)

    call._torchdynamo_disable = True  # type: ignore[attr-defined]
    return call
