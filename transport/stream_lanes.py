"""Lanes as streams of a device: copies run in order, and a word is stored behind them.

This is the lane of the contract, fed by a host. The core, which enqueues whole calls, forks streams
of its own (``core.device.lanes``): there the number of a call is known to the device only.
"""

from __future__ import annotations

import time

import torch

from gemmlink.errors import PeerTimeout

_WORD = 8
_NAP_S = 50e-6


class StreamLane:
    """Lane ``index`` from ``own`` memory to ``theirs``, both as this process maps them."""

    def __init__(self, own: torch.Tensor, theirs: torch.Tensor, peer: int, index: int) -> None:
        self._own = own
        self._theirs = theirs
        self._name = f"lane {index} to rank {peer}"
        self._peer = peer
        self._stream = torch.cuda.Stream(own.device)  # type: ignore[no-untyped-call]

    def copy(self, src_offset: int, dst_offset: int, nbytes: int) -> None:
        """Enqueue a copy behind all that the current stream holds."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            source = self._own[src_offset : src_offset + nbytes]
            self._theirs[dst_offset : dst_offset + nbytes].copy_(source, non_blocking=True)

    def set(self, offset: int, value: int) -> None:
        """Enqueue a word write behind the copies."""
        with torch.cuda.stream(self._stream):
            self._theirs[offset : offset + _WORD].view(torch.int64).fill_(value)

    def drain(self, timeout_s: float) -> None:
        """Wait until the stream is idle."""
        deadline = time.monotonic() + timeout_s
        while not self._stream.query():
            if time.monotonic() > deadline:
                raise PeerTimeout(
                    f"{self._name} must come to rest within {timeout_s:g} s",
                    "copies that have not ended",
                    peer=self._peer,
                )
            time.sleep(_NAP_S)

    def close(self) -> None:
        """Hold no window any more; nothing can be enqueued then. Idempotent."""
        self._own = self._theirs = torch.empty(0, dtype=torch.uint8)
