"""The function form: one call, prepared on first use and remembered.

Operations are remembered per group, without M in the key, in a cache of bounded size; when M grows
beyond what a window has room for, all ranks agree on a larger one. An operation that failed is
dropped on every rank and prepared anew by the next call.
"""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from gemmlink import groups, plugins
from gemmlink import settings as settings_module
from gemmlink.core.call import Outgrown
from gemmlink.core.compose import Choice
from gemmlink.core.tickets import Ticket
from gemmlink.errors import InvalidArgument, Overlap, Poisoned, Unsupported
from gemmlink.operators import GemmAllGather, choose
from gemmlink.spec.contracts import Group
from gemmlink.spec.problem import dtype_name
from gemmlink.untraced import untraced

#: Prepared operations kept per group. The one not used for longest goes first, on every rank alike.
CACHE_SIZE = 16


@untraced
def gemm_all_gather(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    group: Any = None,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    transport: Any = "auto",
    epilogue: Any = "auto",
    backend: Any = "auto",
    rows: Sequence[int] | None = None,
) -> torch.Tensor:
    """Multiply this rank's rows and gather the products of all ranks: ``cat_r(a_r @ b.T)``.

    Collective over ``group``: every rank calls it, in the same order, with the same b shape, dtypes
    and choices. a is ``(M, K)``, b is ``(N, K)``, float32, bfloat16 or float16, any strides; M may
    be 0 and may differ between ranks. Returns ``(sum of all M, N)`` in ``out_dtype`` (float32 or
    the inputs' dtype, the default), blocks in group-rank order: ``out`` if given, else a fresh
    tensor. ``rows`` is every rank's M, if known.

    The first call with new N, K, dtypes or choices sets up windows and takes longer. Synchronous on
    CPU tensors. Raises ``InvalidArgument`` on every rank when ranks do not agree, ``PeerTimeout``
    when one does not come. See ``GemmAllGather`` for the choices and for a form without a cache.
    """
    calls = _calls_of(groups.resolve(group))
    calls.number += 1
    ticket = Ticket(calls.group, "call", calls.number, {})
    try:
        choice = _choice(transport, epilogue, backend)
        ticket.fields = _fields(a, b, out_dtype, choice)
        return calls.run(Arguments(a, b, out, out_dtype, rows, choice), ticket)
    except (InvalidArgument, Unsupported) as error:
        if not error.call_completed:
            # Every rank raises in this call, but not every rank may have come as far as an
            # operation, whose epochs would then differ between ranks: start afresh everywhere.
            ticket.refuse(error)
            calls.clear()
        raise


def clear_cache(group: Any = None) -> None:
    """Close all operations that ``gemm_all_gather`` remembers for ``group``.

    Local, but must be done on every rank of the group at the same point of its calls.
    """
    _calls_of(groups.resolve(group)).clear()


@dataclass(frozen=True)
class Arguments:
    """The arguments of one function-form call."""

    a: torch.Tensor
    b: torch.Tensor
    out: torch.Tensor | None
    out_dtype: torch.dtype | None
    rows: Sequence[int] | None
    choice: Choice


