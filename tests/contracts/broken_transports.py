"""Transports that break one clause each: shared memory with something wrong."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import Any

from gemmlink.spec.contracts import Group
from gemmlink.transport.shm import SharedMemory

_DATA = 4096


class _Broken(SharedMemory):
    """Shared memory whose sessions and windows are changed as they are made."""

    def open(self, group: Group, *, key: str, timeout_s: float) -> Any:
        session: Any = super().open(group, key=key, timeout_s=timeout_s)
        make = session.window

        def window(nbytes: int, common_from: int | None = None) -> Any:
            return self.window(lambda size: make(size, common_from), nbytes, session)

        session.window = window
        self.session(session)
        return session

    def session(self, session: Any) -> None:
        """Spoil a session."""

    def window(self, make: Callable[[int], Any], nbytes: int, session: Any) -> Any:
        """Make a window and spoil it."""
        window = make(nbytes)
        window.rank = session.rank
        self.spoil(window)
        return window

    def spoil(self, window: Any) -> None:
        """Spoil a window."""


class NotZeroed(_Broken):
    """Leaves a byte of an earlier use."""

    def spoil(self, window: Any) -> None:
        window.tensor(window.rank)[-1] = 1


class PrivateCopy(_Broken):
    """Hands out copies of peers' memory."""

    def spoil(self, window: Any) -> None:
        real: Any = window.tensor
        copies: dict[int, Any] = {}

        def tensor(peer: int) -> Any:
            if peer == window.rank:
                return real(peer)
            return copies.setdefault(peer, real(peer).clone())

        window.tensor = tensor
        window.addresses = [tensor(peer).data_ptr() for peer in range(len(window.addresses))]


class FreeOnce(_Broken):
    """Cannot be freed twice."""

    def spoil(self, window: Any) -> None:
        real: Any = window.free
        freed: list[bool] = []

        def free() -> None:
            if freed:
                raise RuntimeError("freed twice")
            freed.append(True)
            real()

        window.free = free


class Selfish(_Broken):
    """A rank that fails says nothing to the others."""

    def window(self, make: Callable[[int], Any], nbytes: int, session: Any) -> Any:
        try:
            return make(nbytes)
        except Exception:
            if session.rank == session.world - 1:
                raise
            return object()


class _BrokenWords(_Broken):
    def spoil(self, window: Any) -> None:
        real = window.words
        words: Any = type("Words", (), {})()
        words.set, words.read, words.wait = real.set, real.read, real.wait
        self.words(words, real, window)
        window.words = words

    def words(self, words: Any, real: Any, window: Any) -> None:
        """Spoil the words."""


class EarlyWord(_BrokenWords):
    """Data lies in a buffer that is sent some time after the word: no release."""

    def words(self, words: Any, real: Any, window: Any) -> None:
        tensor: Any = window.tensor
        staged: dict[int, Any] = {}

        def stage(peer: int) -> Any:
            if peer == window.rank:
                return tensor(peer)
            return staged.setdefault(peer, tensor(peer).clone())

        def send(peer: int, data: Any) -> None:
            time.sleep(0.005)
            tensor(peer)[_DATA:].copy_(data)

        def set_word(peer: int, offset: int, value: int) -> None:
            real.set(peer, offset, value)
            if peer in staged:
                data = staged[peer][_DATA:].clone()
                threading.Thread(target=send, args=(peer, data), daemon=True).start()

        window.tensor, words.set = stage, set_word


class RaisingWait(_BrokenWords):
    """Raises when a word does not come."""

    def words(self, words: Any, real: Any, window: Any) -> None:
        def wait(offset: int, at_least: int, timeout_s: float) -> int:
            found: int = real.wait(offset, at_least, timeout_s)
            if found < at_least:
                raise TimeoutError("the word did not come")
            return found

        words.wait = wait


class DeafWait(_BrokenWords):
    """Looks at the word only when the time is over."""

    def words(self, words: Any, real: Any, window: Any) -> None:
        def wait(offset: int, at_least: int, timeout_s: float) -> int:
            if real.read(offset) < at_least:
                time.sleep(timeout_s)
            found: int = real.read(offset)
            return found

        words.wait = wait


class EndlessWait(_BrokenWords):
    """Does not give up if it has half a second."""

    def words(self, words: Any, real: Any, window: Any) -> None:
        def wait(offset: int, at_least: int, timeout_s: float) -> int:
            limit = 1e9 if timeout_s == 0.5 else timeout_s
            return int(real.wait(offset, at_least, limit))

        words.wait = wait


class BusyWait(_BrokenWords):
    """Looks without a pause."""

    def words(self, words: Any, real: Any, window: Any) -> None:
        def wait(offset: int, at_least: int, timeout_s: float) -> int:
            until = time.monotonic() + timeout_s
            while (found := real.read(offset)) < at_least and time.monotonic() < until:
                pass
            return int(found)

        words.wait = wait


class NarrowWords(_BrokenWords):
    """Keeps 32 bits."""

    def words(self, words: Any, real: Any, window: Any) -> None:
        def set_word(peer: int, offset: int, value: int) -> None:
            real.set(peer, offset, value & 0xFFFFFFFF)

        words.set = set_word


class ForgetfulSetter(_BrokenWords):
    """Bound to several places, it writes to the first."""

    def words(self, words: Any, real: Any, window: Any) -> None:
        def setter(*groups: tuple[tuple[int, int], ...]) -> Any:
            def write(*values: int) -> None:
                for places, value in zip(groups, values, strict=True):
                    real.set(*places[0], value)

            return write

        words.setter = setter


class HastyLane(_Broken):
    """A lane that sets words at once, ahead of its copies."""

    def spoil(self, window: Any) -> None:
        real, words = window.lane, window.words

        def lane(peer: int, index: int) -> Any:
            found = real(peer, index)
            found.set = lambda offset, value: words.set(peer, offset, value)
            return found

        window.lane = lane


class NewLanes(_Broken):
    """Makes a lane each time it is asked for one."""

    def spoil(self, window: Any) -> None:
        real = window.lane

        def lane(peer: int, index: int) -> Any:
            window._lanes.clear()
            return real(peer, index)

        window.lane = lane


class Careless(_Broken):
    """A barrier that lets everybody pass, and a watch that calls everybody dead."""

    def session(self, session: Any) -> None:
        session.barrier = lambda timeout_s: None
        session.alive = lambda peer: False


class Killer(_Broken):
    """Ends the process when a lane is drained without patience."""

    def spoil(self, window: Any) -> None:
        real = window.lane

        def lane(peer: int, index: int) -> Any:
            found = real(peer, index)
            drain = type(found).drain
            found.drain = lambda limit: drain(found, limit) if limit else os._exit(7)
            return found

        window.lane = lane
