"""Chunks and window layouts, as properties that hold for all sizes."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gemmlink.spec.problem import Problem, chunk_rows
from gemmlink.spec.schedule import Area, Word
from gemmlink.spec.window import LINE, RECORD_FIELDS, WORD, AreaBytes, WindowLayout, inbox

SINGLE = ("enter", "free", "abort", "read", "proof")

NAMES: tuple[Area, ...] = ("inbox", "outbox", "sum")


@st.composite
def _layouts(draw: st.DrawFn, worlds: int, smallest: int, largest: int) -> WindowLayout:
    """Any areas of any phases, in any order; of one and the same size or each of its own."""
    phases = draw(st.integers(1, 3))
    every = [(phase, area) for phase in range(phases) for area in NAMES]
    used = draw(st.lists(st.sampled_from(every), unique=True))
    sizes = st.integers(smallest, largest)
    return WindowLayout(
        world=draw(st.integers(1, worlds)),
        chunks=draw(st.integers(1, 64)),
        areas=tuple(AreaBytes(phase, area, draw(sizes)) for phase, area in used),
        buffers=draw(st.integers(1, 2)),
        phases=phases,
        parts=draw(st.integers(1, 10)),
    )


layouts = _layouts(9, 0, 1 << 20)
#: 40000 rows of 30000 bfloat16 are 2.4e9 bytes: past 32 bits with the second area.
large = _layouts(64, 1 << 31, 1 << 40)


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
    """Every cell of a window: first byte, bytes, writer."""
    cells = []
    for source in range(layout.world):
        cells += [(layout.single(kind, source), WORD, source) for kind in SINGLE]
        cells += [(layout.record(source, n), RECORD_FIELDS * WORD, source) for n in (1, 2)]
        for chunk, phase in itertools.product(range(layout.chunks), range(layout.phases)):
            cells.append((layout.word(Word("arrive", source, chunk, phase=phase)), WORD, source))
    return [*cells, *_own_cells(layout)]


def _own_cells(layout: WindowLayout) -> list[tuple[int, int, int]]:
    """The cells that only the rank itself writes and reads."""
    every = itertools.product(range(layout.chunks), range(layout.parts), range(layout.phases))
    return [(layout.word(Word("chunk", 0, *place)), WORD, -1) for place in every]


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
def test_areas_are_apart_behind_the_words_and_inside_the_window(layout: WindowLayout) -> None:
    """Also those of two calls in a row, where there are two buffers."""
    assert max(first + size for first, size, _ in _cells(layout)) <= layout.data
    assert layout.data % 4096 == 0, "areas start on a page"
    places = sorted(
        (layout.area(area.phase, area.area, epoch), area.nbytes)
        for area in layout.areas
        for epoch in range(layout.buffers)
    )
    for (first, size), (following, _) in itertools.pairwise([*places, (layout.nbytes, 0)]):
        assert first + size <= following
    assert all(first >= layout.data and first % LINE == 0 for first, _ in places)


@given(layout=st.one_of(layouts, large), epoch=st.integers(1, 1 << 40))
def test_a_call_uses_the_areas_of_the_call_before_the_last(
    layout: WindowLayout, epoch: int
) -> None:
    for area in layout.areas:
        now, *later = [layout.area(area.phase, area.area, epoch + n) for n in range(3)]
        assert later[1] == now
        assert (later[0] == now) == (layout.buffers == 1 or not _uses_memory(layout))


def _uses_memory(layout: WindowLayout) -> bool:
    return any(area.nbytes for area in layout.areas)


def test_an_area_that_is_not_there_is_refused() -> None:
    with pytest.raises(KeyError):
        WindowLayout(2, 1, inbox(2, 64)).area(0, "outbox")


@given(layout=layouts, epoch=st.integers(1, 1 << 40))
def test_records_of_two_calls_in_a_row_lie_apart(layout: WindowLayout, epoch: int) -> None:
    for source in range(layout.world):
        assert layout.record(source, epoch) != layout.record(source, epoch + 1)
        assert layout.record(source, epoch) == layout.record(source, epoch + 2)


def test_a_word_of_a_single_kind_has_the_same_place_by_either_name() -> None:
    layout = WindowLayout(3, 2, inbox(3, 100))
    assert layout.word(Word("free", 2)) == layout.single("free", 2)


def test_an_unknown_kind_of_word_is_refused() -> None:
    with pytest.raises(KeyError, match="no word of kind 'fre'"):
        WindowLayout(2, 1, ()).word(Word("fre", 0))


@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32])
def test_sizes_of_large_problems_are_whole_numbers_past_32_bits(out_dtype: torch.dtype) -> None:
    problem = Problem(30_000, 8, 40_000, torch.bfloat16, out_dtype, torch.device("cpu"))
    assert problem.slot_bytes == 40_000 * 30_000 * out_dtype.itemsize
    areas = tuple(AreaBytes(phase, "inbox", problem.slot_bytes) for phase in range(3))
    layout = WindowLayout(3, 8, areas, buffers=2, phases=3)
    assert [layout.area(phase, "inbox", 1) - layout.data for phase in range(3)] == [
        (3 + phase) * problem.slot_bytes for phase in range(3)
    ]
