"""The desk: what the kernels of one operation on one rank share, and what the host reads of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from gemmlink.core.device.arguments import WordsArguments
from gemmlink.core.device.layout import DESK_WORDS, RECORD_WORDS, DeskWord, Field, Why
from gemmlink.core.device.machine import Machine
from gemmlink.spec.schedule import Set, Wait, Word
from gemmlink.spec.window import WindowLayout

_NS = 1_000_000_000


class Report(NamedTuple):
    """What a kernel found wrong, first of all: see ``layout.Field``."""

    why: Why
    epoch: int
    peer: int
    name: int
    seen: int
    wanted: int


class Desk:
    """Device words, the record of failure, and tables of the places of words.

    ``addresses[p]`` is where rank p's window is in this process. Everything stays alive, and at its
    place, as long as this object: captured graphs hold the addresses.
    """

    def __init__(
        self,
        machine: Machine,
        layout: WindowLayout,
        addresses: Sequence[int],
        rank: int,
        timeout_s: float,
    ) -> None:
        self._machine = machine
        self._layout = layout
        self._addresses = addresses
        self._rank = rank
        self._limit = int(timeout_s * _NS)
        #: Names of awaited words; a record says which by its place here.
        self.names: list[Word] = []
        self._words = machine.zeros(DESK_WORDS)
        self._record = machine.shared(RECORD_WORDS)
        self._tables = [machine.table(self._places())]
        self.clear(0)

    @property
    def address(self) -> int:
        """Where the desk's words begin."""
        return self._words.data_ptr()

    def arguments(self, sets: Sequence[Set], waits: Sequence[Wait]) -> WordsArguments:
        """Arguments of a launch that sets and awaits these words."""
        made = WordsArguments()
        made.desk, made.record = self.address, self._record.data_ptr()
        made.peers = self._tables[0].data_ptr()
        made.world, made.rank = len(self._addresses), self._rank
        made.sets, made.nsets = self._table([self._set(action) for action in sets]), len(sets)
        made.waits, made.nwaits = self._table([self._wait(action) for action in waits]), len(waits)
        made.slots = 1
        return made

    def report(self) -> Report | None:
        """What went wrong, as far as the host has heard. Never waits for the device."""
        said = self._record.tolist()
        if not said[Field.SAID]:
            return None
        fields = [said[field] for field in list(Field)[2:]]
        return Report(Why(said[Field.WHY]), *fields)

    def issued(self) -> int:
        """The number of the last call that the device has begun. Synchronous."""
        return self._machine.peek(self._words)[DeskWord.EPOCH]

    def stop(self) -> None:
        """Make kernels that wait give up soon, and later calls at once. Synchronous."""
        self._machine.poke(self._words[DeskWord.STOP : DeskWord.STOP + 1], [1])

    def clear(self, epoch: int) -> None:
        """As if call ``epoch`` had just ended well. No kernel of the operation may be running."""
        self._record.zero_()
        words = [0] * DESK_WORDS
        words[DeskWord.EPOCH] = words[DeskWord.COMPLETED] = epoch
        words[DeskWord.LIMIT] = self._limit
        self._machine.poke(self._words, words)

    # Tables.

    def _places(self) -> list[int]:
        layout, rank = self._layout, self._rank
        own = self._addresses[rank]
        places: list[int] = []
        for peer, theirs in enumerate(self._addresses):
            places += [own + layout.single("abort", peer), own + layout.single("enter", peer)]
            places += [own + layout.record(peer, 0)]
            places += [theirs + layout.single("abort", rank), theirs + layout.single("enter", rank)]
            places += [theirs + layout.record(rank, 0)]
        return places

    def _set(self, action: Set) -> tuple[int, ...]:
        return self._addresses[action.at] + self._layout.word(action.word), action.lag

    def _wait(self, action: Wait) -> tuple[int, ...]:
        self.names.append(action.word)
        address = self._addresses[self._rank] + self._layout.word(action.word)
        return address, action.lag, action.word.source, len(self.names) - 1

    def _table(self, rows: Sequence[tuple[int, ...]]) -> int:
        if not rows:
            return 0
        self._tables.append(self._machine.table([number for row in rows for number in row]))
        return self._tables[-1].data_ptr()
