"""Words in device memory as the host uses them: in set-up, reset and diagnosis.

Calls set and await words from kernels. This is the slow way: some 20 to 50 us for each method, on a
stream aside, so that a kernel which waits on another stream holds nothing up.
"""

from __future__ import annotations

import time

import torch

_WORD = 8
_SHORTEST_NAP_S = 20e-6
#: A read costs the host up to 0.15 ms: at this pace a long wait takes a thirtieth of a core.
_LONGEST_NAP_S = 5e-3


class DeviceWords:
    """``contracts.Words`` over windows that are tensors of one device, all of them mapped here."""

    def __init__(self, tensors: list[torch.Tensor], rank: int) -> None:
        self._words = [_as_words(tensor) for tensor in tensors]
        self._own = self._words[rank]
        self._aside = torch.cuda.Stream(tensors[rank].device)  # type: ignore[no-untyped-call]

    def set(self, peer: int, offset: int, value: int) -> None:
        """Write the word behind all that the current stream holds; return when it is written.

        The end of a kernel publishes its stores, this one's and those of the kernels before it.
        """
        self._aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._aside):
            # One thread stores eight aligned bytes: nobody ever sees half of a word.
            self._words[peer][offset // _WORD].fill_(value)
            self._aside.synchronize()

    def read(self, offset: int) -> int:
        """The word, by a copy that is awaited: what is enqueued later sees what it tells of."""
        with torch.cuda.stream(self._aside):
            return int(self._own[offset // _WORD].item())

    def wait(self, offset: int, at_least: int, timeout_s: float) -> int:
        """Read again and again, with pauses that grow with the time waited."""
        started = time.monotonic()
        while True:
            seen = self.read(offset)
            waited = time.monotonic() - started
            if seen >= at_least or waited > timeout_s:
                return seen
            nap = min(max(_SHORTEST_NAP_S, waited / 8), _LONGEST_NAP_S)
            time.sleep(min(nap, max(0.0, timeout_s - waited)))

    def close(self) -> None:
        """Hold no window any more; no word can be read or set then. Idempotent."""
        self._words = []
        self._own = torch.empty(0, dtype=torch.int64)


def _as_words(tensor: torch.Tensor) -> torch.Tensor:
    return tensor[: tensor.numel() // _WORD * _WORD].view(torch.int64)
