"""gemmlink: a matrix product and the collective that must follow it, as one operation.

>>> import torch, gemmlink
>>> gemmlink.gemm_all_gather(torch.ones(2, 3), torch.ones(4, 3), group=gemmlink.SELF).shape
torch.Size([2, 4])

Layer map; imports go downwards only:

| layer | job |
| --- | --- |
| ``cli``, ``perf``, ``conformance`` | commands, measuring, proving that parts keep their contract |
| ``api``, ``operators`` | the function form and the object form (``calls``, ``prepared``) |
| ``core`` | composes the parts, runs calls |
| ``transport``, ``epilogues``, ``backends`` | the three exchangeable parts |
| ``quantize`` | fp8 operands, their scale layouts, their product |
| ``plugins``, ``settings`` | registry, variables |
| ``rendezvous``, ``groups``, ``lives`` | agreement, ranks, what of a store is theirs |
| ``spec``, ``errors`` | contracts and data |

Public names are loaded on first use, so that importing gemmlink costs nothing but this file.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from gemmlink.api import clear_cache as clear_cache
    from gemmlink.api import gemm_all_gather as gemm_all_gather
    from gemmlink.api import gemm_all_reduce as gemm_all_reduce
    from gemmlink.api import gemm_all_to_all as gemm_all_to_all
    from gemmlink.api import gemm_reduce_scatter as gemm_reduce_scatter
    from gemmlink.errors import GemmlinkError as GemmlinkError
    from gemmlink.errors import InvalidArgument as InvalidArgument
    from gemmlink.errors import Overlap as Overlap
    from gemmlink.errors import PeerLost as PeerLost
    from gemmlink.errors import PeerTimeout as PeerTimeout
    from gemmlink.errors import Poisoned as Poisoned
    from gemmlink.errors import Unavailable as Unavailable
    from gemmlink.errors import Unsupported as Unsupported
    from gemmlink.groups import SELF as SELF
    from gemmlink.groups import CallbackGroup as CallbackGroup
    from gemmlink.operators import AllToAllResult as AllToAllResult
    from gemmlink.operators import GemmAllGather as GemmAllGather
    from gemmlink.operators import GemmAllReduce as GemmAllReduce
    from gemmlink.operators import GemmAllToAll as GemmAllToAll
    from gemmlink.operators import GemmReduceScatter as GemmReduceScatter
    from gemmlink.plugins import Entry as Entry
    from gemmlink.plugins import register as register
    from gemmlink.plugins import unregister as unregister
    from gemmlink.threads import ThreadGroup as ThreadGroup
    from gemmlink.threads import thread_groups as thread_groups

_PUBLIC = {
    "gemm_all_gather": "api",
    "gemm_all_reduce": "api",
    "gemm_all_to_all": "api",
    "gemm_reduce_scatter": "api",
    "clear_cache": "api",
    "AllToAllResult": "operators",
    "GemmAllGather": "operators",
    "GemmAllReduce": "operators",
    "GemmAllToAll": "operators",
    "GemmReduceScatter": "operators",
    "SELF": "groups",
    "CallbackGroup": "groups",
    "ThreadGroup": "threads",
    "thread_groups": "threads",
    "Entry": "plugins",
    "register": "plugins",
    "unregister": "plugins",
    "GemmlinkError": "errors",
    "InvalidArgument": "errors",
    "Overlap": "errors",
    "PeerLost": "errors",
    "PeerTimeout": "errors",
    "Poisoned": "errors",
    "Unavailable": "errors",
    "Unsupported": "errors",
}

__all__ = ["__version__", *_PUBLIC]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'gemmlink' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"gemmlink.{_PUBLIC[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
