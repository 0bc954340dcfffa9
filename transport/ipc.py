"""Transport ``ipc``: device ranks of one host, through the IPC handles of CUDA or HIP.

Each rank makes one base allocation for each window. Another process opens its handle; a rank that
is a thread of the same process uses the pointer. So ranks may be processes, threads, or both, and
need no ``torch.distributed`` group. Set-up and the end of windows are told through host memory
(``shm``), calls through words in the windows themselves.

A window's memory is given back when nobody has it mapped any more: ``leftovers`` tells how.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from gemmlink.errors import Unavailable, Unsupported
from gemmlink.rendezvous import agree
from gemmlink.spec.contracts import INTERFACE, Capabilities, Group, Lane, Words
from gemmlink.transport.handles import (
    Reached,
    Record,
    Way,
    place,
    reach,
    refuse_apart,
    refuse_unreachable,
    told,
    way,
)
from gemmlink.transport.leftovers import LINE, Holding, Leftovers, sweep
from gemmlink.transport.shm import SharedMemory, ShmSession
from gemmlink.transport.site import Site

#: How long the end of a window gives living peers to unmap this rank's memory, in seconds.
_LINGER_S = 0.1


class Ipc:
    """See the module's docstring."""

    name = "ipc"
    interface = INTERFACE
    #: What makes the place where a rank works; tests put one without a device here.
    site: type[Site] = Site

    def probe(self) -> Capabilities:
        """Needs the vendor's bindings. Does not ask for a device: that would begin to use one."""
        return Capabilities(
            memory=self.site.memory,
            host_words=True,
            host_data="cpu" in self.site.memory,
            lanes=("in_order",),
            details=self.site.probe(),
        )

    def open(self, group: Group, *, key: str, timeout_s: float) -> IpcSession:
        """Collective; checks first that all ranks share a host and reach each other's devices."""
        made: list[Site] = []

        def here() -> Record:
            made.append(self.site())
            return place(made[0].vendor, made[0].index)

        places = agree(group, f"{key}/place", here, timeout_s)
        refuse_apart(places)
        site = made[0]

        def reached() -> Record:
            return {"peers": reach(site.vendor, site.index, places)}

        found = agree(group, f"{key}/peers", reached, timeout_s)
        refuse_unreachable(places, [each["peers"] for each in found])
        host = SharedMemory().open(group, key=f"{key}/host", timeout_s=timeout_s)
        return IpcSession(site, group, key, timeout_s, places, host)


class IpcSession:
    """An open ``ipc`` transport over one group."""

    def __init__(
        self,
        site: Site,
        group: Group,
        key: str,
        timeout_s: float,
        places: list[Record],
        host: ShmSession,
    ) -> None:
        self.rank = group.rank
        self.world = group.world
        self._site = site
        self._group = group
        self._key = key
        self._timeout_s = timeout_s
        self._places = places
        self._host = host
        self._left = Leftovers(host)
        self._windows: list[IpcWindow] = []
        self._made = 0
        self._closed = False

    def window(self, nbytes: int, common_from: int | None = None) -> IpcWindow:
        """Collective; see ``contracts.Session``."""
        if common_from is not None:
            raise Unsupported("windows of transport 'ipc' share no memory", "common_from")
        sweep()
        self._made += 1
        key = f"{self._key}/window{self._made}"
        control = self._host.window(self.world * LINE)
        holding = Holding(self._site, self.rank, control, self._host)
        window = IpcWindow(self._site, self._group, nbytes, self._places, holding, self._left)
        try:
            window.make(key, self._timeout_s)
        except BaseException:
            window.free()
            raise
        self._windows = [known for known in self._windows if not known.freed]
        self._windows.append(window)
        return window

    def barrier(self, timeout_s: float) -> None:
        """Collective. What this rank has enqueued on its current stream has ended before it comes.

        Ranks meet in host memory.
        """
        self._site.finish_stream()
        self._host.barrier(timeout_s)

    def alive(self, peer: int) -> bool | None:
        """Whether ``peer``'s process exists."""
        return self._host.alive(peer)

    def close(self) -> None:
        """Free all windows. Living peers get a tenth of a second to unmap this rank's memory.

        What they or a view keep is given back later, see ``leftovers``; nothing is waited for.
        """
        if self._closed:
            return
        self._closed = True
        for window in self._windows:
            window.let_go()
        self._windows = []
        self._left.close()
        self._left.linger(_LINGER_S)


