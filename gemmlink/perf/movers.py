"""The fastest ways to move what an operation moves, without multiplying or adding: for the bound.

What travels in a phase lies ready, packed, a part for each receiver. Where products are summed, the
parts of the first phase arrive and are not added; those of the second are ready sums.
"""

from __future__ import annotations

import torch

from gemmlink.errors import PeerTimeout
from gemmlink.perf.field import Field, Held, Inputs, Label, Role, Truth
from gemmlink.perf.rivals import all_gather, all_to_all, refuse_uneven
from gemmlink.rendezvous import next_key
from gemmlink.spec.contracts import Transport
from gemmlink.spec.operations import Phase
from gemmlink.spec.schedule import Word
from gemmlink.spec.window import AreaBytes, WindowLayout

_LIMIT_S = 60.0


class Cargo:
    """What this rank sends in one phase, and the shape of what comes from each source."""

    def __init__(self, field: Field, phase: Phase) -> None:
        self._field = field
        self.phase = phase
        world, m = field.group.world, field.problem.capacity
        width = phase.routes[0].width
        bands = [(field.band_of(rank), width) for rank in range(world)]
        if phase.source == "sum":
            self.arriving, sent = bands, [bands[field.group.rank]]
        elif phase.sums:
            self.arriving, sent = [bands[field.group.rank]] * world, bands
        else:
            self.arriving, sent = [(m, width)] * world, [(m, width)] * len(phase.sent())
        #: What is sent, by the index of its route.
        self.parts = [field.empty(*shape) for shape in sent]
        rows = max(shape[0] for shape in (*self.arriving, *sent))
        #: Bytes of the largest part of any rank.
        self.slot_bytes = rows * width * field.problem.out_dtype.itemsize

    def load(self, inputs: Inputs) -> None:
        """Pack what is sent."""
        if self.phase.source == "sum":
            self.parts[0].copy_(inputs.band)
            return
        for number, part in enumerate(self.parts):
            part.copy_(self._field.part(inputs.product, number))


def cargoes(field: Field) -> list[Cargo]:
    """That of each phase."""
    return [Cargo(field, phase) for phase in field.operation.phases]


class Library:
    """The library's collectives of what is ready, over the default group."""

    role: Role = "move"

    def __init__(self, field: Field) -> None:
        self.label = Label("comm-library", "none", False, "none", "none", 0, False)
        self._cargoes = cargoes(field)
        if field.operation.phases[0].sums:
            refuse_uneven(field)
        # Blocks lie one behind the other, as the library wants them.
        self._sent = [field.empty(len(each.parts), *each.parts[0].shape) for each in self._cargoes]
        self._came = [field.empty(len(each.arriving), *each.arriving[0]) for each in self._cargoes]
        for each, sent in zip(self._cargoes, self._sent, strict=True):
            each.parts = list(sent)

    def load(self, inputs: Inputs) -> None:
        for each in self._cargoes:
            each.load(inputs)

    def run(self) -> None:
        for each, sent, came in zip(self._cargoes, self._sent, self._came, strict=True):
            if each.phase.name == "gather":
                all_gather(came, sent)
            else:
                all_to_all(came, sent)

    def poison(self) -> None:
        for came in self._came:
            came.fill_(torch.nan)

    def held(self, truth: Truth) -> Held:
        return [
            pair
            for each, came in zip(self._cargoes, self._came, strict=True)
            for pair in zip(came, truth.arrived(each.phase), strict=True)
        ]

    def close(self) -> None:
        pass


class Stores:
    """Plain stores of what is ready into every peer's window, and a word behind them.

    No gate and no copy out of the window: nothing reads the slots between calls. The own part
    stays where it is, as a product can be computed in place. Making one is collective.
    """

    role: Role = "move"

    def __init__(self, field: Field, transport: Transport) -> None:
        group = field.group
        self.label = Label("comm-stores", "none", False, transport.name, "none", 0, False)
        self._cargoes = cargoes(field)
        areas = tuple(
            AreaBytes(number, "inbox", group.world * each.slot_bytes)
            for number, each in enumerate(self._cargoes)
        )
        self._layout = WindowLayout(group.world, 1, areas, phases=len(areas))
        self._session = transport.open(group, key=next_key(group, "stores"), timeout_s=_LIMIT_S)
        self._window = self._session.window(self._layout.nbytes)
        self._rank, self._calls = group.rank, 0
        self._peers = [(group.rank + step) % group.world for step in range(1, group.world)]
        self._dtype = field.problem.out_dtype
        self._places = [
            {peer: self._slot(number, peer, group.rank) for peer in range(group.world)}
            for number in range(len(self._cargoes))
        ]

    def load(self, inputs: Inputs) -> None:
        for each in self._cargoes:
            each.load(inputs)

    def run(self) -> None:
        self._calls += 1
        for number, each in enumerate(self._cargoes):
            offset = self._layout.word(Word("arrive", self._rank, phase=number))
            for peer in self._peers:
                self._places[number][peer].copy_(each.parts[each.phase.part_for(peer)])
                self._window.words.set(peer, offset, self._calls)
            for peer in self._peers:
                self._await(number, peer)

    def poison(self) -> None:
        for number, each in enumerate(self._cargoes):
            for source in range(len(each.arriving)):
                self._slot(number, self._rank, source).fill_(torch.nan)

    def held(self, truth: Truth) -> Held:
        """What came; the own parts beside it, which need not move."""
        found = []
        for number, each in enumerate(self._cargoes):
            own = each.parts[each.phase.part_for(self._rank)]
            self._places[number][self._rank].copy_(own)
            for source, wanted in enumerate(truth.arrived(each.phase)):
                found.append((self._slot(number, self._rank, source), wanted))
        return found

    def close(self) -> None:
        self._session.close()

    def _await(self, number: int, peer: int) -> None:
        offset = self._layout.word(Word("arrive", peer, phase=number))
        if self._window.words.wait(offset, self._calls, _LIMIT_S) < self._calls:
            raise PeerTimeout(
                f"rank {peer} must store its part within {_LIMIT_S:g} s",
                f"nothing at rank {self._rank} in call {self._calls}",
                peer=peer,
            )

    def _slot(self, number: int, owner: int, source: int) -> torch.Tensor:
        """Where in ``owner``'s window the part of ``source`` lies."""
        each = self._cargoes[number]
        if each.phase.source == "sum" or owner == self._rank:
            rows, width = each.arriving[source]
        else:
            rows, width = each.parts[each.phase.part_for(owner)].shape
        first = self._layout.area(number, "inbox") + source * each.slot_bytes
        raw = self._window.tensor(owner)[first : first + rows * width * self._dtype.itemsize]
        return raw.view(self._dtype).view(rows, width)
