"""A schedule on a stream: the same steps as on the host, where words and moves are launches.

Products, sums and what stays private are torch's, enqueued on the current stream. Words, the gate,
the entry and the end of a call are ``gl_words``; what is stored in a peer's window, and what is
copied to the result, is ``gl_moves``, which reads a region once however many places it goes to.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, Protocol

from gemmlink.core.device.arguments import Copy, PreparedMoves, copy_of, packed
from gemmlink.core.device.blocks import Block, Exchange, Fan, Joined, Moves, Posted, blocks
from gemmlink.core.device.desk import Desk
from gemmlink.core.device.lanes import Lanes
from gemmlink.core.device.layout import Flag
from gemmlink.core.device.machine import Machine
from gemmlink.core.flatten import Placed
from gemmlink.core.interpret import CallState, HostProgram, Step
from gemmlink.core.memory import Memory
from gemmlink.core.products import Columns, Product, group
from gemmlink.errors import InvalidArgument, Unsupported
from gemmlink.spec.contracts import Backend
from gemmlink.spec.schedule import Deliver, Join, Schedule


class DeviceCallState(CallState, Protocol):
    """What a step may ask of its call, besides what the host's steps ask."""

    #: The stream that the call is enqueued on.
    stream: int
    fingerprint: int
    #: Whether every rank's M must be the own one, because nobody has said otherwise.
    same_rows: bool
    #: Every rank's M.
    rows: tuple[int, ...]


#: Launches that a step remembers: calls of few sizes need few.
_KNOWN = 64

#: What makes copies of one move; ``call.value`` changes with it as on the host.
_Maker = Callable[[DeviceCallState], Iterator[Copy]]


