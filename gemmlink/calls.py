"""The function form's memory: the operations that its calls over a group have prepared.

Operations are remembered per group, without M in the key, in a cache of bounded size; when M grows
beyond what a window has room for, all ranks agree on a larger one. An operation that failed is
dropped on every rank and prepared anew by the next call.
"""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from gemmlink import plugins
from gemmlink.core.call import Outgrown
from gemmlink.core.compose import Choice
from gemmlink.core.launch import Outcome
from gemmlink.core.tickets import Ticket
from gemmlink.errors import InvalidArgument, Overlap, Poisoned, Unsupported
from gemmlink.prepared import Prepared
from gemmlink.spec.contracts import Group

#: Prepared operations kept per group. The one not used for longest goes first, on every rank alike.
CACHE_SIZE = 16


@dataclass(frozen=True)
class Arguments:
    """The arguments of one function-form call; ``options`` are those of ``make`` alone."""

    make: type[Prepared]
    a: torch.Tensor
    b: torch.Tensor
    out: torch.Tensor | None
    out_dtype: torch.dtype | None
    rows: Sequence[int] | None
    choice: Choice
    options: Mapping[str, Any]


class Calls:
    """The function-form calls made over one group: how many, and the prepared operations."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self.number = 0
        self._busy = threading.Lock()
        self._ops: OrderedDict[Hashable, Prepared] = OrderedDict()

    def run(self, arguments: Arguments, ticket: Ticket) -> tuple[Prepared, Outcome]:
        """One call; on every rank alike, prepare or enlarge the operation that it needs.

        Returns that operation, too.
        """
        if not self._busy.acquire(blocking=False):
            raise Overlap("one call at a time over a group", "a call from another thread")
        try:
            return self._run(arguments, ticket)
        finally:
            self._busy.release()

    def _run(self, arguments: Arguments, ticket: Ticket) -> tuple[Prepared, Outcome]:
        key = _key(arguments.choice, ticket)
        capacity = max(arguments.rows) if arguments.rows else arguments.a.shape[0]
        op = self._ops.get(key)
        if op is None:
            op = self._prepared(key, arguments, capacity, ticket, "")
        try:
            return op, self._call(key, op, arguments, ticket)
        except Poisoned:  # by a peer, in an earlier call: that peer prepares anew in this one
            self._drop(key)
            op = self._prepared(key, arguments, capacity, ticket, "")
        except Outgrown as error:
            self._drop(key)
            op = self._prepared(key, arguments, error.rows, ticket, "/grown")
        return op, self._call(key, op, arguments, ticket)

    def clear(self) -> None:
        """Close and forget everything."""
        for op in self._ops.values():
            op.close()
        self._ops.clear()

    def _call(self, key: Hashable, op: Prepared, arguments: Arguments, ticket: Ticket) -> Outcome:
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
    ) -> Prepared:
        n, k = arguments.b.shape
        choice = arguments.choice
        op = arguments.make(
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
            bit_identical=choice.bit_identical,
            **arguments.options,
        )
        op.prepare_at(f"call{ticket.number}{suffix}", ticket)
        self._ops[key] = op
        while len(self._ops) > CACHE_SIZE:
            self._ops.popitem(last=False)[1].close()
        return op

    def _drop(self, key: Hashable) -> None:
        self._ops.pop(key).close()


_calls: weakref.WeakKeyDictionary[Group, Calls] = weakref.WeakKeyDictionary()


def calls_of(group: Group) -> Calls:
    """The calls made over ``group``."""
    found = _calls.get(group)
    if found is None:
        found = _calls[group] = Calls(group)
    return found


def _key(choice: Choice, ticket: Ticket) -> Hashable:
    """The cache key: everything but M, and which objects the names stand for at present."""
    # As text: True equals 1, and is not the same argument.
    values = tuple(repr(ticket.fields[name]) for name in sorted(ticket.fields))
    parts = (choice.transport, choice.epilogue, choice.backend)
    return (
        *values,
        *(id(part) for part in parts if not isinstance(part, str)),
        plugins.generation(),
    )


def _power_of_two(rows: int) -> int:
    return 1 << max(rows - 1, 0).bit_length()
