"""A machine that is no GPU: the two kernels, interpreted on CPU memory as they are launched.

It is the other definition of ``kernels.cu``, function by function. With it the device program runs
over ``shm`` windows, so that all of it but the hardware is tested where there is none. A "stream"
ends whatever it is given at once.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch

from gemmlink.core.call import FAILED, POISONED, REFUSED
from gemmlink.core.device import build
from gemmlink.core.device.arguments import MovesArguments, WordsArguments
from gemmlink.core.device.layout import NAME_ENTER, NAME_RECORD, PLACES, DeskWord, Field, Flag, Why
from gemmlink.core.launch import CODES, RANKS
from gemmlink.transport import atomics

_WORD = 8
_LINE = 64


class Emulated:
    """``core.device.machine.Machine`` without a device. ``launches`` counts what was launched."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.launches: list[str] = []
        self._made = 0

    def zeros(self, count: int) -> torch.Tensor:
        return torch.zeros(count, dtype=torch.int64)

    def table(self, numbers: Sequence[int]) -> torch.Tensor:
        return torch.tensor(numbers, dtype=torch.int64)

    def shared(self, count: int) -> torch.Tensor:
        return self.zeros(count)

    def peek(self, words: torch.Tensor) -> list[int]:
        found: list[int] = words.tolist()
        return found

    def poke(self, words: torch.Tensor, values: Sequence[int]) -> None:
        words.copy_(torch.tensor(values))

    def stream(self) -> int:
        return 0

    def new_stream(self) -> int:
        self._made += 1
        return self._made

    def is_capturing(self, stream: int) -> bool:
        return False

    def event(self) -> int:
        return 0

    def record(self, event: int, stream: int) -> None:
        self.launches.append(f"record {stream}")

    def wait(self, stream: int, event: int) -> None:
        self.launches.append(f"stream {stream} waits")

    def has_happened(self, event: int) -> bool:
        return True

    def words(self, arguments: WordsArguments, stream: int) -> None:
        self.launches.append("words")
        _Words(arguments).run()

    def moves(self, arguments: MovesArguments, stream: int) -> None:
        self.launches.append("moves")
        if atomics.load(arguments.desk + DeskWord.FAILED * _WORD):
            return
        for item in arguments.items[: arguments.count]:
            broken = item.fan and item.rows > 1 and item.row_bytes % item.unit
            assert not broken, "a row of broken units"
            for place in arguments.to[item.first : item.first + item.fan]:
                assert (place | item.from_) % item.unit == 0, "an unaligned access"
                for row in range(item.rows):
                    source, to = item.from_ + row * item.pitch, place + row * item.row_bytes
                    ctypes.memmove(to, source, item.row_bytes)

    def copy(self, to: int, source: int, nbytes: int, stream: int) -> None:
        self.launches.append(f"copy on {stream}")
        ctypes.memmove(to, source, nbytes)


