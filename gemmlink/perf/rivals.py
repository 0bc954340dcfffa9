"""What modes compete with: a plain torch product, then the library's collective, on torch's group.

An operation may have several ways to get from a product to the result; each is measured with each
spelling of the product, and the fastest is the rival.

| operation | way | what happens to the product |
| --- | --- | --- |
| all_gather | | it is gathered |
| all_to_all | ``packed`` | its columns are copied into a send buffer, which is exchanged |
| all_to_all | ``shards`` | one for each peer, straight into the send buffer |
| reduce_scatter | ``reduce_scatter`` | it is reduced and scattered |
| reduce_scatter | ``all_reduce`` | it is reduced everywhere, and the own band copied |
| all_reduce | | it is reduced in place |

Torch's blocks have equal sizes: bands need rows that are a multiple of the world.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from gemmlink.errors import Unsupported
from gemmlink.perf.field import Field, Held, Inputs, Label, Role, Truth
from gemmlink.spec.problem import Problem

Multiply = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Any]

# Later releases of torch have new names for these and warn about the old ones.
_gather: Callable[..., Any] = (
    getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
)
_reduce_scatter: Callable[..., Any] = (
    getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
)


class Way:
    """How a product becomes the result. ``out`` and ``kept`` are where that lies."""

    #: Behind the spelling's name, where an operation has several ways.
    name = ""

    def __init__(self, field: Field) -> None:
        self._field = field
        self.out = field.empty(field.rows, field.width)
        self.kept = field.empty(field.problem.capacity, 0)
        self._product = field.empty(field.problem.capacity, field.problem.n)

    def run(self, multiply: Multiply, a: torch.Tensor, b: torch.Tensor) -> None:
        """Multiply and exchange."""
        raise NotImplementedError


class Gathered(Way):
    def run(self, multiply: Multiply, a: torch.Tensor, b: torch.Tensor) -> None:
        multiply(a, b, self._product)
        all_gather(self.out, self._product)


class Packed(Way):
    name = "packed"

    def __init__(self, field: Field) -> None:
        super().__init__(field)
        world, m = field.group.world, field.problem.capacity
        self._send = field.empty(world, m, field.width)
        sent = self._product[:, : world * field.width]
        shape, (pitch, _) = (world, m, field.width), self._product.stride()
        #: The same columns, a matrix for each peer.
        self._columns = sent.as_strided(shape, (field.width, pitch, 1))
        self.kept = self._product[:, world * field.width :]

    def run(self, multiply: Multiply, a: torch.Tensor, b: torch.Tensor) -> None:
        multiply(a, b, self._product)
        self._send.copy_(self._columns)
        all_to_all(self.out, self._send)


class Shards(Way):
    name = "shards"

    def __init__(self, field: Field) -> None:
        super().__init__(field)
        world, m = field.group.world, field.problem.capacity
        self._send = field.empty(world, m, field.width)
        self.kept = field.empty(m, field.stays)

    def run(self, multiply: Multiply, a: torch.Tensor, b: torch.Tensor) -> None:
        width = self._field.width
        for peer, block in enumerate(self._send):
            multiply(a, b[peer * width : (peer + 1) * width], block)
        if self._field.stays:
            multiply(a, b[len(self._send) * width :], self.kept)
        all_to_all(self.out, self._send)


class Reduced(Way):
    def run(self, multiply: Multiply, a: torch.Tensor, b: torch.Tensor) -> None:
        multiply(a, b, self.out)
        dist.all_reduce(self.out)


class Scattered(Way):
    name = "reduce_scatter"

    def __init__(self, field: Field) -> None:
        super().__init__(field)
        refuse_uneven(field)

    def run(self, multiply: Multiply, a: torch.Tensor, b: torch.Tensor) -> None:
        multiply(a, b, self._product)
        _reduce_scatter(self.out, self._product)


class Cut(Way):
    name = "all_reduce"

    def run(self, multiply: Multiply, a: torch.Tensor, b: torch.Tensor) -> None:
        multiply(a, b, self._product)
        dist.all_reduce(self._product)
        self.out.copy_(self._field.part(self._product, self._field.group.rank))


#: For each operation.
WAYS: Mapping[str, tuple[type[Way], ...]] = {
    "all_gather": (Gathered,),
    "all_to_all": (Packed, Shards),
    "reduce_scatter": (Scattered, Cut),
    "all_reduce": (Reduced,),
}


class Unfused:
    """A torch product and the library's collective over the default group."""

    role: Role = "unfused"

    def __init__(self, field: Field, name: str, multiply: Multiply, way: type[Way]) -> None:
        spelling = f"{name}, {way.name}" if way.name else name
        self.label = Label("unfused", "none", False, "none", spelling, 1, True)
        self._way = way(field)
        self._multiply = multiply

    def load(self, inputs: Inputs) -> None:
        self._inputs = inputs.a, inputs.b

    def run(self) -> None:
        self._way.run(self._multiply, *self._inputs)

    def poison(self) -> None:
        self._way.out.fill_(torch.nan)
        self._way.kept.fill_(torch.nan)

    def held(self, truth: Truth) -> Held:
        return [(self._way.out, truth.result), (self._way.kept, truth.stays)]

    def close(self) -> None:
        pass


class Product:
    """A product of the own rows; nothing is sent."""

    role: Role = "gemm"

    def __init__(self, field: Field, name: str, multiply: Multiply) -> None:
        self.label = Label("gemm-only", "none", False, "none", name, 1, False)
        self._out = field.empty(field.problem.capacity, field.problem.n)
        self._multiply = multiply

    def load(self, inputs: Inputs) -> None:
        self._inputs = inputs.a, inputs.b

    def run(self) -> None:
        self._multiply(*self._inputs, self._out)

    def poison(self) -> None:
        self._out.fill_(torch.nan)

    def held(self, truth: Truth) -> Held:
        return [(self._out, truth.block)]

    def close(self) -> None:
        pass


def all_gather(out: torch.Tensor, block: torch.Tensor) -> None:
    """The library's all-gather, as bytes: gloo does not know every dtype in every release."""
    _gather(out.view(-1).view(torch.uint8), block.view(-1).view(torch.uint8))


def all_to_all(out: torch.Tensor, blocks: torch.Tensor) -> None:
    """The library's exchange of equal blocks, as bytes."""
    dist.all_to_all_single(out.view(-1).view(torch.uint8), blocks.view(-1).view(torch.uint8))


def refuse_uneven(field: Field) -> None:
    """Raise ``Unsupported`` where ranks' bands differ."""
    rows, world = field.problem.capacity, field.group.world
    if rows % world:
        raise Unsupported(
            "the library reduces and gathers bands of equal size", f"{rows} rows on {world} ranks"
        )


def spellings(problem: Problem) -> Mapping[str, Multiply]:
    """The ways to write the product in plain torch that meet the contract's accuracy.

    ``torch.mm(a, b.T).float()`` is not among them: it rounds twice. Nor is a product with weights
    that are kept in float32: that is another program, with twice the weights.
    """
    widened = {"float+torch.mm": _widened}
    if problem.dtype == torch.float32:
        return {"torch.mm": _plain}
    return widened if problem.out_dtype == torch.float32 else {"torch.mm": _plain, **widened}


def _plain(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
    torch.mm(a, b.T, out=out)


def _widened(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
    if out.dtype == torch.float32:
        torch.mm(a.float(), b.float().T, out=out)
    else:
        out.copy_(a.float() @ b.float().T)
