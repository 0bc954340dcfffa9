"""``quantize.reference`` and ``quantize.multiply``."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

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
    Scale,
    multiply,
    mxfp8,
    product,
    ptpc,
    reference,
)
from gemmlink.quantize.operands import values_of
from tests.float8_refs import FN, FNUZ, INF, NAN
from tests.refs import assert_equal, relative_error, whole

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
M, N, K = 64, 128, 256
PACKED = ("mxfp8 packed", "mxfp8 packed A", "mxfp8 packed B")
LAYOUTS = ("ptpc", "blockscale", "mxfp8", *PACKED)


def _powers(seed: int, *shape: int) -> torch.Tensor:
    """0.5, 1 or 2."""
    generator = torch.Generator().manual_seed(seed)
    return 2.0 ** torch.randint(-1, 2, shape, generator=generator).float()


def _codes(seed: int, *shape: int) -> torch.Tensor:
    return (_powers(seed, *shape).log2() + 127).to(torch.uint8)


def _scales(layout: str, m: int = M, n: int = N, k: int = K) -> tuple[Scale, Scale]:
    if layout == "ptpc":
        return PerToken(_powers(1, m)), PerChannel(_powers(2, n))
    if layout == "blockscale":
        return Block1x128(_powers(1, k // 128, m)), Block128x128(_powers(2, n // 128, k // 128))
    a, b = Mx1x32(_codes(1, m, k // 32)), Mx32x32(_codes(2, n // 32, k // 32))
    return (
        a.pack() if layout in PACKED[:2] else a,
        b.pack() if layout in (PACKED[0], PACKED[2]) else b,
    )


def _exact(layout: str, dtype: torch.dtype = FN) -> tuple[Quantized, Quantized]:
    """Whole numbers times powers of two: every product and sum is exact in float32."""
    a_scale, b_scale = _scales(layout)
    a = Quantized(whole(1, M, K).to(dtype), a_scale)
    return a, Quantized(whole(2, N, K).to(dtype), b_scale)


def _scale_at(scale: Scale, row: int, k: int, rows: int) -> float:
    """By the index formulas of the layouts, from plain numbers."""
    blocks, flat = K // 32, scale.tensor.flatten()
    kind = type(scale).__name__
    if kind in ("PerToken", "PerChannel"):
        return float(flat[row])
    if kind == "Block1x128":
        return float(flat[k // 128 * rows + row])
    if kind == "Block128x128":
        return float(flat[row // 128 * (K // 128) + k // 128])
    if kind == "Mx1x32Packed":
        word = int(flat[k // 32 * (rows // 4) + row // 64 * 16 + row % 16])
        return 2.0 ** ((word >> 8 * (row % 64 // 16) & 255) - 127)
    place = {
        "Mx1x32": row * blocks + k // 32,
        "Mx32x32": row // 32 * blocks + k // 32,
        "Mx32x32Packed": k // 32 * (rows // 32) + row // 32,
    }[kind]
    return 2.0 ** (int(flat[place]) - 127)


def _one_sum(a: Quantized, b: Quantized, m: int, n: int) -> float:
    """One element of the product with plain numbers; ``fsum`` rounds once."""
    left, right = a.elements[m].float().tolist(), b.elements[n].float().tolist()
    return math.fsum(
        left[k] * _scale_at(a.scale, m, k, M) * right[k] * _scale_at(b.scale, n, k, N)
        for k in range(K)
    )


def _multiplied(a: Quantized, b: Quantized, out_dtype: torch.dtype = F32) -> torch.Tensor:
    """Into the middle of a block of NaN, as into a window; nothing beside may change."""
    m, n = a.shape[0], b.shape[0]
    around = torch.full((m + 2, n + 3), 7.0, dtype=out_dtype)
    out = around[1 : 1 + m, 2 : 2 + n]
    out.fill_(NAN)
    multiply(a, b, out)
    found = out.clone()
    out.fill_(7.0)
    assert bool((around == 7.0).all()), "wrote beside"
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
def test_reference_is_the_sum_of_plain_numbers(layout: str) -> None:
    a, b = _exact(layout)
    got = reference(a, b)
    assert got.dtype == F32
    for m, n in ((0, 0), (1, 127), (17, 33), (31, 64), (63, 5), (48, 96)):
        assert got[m, n].item() == _one_sum(a, b, m, n), f"element {m}, {n}"


@pytest.mark.parametrize("out_dtype", [F32, BF16, F16])
@pytest.mark.parametrize(
    ("layout", "dtype"),
    [*((layout, FN) for layout in LAYOUTS), ("ptpc", FNUZ), ("blockscale", FNUZ)],
)
def test_multiply_is_exact_where_float32_is(
    layout: str, dtype: torch.dtype, out_dtype: torch.dtype
) -> None:
    a, b = _exact(layout, dtype)
    before = a.elements.clone(), b.elements.clone()
    assert_equal(_multiplied(a, b, out_dtype), reference(a, b, out_dtype), layout)
    for kept, operand in zip(before, (a, b), strict=True):
        assert torch.equal(kept.view(torch.uint8), operand.elements.view(torch.uint8)), "changed"


@pytest.mark.parametrize("layout", PACKED)
def test_packed_scales_give_the_same(layout: str) -> None:
    assert_equal(_multiplied(*_exact(layout)), _multiplied(*_exact("mxfp8")), layout)


@pytest.mark.parametrize(
    ("name", "dtype"), [*((name, FN) for name in FORMATS), ("ptpc", FNUZ), ("blockscale", FNUZ)]
)
def test_multiply_lies_within_the_documented_bound(name: str, dtype: torch.dtype) -> None:
    """(K + 2) * 2**-24 of the sum of sizes, for values that no format holds exactly."""
    generator = torch.Generator().manual_seed(1)
    k = 7168
    more = () if name == "mxfp8" else (dtype,)
    a = FORMATS[name](torch.randn(8, k, generator=generator), "a", *more)
    b = FORMATS[name](torch.randn(128, k, generator=generator), "b", *more)
    left, right = values_of(a, torch.float64), values_of(b, torch.float64)
    want = left @ right.T
    limit = (k + 2) * 2.0**-24 * (left.abs() @ right.abs().T)
    got = _multiplied(a, b)
    assert bool(((got.double() - want).abs() <= limit).all())
    assert relative_error(got, want) < 1e-5
    assert_equal(reference(a, b), want.float(), "reference")


@pytest.mark.parametrize("name", FORMATS)
def test_the_product_is_near_that_of_the_floats(name: str) -> None:
    """Each element off by at most a 16th (or half a subnormal step), so by about that in L2."""
    generator = torch.Generator().manual_seed(2)
    a, b = torch.randn(16, 512, generator=generator), torch.randn(128, 512, generator=generator)
    got = reference(FORMATS[name](a, "a"), FORMATS[name](b, "b"))
    assert 5e-3 < relative_error(got, a.double() @ b.double().T) < 2 * 2.0**-4


@pytest.mark.parametrize("rows", [(1, 50), (30, 1), (13, 31), (64, 128), (999, 999)])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_blocks_of_any_number_of_rows_give_the_same(
    monkeypatch: pytest.MonkeyPatch, layout: str, rows: tuple[int, int]
) -> None:
    monkeypatch.setattr(product, "_A_BYTES", rows[0] * 4 * K)
    monkeypatch.setattr(product, "_B_BYTES", rows[1] * 4 * K)
    a, b = _exact(layout)
    for out_dtype in (F32, BF16):
        assert_equal(_multiplied(a, b, out_dtype), reference(a, b, out_dtype), f"{rows}")


@pytest.mark.parametrize("k", [256, 7168, 1 << 20])
def test_scratch_is_bounded(monkeypatch: pytest.MonkeyPatch, k: int) -> None:
    """Never a float32 copy of an operand; one row at least, however long it is."""
    sizes = []
    real = torch.empty

    def empty(*size: int, **more: Any) -> torch.Tensor:
        made = real(*size, **more)
        sizes.append(made.nbytes)
        return made

    m, n = min(3000, 1 + (20 << 20) // (4 * k)), min(300, 1 + (4 << 20) // (4 * k))
    a = Quantized(torch.ones(m, k).to(FN), PerToken(torch.ones(m)))
    b = Quantized(torch.ones(n, k).to(FN), PerChannel(torch.ones(n)))
    out = real(m, n)
    monkeypatch.setattr(torch, "empty", empty)
    multiply(a, b, out)
    monkeypatch.undo()
    assert bool((out == k).all())
    assert sizes, "no scratch was taken"
    assert max(sizes) <= max(16 << 20, 4 * k)
    assert sorted(sizes)[-2] <= max(2 << 20, 4 * k)


def _sliced(values: torch.Tensor) -> torch.Tensor:
    around = torch.full((2 * len(values), 3 * values.shape[1]), NAN).to(values.dtype)
    inside = around[::2, 1::3]
    inside.copy_(values)
    return inside


STRIDES: list[Callable[[torch.Tensor], torch.Tensor]] = [
    torch.clone,
    lambda values: values.T.contiguous().T,
    _sliced,
    lambda values: values[:1].expand(values.shape),
    lambda values: values[:, :1].expand(values.shape),
]


@pytest.mark.parametrize("stride_b", STRIDES)
@pytest.mark.parametrize("stride_a", STRIDES)
def test_elements_may_have_any_strides(
    stride_a: Callable[[torch.Tensor], torch.Tensor],
    stride_b: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    a, b = _exact("blockscale")
    strided = Quantized(stride_a(a.elements), a.scale), Quantized(stride_b(b.elements), b.scale)
    plain = [Quantized(q.elements.float().contiguous().to(FN), q.scale) for q in strided]
    assert_equal(_multiplied(*strided), reference(plain[0], plain[1]), "strided")


@pytest.mark.parametrize("out_dtype", [F32, BF16, F16])
@pytest.mark.parametrize("poison", [NAN, 7.0, -0.0])
def test_a_product_over_nothing_is_positive_zero(poison: float, out_dtype: torch.dtype) -> None:
    for make in FORMATS.values():
        out = torch.full((3, 128), poison, dtype=out_dtype)
        multiply(make(torch.ones(3, 0), "a"), make(torch.ones(128, 0), "b"), out)
        assert_equal(out, torch.zeros(3, 128, dtype=out_dtype), "K=0")
        assert not out.signbit().any()


@pytest.mark.parametrize(("m", "n", "k"), [(0, 128, 128), (3, 0, 128), (0, 0, 0), (0, 128, 0)])
def test_an_empty_result_is_no_error(m: int, n: int, k: int) -> None:
    for make in FORMATS.values():
        a, b = make(torch.ones(m, k), "a"), make(torch.ones(n, k), "b")
        multiply(a, b, torch.empty(m, n))
        assert reference(a, b).shape == (m, n)


def test_the_same_bytes_are_a_quarter_in_the_other_dtype() -> None:
    """0x38 is 1.0 in e4m3fn and 0.5 in e4m3fnuz; nothing may guess between them."""
    byte = torch.full((2, 32), 0x38, dtype=torch.uint8)
    for dtype, want in ((FN, 32.0), (FNUZ, 8.0)):
        a = Quantized(byte.view(dtype), PerToken(torch.ones(2)))
        b = Quantized(byte.view(dtype), PerChannel(torch.ones(2)))
        assert _multiplied(a, b).tolist() == reference(a, b).tolist() == [[want] * 2] * 2


def test_scales_of_a_row_stay_with_the_row() -> None:
    for scales in ([2.0**i for i in range(4)], [2.0**-i for i in range(4)]):
        a = Quantized(torch.ones(4, 32).to(FN), PerToken(torch.tensor(scales)))
        b = Quantized(torch.ones(5, 32).to(FN), PerChannel(torch.ones(5)))
        assert _multiplied(a, b).tolist() == [[32 * scale] * 5 for scale in scales]


def test_nan_and_huge_scales_are_carried() -> None:
    a_values, b_values = torch.ones(3, 32), torch.ones(32, 32)
    a_values[1, 4] = NAN
    got = _multiplied(mxfp8(a_values, "a"), mxfp8(b_values, "b"))
    assert got.isnan().all(dim=1).tolist() == [False, True, False]
    assert bool((got[::2] == 32).all())
    zeros = torch.zeros(64, 64).to(FN)
    codes = torch.full((64, 2), 127, dtype=torch.uint8)
    codes[2, 1] = 0xFF
    b = mxfp8(torch.ones(32, 64), "b")
    for scale in (Mx1x32(codes), Mx1x32(codes).pack()):
        got = _multiplied(Quantized(zeros, scale), b)
        assert got.isnan().all(dim=1).nonzero().tolist() == [[2]], "NaN of zeros, too"
    huge = Quantized(torch.full((1, 8), 448.0).to(FN), PerToken(torch.tensor([3e38])))
    one = ptpc(torch.full((2, 8), 448.0), "b")
    assert _multiplied(huge, one).tolist() == reference(huge, one).tolist() == [[INF, INF]]


# Operands that do not belong together.


def _says(make: Callable[[], object], rule: str, came: str, fix: str = "") -> None:
    with pytest.raises(InvalidArgument) as caught:
        make()
    assert (caught.value.rule, caught.value.came, caught.value.fix) == (rule, came, fix)


def _pair_refused(a: Quantized, b: Quantized, rule: str, came: str, fix: str = "") -> None:
    """By both functions, and before anything is written."""
    out = torch.full((a.shape[0], b.shape[0]), 7.0)
    _says(lambda: multiply(a, b, out), rule, came, fix)
    assert bool((out == 7.0).all())
    _says(lambda: reference(a, b), rule, came, fix)


def test_dtypes_are_never_mixed() -> None:
    ones = torch.ones(3, 128)
    for a, b, came in (
        (ptpc(ones, "a", FN), ptpc(ones, "b", FNUZ), "a float8_e4m3fn, b float8_e4m3fnuz"),
        (ptpc(ones, "a", FNUZ), ptpc(ones, "b", FN), "a float8_e4m3fnuz, b float8_e4m3fn"),
    ):
        _pair_refused(
            a,
            b,
            "float8_e4m3fn and float8_e4m3fnuz are different numbers and are never mixed",
            came,
            "Quantise one of them again from its source; the same bytes viewed as the other dtype "
            "are off by a factor of 2.",
        )


def test_operands_have_a_side() -> None:
    a, b = ptpc(torch.ones(3, 128), "a"), ptpc(torch.ones(4, 128), "b")
    rule = "the first operand must have A's scales, the second B's"
    _pair_refused(b, a, rule, "PerChannel and PerToken")
    _pair_refused(a, a, rule, "PerToken and PerToken")
    _pair_refused(b, b, rule, "PerChannel and PerChannel")


def test_formats_are_not_mixed() -> None:
    ones = torch.ones(128, 128)
    for left, right in (("ptpc", "mxfp8"), ("blockscale", "ptpc"), ("mxfp8", "blockscale")):
        a, b = FORMATS[left](ones, "a"), FORMATS[right](ones, "b")
        _pair_refused(a, b, "both operands must be of one format", f"{left} and {right}")


def test_k_and_device_agree() -> None:
    a, b = ptpc(torch.ones(3, 128), "a"), ptpc(torch.ones(4, 64), "b")
    _pair_refused(a, b, "both operands must have the same K", "K=128 and K=64")
    far = Quantized(torch.ones(4, 128).to(FN).to("meta"), PerChannel(torch.ones(4).to("meta")))
    _pair_refused(a, far, "both operands must be on one device", "cpu and meta")


def test_out_must_fit() -> None:
    a, b = ptpc(torch.ones(3, 128), "a"), ptpc(torch.ones(4, 128), "b")
    _says(lambda: multiply(a, b, torch.empty(4, 3)), "out must have shape (3, 4)", "(4, 3)")
    floats = "the result must be one of float32, bfloat16, float16"
    _says(lambda: multiply(a, b, torch.empty(3, 4).to(FN)), floats, "float8_e4m3fn")
    _says(lambda: reference(a, b, torch.float64), floats, "float64")
    _says(
        lambda: multiply(a, b, torch.empty(3, 4, device="meta")),
        "out must be on the operands' device",
        "meta and cpu",
    )
