"""Lanes on a device: side streams that fork from the stream of the call and are joined by it.

Where ranks are threads that share a context, lanes are that stream itself. Streams of one context
share its hardware queues, whoever made them: a copy behind which one rank waits would stand in a
queue behind that rank's wait. Each rank's own order, on one stream, cannot.

The gate stands in the call's own stream, before the fork. Behind each copy the same stream sets the
arrival word, by a kernel that sets nothing once the call has failed.

A copy that a copy engine makes cannot be told not to. After a failed gate it may so overwrite what
a peer still reads. A peer that copies its result out learns that within the same call (it looks at
abort words behind its reads). One that has handed out a view would not: there lanes use the guarded
mover, which takes multiprocessors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gemmlink.core.device.arguments import Copy as Bytes
from gemmlink.core.device.arguments import packed
from gemmlink.core.device.desk import Desk
from gemmlink.core.device.machine import Machine
from gemmlink.core.flatten import Placed
from gemmlink.core.interpret import CallState
from gemmlink.core.memory import Memory
from gemmlink.errors import Unsupported
from gemmlink.spec.schedule import Copy, Set

#: What a lane does at one point of a call, on a stream.
Order = Callable[[CallState, int], None]


@dataclass
class _Lane:
    stream: int
    ended: int
    used: bool = False


class Lanes:
    """The lanes of one operation, by the queue (peer, index) that each is.

    ``forks``: whether they have streams of their own.
    """

    def __init__(
        self,
        machine: Machine,
        desk: Desk,
        memory: Memory,
        addresses: Sequence[int],
        queues: dict[str, tuple[int, int]],
        forks: bool = True,
    ) -> None:
        self._machine = machine
        self._desk = desk
        self._memory = memory
        self._addresses = addresses
        self._queues = queues
        self._lanes: dict[tuple[int, int], _Lane] = {}
        if forks and queues:
            self._fork = machine.event()
            for queue in dict.fromkeys(queues.values()):
                self._lanes[queue] = _Lane(machine.new_stream(), machine.event())

    def post(self, actions: Sequence[Placed]) -> Callable[[CallState, int], None]:
        """What gives the lanes these actions, behind all that its stream has been given."""
        if not self._lanes:
            return self._in_line([self._order(item) for item in actions])
        orders = [(self._lanes[self._queues[item.actor]], self._order(item)) for item in actions]
        lanes = list({id(lane): lane for lane, _ in orders}.values())

        def step(call: CallState, stream: int) -> None:
            self._machine.record(self._fork, stream)
            for lane in lanes:
                self._machine.wait(lane.stream, self._fork)
                lane.used = True
            for lane, order in orders:
                order(call, lane.stream)

        return step

    def join(self, stream: int) -> None:
        """Let ``stream`` wait for all that the lanes have been given."""
        for lane in self._lanes.values():
            if lane.used:
                self._machine.record(lane.ended, lane.stream)
                self._machine.wait(stream, lane.ended)
                lane.used = False

    def _in_line(self, orders: Sequence[Order]) -> Callable[[CallState, int], None]:
        def step(call: CallState, stream: int) -> None:
            for order in orders:
                order(call, stream)

        return step

    def _order(self, item: Placed) -> Order:
        action = item.action
        if isinstance(action, Set):
            arguments = self._desk.arguments([action], [])
            return lambda call, stream: self._machine.words(arguments, stream)
        if isinstance(action, Copy):
            return self._copy(action)
        raise Unsupported("a lane copies and sets words", f"'{action}'")

    def _copy(self, action: Copy) -> Order:
        source = self._memory.offset(action.area, action.region)
        target = self._memory.offset("inbox", action.region)
        own, theirs = self._addresses[self._memory.plan.rank], self._addresses[action.to]
        guarded = self._memory.plan.view

        def order(call: CallState, stream: int) -> None:
            start, nbytes = source(call)
            if not nbytes:
                return
            here, there = own + start, theirs + target(call)[0]
            if not guarded:
                self._machine.copy(there, here, nbytes, stream)
                return
            for arguments in packed(self._desk.address, [Bytes(here, 0, nbytes, 1, (there,))]):
                self._machine.moves(arguments, stream)

        return order