class _Calls:
    """The function-form calls made over one group: how many, and the prepared operations."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self.number = 0
        self._busy = threading.Lock()
        self._ops: OrderedDict[Hashable, GemmAllGather] = OrderedDict()

    def run(self, arguments: Arguments, ticket: Ticket) -> torch.Tensor:
        """One call; on every rank alike, prepare or enlarge the operation that it needs."""
        if not self._busy.acquire(blocking=False):
            raise Overlap("one call at a time over a group", "a call from another thread")
        try:
            return self._run(arguments, ticket)
        finally:
            self._busy.release()

    def _run(self, arguments: Arguments, ticket: Ticket) -> torch.Tensor:
        key = _key(arguments.choice, ticket)
        capacity = max(arguments.rows) if arguments.rows else arguments.a.shape[0]
        op = self._ops.get(key)
        if op is None:
            op = self._prepared(key, arguments, capacity, ticket, "")
        try:
            return self._call(key, op, arguments, ticket)
        except Poisoned:  # by a peer, in an earlier call: that peer prepares anew in this one
            self._drop(key)
            op = self._prepared(key, arguments, capacity, ticket, "")
        except Outgrown as error:
            self._drop(key)
            op = self._prepared(key, arguments, error.rows, ticket, "/grown")
        return self._call(key, op, arguments, ticket)

    def clear(self) -> None:
        """Close and forget everything."""
        for op in self._ops.values():
            op.close()
        self._ops.clear()

    def _call(
        self, key: Hashable, op: GemmAllGather, arguments: Arguments, ticket: Ticket
    ) -> torch.Tensor:
        self._ops.move_to_end(key)
        try:
            return op.run(arguments.a, arguments.b, arguments.out, arguments.rows, ticket)
        except (InvalidArgument, Unsupported, Poisoned, Outgrown):
            raise
        except BaseException:
            self._drop(key)
            raise

    def _prepared(
        self, key: Hashable, arguments: Arguments, capacity: int, ticket: Ticket, suffix: str
    ) -> GemmAllGather:
        n, k = arguments.b.shape
        choice = arguments.choice
        op = GemmAllGather(
            n,
            k,
            _power_of_two(capacity),
            arguments.b.dtype,
            arguments.out_dtype,
            arguments.b.device,
            self.group,
            transport=choice.transport,
            epilogue=choice.epilogue,
            backend=choice.backend,
            chunks=choice.chunks,
        )
        op.prepare_at(f"call{ticket.number}{suffix}", ticket)
        self._ops[key] = op
        while len(self._ops) > CACHE_SIZE:
            self._ops.popitem(last=False)[1].close()
        return op

    def _drop(self, key: Hashable) -> None:
        self._ops.pop(key).close()


_calls: weakref.WeakKeyDictionary[Group, _Calls] = weakref.WeakKeyDictionary()


def _calls_of(group: Group) -> _Calls:
    found = _calls.get(group)
    if found is None:
        found = _calls[group] = _Calls(group)
    return found


def _choice(transport: Any, epilogue: Any, backend: Any) -> Choice:
    return choose(settings_module.current(), transport, epilogue, backend, None)


def _fields(
    a: torch.Tensor, b: torch.Tensor, out_dtype: torch.dtype | None, choice: Choice
) -> dict[str, Any]:
    """What must be equal on all ranks, as comparable values."""
    for name, tensor in (("a", a), ("b", b)):
        if not isinstance(tensor, torch.Tensor) or tensor.dim() != 2:
            came = (
                f"shape {tuple(tensor.shape)}"
                if isinstance(tensor, torch.Tensor)
                else type(tensor).__name__
            )
            raise InvalidArgument(f"{name} must be a tensor of two dimensions", came)
    if out_dtype is not None and not isinstance(out_dtype, torch.dtype):
        raise InvalidArgument("out_dtype must be a torch.dtype", repr(out_dtype))
    return {
        "operation": "all_gather",
        "n": b.shape[0],
        "k": b.shape[1],
        "dtype": dtype_name(b.dtype),
        "out_dtype": dtype_name(out_dtype or b.dtype),
        "device": b.device.type,
        **choice.names(),
        "timeout_s": settings_module.current().timeout_s,
    }


def _key(choice: Choice, ticket: Ticket) -> Hashable:
    """The cache key: everything but M, and which objects the names stand for at present."""
    values = tuple(ticket.fields[name] for name in sorted(ticket.fields))
    parts = (choice.transport, choice.epilogue, choice.backend)
    return (
        *values,
        *(id(part) for part in parts if not isinstance(part, str)),
        plugins.generation(),
    )


def _power_of_two(rows: int) -> int:
    return 1 << max(rows - 1, 0).bit_length()
