"""Lanes on CPUs: a worker thread per lane plays the copy engine.

A lane executes what was enqueued in order: copies between mapped windows, and word writes that
follow them. torch releases the interpreter lock while it copies, so a lane really works beside a
product that runs on another core. An idle lane sleeps and costs nothing.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable

import torch

from gemmlink.errors import PeerTimeout
from gemmlink.spec.contracts import Words

_Task = Callable[[], None]


class CpuLane:
    """Lane ``index`` from rank ``rank`` to ``peer``; see ``contracts.Lane``. In order."""

    def __init__(
        self, source: torch.Tensor, target: torch.Tensor, words: Words, peer: int, index: int
    ) -> None:
        self._source = source
        self._target = target
        self._words = words
        self._peer = peer
        self._name = f"lane {index} to rank {peer}"
        self._tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._posted = 0
        self._done = 0
        self._failed: BaseException | None = None
        self._progress = threading.Condition()
        self._worker: threading.Thread | None = None

    def copy(self, src_offset: int, dst_offset: int, nbytes: int) -> None:
        """Enqueue a copy of ``nbytes`` from the own window to the peer's."""
        source = self._source[src_offset : src_offset + nbytes]
        target = self._target[dst_offset : dst_offset + nbytes]
        self._post(lambda: self._copy(target, source))

    def set(self, offset: int, value: int) -> None:
        """Enqueue a word write at the peer, after the copies enqueued before it."""
        self._post(lambda: self._words.set(self._peer, offset, value))

    def drain(self, timeout_s: float) -> None:
        """Wait until everything enqueued has been done; raise what a copy raised, once."""
        deadline = time.monotonic() + timeout_s
        with self._progress:
            while self._done < self._posted:
                left = deadline - time.monotonic()
                if left <= 0:
                    raise PeerTimeout(
                        f"{self._name} must drain within {timeout_s:g} s",
                        f"{self._done} of {self._posted} steps done",
                        peer=self._peer,
                        word=self._name,
                        seen=self._done,
                        wanted=self._posted,
                    )
                self._progress.wait(left)
            failed, self._failed = self._failed, None
            if failed is not None:
                raise failed

    def close(self) -> None:
        """End the worker once it has done what is enqueued. Does not wait for it. Idempotent."""
        if self._worker is not None:
            self._tasks.put(None)
            self._worker = None

    def _post(self, task: _Task) -> None:
        if self._worker is None:
            self._worker = threading.Thread(target=self._work, name=self._name, daemon=True)
            self._worker.start()
        with self._progress:
            self._posted += 1
        self._tasks.put(task)

    @staticmethod
    def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source)

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None:
            try:
                if self._failed is None:  # after a failed copy no word may announce anything
                    task()
            except BaseException as error:
                self._failed = error
            with self._progress:
                self._done += 1
                self._progress.notify_all()
