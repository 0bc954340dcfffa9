"""Ordered sums, rows in fp8 with their scales, and which products may be one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gemmlink.core import wire
from gemmlink.core.flatten import flatten
from gemmlink.core.products import Columns, Product, group
from gemmlink.core.sums import ordered_sum
from gemmlink.errors import InvalidArgument, Unsupported
from gemmlink.spec.operations import all_reduce, all_to_all, band_rows, checked_extent
from gemmlink.spec.schedule import LOCAL, Plan
from tests.none.test_schedule import MODES
from tests.refs import relative_error
from tests.simulator import band

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
INF, NAN = float("inf"), float("nan")


def _summed(values: Sequence[float], dtype: torch.dtype, out_dtype: torch.dtype) -> float:
    out = torch.full((1, 1), NAN, dtype=out_dtype)
    ordered_sum([torch.tensor([[value]], dtype=dtype) for value in values], out)
    return float(out)


@pytest.mark.parametrize(
    ("values", "wanted"),
    [
        ([2.0**25, 1.0, 1.0, -(2.0**25)], 0.0),
        ([1.0, 1.0, 2.0**25, -(2.0**25)], 0.0),
        ([2.0**25, -(2.0**25), 1.0, 1.0], 2.0),
        ([1.0, 2.0**25, -(2.0**25), 1.0], 1.0),
        ([1.0, 1.0, 1.0, 2.0**24], 2.0**24 + 4),
        ([2.0**24, 1.0, 1.0, 1.0], 2.0**24),
    ],
    ids=str,
)
def test_terms_are_added_in_float32_from_the_first_to_the_last(
    values: list[float], wanted: float
) -> None:
    """Any other order, or pairs, or wider sums would give another number."""
    assert _summed(values, F32, F32) == wanted


@pytest.mark.parametrize("count", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("dtype", [F32, BF16, F16])
def test_a_sum_is_that_of_float32_rounded_once(dtype: torch.dtype, count: int) -> None:
    """Rounded in between, a sum of many would be another; more rows than are summed at a time."""
    generator = torch.Generator().manual_seed(count)
    terms = [torch.randn(900, 160, generator=generator).to(dtype) for _ in range(count)]
    wide = terms[0].float()
    for term in terms[1:]:
        wide = wide + term.float()
    out = torch.full((900, 160), NAN, dtype=dtype)
    ordered_sum(terms, out)
    assert torch.equal(out, wide.to(dtype))
    narrow = terms[0]
    for term in terms[1:]:
        narrow = narrow + term
    assert torch.equal(out, narrow) == (count < 3 or dtype == F32), "the order cannot be told"


def test_narrow_numbers_keep_what_their_sum_cannot() -> None:
    assert _summed([256, 1, 1, 1, 1], BF16, BF16) == 260
    assert _summed([60000, 60000, -60000], F16, F16) == 60000
    assert _summed([256, 1, 1], BF16, F32) == 258


def test_a_sum_of_rows_that_lie_apart_and_of_none() -> None:
    big = torch.full((6, 9), 99.0)
    ordered_sum([torch.ones(3, 3), torch.ones(3, 3)], big[::2, ::3])
    assert int((big == 2).sum()) == 9
    assert int((big == 99).sum()) == 45
    for shape in ((0, 4), (4, 0)):
        for dtype in (F32, BF16):
            out = torch.empty(shape, dtype=dtype)
            ordered_sum([torch.empty(shape, dtype=dtype)] * 3, out)


# The wire.


def _carried(values: torch.Tensor, into: torch.dtype = F32) -> torch.Tensor:
    rows, n = values.shape
    encoded = torch.full((rows, wire.row_bytes(n)), 0xAB, dtype=torch.uint8)
    wire.encode(values, encoded)
    assert (encoded[:, n + 4 :] == 0xAB).all(), "padding is left alone"
    out = torch.full((rows, n), NAN, dtype=into)
    wire.decode(encoded, out)
    return out


@hypothesis.settings(max_examples=30)
@given(rows=st.integers(1, 9), n=st.integers(1, 70), seed=st.integers(0, 99), power=st.data())
def test_a_row_of_any_length_travels_within_an_eighth_of_its_bits(
    rows: int, n: int, seed: int, power: st.DataObject
) -> None:
    """Each row by its own scale, however different they are."""
    generator = torch.Generator().manual_seed(seed)
    scales = [2.0 ** power.draw(st.integers(-40, 40)) for _ in range(rows)]
    values = torch.randn(rows, n, generator=generator) * torch.tensor(scales).view(-1, 1)
    got = _carried(values)
    largest = values.abs().amax(1, keepdim=True)
    assert ((got - values).abs() <= values.abs() / 16 + largest * 2.0**-9 / 448).all()
    assert torch.allclose(got.abs().amax(1), largest.view(-1), rtol=1e-6), "the largest is exact"


@pytest.mark.parametrize("dtype", [F32, BF16, F16])
def test_the_error_of_normal_values_is_as_documented(dtype: torch.dtype) -> None:
    """From both sides: a smaller one would mean that nothing was narrowed."""
    values = torch.randn(64, 256, generator=torch.Generator().manual_seed(3)).to(dtype)
    assert 5e-3 < relative_error(_carried(values, dtype), values) < 3e-2
    assert "2.6e-2" in wire.ERROR


def test_zeros_nan_and_infinity_travel_as_documented() -> None:
    values = torch.tensor([[0.0, 0.0, 0.0], [1.0, NAN, -2.0], [1.0, INF, -4.0], [-INF, 8.0, 2.0]])
    got = _carried(values)
    assert torch.equal(got[0], values[0])
    assert got[1].isnan().tolist() == [False, True, False]
    assert torch.allclose(got[1, ::2], values[1, ::2])
    assert torch.allclose(got[2], torch.tensor([1.0, 4.0, -4.0]), rtol=1 / 16)
    assert torch.allclose(got[3], torch.tensor([-8.0, 8.0, 2.0]), rtol=1 / 16)


@pytest.mark.parametrize("n", range(0, 40))
def test_a_row_is_as_long_as_its_elements_and_its_scale_and_even(n: int) -> None:
    assert wire.row_bytes(n) % 16 == 0
    assert n + 4 <= wire.row_bytes(n) < n + 4 + 16


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", 8, True])
def test_a_wire_dtype_is_a_dtype(dtype: Any) -> None:
    with pytest.raises(InvalidArgument, match=r"wire_dtype must be a torch\.dtype or None; got"):
        wire.check_wire_dtype(dtype)


@pytest.mark.parametrize("dtype", [torch.float8_e5m2, BF16, torch.int8])
def test_a_wire_dtype_that_is_not_served_names_those_that_are(dtype: torch.dtype) -> None:
    with pytest.raises(Unsupported, match="wire_dtype must be float8_e4m3fn, or None; got"):
        wire.check_wire_dtype(dtype)


# Bands and extents.


@given(rows=st.integers(0, 1 << 40), world=st.integers(1, 64))
def test_bands_are_a_partition_in_order_whose_first_ones_are_longer(rows: int, world: int) -> None:
    bands = [band_rows(rows, world, rank) for rank in range(world)]
    assert [range(*each) for each in bands] == [band(rows, world, rank) for rank in range(world)]
    assert [first for first, _ in bands[1:]] == [last for _, last in bands[:-1]]
    assert (bands[0][0], bands[-1][1]) == (0, rows)
    assert max(last - first for first, last in bands) <= -(-rows // world)


@given(world=st.integers(1, 9), n=st.integers(0, 60), extent=st.integers(-3, 70))
def test_an_extent_that_cannot_be_dealt_out_names_the_nearest_that_can(
    world: int, n: int, extent: int
) -> None:
    legal = range(0, n + 1, world)
    if extent in legal:
        assert checked_extent(world, n, extent) == extent
        return
    with pytest.raises(InvalidArgument) as caught:
        checked_extent(world, n, extent)
    text = str(caught.value)
    if not 0 <= extent <= n:
        assert f"extent must be a whole number from 0 to N={n}; got {extent}" in text
        return
    near = [each for each in legal if abs(each - extent) < world]
    names = " and ".join(map(str, near))
    assert f"multiple of the world, {world}; got extent={extent}" in text
    assert f"nearest legal value{'s are' if len(near) > 1 else ' is'} {names}." in text


@pytest.mark.parametrize("extent", [True, 4.0, "4"])
def test_an_extent_is_a_whole_number(extent: Any) -> None:
    with pytest.raises(InvalidArgument, match="extent must be a whole number from 0 to N=8; got"):
        checked_extent(2, 8, extent)


def test_without_an_extent_all_columns_travel_if_they_can() -> None:
    assert checked_extent(2, 8, None) == 8
    with pytest.raises(InvalidArgument, match=r"extent=9\. The nearest legal value is 8\."):
        checked_extent(2, 9, None)


# Products that are one.


def _products(merge: bool, mode: str, operation: str, **choices: Any) -> list[Product]:
    made = all_reduce(3, 6) if operation == "all_reduce" else all_to_all(3, 7, 6)
    epilogue, fused = MODES[mode]
    plan = Plan(1, 3, 2, fused, phases=len(made.phases), **choices)
    placed = flatten(epilogue.schedule(made.phases[0], plan))
    found = group(placed, plan.chunks, made.phases if merge else None)
    products: list[Product] = []
    for item in found:
        if isinstance(item, Columns):
            products += item.products
        elif isinstance(item, Product):
            products.append(item)
    return products


@pytest.mark.parametrize("mode", ["split-push", "split-pull", "split-lanes", "collective"])
def test_neighbouring_bands_are_one_product(mode: str) -> None:
    """A split form that sums keeps all rows in one place: then it is one product."""
    (one,) = _products(True, mode, "all_reduce")
    assert (one.store.region.chunk, one.store.region.part) == (0, 0)
    assert (one.end.chunk, one.end.part) == (1, 2)
    assert len(_products(False, mode, "all_reduce")) == 6


@pytest.mark.parametrize("mode", ["fused-push", "fused-pull", "fused-lanes"])
@pytest.mark.parametrize("operation", ["all_to_all", "all_reduce"])
def test_what_is_announced_in_between_is_not_one_product(mode: str, operation: str) -> None:
    made = _products(True, mode, operation)
    sent = [product for product in made if product.store.to != LOCAL]
    assert len(sent) == 6
    assert all(product.last is None for product in sent)


@pytest.mark.parametrize("mode", ["split-push", "split-pull", "split-lanes"])
def test_columns_keep_places_of_their_own(mode: str) -> None:
    """They may be multiplied together; only the chunks of one shard lie behind each other."""
    made = _products(True, mode, "all_to_all")
    assert [(product.store.region.part, product.end.part) for product in made] == [
        (part, part) for part in range(4)
    ]
    assert all((p.store.region.chunk, p.end.chunk) == (0, 1) for p in made)


@pytest.mark.parametrize("mode", ["split-push", "split-pull", "split-lanes"])
def test_what_is_kept_besides_is_not_one_product(mode: str) -> None:
    """The copy behind it would copy the rows of the last one only."""
    made = _products(True, mode, "all_to_all", keep=True)
    copied = [product for product in made if product.store.region.part < 3]
    assert all(product.last is None for product in copied)
    assert len(copied) == 6
