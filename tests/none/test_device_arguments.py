"""`core.device.arguments`: sizes of structs, widths of accesses, cuts into launches."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path

import pytest
import torch

import gemmlink.core.device.layout as layout
from gemmlink.core.device import compiled
from gemmlink.core.device.arguments import (
    Copy,
    ItemArguments,
    MovesArguments,
    PreparedMoves,
    WordsArguments,
    copy_of,
    packed,
)
from gemmlink.errors import Unavailable

SOURCE = Path(compiled.__file__).with_name("kernels.cu").read_text()
SIZES = {"i64": 8, "int": 4}


def _enum(first: str) -> list[str]:
    found = re.search(rf"enum \{{ ({first}\b[^}}]*) \}}", SOURCE)
    assert found is not None, f"no enum that begins with {first}"
    return [name.split("=")[0].strip() for name in found[1].split(",")]


@pytest.mark.parametrize(
    ("first", "names"),
    [
        ("EPOCH", list(layout.DeskWord.__members__)),
        ("TIMEOUT", list(layout.Why.__members__)),
        ("ENTERS", list(layout.Flag.__members__)),
    ],
)
def test_numbers_are_those_of_the_kernels(first: str, names: list[str]) -> None:
    assert _enum(first) == names


def _fields(struct: str) -> list[tuple[str, int]]:
    """Names and sizes of the members of a struct in the source."""
    body = SOURCE.split(f"struct {struct} {{")[1].split("};")[0]
    found = []
    for line in re.sub(r"//.*", "", body).split(";"):
        kind, _, names = line.strip().partition(" ")
        if not names:
            continue
        pointer = "*" in line
        for name in names.replace("*", " ").replace("const ", " ").split(","):
            size = 8 if pointer else SIZES[kind]
            found.append((name.split()[-1], size))
    return found


@pytest.mark.parametrize(("struct", "mirror"), [("Words", WordsArguments), ("Item", ItemArguments)])
def test_structs_are_those_of_the_kernels(struct: str, mirror: type[ctypes.Structure]) -> None:
    mine = [(name.rstrip("_"), ctypes.sizeof(kind)) for name, kind, *_ in mirror._fields_]
    assert mine == _fields(struct)


def test_arguments_fit_the_smallest_limit_of_a_launch() -> None:
    assert ctypes.sizeof(MovesArguments) <= 4096
    assert f"ITEMS = {layout.ITEMS}, PLACES_TO = {layout.DESTINATIONS}" in SOURCE


@pytest.mark.parametrize(
    ("copy", "unit"),
    [
        (Copy(0x1000, 0, 64, 1, (0x2000, 0x3000)), 16),
        (Copy(0x1000, 0, 7, 1, (0x2000,)), 16),
        (Copy(0x1008, 0, 64, 1, (0x2000,)), 8),
        (Copy(0x1000, 0, 64, 1, (0x2000, 0x3002)), 2),
        (Copy(0x1001, 0, 64, 1, (0x2000,)), 1),
        (Copy(0x1000, 128, 64, 3, (0x2000,)), 16),
        (Copy(0x1000, 100, 64, 3, (0x2000,)), 4),
        (Copy(0x1000, 128, 6, 3, (0x2000,)), 2),
    ],
)
def test_accesses_are_as_wide_as_all_places_allow(copy: Copy, unit: int) -> None:
    assert copy.unit == unit


def test_rows_that_lie_packed_are_one() -> None:
    grid = torch.zeros(6, 8)
    assert copy_of(grid, [1])[1:4] == (0, 6 * 8 * 4, 1)
    assert copy_of(grid[:, :4], [1])[1:4] == (8 * 4, 4 * 4, 6)
    assert copy_of(grid[2:3, :4], [1])[1:4] == (0, 4 * 4, 1)


def test_many_copies_take_several_launches_and_empty_ones_none() -> None:
    copies = [Copy(4096 * i, 0, i % 3, 1, (8192 * i,)) for i in range(40)]
    made = list(packed(7, copies))
    assert [launch.count for launch in made] == [16, 10]
    assert {launch.desk for launch in made} == {7}
    assert [launch.longest for launch in made] == [2, 2]


def test_many_destinations_take_several_launches() -> None:
    to = tuple(range(0, 16 * 150, 16))
    made = list(packed(0, [Copy(64, 0, 4, 1, to), Copy(128, 0, 4, 1, to[:5])]))
    seen = [
        (item.from_, place)
        for launch in made
        for item in launch.items[: launch.count]
        for place in launch.to[item.first : item.first + item.fan]
    ]
    assert seen == [(64, place) for place in to] + [(128, place) for place in to[:5]]


def test_prepared_launches_follow_the_result() -> None:
    first, second = torch.zeros(4, 4), torch.zeros(4, 4)
    elsewhere = 1 << 12
    at = first.data_ptr()
    copies = [Copy(64, 0, 4, 1, (elsewhere,)), Copy(64, 0, 4, 1, (at + 16, elsewhere))]
    prepared = PreparedMoves(list(packed(0, copies)), first)
    for result in (second, first, second):
        prepared.deliver_to(result)
        (launch,) = prepared.launches
        assert launch.to[:3] == [elsewhere, result.data_ptr() + 16, elsewhere]


def test_a_torch_without_cuda_is_named() -> None:
    if torch.version.cuda is not None:
        return  # then it is the device's tests that tell
    with pytest.raises(Unavailable, match=r"a torch .* CUDA.*pip install"):
        compiled.function("gl_words", 0)