class _Words:
    """One launch of ``gl_words``."""

    def __init__(self, arguments: WordsArguments) -> None:
        self.w = arguments

    def run(self) -> None:
        w, flags = self.w, Flag(self.w.flags)
        if Flag.ENTERS in flags and not self.failed():
            self.begin()
        epoch = self.desk(DeskWord.EPOCH)
        if Flag.ENTERS in flags:
            for peer in self.peers():
                if not self.failed():
                    self.enter(epoch, peer)
        if not self.failed():
            if Flag.REFUSES in flags:
                self.tell(epoch, REFUSED, w.rank)
            for at in range(w.nsets):
                place, lag = self.row(w.sets, at, 2)
                atomics.store(place, epoch - lag)
            for at in range(w.nwaits):
                place, lag, peer, name = self.row(w.waits, at, 4)
                if not self.wait(epoch, place, epoch - lag, peer, name):
                    break
        if Flag.LEAVES in flags:
            self.leave(epoch, flags)

    def leave(self, epoch: int, flags: Flag) -> None:
        for peer in self.peers():
            if Flag.REFUSES not in flags and not self.failed():
                self.compare(epoch, peer, flags)
                self.heed(epoch, peer)
        if self.failed():
            self.poison()
        else:
            self.put(DeskWord.COMPLETED, epoch)

    def begin(self) -> None:
        w, done = self.w, self.desk(DeskWord.COMPLETED)
        if self.desk(DeskWord.STOP):
            self.fail(done + 1, Why.STOPPED, w.rank, 0, 0, 0, FAILED, w.rank)
            return
        self.put(DeskWord.STARTED, time.monotonic_ns())
        before = self.desk(DeskWord.EPOCH)
        if before != done:
            self.fail(before, Why.OVERLAP, w.rank, 0, before, done, FAILED, w.rank)
            return
        self.put(DeskWord.EPOCH, done + 1)
        if w.slots > 1 and (done + 1) % w.slots != w.slot:
            seen, wanted = w.slot, (done + 1) % w.slots
            self.fail(done + 1, Why.SLOT, w.rank, 0, seen, wanted, FAILED, w.rank)

    def enter(self, epoch: int, peer: int) -> None:
        _, enter, _, _, its_enter, its_record = self.places(peer)
        if not self.wait(epoch, enter, epoch - 1, peer, NAME_ENTER):
            return
        record = its_record + epoch % 2 * _LINE
        for at, value in enumerate((epoch, self.w.rows, self.w.fingerprint)):
            atomics.store(record + at * _WORD, value)
        atomics.store(its_enter, epoch)

    def compare(self, epoch: int, peer: int, flags: Flag) -> None:
        w = self.w
        _, enter, record, _, _, _ = self.places(peer)
        if not self.wait(epoch, enter, epoch, peer, NAME_ENTER):
            return
        its, rows, mark = (atomics.load(record + epoch % 2 * _LINE + at * _WORD) for at in range(3))
        if its != epoch:
            self.fail(epoch, Why.GONE, peer, NAME_RECORD, its, epoch, FAILED, peer)
        elif mark != w.fingerprint:
            self.fail(epoch, Why.ARGUMENTS, peer, NAME_RECORD, mark, w.fingerprint, FAILED, peer)
        elif Flag.SAME_ROWS in flags and rows != w.rows:
            self.fail(epoch, Why.ROWS, peer, NAME_RECORD, rows, w.rows, FAILED, peer)

    def heed(self, epoch: int, peer: int) -> None:
        said = atomics.load(self.places(peer)[0])
        its, code = divmod(said // RANKS, CODES)
        if code in (FAILED, POISONED):
            mine = POISONED if its < epoch else FAILED
            self.fail(epoch, Why.ABORTED, peer, 0, said, epoch, mine, said % RANKS)

    def wait(self, epoch: int, place: int, wanted: int, peer: int, name: int) -> bool:
        while True:
            seen = atomics.wait(place, wanted, 2_000_000)
            if seen >= wanted:
                return True
            if self.failed() or self.is_aborted(epoch, place, wanted, peer, name):
                return False
            if self.desk(DeskWord.STOP):
                rank = self.w.rank
                self.fail(epoch, Why.STOPPED, rank, name, seen, wanted, FAILED, rank)
                return False
            if time.monotonic_ns() - self.desk(DeskWord.STARTED) > self.desk(DeskWord.LIMIT):
                self.fail(epoch, Why.TIMEOUT, peer, name, seen, wanted, FAILED, peer)
                return False

    def is_aborted(self, epoch: int, place: int, wanted: int, peer: int, name: int) -> bool:
        for other in self.peers():
            said = atomics.load(self.places(other)[0])
            its, code = divmod(said // RANKS, CODES)
            lost = code not in (0, REFUSED) and its <= epoch
            refused = code == REFUSED and its == epoch
            left = its > epoch and other == peer
            if not (lost or refused or left) or (not lost and atomics.load(place) >= wanted):
                continue
            mine = POISONED if code != REFUSED and its < epoch else FAILED
            culprit = other if code == REFUSED else said % RANKS
            self.fail(epoch, Why.ABORTED, other, name, said, wanted, mine, culprit)
            return True
        return False

    def fail(
        self,
        epoch: int,
        why: Why,
        peer: int,
        name: int,
        seen: int,
        wanted: int,
        code: int,
        culprit: int,
    ) -> None:
        if self.desk(DeskWord.CLAIM):
            return
        self.put(DeskWord.CLAIM, 1)
        fields = (why, epoch, peer, name, seen, wanted)
        for field, value in zip(list(Field)[1:], fields, strict=True):
            atomics.store(self.w.record + field * _WORD, value)
        atomics.store(self.w.record + Field.SAID * _WORD, 1)
        self.tell(epoch, code, culprit)
        self.put(DeskWord.FAILED, epoch)

    def tell(self, epoch: int, code: int, culprit: int) -> None:
        for peer in range(self.w.world):
            atomics.store(self.places(peer)[3], (epoch * CODES + code) * RANKS + culprit)

    def poison(self) -> None:
        w = self.w
        for row in range(w.fill_rows):
            for col in range(w.fill_cols):
                at = w.fill + row * w.row_pitch + col * w.col_pitch
                ctypes.memset(at, 0xFF, w.itemsize)

    # Memory.

    def desk(self, word: DeskWord) -> int:
        return atomics.load(self.w.desk + word * _WORD)

    def put(self, word: DeskWord, value: int) -> None:
        atomics.store(self.w.desk + word * _WORD, value)

    def failed(self) -> bool:
        return self.desk(DeskWord.FAILED) != 0

    def peers(self) -> list[int]:
        return [peer for peer in range(self.w.world) if peer != self.w.rank]

    def places(self, peer: int) -> list[int]:
        return self.row(self.w.peers, peer, PLACES)

    def row(self, table: int, at: int, width: int) -> list[int]:
        first = table + at * width * _WORD
        return [atomics.load(first + column * _WORD) for column in range(width)]


@contextmanager
def emulation() -> Iterator[None]:
    """Within, operations on CPU tensors are prepared as if the CPU were a device."""
    from gemmlink.core import prepare

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(build.MACHINES, "cpu", Emulated)
        patch.setattr(prepare, "_is_host", lambda device: False)
        yield
