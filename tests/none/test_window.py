"""Chunks and window layouts, as properties that hold for all sizes."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gemmlink.spec.problem import Problem, chunk_rows
from gemmlink.spec.schedule import Word
from gemmlink.spec.window import LINE, RECORD_FIELDS, WORD, WindowLayout

SINGLE = ("enter", "free", "abort", "proof")

layouts = st.builds(
    WindowLayout,
    world=st.integers(1, 9),
    chunks=st.integers(1, 64),
    slot_bytes=st.integers(0, 1 << 20),
)
#: 40000 rows of 30000 bfloat16 are 2.4e9 bytes: past 32 bits with the second slot.
large = st.builds(
    WindowLayout,
    world=st.integers(1, 64),
    chunks=st.integers(1, 64),
    slot_bytes=st.integers(1 << 31, 1 << 40),
)


@given(rows=st.integers(0, 10_000), chunks=st.integers(1, 64))
def test_chunks_cover_every_row_once_in_order(rows: int, chunks: int) -> None:
    pieces = [chunk_rows(rows, chunks, chunk) for chunk in range(chunks)]
    assert [row for first, last in pieces for row in range(first, last)] == list(range(rows))


@given(rows=st.integers(0, 1 << 40), chunks=st.integers(1, 64))
def test_chunks_differ_by_at_most_a_row(rows: int, chunks: int) -> None:
    sizes = [last - first for first, last in (chunk_rows(rows, chunks, c) for c in range(chunks))]
    assert max(sizes) - min(sizes) <= 1
    assert min(sizes) >= 0


def _cells(layout: WindowLayout) -> list[tuple[int, int, int]]:
    """Every cell that a peer writes: first byte, bytes, writer."""
    cells = []
    for source in range(layout.world):
        cells += [(layout.single(kind, source), WORD, source) for kind in SINGLE]
        cells += [(layout.record(source, n), RECORD_FIELDS * WORD, source) for n in (1, 2)]
        for chunk in range(layout.chunks):
            cells.append((layout.word(Word("arrive", source, chunk)), WORD, source))
    return cells


@given(layout=layouts)
def test_no_two_words_share_a_byte(layout: WindowLayout) -> None:
    cells = sorted(_cells(layout))
    for (first, size, _), (following, _, _) in itertools.pairwise(cells):
        assert first + size <= following
    assert all(first % WORD == 0 for first, _, _ in cells)


@given(layout=layouts)
def test_no_two_writers_share_a_line(layout: WindowLayout) -> None:
    writers: dict[int, int] = {}
    for first, size, writer in _cells(layout):
        for line in range(first // LINE, (first + size - 1) // LINE + 1):
            assert writers.setdefault(line, writer) == writer, f"line {line}"


@given(layout=st.one_of(layouts, large))
def test_slots_are_apart_behind_the_words_and_inside_the_window(layout: WindowLayout) -> None:
    assert max(first + size for first, size, _ in _cells(layout)) <= layout.slot(0)
    for source in range(layout.world):
        end = layout.slot(source) + layout.slot_bytes
        assert end <= (layout.slot(source + 1) if source + 1 < layout.world else layout.nbytes)
    assert layout.slot(0) % 4096 == 0, "slots start on a page"


@given(layout=layouts, epoch=st.integers(1, 1 << 40))
def test_records_of_two_calls_in_a_row_lie_apart(layout: WindowLayout, epoch: int) -> None:
    for source in range(layout.world):
        assert layout.record(source, epoch) != layout.record(source, epoch + 1)
        assert layout.record(source, epoch) == layout.record(source, epoch + 2)


def test_a_word_of_a_single_kind_has_the_same_place_by_either_name() -> None:
    layout = WindowLayout(3, 2, 100)
    assert layout.word(Word("free", 2)) == layout.single("free", 2)


def test_an_unknown_kind_of_word_is_refused() -> None:
    with pytest.raises(KeyError, match="no word of kind 'fre'"):
        WindowLayout(2, 1, 0).word(Word("fre", 0))


@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32])
def test_sizes_of_large_problems_are_whole_numbers_past_32_bits(out_dtype: torch.dtype) -> None:
    problem = Problem(30_000, 8, 40_000, torch.bfloat16, out_dtype, torch.device("cpu"))
    assert problem.slot_bytes == 40_000 * 30_000 * out_dtype.itemsize
    layout = WindowLayout(3, 8, problem.slot_bytes)
    assert [layout.slot(r) - layout.data for r in (0, 1, 2)] == [
        r * problem.slot_bytes for r in (0, 1, 2)
    ]
