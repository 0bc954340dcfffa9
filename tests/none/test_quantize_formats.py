"""``quantize.ptpc``, ``blockscale``, ``mxfp8`` against plain Python, and their error bounds."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from gemmlink import InvalidArgument
from gemmlink.quantize import (
    FORMATS,
    Block1x128,
    Block128x128,
    Mx1x32,
    Mx32x32,
    PerChannel,
    PerToken,
    Quantized,
    mxfp8,
    ptpc,
)
from gemmlink.quantize.operands import values_of
from gemmlink.quantize.scales import Operand
from tests.float8_refs import (
    FN,
    FNUZ,
    HALF_SUBNORMAL,
    INF,
    NAN,
    TOP,
    adversarial,
    float32_scale,
    quantised,
    ue8m0_scale,
    value_of,
)

FLT_MAX = torch.finfo(torch.float32).max
#: Format, operand, dtype, and the rows and columns of a group (0: the whole row).
CASES: list[tuple[str, Operand, torch.dtype, tuple[int, int]]] = [
    ("ptpc", "a", FN, (1, 0)),
    ("ptpc", "b", FN, (1, 0)),
    ("ptpc", "a", FNUZ, (1, 0)),
    ("ptpc", "b", FNUZ, (1, 0)),
    ("blockscale", "a", FN, (1, 128)),
    ("blockscale", "b", FN, (128, 128)),
    ("blockscale", "a", FNUZ, (1, 128)),
    ("blockscale", "b", FNUZ, (128, 128)),
    ("mxfp8", "a", FN, (1, 32)),
    ("mxfp8", "b", FN, (32, 32)),
]
each_case = pytest.mark.parametrize(
    ("name", "operand", "dtype", "group"),
    CASES,
    ids=[f"{n}-{o}-{str(d).removeprefix('torch.float8_')}" for n, o, d, _ in CASES],
)
#: One group a row, so that a test can say what is in it.
each_row_case = pytest.mark.parametrize(
    ("name", "operand", "dtype"), [c[:3] for c in CASES if c[3][0] == 1 and c[1] == "a"]
)


def _make(name: str, values: torch.Tensor, operand: Operand, dtype: torch.dtype) -> Quantized:
    if name == "mxfp8":
        return mxfp8(values, operand)
    return FORMATS[name](values, operand, dtype)


def _one_group(name: str, dtype: torch.dtype, *numbers: float) -> Quantized:
    """A row that begins with ``numbers`` and goes on with zeros, one group long."""
    values = torch.zeros(1, 128 if name == "blockscale" else 32)
    values[0, : len(numbers)] = torch.tensor(numbers)
    return _make(name, values, "a", dtype)


def _scale(made: Quantized) -> float:
    return made.scale.plain().of_rows(0, 1).item()


def _elements(made: Quantized, count: int) -> list[float]:
    return made.elements[0, :count].float().tolist()


@each_case
@pytest.mark.parametrize("seed", range(3))
def test_bytes_and_scales_are_those_of_plain_python(
    name: str, operand: Operand, dtype: torch.dtype, group: tuple[int, int], seed: int
) -> None:
    """Every group of hostile values: each byte, each scale, NaN where NaN was."""
    rows, k = (2 * group[0], 2 * group[1] or 384) if operand == "b" else (9, 384)
    values = adversarial(seed, rows, k)
    high, wide = group[0], group[1] or k
    rule = ue8m0_scale if name == "mxfp8" else float32_scale(TOP[dtype])
    codes, scales = quantised(values.tolist(), (high, wide), rule, dtype)
    made = _make(name, values, operand, dtype)
    assert made.dtype == dtype
    assert made.scale.of_rows(0, rows)[::high].tolist() == scales
    nan = values.isnan()
    assert torch.equal(made.elements.float().isnan(), nan)
    got = made.elements.view(torch.uint8).masked_fill(nan, 0)
    want = torch.tensor(codes, dtype=torch.uint8).masked_fill(nan, 0)
    assert got.tolist() == want.tolist()


@pytest.mark.parametrize("dtype", [FN, FNUZ])
def test_values_are_divided_by_the_scale(dtype: torch.dtype) -> None:
    """Ties of the quotient: a product with the rounded reciprocal falls beside some of them."""
    generator = torch.Generator().manual_seed(7)
    amax = 1 + torch.rand(200, 1, generator=generator)
    ties = torch.tensor([8 + i + 0.5 for i in range(8)])
    values = torch.cat([amax, amax / TOP[dtype] * ties], dim=1)
    codes, scales = quantised(values.tolist(), (1, 9), float32_scale(TOP[dtype]), dtype)
    made = ptpc(values, "a", dtype)
    assert made.scale.of_rows(0, 200).tolist() == scales
    assert made.elements.view(torch.uint8).tolist() == codes


def _mixture(seed: int, rows: int, k: int) -> torch.Tensor:
    """Normal values whose size differs by row and column."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.randint(-20, 20, (rows, 1), generator=generator)
    more = torch.randint(-6, 6, (1, k), generator=generator)
    return torch.ldexp(torch.randn(rows, k, generator=generator), sizes + more)


