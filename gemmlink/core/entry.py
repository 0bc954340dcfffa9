"""The entry records of an operation: what each rank says of a call as it enters it.

A record is the number of the call, M, and the fingerprint of the other arguments; the word
``enter`` is set behind it. Two records alternate, see ``spec.window.WindowLayout.record``.
"""

from __future__ import annotations

from collections.abc import Callable

from gemmlink.core.words import SLICE_S, reader, setter, waiter
from gemmlink.spec.contracts import Words
from gemmlink.spec.window import WORD, WindowLayout


class Entry:
    """The records that ``rank`` writes at its peers, and those that they write here."""

    def __init__(
        self, words: Words, layout: WindowLayout, rank: int, peers: tuple[int, ...]
    ) -> None:
        self._layout = layout
        self._say = [_sayer(words, layout, rank, peers, parity) for parity in (0, 1)]
        self._read = [
            {peer: reader(words, *_places(layout, peer, parity)) for peer in peers}
            for parity in (0, 1)
        ]
        #: For each peer what waits, for a slice, until it has entered a call.
        self.waits = {peer: waiter(words, self.offset(peer), SLICE_S) for peer in peers}

    def offset(self, peer: int) -> int:
        """Where the word ``enter`` of ``peer`` lies."""
        return self._layout.single("enter", peer)

    def say(self, epoch: int, rows: int, fingerprint: int) -> None:
        """Enter call ``epoch``."""
        self._say[epoch % 2](epoch, rows, fingerprint, epoch)

    def read(self, peer: int, epoch: int) -> tuple[int, ...]:
        """The last call that ``peer`` has entered; then its record for call ``epoch``.

        The record holds what its name says only if the first of these numbers is at least
        ``epoch``: epoch, M, fingerprint.
        """
        return self._read[epoch % 2][peer]()


def _places(layout: WindowLayout, source: int, epoch: int) -> tuple[int, int, int, int]:
    base = layout.record(source, epoch)
    return layout.single("enter", source), base, base + WORD, base + 2 * WORD


def _sayer(
    words: Words, layout: WindowLayout, rank: int, peers: tuple[int, ...], epoch: int
) -> Callable[..., None]:
    # The word comes last: whoever sees it sees the record.
    enter, *record = _places(layout, rank, epoch)
    return setter(words, *(tuple((peer, at) for peer in peers) for at in (*record, enter)))
