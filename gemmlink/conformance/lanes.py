"""The contract of lanes, clause by clause; see ``spec.contracts.Lane``.

For transports whose ``Capabilities.lanes`` names something. What is checked of a copy's arrival is
what the transport promises: ``in_order``, that a word set in a lane follows the copies before it;
``after_drain``, that copies are there once the lane has drained.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time

import torch

from gemmlink.conformance.clauses import LIMIT_S, Desk, RankContract, clause, require, span
from gemmlink.errors import PeerTimeout

_LINE = 64
_DATA = 4096


class LaneContract(RankContract):
    """``Lane``: an ordered queue of copies to one peer. ``rounds``, ``payload`` as for words."""

    section = "transport/lane"
    rounds: int = 60
    payload: int = 1 << 21

    @clause
    def test_the_transport_has_lanes(self, desk: Desk) -> None:
        """This contract is for transports that have lanes; others leave it out."""
        require(bool(desk.capabilities.lanes), f"transport {desk.transport.name!r} has none")

    @clause
    def test_a_lane_is_the_same_object_each_time(self, desk: Desk) -> None:
        """``lane(peer, index)`` is the same object each time, another for another lane."""
        window = desk.window(_DATA)
        lanes = [window.lane(peer, index) for peer in desk.peers for index in range(2)]
        again = [window.lane(peer, index) for peer in desk.peers for index in range(2)]
        require(all(map(lambda a, b: a is b, lanes, again)), "a lane was made twice")
        require(len({id(lane) for lane in lanes}) == len(lanes), "two lanes are one object")
        desk.meet()

    @clause
    def test_copies_arrive(self, desk: Desk) -> None:
        """A copy carries bytes of the own window to a place in the peer's, and no others."""
        window = desk.window(_DATA + self.payload)
        own, middle = window.tensor(desk.rank), _DATA + self.payload // 2
        own[:1024] = 1 + desk.rank
        desk.meet()
        lane = window.lane(desk.peers[0], 0)
        lane.copy(1, middle + 3, 1000)
        lane.copy(0, window.nbytes - 1, 1)
        lane.drain(LIMIT_S)
        desk.meet()
        value = 1 + desk.peers[-1]
        ends = [int(own[at]) for at in (middle + 3, middle + 1002, window.nbytes - 1)]
        require(ends == [value] * 3, f"the ends of the copies hold {ends}, not {value}")
        beside = [int(own[at]) for at in (middle + 2, middle + 1003, window.nbytes - 2)]
        require(beside == [0] * 3, f"the bytes beside the copies hold {beside}")
        desk.meet()

    @clause
    def test_a_copy_is_there_when_it_is_announced(self, desk: Desk) -> None:
        """A word set in a lane follows the copies before it; or they are there after ``drain``."""
        window = desk.window(_DATA + 2 * self.payload)
        to, source = desk.peers[0], desk.peers[-1]
        send, take = _DATA, _DATA + self.payload
        lane = window.lane(to, 0)
        mine = window.tensor(desk.rank)[take:].view(torch.int64)
        in_order = "in_order" in desk.capabilities.lanes
        for turn in range(1, self.rounds + 1):
            window.tensor(desk.rank)[send:take].view(torch.int64).fill_(turn)
            lane.copy(send, take, self.payload)
            if in_order:
                lane.set(_LINE * desk.rank, turn)
            else:
                lane.drain(LIMIT_S)
                window.words.set(to, _LINE * desk.rank, turn)
            found = window.words.wait(_LINE * source, turn, LIMIT_S)
            require(found >= turn, f"the word of turn {turn} never came: {found}")
            low, high = span(mine)
            require((low, high) == (turn, turn), f"data {turn} announced, {low}..{high} found")
            lane.drain(LIMIT_S)
            window.words.set(source, _LINE * (desk.world + desk.rank), turn)
            window.words.wait(_LINE * (desk.world + to), turn, LIMIT_S)
        desk.meet()

    @clause
    def test_sources_may_be_overwritten_after_drain(self, desk: Desk) -> None:
        """After ``drain`` all sources enqueued may be overwritten."""
        window = desk.window(_DATA + 2 * self.payload)
        send, take = _DATA, _DATA + self.payload
        own, lane = window.tensor(desk.rank), window.lane(desk.peers[0], 0)
        for turn in range(1, 11):
            own[send:take].fill_(turn)
            lane.copy(send, take, self.payload)
            lane.drain(LIMIT_S)
            own[send:take].fill_(255)
            desk.meet()
            found = span(own[take:])
            require(found == (turn, turn), f"copy {turn} brought {found}")
            desk.meet()

    @clause
    def test_drain_is_bounded(self, desk: Desk) -> None:
        """``drain`` raises ``PeerTimeout`` after its limit, or has drained; it does not hang."""
        window = desk.window(_DATA + 2 * self.payload)
        lane = window.lane(desk.peers[0], 0)
        for _ in range(200):
            lane.copy(_DATA, _DATA + self.payload, self.payload)
        started = time.monotonic()
        with contextlib.suppress(PeerTimeout):
            lane.drain(0.001)
        took = time.monotonic() - started
        require(took < 2.0, f"drain within 1 ms took {took:.1f} s")
        lane.drain(LIMIT_S)
        desk.meet()

    @clause
    def test_an_empty_lane_has_drained(self, desk: Desk) -> None:
        """A lane that nothing was enqueued in has drained, whatever the limit."""
        lane = desk.window(_DATA).lane(desk.peers[0], 0)
        lane.drain(0.0)
        desk.meet()

    @clause
    def test_lanes_end_with_the_window(self, desk: Desk) -> None:
        """Lanes end with the window: after ``free`` nothing of them is left running."""
        session = desk.open()
        before = _tasks()
        window = session.window(_DATA)
        for peer in desk.peers:
            for index in range(2):
                window.lane(peer, index).copy(0, _LINE, 8)
                window.lane(peer, index).drain(LIMIT_S)
        desk.meet()
        window.free()
        deadline = time.monotonic() + LIMIT_S
        while (left := _tasks() - before) and time.monotonic() < deadline:
            time.sleep(0.01)
        require(not left, f"threads that run after free and did not before: {sorted(left)}")


def _tasks() -> set[str]:
    """This process's threads, as the system numbers them, with the names that Python knows."""
    names = {str(thread.native_id): thread.name for thread in threading.enumerate()}
    return {f"{task} {names.get(task, '')}".strip() for task in os.listdir("/proc/self/task")}