@each_case
def test_round_trip_error_is_that_of_the_format(
    name: str, operand: Operand, dtype: torch.dtype, group: tuple[int, int]
) -> None:
    """Half a step of the element: 2**-4 of it, or half the subnormal step times the scale.

    Above that only float32's rounding of scale and quotient, and the error comes near the limit.
    """
    values = _mixture(1, 256, 512)
    made = _make(name, values, operand, dtype)
    scale = made.scale.of_rows(0, 256).double()
    scale = scale.repeat_interleave(512 // scale.shape[1], dim=1)
    exact = values.double()
    limit = torch.maximum(exact.abs() * 2.0**-4, scale * HALF_SUBNORMAL[dtype])
    error = (values_of(made, torch.float64) - exact).abs()
    assert bool((error <= limit + exact.abs() * 2.0**-22).all())
    assert float((error / limit).max()) > 0.9, "the values do not try the limit"


@each_case
def test_powers_of_two_and_what_fp8_holds_come_back_exactly(
    name: str, operand: Operand, dtype: torch.dtype, group: tuple[int, int]
) -> None:
    """Each group holds its dtype's values times a power of two, and the largest among them."""
    generator = torch.Generator().manual_seed(3)
    high, wide = group[0], group[1] or 256
    finite = torch.tensor([value_of(code, dtype) for code in range(127)])
    down, across = 256 // high, 256 // wide
    cells = finite[torch.randint(0, 127, (down, high, across, wide), generator=generator)]
    cells[:, 0, :, 0] = TOP[dtype]
    cells = torch.ldexp(cells, torch.randint(-30, 30, (down, 1, across, 1), generator=generator))
    values = cells.view(256, 256)
    assert _make(name, values, operand, dtype).dequantize().tolist() == values.tolist()


@each_case
@pytest.mark.parametrize("wide", [torch.bfloat16, torch.float16])
def test_16_bit_inputs_are_widened_first(
    name: str, operand: Operand, dtype: torch.dtype, group: tuple[int, int], wide: torch.dtype
) -> None:
    values = torch.randn(128, 128, generator=torch.Generator().manual_seed(4)).to(wide)
    got, want = (_make(name, v, operand, dtype) for v in (values, values.float()))
    assert got.elements.view(torch.uint8).tolist() == want.elements.view(torch.uint8).tolist()
    assert got.scale.tensor.tolist() == want.scale.tensor.tolist()


@each_case
def test_strides_do_not_matter_and_the_input_is_kept(
    name: str, operand: Operand, dtype: torch.dtype, group: tuple[int, int]
) -> None:
    around = torch.full((128, 257), NAN)
    values = around[:, 1::2]
    values.copy_(_mixture(5, 128, 128))
    before = values.clone()
    got, want = (_make(name, v, operand, dtype) for v in (values, before))
    turned = _make(name, before.T.contiguous().T, operand, dtype)
    assert values.tolist() == before.tolist(), "the input was changed"
    for made in (got, turned):
        assert made.elements.view(torch.uint8).tolist() == want.elements.view(torch.uint8).tolist()
        assert made.elements.is_contiguous()


def test_gradients_stay_outside() -> None:
    values = torch.ones(32, 32, requires_grad=True)
    for made in (ptpc(values, "a"), mxfp8(values, "b")):
        assert not made.elements.requires_grad
        assert not made.scale.tensor.requires_grad


# One group at a time: the rules of the module's docstring.


@each_row_case
def test_a_group_of_zeros_has_scale_1(name: str, operand: Operand, dtype: torch.dtype) -> None:
    made = _one_group(name, dtype, 0.0, -0.0)
    assert _scale(made) == 1.0
    assert made.dequantize().tolist()[0] == [0.0] * made.shape[1]


@each_row_case
def test_nan_stays_where_it_is(name: str, operand: Operand, dtype: torch.dtype) -> None:
    """Its neighbours keep scale and value."""
    made, clean = (_one_group(name, dtype, TOP[dtype], x, -3.0) for x in (NAN, 1.0))
    assert _scale(made) == _scale(clean) == 1.0
    assert made.dequantize().isnan().nonzero().tolist() == [[0, 1]]
    assert _elements(made, 3)[::2] == [TOP[dtype], -3.0]


@each_row_case
def test_infinity_becomes_the_largest_element(
    name: str, operand: Operand, dtype: torch.dtype
) -> None:
    top = TOP[dtype]
    made = _one_group(name, dtype, INF, 2 * top, -INF, 5.0)
    assert _scale(made) == 2.0
    assert _elements(made, 4) == [top, top, -top, 2.5]


@each_row_case
@pytest.mark.parametrize("only", [NAN, INF, -INF])
def test_a_group_without_a_finite_value_has_scale_1(
    name: str, operand: Operand, dtype: torch.dtype, only: float
) -> None:
    made = (
        _one_group(name, dtype, *[only] * 128)
        if name == "blockscale"
        else _one_group(name, dtype, *[only] * 32)
    )
    assert _scale(made) == 1.0
    want = NAN if only != only else TOP[dtype] * (1 if only > 0 else -1)
    assert torch.equal(
        made.dequantize().nan_to_num(-1.0), torch.full(made.shape, want).nan_to_num(-1.0)
    )


@each_row_case
def test_tiny_groups_keep_the_smallest_normal_scale(
    name: str, operand: Operand, dtype: torch.dtype
) -> None:
    """No scale is subnormal or 0, however small amax is; the value then is a small element."""
    smallest = 2.0**-126
    for size, element in ((2.0**-126, 1.0), (2.0**-134, 2.0**-8), (2.0**-149, 0.0)):
        made = _one_group(name, dtype, size, -size)
        assert _scale(made) == smallest
        assert _elements(made, 2) == [element, -element]
    edge = TOP[dtype] * smallest
    assert _scale(_one_group(name, dtype, edge)) == smallest
    assert _scale(_one_group(name, dtype, 2 * edge)) == 2 * smallest


@each_row_case
def test_the_largest_float32_stays_finite(name: str, operand: Operand, dtype: torch.dtype) -> None:
    """And each of the 200 numbers before it, and a sweep of the last two binades."""
    last = torch.tensor(FLT_MAX).view(torch.int32) - torch.arange(200, dtype=torch.int32)
    sweep = torch.linspace(2.0**126, FLT_MAX, 500, dtype=torch.float64).float()
    numbers = torch.cat([last.view(torch.float32), sweep])
    values = torch.zeros(700, 128)
    values[:, 0], values[:, 1] = numbers, -numbers
    got = _make(name, values, operand, dtype).dequantize()
    assert got[:, 0].tolist() == (-got[:, 1]).tolist()
    assert bool(got.isfinite().all())
    allowed = 1 / 8 if name == "mxfp8" else 2.0**-23
    assert bool(((got[:, 0] - numbers).abs() <= numbers * allowed).all())


def test_ue8m0_scales_end_at_2_to_the_119() -> None:
    for amax, scale in (
        (448 * 2.0**118, 2.0**118),
        (448 * 2.0**119, 2.0**119),
        (FLT_MAX, 2.0**119),
    ):
        assert _scale(_one_group("mxfp8", FN, amax)) == scale
    assert _elements(_one_group("mxfp8", FN, FLT_MAX, -FLT_MAX), 2) == [448.0, -448.0]


@pytest.mark.parametrize("exponent", [-126, -40, -1, 0, 1, 9, 40, 118])
def test_ue8m0_scales_are_rounded_up(exponent: int) -> None:
    """448 fits, the next float32 needs twice the scale, so that nothing finite is clamped."""
    fits = 448 * 2.0**exponent
    above = torch.nextafter(torch.tensor(fits), torch.tensor(INF)).item()
    assert _scale(_one_group("mxfp8", FN, fits)) == 2.0**exponent
    assert _elements(_one_group("mxfp8", FN, fits), 1) == [448.0]
    assert _scale(_one_group("mxfp8", FN, above)) == 2.0 ** (exponent + 1)
    assert _elements(_one_group("mxfp8", FN, above), 1) == [224.0]
    below = _one_group("mxfp8", FN, 449 * 2.0 ** (exponent - 1))
    assert _scale(below) == 2.0**exponent


def test_no_quantiser_makes_the_code_of_nan() -> None:
    for seed in range(20):
        codes = mxfp8(adversarial(seed, 64, 64), "a").scale.tensor
        assert 1 <= int(codes.min()) <= int(codes.max()) <= 246, "2**-126 to 2**119"


# What the scales are stored in, and sizes.


def test_each_format_and_operand_has_its_scale_type() -> None:
    values = torch.ones(256, 128)
    found = {
        (name, operand): type(make(values, operand).scale)
        for name, make in FORMATS.items()
        for operand in ("a", "b")
    }
    assert found == {
        ("ptpc", "a"): PerToken,
        ("ptpc", "b"): PerChannel,
        ("blockscale", "a"): Block1x128,
        ("blockscale", "b"): Block128x128,
        ("mxfp8", "a"): Mx1x32,
        ("mxfp8", "b"): Mx32x32,
    }


@each_case
@pytest.mark.parametrize(("rows", "k"), [(0, 128), (128, 0), (0, 0), (128, 128)])
def test_empty_operands(
    name: str, operand: Operand, dtype: torch.dtype, group: tuple[int, int], rows: int, k: int
) -> None:
    made = _make(name, torch.ones(rows, k), operand, dtype)
    assert made.shape == (rows, k)
    assert made.dtype == dtype
    got = made.dequantize()
    assert got.shape == (rows, k)
    assert torch.allclose(got, torch.ones(rows, k), rtol=2.0**-23)


def _says(make: Callable[[], object], rule: str, came: str, fix: str = "") -> None:
    with pytest.raises(InvalidArgument) as caught:
        make()
    assert (caught.value.rule, caught.value.came, caught.value.fix) == (rule, came, fix)


@pytest.mark.parametrize(
    ("name", "operand", "shape", "dim", "of", "nearest"),
    [
        ("blockscale", "a", (3, 200), "K=200", 128, "128 or 256"),
        ("blockscale", "a", (3, 100), "K=100", 128, "128"),
        ("blockscale", "b", (128, 129), "K=129", 128, "128 or 256"),
        ("blockscale", "b", (576, 128), "N=576", 128, "512 or 640"),
        ("mxfp8", "a", (3, 33), "K=33", 32, "32 or 64"),
        ("mxfp8", "b", (31, 32), "N=31", 32, "32"),
    ],
)
def test_ragged_sizes_are_refused_with_the_nearest(
    name: str, operand: str, shape: tuple[int, int], dim: str, of: int, nearest: str
) -> None:
    above = nearest.split()[-1]
    _says(
        lambda: FORMATS[name](torch.ones(shape), operand),
        f"{dim[0]} must be a multiple of {of}",
        dim,
        f"The nearest is {nearest}; pad with zeros to {above} before quantising.",
    )


@pytest.mark.parametrize(("name", "operand"), [("blockscale", "b"), ("mxfp8", "b")])
def test_padding_first_changes_no_value(name: str, operand: Operand) -> None:
    """What the refusal recommends: a padded part group has the scale of its values alone."""
    values = _mixture(6, 128, 128)
    ragged = values[:70, :90]
    padded = torch.nn.functional.pad(ragged, (0, 38, 0, 58))
    made = FORMATS[name](padded, operand)
    rule = ue8m0_scale if name == "mxfp8" else float32_scale(448.0)
    group = made.scale.group
    codes, scales = quantised(ragged.tolist(), group, rule, FN)
    assert made.elements[:70, :90].view(torch.uint8).tolist() == codes
    assert made.scale.of_rows(0, 70)[:: group[0], : len(scales[0])].tolist() == scales
    assert not made.dequantize()[70:].any()


def test_other_arguments_are_refused() -> None:
    floats = "values to quantise must be one of float32, bfloat16, float16"
    for name, make in FORMATS.items():
        _says(lambda make=make: make(torch.ones(2, 128).double(), "a"), floats, "float64")  # type: ignore[misc]
        _says(lambda make=make: make(torch.ones(2, 128).to(FN), "a"), floats, "float8_e4m3fn")  # type: ignore[misc]
        shape = "values to quantise must be (rows, K)"
        _says(lambda make=make: make(torch.ones(128), "a"), shape, "shape (128,)")  # type: ignore[misc]
        side = 'operand must be "a" (tokens) or "b" (weights)'
        _says(lambda make=make: make(torch.ones(2, 128), "A"), side, "'A'")  # type: ignore[misc]
        if name != "mxfp8":
            _says(
                lambda make=make: make(torch.ones(2, 128), "a", torch.float8_e5m2),  # type: ignore[misc]
                "fp8 elements must be float8_e4m3fn or float8_e4m3fnuz",
                "float8_e5m2",
            )


# Quantized itself.


def test_quantized_refuses_what_does_not_belong_together() -> None:
    ones = torch.ones(4, 128).to(FN)
    per_token = PerToken(torch.ones(4))
    _says(
        lambda: Quantized(ones, torch.ones(4)),  # type: ignore[arg-type]
        "scale must be an object that says its layout, such as PerToken(tensor)",
        "Tensor",
        "For A's block scales Block1x128.from_tensor(tensor, m, k) recognises the layout.",
    )
    _says(
        lambda: Quantized(torch.ones(4, 128), per_token),
        "fp8 elements must be float8_e4m3fn or float8_e4m3fnuz",
        "float32",
    )
    _says(lambda: Quantized(ones[0], per_token), "elements must be (rows, K)", "shape (128,)")
    _says(
        lambda: Quantized(ones.float().to(FNUZ), Mx1x32(torch.zeros(4, 4, dtype=torch.uint8))),
        "mxfp8 elements must be float8_e4m3fn",
        "float8_e4m3fnuz",
    )
    _says(
        lambda: Quantized(ones.to("meta"), per_token),
        "elements and scale must be on one device",
        "meta and cpu",
    )


def test_a_shard_refuses_the_scales_of_all_ranks() -> None:
    """Each of two ranks has 4 rows; one passes 8 scales."""
    _says(
        lambda: Quantized(torch.ones(4, 32).to(FN), PerToken(torch.ones(8))),
        "PerToken of a (4, 32) operand must have shape (4,)",
        "(8,)",
        "Every rank passes the scales of its own rows, and only those.",
    )


def test_quantized_keeps_what_it_was_given() -> None:
    elements, scales = torch.ones(4, 32).to(FN), torch.full((4,), 2.0)
    made = Quantized(elements, PerToken(scales))
    assert (made.shape, made.dtype, made.format, made.operand) == ((4, 32), FN, "ptpc", "a")
    assert made.elements is elements
    scales[1] = 3.0
    assert made.dequantize()[:, 0].tolist() == [2.0, 3.0, 2.0, 2.0]
    assert made.plain() is made
