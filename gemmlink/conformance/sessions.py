"""The contract of a transport and its sessions, clause by clause; see ``spec.contracts``."""

from __future__ import annotations

import os
import threading
import time

from gemmlink.conformance.clauses import (
    LIMIT_S,
    Desk,
    RankContract,
    clause,
    last_clause,
    require,
    span,
)
from gemmlink.errors import PeerTimeout
from gemmlink.spec.contracts import INTERFACE, Capabilities

_LANES = ((), ("in_order",), ("after_drain",), ("in_order", "after_drain"))
#: What something that never waits for a peer may take on a busy machine, in seconds.
_AT_ONCE_S = 2.0


class TransportContract(RankContract):
    """``Transport`` and ``Session``: opening, meeting, watching and closing."""

    section = "transport/session"

    @clause
    def test_it_has_a_name_and_is_written_for_this_interface(self, desk: Desk) -> None:
        """A transport has a name, and states the version of the contracts it was written for."""
        transport = desk.transport
        require(bool(transport.name), f"name is {transport.name!r}")
        require(transport.interface == INTERFACE, f"interface is {transport.interface}")

    @clause
    def test_probe_states_what_this_machine_offers(self, desk: Desk) -> None:
        """``probe`` returns capabilities in the contract's words, the same each time."""
        found = desk.transport.probe()
        require(isinstance(found, Capabilities), f"probe returned {found!r}")
        require(bool(found.memory), "memory names no device type")
        require(found.lanes in _LANES, f"lanes is {found.lanes!r}, not one of {_LANES}")
        again = desk.transport.probe()
        for name in ("memory", "host_words", "host_data", "lanes", "one_host"):
            first, second = getattr(found, name), getattr(again, name)
            require(first == second, f"{name} was {first!r} and then {second!r}")

    @clause
    def test_probe_leaves_nothing_behind(self, desk: Desk) -> None:
        """``probe`` is local and cheap, and allocates nothing that outlives the call."""
        desk.transport.probe()
        before, started = _belongings(), time.monotonic()
        for _ in range(10):
            desk.transport.probe()
        took = (time.monotonic() - started) / 10
        require(took < 0.5, f"a probe takes {took:.2f} s")
        after = _belongings()
        require(after == before, f"(open files, threads) went from {before} to {after}")

    @clause
    def test_a_session_knows_its_rank_and_world(self, desk: Desk) -> None:
        """A session has the rank and the world of the group it was opened over."""
        session = desk.open()
        found = (session.rank, session.world)
        require(found == (desk.rank, desk.world), f"rank and world are {found}")

    @clause
    def test_several_sessions_live_at_once(self, desk: Desk) -> None:
        """There may be several sessions at once; closing one leaves the others usable."""
        first, second = desk.open(), desk.open()
        one, two = first.window(4096), second.window(4096)
        one.tensor(desk.rank).fill_(1)
        two.tensor(desk.rank).fill_(2)
        desk.meet()
        first.close()
        desk.meet()
        for peer in range(desk.world):
            values = span(two.tensor(peer))
            require(values == (2, 2), f"after another session's close rank {peer} shows {values}")
        second.barrier(LIMIT_S)
        desk.meet()

    @clause
    def test_a_barrier_waits_for_every_rank(self, desk: Desk) -> None:
        """``barrier`` returns once every rank has called it."""
        session = desk.open()
        window = session.window(4096)
        for turn in range(1, 2 * desk.world + 1):
            if turn % desk.world == desk.rank:
                time.sleep(0.1)
            for peer in range(desk.world):
                window.tensor(peer)[64 * desk.rank] = turn
            session.barrier(LIMIT_S)
            seen = window.tensor(desk.rank)[: 64 * desk.world : 64].tolist()
            require(
                min(seen) >= turn,
                f"barrier {turn} returned while ranks had come to barriers {seen}",
            )

    @clause
    def test_a_barrier_is_bounded(self, desk: Desk) -> None:
        """``barrier`` raises ``PeerTimeout`` when a rank does not come within the limit."""
        session = desk.open()
        if desk.rank != desk.world - 1:
            started = time.monotonic()
            try:
                session.barrier(0.3)
            except PeerTimeout:
                took = time.monotonic() - started
                require(took < 0.3 + _AT_ONCE_S, f"it took {took:.1f} s to raise after 0.3 s")
            else:
                raise AssertionError(f"it returned although rank {desk.world - 1} never came")
        desk.meet()

    @clause
    def test_a_living_peer_is_not_called_dead(self, desk: Desk) -> None:
        """``alive`` is True for a process that exists, or None if unknown; it never waits."""
        session = desk.open()
        for peer in range(desk.world):
            started = time.monotonic()
            found = session.alive(peer)
            took = time.monotonic() - started
            require(found is True or found is None, f"alive({peer}) is {found!r}")
            require(took < _AT_ONCE_S, f"alive({peer}) took {took:.1f} s")
        desk.meet()

    @clause
    def test_close_is_idempotent_and_waits_for_nobody(self, desk: Desk) -> None:
        """``close`` frees all windows, may be called again, and never waits for a peer."""
        session = desk.open()
        window = session.window(4096)
        desk.meet()
        if desk.rank == 0:  # the others are still inside
            started = time.monotonic()
            session.close()
            session.close()
            window.free()
            took = time.monotonic() - started
            require(took < _AT_ONCE_S, f"close took {took:.1f} s while the peers were at work")
        desk.meet()
        if desk.rank:
            window.tensor(desk.rank).fill_(3)
        desk.meet()

    @last_clause
    def test_a_dead_peer_is_noticed_and_not_waited_for(self, desk: Desk) -> None:
        """A peer whose process has ended is not alive, or unknown; ``close`` does not wait."""
        session = desk.open()
        session.window(4096)
        gone = desk.world - 1
        desk.meet()
        if desk.rank == gone:
            desk.die()
        deadline = time.monotonic() + LIMIT_S
        while session.alive(gone) is True and time.monotonic() < deadline:
            time.sleep(0.02)
        found = session.alive(gone)
        require(found is not True, f"rank {gone} has ended and alive({gone}) is still {found!r}")
        started = time.monotonic()
        session.close()
        took = time.monotonic() - started
        require(took < _AT_ONCE_S, f"close took {took:.1f} s beside a dead peer")


def _belongings() -> tuple[int, int]:
    return len(os.listdir("/proc/self/fd")), threading.active_count()
