"""Arguments of the kernels, passed by value: what a graph captures is the addresses themselves."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch

from gemmlink.core.device.layout import DESTINATIONS, ITEMS

_i64, _int = ctypes.c_int64, ctypes.c_int


class WordsArguments(ctypes.Structure):
    """``struct Words`` of ``kernels.cu``."""

    _fields_ = (
        ("desk", _i64),
        ("record", _i64),
        ("sets", _i64),
        ("waits", _i64),
        ("peers", _i64),
        ("rows", _i64),
        ("fingerprint", _i64),
        ("fill", _i64),
        ("fill_rows", _i64),
        ("fill_cols", _i64),
        ("row_pitch", _i64),
        ("col_pitch", _i64),
        ("nsets", _int),
        ("nwaits", _int),
        ("world", _int),
        ("rank", _int),
        ("flags", _int),
        ("slot", _int),
        ("slots", _int),
        ("itemsize", _int),
    )

    def fill_with_nan(self, result: torch.Tensor) -> None:
        """What the kernel fills if the call has failed: a matrix of any strides."""
        size = result.element_size()
        self.fill = result.data_ptr()
        self.fill_rows, self.fill_cols = result.shape
        self.row_pitch, self.col_pitch = (stride * size for stride in result.stride())
        self.itemsize = size


class ItemArguments(ctypes.Structure):
    """``struct Item`` of ``kernels.cu``."""

    _fields_ = (
        ("from_", _i64),
        ("pitch", _i64),
        ("row_bytes", _i64),
        ("rows", _i64),
        ("first", _int),
        ("fan", _int),
        ("unit", _int),
        ("spare", _int),
    )


class MovesArguments(ctypes.Structure):
    """``struct Moves`` of ``kernels.cu``. ``count`` items of it are used, ``longest`` in bytes."""

    _fields_ = (
        ("desk", _i64),
        ("items", ItemArguments * ITEMS),
        ("to", _i64 * DESTINATIONS),
    )
    count = 0
    longest = 0


class Copy(NamedTuple):
    """Rows that go from one place to several; all numbers are bytes or addresses.

    Rows lie ``pitch`` apart at the source and packed at their destinations. ``rows`` is 1 where
    they are packed at the source, too.
    """

    source: int
    pitch: int
    row_bytes: int
    rows: int
    to: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes read."""
        return self.rows * self.row_bytes

    @property
    def unit(self) -> int:
        """The widest access, 16 bytes at most, that fits all addresses and rows."""
        bits = 16 | self.source
        for address in self.to:
            bits |= address
        if self.rows > 1:
            bits |= self.pitch | self.row_bytes
        return bits & -bits


class PreparedMoves:
    """Launches that can be made again and again; ``result`` is where they now deliver to.

    All other addresses are those of windows, which stay. A result of the same shape and alignment
    takes the place of the last one.
    """

    def __init__(self, launches: list[MovesArguments], result: torch.Tensor) -> None:
        self.launches = launches
        self._base = result.data_ptr()
        end = self._base + result.numel() * result.element_size()
        self._within = [
            (launch, place)
            for launch in launches
            for item in launch.items[: launch.count]
            for place in range(item.first, item.first + item.fan)
            if self._base <= launch.to[place] < end
        ]

    def deliver_to(self, result: torch.Tensor) -> None:
        """Deliver to ``result`` from now on."""
        base = result.data_ptr()
        if base != self._base:
            for launch, place in self._within:
                launch.to[place] += base - self._base
            self._base = base


def copy_of(value: torch.Tensor, to: Iterable[int]) -> Copy:
    """A copy of the rows of ``value``, ``(rows, width)`` with unit stride in a row."""
    size = value.element_size()
    rows, width = value.shape
    if rows == 1 or value.stride(0) == width:
        return Copy(value.data_ptr(), 0, rows * width * size, 1, tuple(to))
    return Copy(value.data_ptr(), value.stride(0) * size, width * size, rows, tuple(to))


def packed(desk: int, copies: Iterable[Copy]) -> Iterator[MovesArguments]:
    """The arguments of as few launches as have room for these copies. Empty ones are left out."""
    made, used = _moves(desk), 0
    for copy in _bounded(copies):
        if not copy.nbytes:
            continue
        if made.count == ITEMS or used + len(copy.to) > DESTINATIONS:
            yield made
            made, used = _moves(desk), 0
        item = made.items[made.count]
        item.from_, item.pitch, item.row_bytes, item.rows, _ = copy
        item.first, item.fan, item.unit = used, len(copy.to), copy.unit
        for address in copy.to:
            made.to[used] = address
            used += 1
        made.count += 1
        made.longest = max(made.longest, copy.nbytes)
    if made.count:
        yield made


def _moves(desk: int) -> MovesArguments:
    made = MovesArguments()
    made.desk = desk
    return made


def _bounded(copies: Iterable[Copy]) -> Iterator[Copy]:
    for copy in copies:
        if len(copy.to) <= DESTINATIONS:
            yield copy
            continue
        for first in range(0, len(copy.to), DESTINATIONS):
            yield copy._replace(to=copy.to[first : first + DESTINATIONS])
