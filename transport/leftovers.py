"""Giving device memory back that other processes have mapped.

An allocation may be freed only when no peer has its handle open, and a handle may be closed only
when no view of that memory is held. Neither may be waited for: a peer may be dead, and a caller may
hold a view for ever. So what ``free`` cannot give back yet is left here, and looked at again by
every later ``window``, ``free`` and ``close`` of this process, never by a destructor or a thread:
freeing waits for the device, and would end a graph capture that is under way.

Who has let go of whose memory is told by words in host memory, one line for each rank in every
rank's control window. A rank whose process has ended has let go of everything.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable

import torch

from gemmlink.transport.handles import Reached
from gemmlink.transport.shm import ShmSession, ShmWindow
from gemmlink.transport.site import Site, view

#: Bytes between the words of two ranks in a control window.
LINE = 64
_NAP_S = 1e-3

_log = logging.getLogger("gemmlink")


class _Keeper:
    """Held by every view of one rank's memory: it is gone when the last of them is."""


class Holding:
    """What one rank holds of one window: its own allocation, and its ways to the peers' memory."""

    def __init__(self, site: Site, rank: int, control: ShmWindow, host: ShmSession) -> None:
        self._site = site
        self._rank = rank
        self._control = control
        self._alive = host.alive
        self._base: int | None = None
        self._ways: dict[int, tuple[Reached, weakref.ref[_Keeper]]] = {}
        #: Owners of memory that have not been told yet that this rank has let go.
        self._owes = set(range(host.world))
        #: Ranks that have not let go of the own memory.
        self._awaits = set(range(host.world))

    def allocate(self, nbytes: int) -> int:
        """The own base allocation, zeroed."""
        self._base = self._site.vendor.allocate(nbytes)
        return self._base

    def take(self, owner: int, reached: Reached, nbytes: int) -> torch.Tensor:
        """A view of ``owner``'s memory, which is held until the last view of it has gone."""
        keeper = _Keeper()
        self._ways[owner] = (reached, weakref.ref(keeper))
        return view(reached.address, nbytes, self._site.device, keeper)

    def settle(self) -> bool:
        """Give back what nobody uses any more; whether that was the rest. Never waits for a peer.

        Waits for the own device: a view may have gone before the kernel that reads it has ended.
        """
        unused = [owner for owner in sorted(self._owes) if not self._is_viewed(owner)]
        if unused:
            self._site.finish()
        for owner in unused:
            self._let_go(owner)
        self._awaits = {rank for rank in self._awaits if not self._has_let_go(rank)}
        if self._base is not None and not self._awaits:
            base, self._base = self._base, None
            self._carefully(lambda: self._site.vendor.release(base))
        if self._owes or self._base is not None:
            return False
        self._control.free()
        return True

    def waits_only_for_peers(self) -> bool:
        """Whether no view that is held here keeps it."""
        return not self._owes and self._base is not None

    def _is_viewed(self, owner: int) -> bool:
        return owner in self._ways and self._ways[owner][1]() is not None

    def _let_go(self, owner: int) -> None:
        reached = self._ways.pop(owner, None)
        if reached is not None:
            self._carefully(reached[0].close)
        self._owes.remove(owner)
        self._control.words.set(owner, self._rank * LINE, 1)

    def _carefully(self, give_back: Callable[[], None]) -> None:
        """A device that has failed cannot give memory back; its process's end does."""
        try:
            with self._site.selected():
                give_back()
        except Exception as error:
            _log.warning("device memory was not given back: %s", error)

    def _has_let_go(self, rank: int) -> bool:
        return self._control.words.read(rank * LINE) > 0 or self._alive(rank) is False


class Leftovers:
    """The holdings of one session that could not be given back when they were freed.

    ``host`` carries the words, and so is closed after the last of them.
    """

    def __init__(self, host: ShmSession) -> None:
        self._host = host
        self._holdings: list[Holding] = []
        self._closing = False

    def add(self, holding: Holding) -> None:
        """Give ``holding`` back as soon as that may be."""
        with _lock:
            self._holdings.append(holding)
            if self not in _all:
                _all.append(self)
        sweep()

    def close(self) -> None:
        """Nothing is added any more."""
        with _lock:
            self._closing = True
            if self not in _all:
                _all.append(self)
        sweep()

    def linger(self, limit_s: float) -> None:
        """Give peers that live the time to let go. Returns at once where that would not help."""
        deadline = time.monotonic() + limit_s
        while self._would_help() and time.monotonic() < deadline:
            time.sleep(_NAP_S)
            sweep()

    def settle(self) -> bool:
        """Look at all of them again; whether this session is done with."""
        self._holdings = [each for each in self._holdings if not each.settle()]
        if self._closing and not self._holdings:
            self._host.close()
        return not self._holdings

    def _would_help(self) -> bool:
        with _lock:
            return any(each.waits_only_for_peers() for each in self._holdings)


_lock = threading.RLock()
_all: list[Leftovers] = []


def sweep() -> int:
    """Give back what has become free since; the number of sessions that still hold something."""
    with _lock:
        _all[:] = [each for each in _all if not each.settle()]
        return len(_all)
