"""Ranks as threads of one process: groups that exchange through ordinary memory.

Useful for tests, and for programs that drive several devices from one process. Each thread makes
its own operations over its own group object; windows are shared memory as between processes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from gemmlink.errors import InvalidArgument, PeerTimeout
from gemmlink.spec.contracts import Board

_STALL_S = 0.25


class ThreadGroup:
    """One rank's view of a world of threads; see ``contracts.Group``."""

    def __init__(self, rank: int, meeting: _Meeting) -> None:
        self.rank = rank
        self.world = meeting.world
        self.board: Board | None = meeting
        self._meeting = meeting

    def all_gather(
        self,
        data: bytes,
        *,
        key: str,
        timeout_s: float,
        on_stall: Callable[[], None] | None = None,
    ) -> list[bytes]:
        """Exchange through memory."""
        return self._meeting.gather(self.rank, data, key, timeout_s, on_stall)


def thread_groups(world: int) -> list[ThreadGroup]:
    """Groups for ``world`` threads, one each, in rank order."""
    if world < 1:
        raise InvalidArgument("world must be at least 1", repr(world))
    meeting = _Meeting(world)
    return [ThreadGroup(rank, meeting) for rank in range(world)]


class _Meeting:
    """Records by key, and texts for the board."""

    def __init__(self, world: int) -> None:
        self.world = world
        self._changed = threading.Condition()
        self._records: dict[str, dict[int, bytes]] = {}
        self._readers: dict[str, int] = {}
        self._texts: dict[str, bytes] = {}

    def post(self, key: str, data: bytes) -> None:
        self._texts[key] = data

    def peek(self, key: str) -> bytes | None:
        return self._texts.get(key)

    def gather(
        self,
        rank: int,
        data: bytes,
        key: str,
        timeout_s: float,
        on_stall: Callable[[], None] | None,
    ) -> list[bytes]:
        deadline = time.monotonic() + timeout_s
        with self._changed:
            self._records.setdefault(key, {})[rank] = data
            self._changed.notify_all()
        while not self._complete(key, min(_STALL_S, max(0.0, deadline - time.monotonic()))):
            if on_stall is not None:
                on_stall()
            if time.monotonic() > deadline:
                raise self._missing(rank, key, timeout_s)
        return self._take(key)

    def _complete(self, key: str, timeout_s: float) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: len(self._records[key]) == self.world, timeout_s)

    def _take(self, key: str) -> list[bytes]:
        with self._changed:
            records = self._records[key]
            found = [records[rank] for rank in range(self.world)]
            self._readers[key] = self._readers.get(key, 0) + 1
            if self._readers[key] == self.world:  # everybody has read it
                del self._records[key], self._readers[key]
            return found

    def _missing(self, rank: int, key: str, timeout_s: float) -> PeerTimeout:
        with self._changed:
            absent = [r for r in range(self.world) if r not in self._records[key]]
        return PeerTimeout(
            f"every rank must come to {key} within {timeout_s:g} s",
            f"nothing from ranks {absent} at rank {rank}",
            "Call it on every thread's group, in the same order.",
            operation=key,
            rank=rank,
            peer=absent[0] if len(absent) == 1 else -1,
        )
