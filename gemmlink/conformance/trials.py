"""One problem through one prepared operation: which class, which arguments, what must come out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from gemmlink.conformance import devices
from gemmlink.conformance.problems import Case
from gemmlink.core import wire
from gemmlink.operators import GemmAllGather, GemmAllReduce, GemmAllToAll, GemmReduceScatter
from gemmlink.prepared import Prepared

_CLASSES: Mapping[str, Any] = {
    each.operation: each for each in (GemmAllGather, GemmAllToAll, GemmReduceScatter, GemmAllReduce)
}
OPERATIONS = tuple(_CLASSES)
#: Operations whose ranks may have different M.
RAGGED = ("all_gather", "all_to_all")


@dataclass(frozen=True)
class Part:
    """Something that a call gives a rank, and what it must be, in float64."""

    name: str
    got: torch.Tensor
    want: torch.Tensor

    def wrong(self) -> str | None:
        """How it differs, as a sentence; None if it does not."""
        if self.got.shape != self.want.shape:
            return f"{self.name} has shape {tuple(self.got.shape)}, not {tuple(self.want.shape)}"
        got = self.got.cpu()
        bad = (got.double() != self.want).nonzero()
        if not len(bad):
            return None
        at = tuple(bad[0].tolist())
        return (
            f"{len(bad)} of {got.numel()} elements differ in {self.name}, first at {at}: "
            f"{got[at].item()} instead of {self.want[at].item()}"
        )


def operation_for(case: Case, max_m: int, **options: Any) -> Prepared:
    """The operation for a problem, not prepared yet. ``options`` as its class takes them."""
    if case.operation == "all_to_all":
        options["extent"] = case.extent
    made: Prepared = _CLASSES[case.operation](
        case.n, case.k, max_m, case.dtype, case.out_dtype, **options
    )
    return made


def called(
    operation: Any,
    case: Case,
    out: torch.Tensor | None = None,
    rows: Sequence[int] | None = None,
    wire_dtype: torch.dtype | None = None,
) -> list[Part]:
    """Collective: call it with this rank's share of the problem. The first part is the result.

    Raises what went wrong on a device, where a call itself does not.
    """
    rank, where = operation.group.rank, operation.launch.problem.device
    if devices.is_enqueued(where.type):
        rows = case.rows
    more = {"rows": rows} if rows is not None and case.operation in RAGGED else {}
    found = operation(case.a(rank).to(where), case.b(rank).to(where), out=out, **more)
    if devices.is_enqueued(where.type):
        devices.settle(where.type)
        operation.check()
    want = case.reference(rank)
    if case.operation != "all_to_all":
        return [Part("the result", found, _as_sent(want, case) if wire_dtype else want)]
    block = case.block(rank)
    extent = case.n if case.extent is None else case.extent
    parts = [Part("received", found.received, want), Part("local", found.local, block[:, extent:])]
    return parts if found.product is None else [*parts, Part("product", found.product, block)]


def _as_sent(want: torch.Tensor, case: Case) -> torch.Tensor:
    """Whole numbers as they arrive in a wire dtype, row by row: its rounding is the same always."""
    rows = want.to(case.out_dtype)
    encoded = torch.zeros(len(rows), wire.row_bytes(case.n), dtype=torch.uint8)
    arrived = torch.empty_like(rows)
    if len(rows):
        wire.encode(rows, encoded)
        wire.decode(encoded, arrived)
    return arrived.double()