class IpcWindow:
    """One allocation a rank, reached by all."""

    words: Words

    def __init__(
        self,
        site: Site,
        group: Group,
        nbytes: int,
        places: list[Record],
        holding: Holding,
        left: Leftovers,
    ) -> None:
        self.nbytes = nbytes
        self.freed = False
        self._site = site
        self._group = group
        self._places = places
        self._holding = holding
        self._left = left
        self._tensors: list[torch.Tensor] = []
        self._lanes: dict[tuple[int, int], Lane] = {}
        self._closers: list[Callable[[], None]] = []
        #: Addresses are those of this process.
        self.addresses: Sequence[int | None] = []

    def make(self, key: str, timeout_s: float) -> None:
        """Collective: allocate, and reach the peers' memory."""
        records = agree(self._group, f"{key}/allocate", self._allocate, timeout_s)
        agree(self._group, f"{key}/map", lambda: self._map(records), timeout_s)
        self.addresses = [tensor.data_ptr() for tensor in self._tensors]
        words: Any = self._site.words(self._tensors, self._group.rank)
        self.words = words
        self._closers.append(words.close)

    def _way(self, owner: int) -> Way:
        rank = self._group.rank
        return way(self._places[rank], self._places[owner], owner == rank)

    def _allocate(self) -> Record:
        with self._site.selected():
            try:
                base = self._holding.allocate(self.nbytes)
            except Unavailable as error:
                raise Unavailable(
                    f"a window needs {self.nbytes} bytes of device memory: {error.rule}",
                    error.came,
                    error.fix,
                ) from error
            shared = any(self._way(peer) is Way.HANDLE for peer in range(self._group.world))
            return told(self._site.vendor, base, self.nbytes, shared)

    def _map(self, records: list[Record]) -> Record:
        with self._site.selected():
            self._tensors = [self._map_one(peer, record) for peer, record in enumerate(records)]
        return {}

    def _map_one(self, owner: int, record: Record) -> torch.Tensor:
        site, bus = self._site, str(self._places[owner]["bus"])
        try:
            reached = Reached(site.vendor, self._way(owner), record, bus, site.index)
        except Unavailable as error:
            raise Unavailable(
                f"the memory of rank {owner} on {bus} must be mapped: {error.rule}",
                error.came,
                error.fix,
            ) from error
        return self._holding.take(owner, reached, self.nbytes)

    def tensor(self, peer: int) -> torch.Tensor:
        """All bytes of ``peer``'s allocation, as this rank's device reaches them."""
        return self._tensors[peer]

    def lane(self, peer: int, index: int) -> Lane:
        """A stream that copies."""
        key = (peer, index)
        if key not in self._lanes:
            own, theirs = self._tensors[self._group.rank], self._tensors[peer]
            lane: Any = self._site.lane(own, theirs, self.words, peer, index)
            self._lanes[key] = lane
            self._closers.append(lane.close)
        return self._lanes[key]

    def free(self) -> None:
        """Let go of all memory, once what is enqueued on the own device has ended. Idempotent.

        Living peers get a tenth of a second to unmap this rank's. What they or a view still hold
        then is given back later, see ``leftovers``.
        """
        if not self.freed:
            self.let_go()
            self._left.linger(_LINGER_S)

    def let_go(self) -> None:
        """``free``, but for the memory that a peer has not unmapped at this moment."""
        if self.freed:
            return
        self.freed = True
        for close in self._closers:
            close()
        self._closers, self._lanes, self._tensors, self.addresses = [], {}, [], []
        self._left.add(self._holding)
