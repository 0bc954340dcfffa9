"""What a device program needs of a device: memory, kernels, streams and events.

``Machine`` is the seam between the core's logic and the hardware: the tests of a machine without
GPUs put an interpreter of the two kernels behind it. ``Gpu`` is the CUDA device.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from gemmlink.core.device.arguments import MovesArguments, WordsArguments
from gemmlink.core.device.compiled import function
from gemmlink.core.device.driver import Driver
from gemmlink.errors import InvalidArgument

_THREADS = 256
#: Bytes that a block of ``gl_moves`` carries in one round: four accesses of 16 bytes a thread.
_ROUND = _THREADS * 64
#: Rounds of blocks that one multiprocessor is given at most.
_BLOCKS_A_MULTIPROCESSOR = 4
#: Streams of machines that have gone, by the device. None is ever destroyed.
_spare: dict[int, list[int]] = {}


class Machine(Protocol):
    """A device. Streams and events are handles; whatever takes a stream is asynchronous."""

    device: torch.device

    def zeros(self, count: int) -> torch.Tensor:
        """``count`` zeroed int64 words of device memory."""

    def table(self, numbers: Sequence[int]) -> torch.Tensor:
        """Constant int64 words of device memory."""

    def shared(self, count: int) -> torch.Tensor:
        """Zeroed int64 words of host memory that the device writes at the same address."""

    def peek(self, words: torch.Tensor) -> list[int]:
        """The present values of device words, whatever else is running. Synchronous."""

    def poke(self, words: torch.Tensor, values: Sequence[int]) -> None:
        """Write device words, whatever else is running. Synchronous."""

    def stream(self) -> int:
        """The current stream of the calling thread."""

    def new_stream(self) -> int:
        """A stream of this operation's own."""

    def is_capturing(self, stream: int) -> bool:
        """Whether a graph is being captured on ``stream``."""

    def event(self) -> int:
        """A new event."""

    def record(self, event: int, stream: int) -> None:
        """Mark the present end of a stream."""

    def wait(self, stream: int, event: int) -> None:
        """Let a stream wait for an event."""

    def has_happened(self, event: int) -> bool:
        """Whether all that was enqueued before the event has ended."""

    def words(self, arguments: WordsArguments, stream: int) -> None:
        """Launch ``gl_words``."""

    def moves(self, arguments: MovesArguments, stream: int) -> None:
        """Launch ``gl_moves``."""

    def copy(self, to: int, source: int, nbytes: int, stream: int) -> None:
        """A copy that nothing guards."""


class Gpu:
    """A CUDA device."""

    def __init__(self, device: torch.device) -> None:
        _check_current(device)
        self.device = device
        index = device.index
        self._index = index
        self._driver = Driver(device)
        self._words = function("gl_words", index)
        self._moves = function("gl_moves", index)
        count = torch.cuda.get_device_properties(index).multi_processor_count
        self._blocks = _BLOCKS_A_MULTIPROCESSOR * count
        # What the host asks for while kernels wait must not queue up behind them.
        aside = self.new_stream()
        self._aside = torch.cuda.ExternalStream(aside, device)  # type: ignore[no-untyped-call]
        self._current = _current_stream()
        self.is_capturing = self._driver.is_capturing
        self.event = self._driver.event
        self.record = self._driver.record
        self.wait = self._driver.wait
        self.has_happened = self._driver.has_happened
        self.copy = self._driver.copy

    def zeros(self, count: int) -> torch.Tensor:
        """``count`` zeroed words."""
        return self.table([0] * count)

    def table(self, numbers: Sequence[int]) -> torch.Tensor:
        """Constant words."""
        made = torch.tensor([*numbers, 0], dtype=torch.int64, device=self.device)
        torch.cuda.current_stream(self.device).synchronize()  # used on other streams, too
        return made[: len(numbers)]

    def shared(self, count: int) -> torch.Tensor:
        """Pinned memory: one address for host and device."""
        return torch.zeros(count, dtype=torch.int64, pin_memory=True)

    def peek(self, words: torch.Tensor) -> list[int]:
        """Values now."""
        with torch.cuda.stream(self._aside):
            found: list[int] = words.cpu().tolist()
        return found

    def poke(self, words: torch.Tensor, values: Sequence[int]) -> None:
        """Write now."""
        with torch.cuda.stream(self._aside):
            words.copy_(torch.tensor(values, dtype=torch.int64))
            self._aside.synchronize()

    def stream(self) -> int:
        """The current stream; raises ``InvalidArgument`` while another device is current."""
        if torch.cuda.current_device() != self._index:
            _check_current(self.device)
        return self._current(self._index)

    def new_stream(self) -> int:
        """A stream that nobody else uses as long as this machine lives.

        torch's pool has 32 and then gives the first ones out again: what is enqueued on one of them
        might stand behind a caller's kernel that waits.
        """
        spare = _spare.setdefault(self._index, [])
        made = spare.pop() if spare else self._driver.new_stream()
        weakref.finalize(self, spare.append, made)
        return made

    def words(self, arguments: WordsArguments, stream: int) -> None:
        """One CTA: a kernel that waits must not keep others from the device."""
        self._driver.launch(self._words, 1, 1, _THREADS, arguments, stream)

    def moves(self, arguments: MovesArguments, stream: int) -> None:
        """Blocks enough for the longest item, a row of them for each."""
        most = max(1, self._blocks // arguments.count)
        blocks = min(most, max(1, -(-arguments.longest // _ROUND)))
        self._driver.launch(self._moves, blocks, arguments.count, _THREADS, arguments, stream)


def _check_current(device: torch.device) -> None:
    """Raise unless ``device`` is the current one: windows and streams belong to it."""
    current = torch.cuda.current_device()
    if device.index != current:
        raise InvalidArgument(
            "an operation is prepared and called on the current device",
            f"{device} where cuda:{current} is current",
            f"Call torch.cuda.set_device({device.index}) first, in every thread.",
        )


def _current_stream() -> Callable[[int], int]:
    """What gives the current stream of a device: torch's short way if it has one."""
    short: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)
    if callable(short):
        return lambda index: int(short(index))
    return lambda index: int(torch.cuda.current_stream(index).cuda_stream)