class DeviceProgram(HostProgram):
    """A schedule bound to windows, a backend and a device; ``run`` enqueues it once."""

    def __init__(
        self,
        schedule: Schedule,
        memory: Memory,
        backend: Backend,
        merge: bool,
        machine: Machine,
        desk: Desk,
        forks: bool = True,
    ) -> None:
        if any(phase.wire is not None for phase in memory.phases):
            raise Unsupported("a mover does not decode", f"a wire dtype on {machine.device}")
        self.machine = machine
        self.desk = desk
        addresses = addresses_of(memory)
        queues = {p.actor: p.lane for p in schedule.programs if p.lane is not None}
        self._queues = queues
        self._streams = Lanes(machine, desk, memory, addresses, queues, forks)
        self._private: list[Step] = []
        super().__init__(schedule, memory, backend, merge)

    def rehearse(self, call: DeviceCallState) -> None:
        """Do what is torch's in a call, products and sums, and nothing that peers would hear of."""
        for step in self._private:
            step.run(call)

    def release(self) -> None:
        """See ``HostProgram``."""
        super().release()
        self._private = []

    def _open_lanes(self, schedule: Schedule) -> None:
        self.lanes = {}  # no host feeds them: see ``lanes.Lanes``

    def _bind(self, placed: tuple[Placed, ...], merge: bool) -> list[Step]:
        items = group(placed, self._plan.chunks, self._phases if merge else None)
        return [self._step(block) for block in blocks(items, self._queues)]

    def _step(self, block: Block) -> Step:
        if isinstance(block, Product | Columns | Placed):
            self._private.append(self._torch_step(block))
            return self._private[-1]
        return Step(_placed(block), self._launched(block))

    def _torch_step(self, block: Product | Columns | Placed) -> Step:
        if isinstance(block, Product):
            return Step(block.placed, self._produce(block))
        if isinstance(block, Columns):
            return Step(block.placed, self._produce_columns(block))
        return Step(block, self._other(block.action))

    def _launched(self, block: Exchange | Moves | Posted | Joined) -> Callable[[Any], None]:
        if isinstance(block, Exchange):
            return self._exchange(block)
        if isinstance(block, Moves):
            return self._move(block)
        if isinstance(block, Posted):
            post = self._streams.post(block.actions)
            return lambda call: post(call, call.stream)
        return lambda call: self._streams.join(call.stream)

    # Words.

    def _exchange(self, block: Exchange) -> Callable[[DeviceCallState], None]:
        arguments = self.desk.arguments(block.sets, block.waits)
        words, slots = self.machine.words, self._plan.buffers
        ends = int(Flag.ENTERS) * block.enters | int(Flag.LEAVES) * block.leaves
        same_rows = int(Flag.SAME_ROWS)

        def step(call: DeviceCallState) -> None:
            if ends:
                arguments.flags = ends | same_rows * call.same_rows
                arguments.rows, arguments.fingerprint = call.m, call.fingerprint
                arguments.slots, arguments.slot = slots, call.epoch % slots
            if block.leaves:
                arguments.fill_with_nan(call.result())
            words(arguments, call.stream)

        return step

    # Moves.

    def _move(self, block: Moves) -> Callable[[DeviceCallState], None]:
        makers = [
            self._fan(move) if isinstance(move, Fan) else self._delivery(move)
            for move in block.moves
            if isinstance(move, Fan) or not self._plan.view
        ]
        for move in block.moves:
            self._refuse_other_views(move)
        launch, slots = self.machine.moves, self._plan.buffers
        delivers = any(isinstance(move, Deliver) for move in block.moves) and not self._plan.view
        known: dict[Hashable, PreparedMoves] = {}

        def prepared(call: DeviceCallState) -> PreparedMoves:
            result = call.result()
            if self._plan.keep or (delivers and not result.is_contiguous()):
                return self._prepared(makers, call)
            key = (call.rows, call.epoch % slots, result.data_ptr() % 16 if delivers else 0)
            if key not in known:
                if len(known) >= _KNOWN:
                    known.clear()
                known[key] = self._prepared(makers, call)
            return known[key]

        def step(call: DeviceCallState) -> None:
            found = prepared(call)
            if delivers:
                found.deliver_to(call.result())
            for arguments in found.launches:
                launch(arguments, call.stream)

        return step

    def _prepared(self, makers: Sequence[_Maker], call: DeviceCallState) -> PreparedMoves:
        copies = [copy for make in makers for copy in make(call)]
        return PreparedMoves(list(packed(self.desk.address, copies)), call.result())

    def _refuse_other_views(self, move: Fan | Deliver) -> None:
        if not self._plan.view or isinstance(move, Fan):
            return
        if move.window != self._plan.rank or move.area != "inbox":
            raise InvalidArgument("a view shows the own window's inbox", f"'{move}'")

    def _fan(self, fan: Fan) -> _Maker:
        load = None if fan.load is None else self._load(fan.load)
        finds = [self.memory.find(store.to, store.area, store.region) for store in fan.stores]

        def make(call: DeviceCallState) -> Iterator[Copy]:
            if load is not None:
                load(call)
            places = [find(call) for find in finds]
            first, last, _ = places[0]
            if last > first:
                yield copy_of(call.value, [place[2].data_ptr() for place in places])

        return make

    def _delivery(self, deliver: Deliver) -> _Maker:
        region = deliver.region
        find = self.memory.find(deliver.window, deliver.area, region)
        places = self.memory.places[region.phase]

        def make(call: DeviceCallState) -> Iterator[Copy]:
            first, last, place = find(call)
            result = call.result()
            start = places.result_row(region, call.rows_of(region.source), call.starts)
            target = result[start : start + last - first]
            if target.is_contiguous():
                yield copy_of(place, [target.data_ptr()])
            else:  # the caller's own strides: torch knows them all
                target.copy_(place)

        return make


def addresses_of(memory: Memory) -> Sequence[int]:
    """Where all ranks' windows are; set-up has seen to it that each has an address."""
    return [int(address or 0) for address in memory.window().addresses]


def _placed(block: Exchange | Moves | Posted | Joined) -> Placed:
    """The action that stands for a block, for whoever looks at the steps of a program."""
    if isinstance(block, Posted):
        return block.actions[0]
    if isinstance(block, Moves):
        move = block.moves[0]
        return Placed("mover", move.stores[0] if isinstance(move, Fan) else move)
    if isinstance(block, Exchange) and (block.sets or block.waits):
        return Placed("words", block.sets[0] if block.sets else block.waits[0])
    return Placed("words", Join("lanes"))
