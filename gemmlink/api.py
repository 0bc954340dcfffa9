"""The function form: one call, prepared on first use and remembered (``gemmlink.calls``)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from gemmlink import groups
from gemmlink import settings as settings_module
from gemmlink.arguments import flag
from gemmlink.calls import Arguments, calls_of
from gemmlink.core.launch import Outcome
from gemmlink.core.tickets import Ticket
from gemmlink.errors import InvalidArgument, Unsupported
from gemmlink.operators import (
    AllToAllResult,
    GemmAllGather,
    GemmAllReduce,
    GemmAllToAll,
    GemmReduceScatter,
)
from gemmlink.prepared import Prepared, choose
from gemmlink.spec.problem import dtype_name
from gemmlink.untraced import untraced


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
    wire_dtype: torch.dtype | None = None,
    bit_identical: bool = False,
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
    given = _Given(group, a, b, out, out_dtype, transport, epilogue, backend, bit_identical)
    return _run(GemmAllGather, given, rows, {"wire_dtype": wire_dtype})[1].result


@untraced
def gemm_all_to_all(
    a: torch.Tensor,
    b: torch.Tensor,
    extent: int | None = None,
    *,
    group: Any = None,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    transport: Any = "auto",
    epilogue: Any = "auto",
    backend: Any = "auto",
    rows: Sequence[int] | None = None,
    keep_product: bool = False,
    bit_identical: bool = False,
) -> AllToAllResult:
    """Multiply this rank's rows and deal the leading ``extent`` columns out to all ranks.

    Rank j receives columns ``[j * s, (j + 1) * s)`` of every rank's product, ``s = extent / world``
    and extent N by default. Returns ``(received, local, product)``, see ``AllToAllResult``; ``out``
    is where ``received`` goes. Everything else is as in ``gemm_all_gather``; see ``GemmAllToAll``.
    """
    given = _Given(group, a, b, out, out_dtype, transport, epilogue, backend, bit_identical)
    options = {"extent": extent, "keep_product": keep_product}
    op, outcome = _run(GemmAllToAll, given, rows, options)
    assert isinstance(op, GemmAllToAll), "another operation than the one asked for"
    return op.named(outcome)


@untraced
def gemm_reduce_scatter(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    group: Any = None,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    transport: Any = "auto",
    epilogue: Any = "auto",
    backend: Any = "auto",
    deterministic: bool = True,
    bit_identical: bool = False,
) -> torch.Tensor:
    """Add the products of all ranks and return this rank's band of rows of the sum.

    a is ``(M, K)`` with M equal on all ranks, b is ``(N, K)``, both each rank's own. Band i has
    ``M // world + (i < M % world)`` rows. Products travel in ``out_dtype`` and are added in
    float32, rank 0's first. Everything else is as in ``gemm_all_gather``; see
    ``GemmReduceScatter``.
    """
    given = _Given(group, a, b, out, out_dtype, transport, epilogue, backend, bit_identical)
    return _run(GemmReduceScatter, given, None, {"deterministic": deterministic})[1].result


@untraced
def gemm_all_reduce(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    group: Any = None,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    transport: Any = "auto",
    epilogue: Any = "auto",
    backend: Any = "auto",
    wire_dtype: torch.dtype | None = None,
    deterministic: bool = True,
    bit_identical: bool = False,
) -> torch.Tensor:
    """Add the products of all ranks: ``sum_r(a_r @ b_r.T)``, ``(M, N)``, on every rank.

    a is ``(M, K)`` with M equal on all ranks, b is ``(N, K)``, both each rank's own. All ranks get
    the same bits. Everything else is as in ``gemm_reduce_scatter``; see ``GemmAllReduce``.
    """
    given = _Given(group, a, b, out, out_dtype, transport, epilogue, backend, bit_identical)
    options = {"wire_dtype": wire_dtype, "deterministic": deterministic}
    return _run(GemmAllReduce, given, None, options)[1].result


def clear_cache(group: Any = None) -> None:
    """Close all operations that the function form remembers for ``group``.

    Local, but must be done on every rank of the group at the same point of its calls.
    """
    calls_of(groups.resolve(group)).clear()


class _Given(NamedTuple):
    """What all functions take."""

    group: Any
    a: torch.Tensor
    b: torch.Tensor
    out: torch.Tensor | None
    out_dtype: torch.dtype | None
    transport: Any
    epilogue: Any
    backend: Any
    bit_identical: bool


def _run(
    make: type[Prepared], given: _Given, rows: Sequence[int] | None, options: Mapping[str, Any]
) -> tuple[Prepared, Outcome]:
    calls = calls_of(groups.resolve(given.group))
    calls.number += 1
    ticket = Ticket(calls.group, "call", calls.number, {})
    try:
        settings = settings_module.current()
        choice = choose(settings, given.transport, given.epilogue, given.backend, None)
        choice = replace(choice, bit_identical=flag("bit_identical", given.bit_identical))
        arguments = Arguments(
            make, given.a, given.b, given.out, given.out_dtype, rows, choice, options
        )
        ticket.fields = _fields(arguments)
        return calls.run(arguments, ticket)
    except (InvalidArgument, Unsupported) as error:
        if not error.call_completed:
            # Every rank raises in this call, but not every rank may have come as far as an
            # operation, whose epochs would then differ between ranks: start afresh everywhere.
            ticket.refuse(error)
            calls.clear()
        raise


def _fields(arguments: Arguments) -> dict[str, Any]:
    """What must be equal on all ranks, as comparable values."""
    a, b, out_dtype = arguments.a, arguments.b, arguments.out_dtype
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
        "operation": arguments.make.operation,
        "n": b.shape[0],
        "k": b.shape[1],
        "dtype": dtype_name(b.dtype),
        "out_dtype": dtype_name(out_dtype or b.dtype),
        "device": b.device.type,
        **arguments.choice.names(),
        # Behind the names of the choice, which has two of them at their defaults.
        **{name: _comparable(value) for name, value in arguments.options.items()},
        "timeout_s": settings_module.current().timeout_s,
    }


def _comparable(value: Any) -> Any:
    return value if value is None or isinstance(value, bool | int | float) else str(value)
