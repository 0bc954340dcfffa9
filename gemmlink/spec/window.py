"""Where words, entry records and areas lie inside a symmetric window.

All offsets are bytes from the start of the window and equal on every rank::

    [ enter free abort read proof | records | arrive | chunk | areas ]

Each word is 8 bytes, has one writer, and stands on its own 64-byte line with other words of the
same writer at most: two ranks never write to one cache line.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from gemmlink.spec.schedule import Area, Word

WORD = 8
LINE = 64
PAGE = 4096

#: int64 fields of an entry record: epoch, rows of the call, fingerprint of its arguments.
RECORD_FIELDS = 3

_SINGLE = ("enter", "free", "abort", "read", "proof")


def _up(value: int, unit: int) -> int:
    return -(-value // unit) * unit


@dataclass(frozen=True)
class AreaBytes:
    """How much of a window an area of a phase takes."""

    phase: int
    area: Area
    nbytes: int


def inbox(world: int, slot_bytes: int) -> tuple[AreaBytes, ...]:
    """The areas of an operation with one phase and nothing but a slot for each source."""
    return (AreaBytes(0, "inbox", world * slot_bytes),)


@dataclass(frozen=True)
class WindowLayout:
    """Offsets for ``world`` ranks, ``chunks`` chunks per part, and these areas.

    ``buffers`` sets of areas follow each other; call n uses set ``n % buffers``. ``phases`` and
    ``parts`` are how many of each there are words for.
    """

    world: int
    chunks: int
    areas: tuple[AreaBytes, ...]
    buffers: int = 1
    phases: int = 1
    parts: int = 1

    def word(self, word: Word) -> int:
        """Offset of ``word``. Raises ``KeyError`` for a kind that this layout does not have."""
        if word.kind == "arrive":
            line = word.phase * self.world + word.source
            return self._arrive + line * self._chunk_line + word.chunk * WORD
        if word.kind == "chunk":
            line = word.phase * self.parts + word.part
            return self._chunk + line * self._chunk_line + word.chunk * WORD
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

    def area(self, phase: int, area: Area, epoch: int = 0) -> int:
        """Offset of an area in call ``epoch``. Raises ``KeyError`` if there is none."""
        return self.data + epoch % self.buffers * self._set_bytes + self._area_starts[phase, area]

    @cached_property
    def _area_starts(self) -> dict[tuple[int, Area], int]:
        starts, at = {}, 0
        for area in self.areas:
            starts[area.phase, area.area] = at
            at += _up(area.nbytes, LINE)
        return starts

    @cached_property
    def _set_bytes(self) -> int:
        return sum(_up(area.nbytes, LINE) for area in self.areas)

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
        return self._arrive + self.phases * self.world * self._chunk_line

    @cached_property
    def data(self) -> int:
        """Offset of the first area; words end before it."""
        return _up(self._chunk + self.phases * self.parts * self._chunk_line, PAGE)

    @cached_property
    def nbytes(self) -> int:
        """Size of the whole window."""
        return self.data + max(self.buffers * self._set_bytes, LINE)
