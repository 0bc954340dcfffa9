"""Lives: which keys of a store belong to the ranks that are running now.

A store may outlive the ranks that talk through it: a launcher starts them again over the same one,
or a group is destroyed and made anew. What an earlier life of a rank has left there must never be
read as new, and ranks need not have had equally many lives: one may have died before it came here.

So each life has a name of its own, drawn at random, and the ranks agree on the names of all before
they share a key. Under a key of its own, which each life overwrites, a rank says its name and a
digest of the names that it sees at all ranks. They agree once all say the same digest. A record
that was left over ends no wait: whoever wrote it did not know the name of this life, so its digest
is another. It is read again until the new life has overwritten it.

A rank that refuses its first call waits for nobody, and peers that wait for it must hear of that
before there is an agreement. Such *early* texts are under keys that all lives share. What a dead
life has posted there is not believed: it is older than this process, as launchers end all ranks
before they start any of them again. In one process that outlives its groups the name must do: an
early text goes out of force when its rank has another life.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

_EARLY = "gemmlink/early/"


class _Record(NamedTuple):
    """What a rank says of itself; empty where it has said nothing."""

    name: str = ""
    sees: str = ""


class Life:
    """One life of one rank in ``store``, and its ``contracts.Board`` there.

    Making one touches nothing. ``agree`` looks and says, and never waits: call it until it holds.
    """

    def __init__(self, store: Any, rank: int, world: int) -> None:
        self._store = store
        self._rank = rank
        self._keys = [f"gemmlink/life/{peer}" for peer in range(world)]
        self._said = _Record(secrets.token_hex(8))
        self._prefix = ""
        self._early: dict[str, bytes] = {}
        self._since = process_start()
        #: The ranks without which ``agree`` did not hold, when it was last called.
        self.missing = [peer for peer in range(world) if peer != rank]
        self.agreed = False

    @property
    def prefix(self) -> str:
        """How the keys of these lives begin: the same on all ranks, and new."""
        assert self.agreed, "keys are shared before the ranks have agreed on their lives"
        return self._prefix

    def agree(self) -> bool:
        """Whether all ranks say of each other what this one sees."""
        if self.agreed:
            return True
        found = [self._record(peer) for peer in range(len(self._keys))]
        names = [record.name for record in found]
        sees = _digest(names)
        if all(names):
            self._use(f"gemmlink/{sees}/")
        self._say(sees)
        peers = [peer for peer in range(len(self._keys)) if peer != self._rank]
        self.missing = [peer for peer in peers if found[peer].sees != sees]
        if not self.missing:
            self._retire_early()
            self.agreed = True
        return self.agreed

    # A store that does not answer (its host has died) must not hide the error that is looked for.

    def post(self, key: str, data: bytes) -> None:
        """Leave ``data`` under ``key``."""
        with contextlib.suppress(RuntimeError):
            if not self.agreed:
                self._post_early(key, data)
            if self._prefix:  # peers may have agreed on it already
                self._store.set(self._board(key), data)

    def peek(self, key: str) -> bytes | None:
        """The data under ``key``, or None."""
        with contextlib.suppress(RuntimeError):
            found = self._read(self._board(key)) if self._prefix else None
            return found if found is not None or self.agreed else self._peek_early(key)
        return None

    def _board(self, key: str) -> str:
        return f"{self._prefix}board/{key}"

    def _use(self, prefix: str) -> None:
        # Before the digest is said: whoever agrees on it looks for texts there and nowhere else.
        if prefix != self._prefix:
            self._prefix = prefix
            for key, data in self._early.items():
                self._store.set(self._board(key), data)

    def _say(self, sees: str) -> None:
        if sees != self._said.sees:
            self._said = self._said._replace(sees=sees)
            self._store.set(self._keys[self._rank], " ".join(self._said))

    def _record(self, rank: int) -> _Record:
        if rank == self._rank:
            return self._said
        data = self._read(self._keys[rank])
        return _Record() if data is None else _Record(*data.decode().split(" "))

    def _post_early(self, key: str, data: bytes) -> None:
        self._early[key] = data
        if not self._said.sees:
            self._say(_digest([]))  # the name; as for what it sees, it has not looked
        stamp = f"{self._rank} {self._said.name} {time.time()}\n"
        self._store.set(_EARLY + key, stamp.encode() + data)

    def _peek_early(self, key: str) -> bytes | None:
        stamp, _, data = (self._read(_EARLY + key) or b"").partition(b"\n")
        if not stamp:
            return None
        rank, name, posted = stamp.decode().split(" ")
        valid = float(posted) >= self._since and self._record(int(rank)).name == name
        return data if valid else None

    def _retire_early(self) -> None:
        # Emptied, not deleted: a peer that has seen the key would wait in ``get`` for it to return.
        for key in self._early:
            self._store.set(_EARLY + key, "")
        self._early.clear()

    def _read(self, name: str) -> bytes | None:
        return bytes(self._store.get(name)) if self._store.check([name]) else None


def _digest(names: Sequence[str]) -> str:
    return hashlib.sha256(" ".join(names).encode()).hexdigest()[:16]


_LOADED = time.time()


def process_start() -> float:
    """When this process was started, as ``time.time`` counts; at the latest, where unknown."""
    try:
        with open("/proc/self/stat") as file:
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return _LOADED
    since_boot = int(fields[19]) / os.sysconf("SC_CLK_TCK")
    return time.time() - (time.clock_gettime(time.CLOCK_BOOTTIME) - since_boot)
