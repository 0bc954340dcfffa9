"""Transport ``directory``: CPU ranks of one host, through memory-mapped files in a directory.

Each rank makes one file for each window, and every rank maps all of them. A file loses its name as
soon as all ranks have mapped it, and its memory when the last view is gone. The directory is
``$GEMMLINK_X_EXAMPLE_DIR``, or the system's for temporary files.
"""

from __future__ import annotations

import mmap
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from gemmlink.errors import PeerTimeout, Unavailable, Unsupported
from gemmlink.rendezvous import agree
from gemmlink.spec.contracts import INTERFACE, Capabilities, Group, Lane
from gemmlink.transport import atomics

_LINE = 64


def _directory() -> str:
    return os.environ.get("GEMMLINK_X_EXAMPLE_DIR") or tempfile.gettempdir()


class Directory:
    """See the module's docstring."""

    name = "directory"
    interface = INTERFACE

    def probe(self) -> Capabilities:
        if not sys.platform.startswith("linux"):
            raise Unavailable("transport 'directory' needs Linux", sys.platform)
        details = {"directory": _directory()}
        return Capabilities(memory=("cpu",), host_words=True, host_data=True, details=details)

    def open(self, group: Group, *, key: str, timeout_s: float) -> DirectorySession:
        # Two hosts may share a directory, but not the memory that its files are mapped to.
        boot = Path("/proc/sys/kernel/random/boot_id")
        hosts = agree(group, f"{key}/host", lambda: {"boot": boot.read_text()}, timeout_s)
        for rank, host in enumerate(hosts):
            if host != hosts[0]:
                raise Unsupported("'directory' needs ranks of one host", f"ranks 0 and {rank}")
        return DirectorySession(group, key, timeout_s)


class DirectorySession:
    """Makes windows; its first one is for barriers."""

    def __init__(self, group: Group, key: str, timeout_s: float) -> None:
        self.rank, self.world = group.rank, group.world
        self._group, self._key, self._timeout_s = group, key, timeout_s
        self._windows: list[DirectoryWindow] = []
        self._made = self._barriers = 0
        self._control = self.window(self.world * _LINE)

    def window(self, nbytes: int, common_from: int | None = None) -> DirectoryWindow:
        self._made += 1
        key = f"{self._key}/window{self._made}"
        window = DirectoryWindow(self._group, key, nbytes, self._timeout_s)
        self._windows = [*(known for known in self._windows if known.addresses), window]
        return window

    def barrier(self, timeout_s: float) -> None:
        self._barriers += 1
        words, deadline = self._control.words, time.monotonic() + timeout_s
        for peer in range(self.world):
            words.set(peer, self.rank * _LINE, self._barriers)
        for peer in range(self.world):
            left = deadline - time.monotonic()
            if words.wait(peer * _LINE, self._barriers, left) < self._barriers:
                raise PeerTimeout(f"rank {peer} must come to a barrier within {timeout_s:g} s")

    def alive(self, peer: int) -> bool | None:
        return None  # unknown: a peer that has ended shows by its silence only

    def close(self) -> None:
        for window in self._windows:
            window.free()


class DirectoryWindow:
    """One file a rank, all of them mapped here."""

    def __init__(self, group: Group, key: str, nbytes: int, timeout_s: float) -> None:
        self.nbytes, self._rank, self._path = nbytes, group.rank, ""
        self._tensors: list[torch.Tensor] = []
        try:
            records = agree(group, f"{key}/create", self._create, timeout_s)
            agree(group, f"{key}/map", lambda: self._map(records), timeout_s)
        except BaseException:
            self._tensors = []
            raise
        finally:
            if self._path:
                os.unlink(self._path)
        self.addresses = [tensor.data_ptr() for tensor in self._tensors]
        self.words = DirectoryWords(self._tensors, group.rank)

    def _create(self) -> dict[str, Any]:
        free = shutil.disk_usage(_directory()).free
        if self.nbytes > free:
            raise Unavailable(f"a window needs {self.nbytes} bytes", f"{free} in {_directory()}")
        file, self._path = tempfile.mkstemp(prefix="gemmlink-example-", dir=_directory())
        with open(file, "wb"):
            # Reserved now: a disk that fills up later would kill the process at a store.
            os.posix_fallocate(file, 0, self.nbytes)
        return {"path": self._path}

    def _map(self, records: list[dict[str, Any]]) -> dict[str, Any]:
        for record in records:
            with open(record["path"], "r+b") as file:
                memory = mmap.mmap(file.fileno(), self.nbytes)
            # The tensor holds the mapping, and so does every view of it that somebody keeps.
            self._tensors.append(torch.frombuffer(memory, dtype=torch.uint8))
        return {}

    def tensor(self, peer: int) -> torch.Tensor:
        return self._tensors[peer]

    def lane(self, peer: int, index: int) -> Lane:
        raise Unsupported("transport 'directory' has no lanes")

    def free(self) -> None:
        self._tensors, self.addresses = [], []


class DirectoryWords:
    """Words at fixed addresses, through gemmlink's atomics."""

    def __init__(self, tensors: list[torch.Tensor], rank: int) -> None:
        self._mapped = tensors  # a word must not be touched after its memory has been unmapped
        self._bases, self._rank = [tensor.data_ptr() for tensor in tensors], rank

    def set(self, peer: int, offset: int, value: int) -> None:
        atomics.store(self._bases[peer] + offset, value)

    def read(self, offset: int) -> int:
        return atomics.load(self._bases[self._rank] + offset)

    def wait(self, offset: int, at_least: int, timeout_s: float) -> int:
        return atomics.wait(self._bases[self._rank] + offset, at_least, int(timeout_s * 1e9))
