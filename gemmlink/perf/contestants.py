"""What a bench measures. Every contestant takes inputs, runs once per call, and can be checked.

| role | what | what it must hold afterwards |
| --- | --- | --- |
| ``mode`` | a prepared operation | the whole result |
| ``unfused`` | a plain torch product, then the library's all-gather | the whole result |
| ``gemm`` | a product of this rank's rows, nothing sent | the own rows |
| ``move`` | a product that is ready, sent to all ranks | the whole result |

All write into memory that is theirs from the start: no call allocates a result.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, Protocol, cast

import torch
import torch.distributed as dist

from gemmlink import plugins
from gemmlink.core.compose import ALIASES, Choice, compose
from gemmlink.errors import PeerTimeout
from gemmlink.operators import GemmAllGather
from gemmlink.rendezvous import next_key
from gemmlink.spec import operations
from gemmlink.spec.contracts import Backend, Group, Transport
from gemmlink.spec.problem import Problem
from gemmlink.spec.schedule import Word
from gemmlink.spec.window import WindowLayout, inbox

Role = Literal["mode", "unfused", "gemm", "move"]
Multiply = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Any]

_LIMIT_S = 60.0

# Later releases of torch have a new name for it and warn about the old one.
_library_call: Callable[..., Any] = (
    getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
)


@dataclass(frozen=True)
class Label:
    """What a row says about who was measured. ``chunks`` is 0 where nothing is cut."""

    mode: str
    epilogue: str
    fused: bool
    transport: str
    backend: str
    chunks: int
    complete: bool
    result: str = "copy"


@dataclass(frozen=True)
class Field:
    """The problem of one run as one rank sees it: every rank has ``problem.capacity`` rows."""

    group: Group
    problem: Problem

    def empty(self, ranks: int) -> torch.Tensor:
        """Room for the products of ``ranks`` ranks, ``(ranks * M, n)``."""
        problem = self.problem
        return torch.empty(ranks * problem.capacity, problem.n, dtype=problem.out_dtype)

    def own(self, gathered: torch.Tensor) -> torch.Tensor:
        """This rank's rows of a gathered tensor."""
        first = self.group.rank * self.problem.capacity
        return gathered[first : first + self.problem.capacity]


class Contestant(Protocol):
    """See the module's docstring. ``out`` is where the result lies."""

    role: Role
    label: Label
    out: torch.Tensor

    def load(self, a: torch.Tensor, b: torch.Tensor, product: torch.Tensor) -> None:
        """Take the inputs of the next runs, and their product ``(M, n)`` in the output's dtype."""

    def run(self) -> None:
        """One call. This is what is timed."""

    def close(self) -> None:
        """Give everything back."""


class Mode:
    """A prepared ``GemmAllGather``. Making one is collective."""

    role: Role = "mode"

    def __init__(self, field: Field, choice: Choice) -> None:
        problem = field.problem
        self._op = GemmAllGather(
            problem.n,
            problem.k,
            problem.capacity,
            problem.dtype,
            problem.out_dtype,
            problem.device,
            field.group,
            transport=choice.transport,
            epilogue=choice.epilogue,
            backend=choice.backend,
            chunks=choice.chunks,
            result="view" if choice.view else "copy",
        ).prepare()
        self._view = choice.view
        parts = self._op.launch.parts
        # From the composition that runs, not from what was asked for: a row must not claim a mode
        # that was replaced on the way.
        self.label = Label(
            parts.mode,
            parts.epilogue.name,
            parts.fused,
            parts.transport_name,
            parts.backend.name,
            parts.chunks,
            parts.epilogue.complete,
            "view" if choice.view else "copy",
        )
        self.out = field.empty(0 if self._view else field.group.world)

    def load(self, a: torch.Tensor, b: torch.Tensor, product: torch.Tensor) -> None:
        self._inputs = a, b

    def run(self) -> None:
        if self._view:
            self.out = self._op(*self._inputs)
        else:
            self._op(*self._inputs, out=self.out)

    def poison(self) -> None:
        """Fill the output with NaN. A view is filled behind torch's back, which would object."""
        if self._view:
            ctypes.memset(self.out.data_ptr(), 0xFF, self.out.numel() * self.out.itemsize)
        else:
            self.out.fill_(torch.nan)

    def close(self) -> None:
        self._op.close()


class Unfused:
    """A torch product and the library's all-gather over the default group."""

    role: Role = "unfused"

    def __init__(self, field: Field, name: str, multiply: Multiply) -> None:
        self.label = Label("unfused", "none", False, "none", name, 1, True)
        self.out = field.empty(field.group.world)
        self._product = field.empty(1)
        self._multiply = multiply

    def load(self, a: torch.Tensor, b: torch.Tensor, product: torch.Tensor) -> None:
        self._inputs = a, b

    def run(self) -> None:
        self._multiply(*self._inputs, self._product)
        all_gather(self.out, self._product)

    def close(self) -> None:
        pass


