"""``quantize.float8``: the two dtypes byte by byte, and the saturating cast."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gemmlink import InvalidArgument
from gemmlink.quantize import MAXIMUM, to_float8
from tests.float8_refs import FN, FNUZ, INF, NAN, TOP, code_of, value_of

each_dtype = pytest.mark.parametrize("dtype", [FN, FNUZ])


def _codes(values: list[float], dtype: torch.dtype) -> list[int]:
    return to_float8(torch.tensor(values), dtype).view(torch.uint8).tolist()


@each_dtype
def test_every_byte_means_what_the_format_says(dtype: torch.dtype) -> None:
    """torch's widening, on which everything else here rests."""
    got = torch.arange(256, dtype=torch.uint8).view(dtype).float()
    want = torch.tensor([value_of(code, dtype) for code in range(256)])
    assert torch.equal(got.isnan(), want.isnan())
    assert got.nan_to_num(-1.0).tolist() == want.nan_to_num(-1.0).tolist()


@each_dtype
def test_the_maximum_is_the_largest_finite_byte(dtype: torch.dtype) -> None:
    finite = [value_of(code, dtype) for code in range(128)]
    assert MAXIMUM[dtype] == max(value for value in finite if value == value) == TOP[dtype]
    assert MAXIMUM[dtype] == torch.finfo(dtype).max


@each_dtype
def test_every_value_of_the_dtype_is_kept(dtype: torch.dtype) -> None:
    codes = [code for code in range(256) if value_of(code, dtype) == value_of(code, dtype)]
    assert _codes([value_of(code, dtype) for code in codes], dtype) == codes


@each_dtype
@given(number=st.floats(width=32, allow_nan=False))
def test_any_number_becomes_the_nearest(dtype: torch.dtype, number: float) -> None:
    assert _codes([number], dtype) == [code_of(number, dtype)]


@each_dtype
def test_ties_go_to_the_even_mantissa(dtype: torch.dtype) -> None:
    values = [value_of(code, dtype) for code in range(126)]
    middles = [(low + high) / 2 for low, high in pairwise(values)]
    want = [code + code % 2 for code in range(125)]
    assert _codes(middles, dtype) == want
    negative = [code + 0x80 if code or dtype == FN else 0 for code in want]
    assert _codes([-middle for middle in middles], dtype) == negative


@each_dtype
@pytest.mark.parametrize("factor", [1.0001, 1.03, 1.04, 1.07, 2.0, 1e30, INF])
def test_what_is_too_large_becomes_the_maximum(dtype: torch.dtype, factor: float) -> None:
    top = 0x7E if dtype == FN else 0x7F
    large = TOP[dtype] * factor
    assert _codes([large, -large], dtype) == [top, top + 0x80]


@pytest.mark.parametrize("wide", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@each_dtype
def test_nan_stays_nan_and_infinity_does_not(dtype: torch.dtype, wide: torch.dtype) -> None:
    got = to_float8(torch.tensor([NAN, -NAN, INF, -INF, 1.0], dtype=wide), dtype).float()
    assert got.isnan().tolist() == [True, True, False, False, False]
    assert got[2:].tolist() == [TOP[dtype], -TOP[dtype], 1.0]


def test_negative_zero_exists_in_one_of_them() -> None:
    assert _codes([-0.0, -(2.0**-30)], FN) == [0x80, 0x80]
    assert _codes([-0.0, -(2.0**-30)], FNUZ) == [0, 0]


def test_torchs_own_cast_does_not_saturate() -> None:
    """Why values are clamped first. Should torch change e4m3fnuz, the docstring must change."""
    assert torch.tensor([241.0, 248.0, INF]).to(FNUZ).isnan().tolist() == [False, True, True]
    own = torch.tensor([464.0, 465.0, INF]).to(FN).float().nan_to_num(-1.0).tolist()
    assert own in ([448.0, -1.0, -1.0], [448.0, 448.0, 448.0]), "old and new torch"


def test_the_same_byte_is_half_as_much() -> None:
    byte = torch.tensor([0x38], dtype=torch.uint8)
    assert (byte.view(FN).float().item(), byte.view(FNUZ).float().item()) == (1.0, 0.5)


@pytest.mark.parametrize("dtype", [torch.float8_e5m2, torch.float8_e5m2fnuz, torch.int8])
def test_other_dtypes_are_refused(dtype: torch.dtype) -> None:
    with pytest.raises(InvalidArgument) as caught:
        to_float8(torch.ones(1), dtype)
    name = str(dtype).removeprefix("torch.")
    want = f"fp8 elements must be float8_e4m3fn or float8_e4m3fnuz; got {name}"
    assert str(caught.value) == want
