"""The contract of a window, clause by clause; see ``spec.contracts.Window``."""

from __future__ import annotations

import contextlib
import importlib
import itertools
import os
import resource
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import torch

from gemmlink.conformance import devices
from gemmlink.conformance.clauses import Desk, RankContract, clause, require, span
from gemmlink.errors import Unsupported
from gemmlink.spec.contracts import Session, Window

_SIZES = (64, 4096, 100_000, 1 << 20)
_AT_ONCE_S = 2.0
_PAGE = 4096
#: Bytes that a process under ``little_memory`` cannot map, and that it may still allocate.
_TOO_MUCH = 96 << 20
_HEADROOM = 48 << 20


@contextlib.contextmanager
def little_memory() -> Iterator[None]:
    """This process cannot map ``_TOO_MUCH`` bytes: its address space is limited."""
    with open("/proc/self/statm") as file:
        size = int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (size + _HEADROOM, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


@contextlib.contextmanager
def little_device_memory() -> Iterator[None]:
    """Nobody can have ``_TOO_MUCH`` bytes of the current device: the rest of it is taken."""
    free = torch.cuda.mem_get_info()[0]
    taken = torch.empty(max(0, free - _HEADROOM), dtype=torch.uint8, device="cuda")
    try:
        yield
    finally:
        del taken
        torch.cuda.empty_cache()


class WindowContract(RankContract):
    """``Window``: memory of one size on every rank, reachable for every peer.

    ``spoil``: ``"module:attribute"`` of a context manager under which this process alone cannot
    provide ``spoil_nbytes``; by default its address space is limited, or its device filled.
    """

    section = "transport/window"
    spoil: str = ""
    spoil_nbytes: int = _TOO_MUCH

    @clause
    def test_a_window_is_zero_at_first(self, desk: Desk) -> None:
        """On return every peer's memory is mapped and zero, also after another was filled."""
        session = desk.open()
        for nbytes in _SIZES:
            window = session.window(nbytes)
            for peer in range(desk.world):
                set_bytes = int(window.tensor(peer).count_nonzero())
                require(not set_bytes, f"{set_bytes} of {nbytes} bytes at rank {peer} are not zero")
            desk.meet()
            window.tensor(desk.rank).fill_(255)
            window.free()
            desk.meet()

    @clause
    def test_a_window_has_the_size_asked_for_everywhere(self, desk: Desk) -> None:
        """``nbytes`` is what was asked for; every rank's tensor is uint8 of that many bytes."""
        session = desk.open()
        for nbytes in _SIZES:
            window = session.window(nbytes)
            require(window.nbytes == nbytes, f"nbytes is {window.nbytes}, not {nbytes}")
            for peer in range(desk.world):
                tensor = window.tensor(peer)
                found = (tuple(tensor.shape), tensor.dtype)
                require(found == ((nbytes,), torch.uint8), f"tensor({peer}) is {found}")
        desk.meet()

    @clause
    def test_addresses_are_those_of_the_tensors(self, desk: Desk) -> None:
        """``addresses[p]`` is where rank p's memory lies in this process, or None."""
        window = desk.window(4096)
        addresses = list(window.addresses)
        require(len(addresses) == desk.world, f"{len(addresses)} addresses for {desk.world} ranks")
        for peer, address in enumerate(addresses):
            lies = window.tensor(peer).data_ptr()
            require(address in (None, lies), f"addresses[{peer}] is {address}, it lies at {lies}")
        require(addresses[desk.rank] is not None, "the own memory has no address")
        desk.meet()

    @clause
    def test_what_is_stored_in_a_peers_tensor_lies_in_its_memory(self, desk: Desk) -> None:
        """``tensor(peer)`` is a view: what is stored in it lies in the peer's memory."""
        window = desk.window(100_000)
        for peer in range(desk.world):
            _mark(window, peer, desk.rank, 1 + desk.rank)
        desk.meet()
        for source in range(desk.world):
            _see(window, desk.rank, source, 1 + source, f"stored by rank {source}")
        desk.meet()

    @clause
    def test_what_a_peer_stores_at_home_shows_in_its_tensor(self, desk: Desk) -> None:
        """``tensor(peer)`` shows what the peer stores in its own memory, from end to end."""
        window = desk.window(100_000)
        _mark(window, desk.rank, desk.rank, 101 + desk.rank)
        desk.meet()
        for peer in range(desk.world):
            _see(window, peer, peer, 101 + peer, f"stored by rank {peer} at home")
        desk.meet()

    @clause
    def test_windows_do_not_overlap(self, desk: Desk) -> None:
        """Distinct windows of a session do not share memory."""
        session = desk.open()
        windows = [session.window(8192) for _ in range(3)]
        for value, window in enumerate(windows, start=1):
            window.tensor(desk.rank).fill_(value)
        desk.meet()
        for value, window in enumerate(windows, start=1):
            for peer in range(desk.world):
                found = span(window.tensor(peer))
                require(found == (value, value), f"window {value} at rank {peer} holds {found}")
        desk.meet()

    @clause
    def test_common_bytes_are_one_memory(self, desk: Desk) -> None:
        """From ``common_from`` on all ranks share one memory; before it each has its own; all zero.

        Where capabilities say ``common``.
        """
        if desk.capabilities.common:
            window = desk.open().window(3 * _PAGE, common_from=_PAGE)
            own, common = window.tensor(desk.rank), window.tensor(desk.rank)[_PAGE:]
            require(not own.any(), "the window is not zero at first")
            desk.meet()
            own[desk.rank], common[desk.rank], common[-1 - desk.rank] = 1, 1, 1
            desk.meet()
            for peer in range(desk.world):
                ends = [int(common[peer]), int(common[-1 - peer])]
                require(ends == [1, 1], f"what rank {peer} stored in common reads {ends} here")
                found = int(window.tensor(peer)[:_PAGE].sum())
                require(found == 1, f"rank {peer}'s private bytes add up to {found}, not to its 1")
        desk.meet()

    @clause
    def test_views_stay_readable_after_free(self, desk: Desk) -> None:
        """A tensor that the caller holds stays readable after ``free``, whoever has gone."""
        session = desk.open()
        window = session.window(1 << 20)
        window.tensor(desk.rank).fill_(7)
        desk.meet()
        views = [window.tensor(peer) for peer in range(desk.world)]
        window.free()
        session.close()
        desk.meet()
        for peer, view in enumerate(views):
            found = span(view)
            require(found == (7, 7), f"the kept view of rank {peer} holds {found}, not 7")
        desk.meet()

    @clause
    def test_free_is_idempotent_and_waits_for_nobody(self, desk: Desk) -> None:
        """``free`` may be called again, and never waits for a peer."""
        window = desk.window(4096)
        desk.meet()
        if desk.rank == 0:
            started = time.monotonic()
            window.free()
            window.free()
            took = time.monotonic() - started
            require(took < _AT_ONCE_S, f"free took {took:.1f} s while the peers held on")
        desk.meet()

    @clause
    def test_free_gives_the_memory_back(self, desk: Desk) -> None:
        """After ``free``, and once no view is held, nothing of the window is mapped."""
        session = desk.open()
        _passing_window(session)
        turns = [_belongings(desk)]
        for _ in range(3):
            for _ in range(3):
                _passing_window(session)
            turns.append(_belongings(desk))
        files = turns[-1][0] - turns[0][0]
        # The least of them: memory of a device that another process takes meanwhile is taken once.
        grown = min(after[1] - before[1] for before, after in itertools.pairwise(turns))
        require(
            files <= 0 and grown <= _HEADROOM // 2,
            f"with three windows each turn (open files, bytes in use) were {turns}",
        )
        desk.meet()

    @clause
    def test_a_size_that_nobody_has_is_refused_everywhere(self, desk: Desk) -> None:
        """A window that cannot be had raises on every rank, and the session stays usable."""
        session = desk.open()
        _refused(session, 1 << 58, f"{1 << 58} bytes")
        desk.meet()
        _usable(desk, session)

    @clause
    def test_a_failure_on_one_rank_raises_on_all_and_leaves_nothing(self, desk: Desk) -> None:
        """If any rank cannot provide its part, every rank raises, and nothing is left behind."""
        spoiler = _spoiler(self.spoil, desk.device)
        session = desk.open()
        _usable(desk, session)
        before = _belongings(desk)
        spoiled = desk.rank == desk.world - 1
        with spoiler() if spoiled else contextlib.nullcontext():
            desk.meet()
            _refused(session, self.spoil_nbytes, f"rank {desk.world - 1} had no memory")
        after = _belongings(desk)
        require(after[0] <= before[0], f"open files went from {before[0]} to {after[0]}")
        grown = after[1] - before[1]
        require(grown < self.spoil_nbytes // 2, f"{grown} more bytes are in use than before")
        desk.meet()
        _usable(desk, session)

    @clause
    def test_a_lane_is_refused_where_there_are_none(self, desk: Desk) -> None:
        """``lane`` raises ``Unsupported`` if the transport has no lanes."""
        window = desk.window(4096)
        if not desk.capabilities.lanes:
            try:
                window.lane(desk.peers[0], 0)
            except Unsupported:
                pass
            else:
                raise AssertionError("lane() gave something although capabilities name no lanes")
        desk.meet()


def _places(window: Window, source: int) -> tuple[int, int]:
    """Two bytes of ``source``'s own: the first ones from the start and from the end."""
    return source, window.nbytes - 1 - source


def _mark(window: Window, owner: int, source: int, value: int) -> None:
    for place in _places(window, source):
        window.tensor(owner)[place] = value


def _see(window: Window, owner: int, source: int, value: int, what: str) -> None:
    for place in _places(window, source):
        found = int(window.tensor(owner)[place])
        require(
            found == value, f"byte {place} of rank {owner}'s memory is {found}, not {value} {what}"
        )


def _passing_window(session: Session) -> None:
    window = session.window(_HEADROOM)
    window.tensor(session.rank)[-1] = 1
    window.free()


def _spoiler(named: str, device: str) -> Callable[[], AbstractContextManager[None]]:
    if not named:
        return little_memory if device == devices.HOST else little_device_memory
    module, _, name = named.partition(":")
    found: Callable[[], AbstractContextManager[None]] = getattr(
        importlib.import_module(module), name
    )
    return found


def _belongings(desk: Desk) -> tuple[int, int]:
    """Collective, since ranks may share a device. Open files, and bytes mapped or in use there."""
    desk.meet()
    files, size = len(os.listdir("/proc/self/fd")), _bytes(desk.device)
    desk.meet()
    return files, size


def _bytes(device: str) -> int:
    if device != devices.HOST:
        torch.cuda.synchronize()
        free, total = torch.cuda.mem_get_info()
        return total - free
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")


def _refused(session: Session, nbytes: int, why: str) -> None:
    try:
        session.window(nbytes)
    except Exception:  # which one is the transport's own affair
        return
    raise AssertionError(f"window() returned although {why} could not be had")


def _usable(desk: Desk, session: Session) -> None:
    window = session.window(4096)
    window.tensor(desk.peers[0])[desk.rank] = 9
    desk.meet()
    found = int(window.tensor(desk.rank)[(desk.rank - 1) % desk.world])
    require(found == 9, f"a window made afterwards shows {found}, not the 9 stored by a peer")
    desk.meet()
    window.free()