class Product:
    """A product of the own rows; nothing is sent."""

    role: Role = "gemm"

    def __init__(self, field: Field, name: str, multiply: Multiply) -> None:
        self.label = Label("gemm-only", "none", False, "none", name, 1, False)
        self.out = field.empty(1)
        self._multiply = multiply

    def load(self, a: torch.Tensor, b: torch.Tensor, product: torch.Tensor) -> None:
        self._inputs = a, b

    def run(self) -> None:
        self._multiply(*self._inputs, self.out)

    def close(self) -> None:
        pass


class Gather:
    """The library's all-gather of products that are ready."""

    role: Role = "move"

    def __init__(self, field: Field) -> None:
        self.label = Label("comm-library", "none", False, "none", "none", 0, False)
        self.out = field.empty(field.group.world)
        self._product = field.empty(1)

    def load(self, a: torch.Tensor, b: torch.Tensor, product: torch.Tensor) -> None:
        self._product.copy_(product)

    def run(self) -> None:
        all_gather(self.out, self._product)

    def close(self) -> None:
        pass


class Stores:
    """Plain stores of a ready product into every peer's window, and a word behind them.

    No gate and no copy out of the window: nothing reads the slots between calls. The own block
    stays where it is, as a product can be computed in place. Making one is collective.
    """

    role: Role = "move"

    def __init__(self, field: Field, transport: Transport) -> None:
        group, problem = field.group, field.problem
        self.label = Label("comm-stores", "none", False, transport.name, "none", 0, False)
        self._layout = WindowLayout(group.world, 1, inbox(group.world, problem.slot_bytes))
        self._session = transport.open(group, key=next_key(group, "stores"), timeout_s=_LIMIT_S)
        self._window = self._session.window(self._layout.nbytes)
        self._rank, self._world, self._calls = group.rank, group.world, 0
        self._peers = [(group.rank + step) % group.world for step in range(1, group.world)]
        self._places = [field.own(self._slots(peer, problem)) for peer in self._peers]
        self._product = field.empty(1)
        self._own = field.own(self._slots(group.rank, problem))
        self.out = self._slots(group.rank, problem)

    def load(self, a: torch.Tensor, b: torch.Tensor, product: torch.Tensor) -> None:
        self._product.copy_(product)

    def run(self) -> None:
        self._calls += 1
        words = self._window.words
        for peer, place in zip(self._peers, self._places, strict=True):
            place.copy_(self._product)
            words.set(peer, self._layout.word(Word("arrive", self._rank)), self._calls)
        for peer in self._peers:
            self._await(peer)

    def finish(self) -> None:
        """Put the own block beside the others, so that the slots can be compared as a whole."""
        self._own.copy_(self._product)

    def close(self) -> None:
        self._session.close()

    def _await(self, peer: int) -> None:
        offset = self._layout.word(Word("arrive", peer))
        if self._window.words.wait(offset, self._calls, _LIMIT_S) < self._calls:
            raise PeerTimeout(
                f"rank {peer} must store its block within {_LIMIT_S:g} s",
                f"nothing at rank {self._rank} in call {self._calls}",
                peer=peer,
            )

    def _slots(self, owner: int, problem: Problem) -> torch.Tensor:
        first = self._layout.area(0, "inbox")
        raw = self._window.tensor(owner)[first : first + self._world * problem.slot_bytes]
        return raw.view(problem.out_dtype).view(self._world * problem.capacity, problem.n)


def all_gather(out: torch.Tensor, block: torch.Tensor) -> None:
    """The library's all-gather, as bytes: gloo does not know every dtype in every release."""
    _library_call(out.view(torch.uint8), block.view(torch.uint8))


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
        operation = operations.all_gather(field.group.world, field.problem.n)
        parts = compose(field.problem, field.group.world, choice, operation)
    except Exception:  # told by whoever tries to prepare it
        name = ALIASES.get(str(choice.epilogue), str(choice.epilogue))
        bare = name.removeprefix("fused-").removeprefix("split-")
        fused = name.startswith("fused-")
        asked = Label(name, bare, fused, choice.transport, choice.backend, 0, True)
        result = "view" if choice.view else "copy"
        return replace(asked, chunks=choice.chunks or 0, result=result)
    return Label(
        parts.mode,
        parts.epilogue.name,
        parts.fused,
        parts.transport_name,
        parts.backend.name,
        parts.chunks,
        parts.epilogue.complete,
        "view" if choice.view else "copy",
    )


def bare(field: Field, backend: Any, transport: Any) -> list[Callable[[], Contestant]]:
    """Makers of everything that is not a mode. Call them in this order on every rank."""
    makers: list[Callable[[], Contestant]] = []
    multiplies = dict(spellings(field.problem))
    for name, multiply in multiplies.items():
        makers.append(partial(Unfused, field, name, multiply))
    multiplies |= _backend_multiply(backend)
    for name, multiply in multiplies.items():
        makers.append(partial(Product, field, name, multiply))
    makers.append(partial(Gather, field))
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
