"""Where words, entry records and slots lie inside a symmetric window.

All offsets are bytes from the start of the window and equal on every rank::

    [ enter free abort read proof | records | arrive | chunk | slots ]

Each word is 8 bytes, has one writer, and stands on its own 64-byte line with other words of the
same writer at most: two ranks never write to one cache line.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from gemmlink.spec.schedule import Word

WORD = 8
LINE = 64
PAGE = 4096

#: int64 fields of an entry record: epoch, rows of the call, fingerprint of its arguments.
RECORD_FIELDS = 3

_SINGLE = ("enter", "free", "abort", "read", "proof")


def _up(value: int, unit: int) -> int:
    return -(-value // unit) * unit


@dataclass(frozen=True)
class WindowLayout:
    """Offsets for ``world`` ranks, ``chunks`` chunks per source and slots of ``slot_bytes``.

    ``buffers`` sets of slots follow each other; call n uses set ``n % buffers``. Within a set the
    slots of all sources are contiguous, so that blocks that fill them form one matrix.
    """

    world: int
    chunks: int
    slot_bytes: int
    buffers: int = 1

    def word(self, word: Word) -> int:
        """Offset of ``word``. Raises ``KeyError`` for a kind that this layout does not have."""
        if word.kind == "arrive":
            return self._arrive + word.source * self._chunk_line + word.chunk * WORD
        if word.kind == "chunk":
            return self._chunk + word.chunk * WORD
        return self.single(word.kind, word.source)

    def single(self, kind: str, source: int) -> int:
        """Offset of the one word of ``kind`` that rank ``source`` writes."""
        try:
            index = _SINGLE.index(kind)
        except ValueError:
            raise KeyError(f"no word of kind {kind!r}") from None
        return (index * self.world + source) * LINE

    def record(self, source: int, epoch: int) -> int:
        """Offset of the entry record of ``source`` for ``epoch``.

        Two records alternate: a rank that enters call n+1 has seen every peer finish sending call
        n, but a peer may still read the record of call n.
        """
        return self._records + (source * 2 + epoch % 2) * LINE

    def slot(self, source: int, epoch: int = 0) -> int:
        """Offset of the slot for ``source`` in call ``epoch``."""
        return self.slots(epoch) + source * self.slot_bytes

    def slots(self, epoch: int) -> int:
        """Offset of the set of slots that call ``epoch`` uses."""
        return self.data + epoch % self.buffers * self.world * self.slot_bytes

    @cached_property
    def _records(self) -> int:
        return len(_SINGLE) * self.world * LINE

    @cached_property
    def _arrive(self) -> int:
        return self._records + 2 * self.world * LINE

    @cached_property
    def _chunk_line(self) -> int:
        return _up(self.chunks * WORD, LINE)

    @cached_property
    def _chunk(self) -> int:
        return self._arrive + self.world * self._chunk_line

    @cached_property
    def data(self) -> int:
        """Offset of slot 0; words end before it."""
        return _up(self._chunk + self._chunk_line, PAGE)

    @cached_property
    def nbytes(self) -> int:
        """Size of the whole window."""
        return self.data + max(self.buffers * self.world * self.slot_bytes, LINE)
