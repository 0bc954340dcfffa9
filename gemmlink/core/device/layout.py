"""Numbers that the kernels and the host share; the same names stand in ``kernels.cu``.

The *desk* is a handful of int64 words in device memory, one desk for each operation and rank. The
*record* is in host memory that the device writes: the host reads it without synchronising.
"""

from __future__ import annotations

from enum import IntEnum, IntFlag


class DeskWord(IntEnum):
    """Words of the desk. ``LIMIT`` and ``STARTED`` are nanoseconds of the device's clock.

    ``EPOCH`` is the one number of the current call: a host that replays a graph does not count.
    ``FAILED``: 0, or the epoch in which the operation failed. ``STOP``: 1 once the host has told
    the kernels to end: whichever waits or enters then fails its call, and tells the peers so before
    a product behind it overwrites what they may be reading.
    """

    EPOCH = 0
    COMPLETED = 1
    LIMIT = 2
    FAILED = 3
    CLAIM = 4
    STARTED = 5
    STOP = 6


DESK_WORDS = 8


class Field(IntEnum):
    """Fields of the record. ``SAID`` is 1 once the others hold."""

    SAID = 0
    WHY = 1
    EPOCH = 2
    PEER = 3
    NAME = 4
    SEEN = 5
    WANTED = 6


RECORD_WORDS = 8


class Why(IntEnum):
    """What went wrong."""

    TIMEOUT = 1
    ABORTED = 2
    ROWS = 3
    ARGUMENTS = 4
    OVERLAP = 5
    SLOT = 6
    GONE = 7
    STOPPED = 8


class Flag(IntFlag):
    """What a launch of ``gl_words`` does besides setting and waiting."""

    ENTERS = 1
    LEAVES = 2
    REFUSES = 4
    SAME_ROWS = 8


#: Addresses in the table of ranks, for each: see ``desk.Desk``.
PLACES = 6
#: ``Field.NAME`` of waits that are not the schedule's.
NAME_ENTER = -1
NAME_RECORD = -2

#: Bounds of one launch of ``gl_moves``.
ITEMS = 16
DESTINATIONS = 64
