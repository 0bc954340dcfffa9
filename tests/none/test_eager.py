"""Backend ``eager``: the contract of ``Backend.multiply`` on CPU tensors."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gemmlink.backends import processor, widened
from gemmlink.backends.eager import Eager
from tests.refs import assert_equal, product, relative_error, whole

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
PAIRS = [(F32, F32), (BF16, BF16), (BF16, F32), (F16, F16), (F16, F32)]
NAN = float("nan")

each_pair = pytest.mark.parametrize(("dtype", "out_dtype"), PAIRS)


def _multiplied(a: torch.Tensor, b: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
    """Into the middle of a block of NaN, as into a window; nothing beside may change."""
    m, n = a.shape[0], b.shape[0]
    around = torch.full((m + 2, n + 3), NAN, dtype=out_dtype)
    out = around[1 : 1 + m, 2 : 2 + n]
    Eager().multiply(a, b, out)
    assert int(around.isnan().sum()) == around.numel() - m * n, "NaN in the result, or wrote beside"
    return out.clone()


@each_pair
@given(m=st.integers(0, 9), n=st.integers(0, 9), k=st.integers(0, 64), seed=st.integers(0, 99))
def test_exact_for_all_small_sizes(
    dtype: torch.dtype, out_dtype: torch.dtype, m: int, n: int, k: int, seed: int
) -> None:
    a, b = whole(seed, m, k, dtype), whole(seed + 100, n, k, dtype)
    assert_equal(_multiplied(a, b, out_dtype), product(a, b, out_dtype), f"{(m, n, k)}")


def _plain(values: torch.Tensor) -> torch.Tensor:
    return values.clone()


def _transposed(values: torch.Tensor) -> torch.Tensor:
    return values.T.contiguous().T


def _sliced(values: torch.Tensor) -> torch.Tensor:
    around = torch.full((2 * len(values) + 1, 3 * values.shape[1] + 2), NAN, dtype=values.dtype)
    inside = around[1::2, 2 : 2 + 3 * values.shape[1] : 3][: len(values)]
    inside.copy_(values)
    return inside


def _unaligned(values: torch.Tensor) -> torch.Tensor:
    around = torch.full((values.numel() + 1,), NAN, dtype=values.dtype)
    around[1:] = values.flatten()
    return around[1:].view(values.shape)


def _one_row(values: torch.Tensor) -> torch.Tensor:
    return values[:1].expand(values.shape)


def _one_column(values: torch.Tensor) -> torch.Tensor:
    return values[:, :1].expand(values.shape)


def _one_value(values: torch.Tensor) -> torch.Tensor:
    return values[:1, :1].expand(values.shape)


STRIDES = [_plain, _transposed, _sliced, _unaligned, _one_row, _one_column, _one_value]


@each_pair
@pytest.mark.parametrize("stride_b", STRIDES)
@pytest.mark.parametrize("stride_a", STRIDES)
def test_exact_for_all_strides(
    dtype: torch.dtype,
    out_dtype: torch.dtype,
    stride_a: Callable[[torch.Tensor], torch.Tensor],
    stride_b: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    """Around sliced inputs lies NaN, so that one element read past an edge shows."""
    a, b = stride_a(whole(1, 5, 33, dtype)), stride_b(whole(2, 7, 33, dtype))
    before = a.clone(), b.clone()
    assert_equal(_multiplied(a, b, out_dtype), product(a, b, out_dtype), "strided")
    assert torch.equal(a, before[0]), "a was changed"
    assert torch.equal(b, before[1]), "b was changed"


@each_pair
@pytest.mark.parametrize("poison", [NAN, 7.0, -0.0])
def test_a_product_over_nothing_is_positive_zero(
    dtype: torch.dtype, out_dtype: torch.dtype, poison: float
) -> None:
    out = torch.full((3, 4), poison, dtype=out_dtype)
    Eager().multiply(torch.empty(3, 0, dtype=dtype), torch.empty(4, 0, dtype=dtype), out)
    assert_equal(out, torch.zeros(3, 4, dtype=out_dtype), "K=0")
    assert not out.signbit().any()


@each_pair
@pytest.mark.parametrize(("m", "n", "k"), [(0, 4, 8), (3, 0, 8), (0, 0, 8), (0, 4, 0)])
def test_an_empty_result_is_no_error(
    dtype: torch.dtype, out_dtype: torch.dtype, m: int, n: int, k: int
) -> None:
    out = torch.empty(m, n, dtype=out_dtype)
    Eager().multiply(torch.empty(m, k, dtype=dtype), torch.empty(n, k, dtype=dtype), out)
    assert out.shape == (m, n)


@pytest.mark.parametrize("dtype", [F32, BF16, F16])
def test_long_sums_keep_float32_accuracy(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    a = torch.randn(32, 7168, generator=generator).to(dtype)
    b = torch.randn(300, 7168, generator=generator).to(dtype)
    assert relative_error(_multiplied(a, b, F32), a.double() @ b.double().T) < 1e-5


@pytest.mark.parametrize(("dtype", "half_ulp"), [(BF16, 2.0**-9), (F16, 2.0**-12)])
def test_a_16_bit_result_is_rounded_once(dtype: torch.dtype, half_ulp: float) -> None:
    """Half a unit in the last place, and float32's own error on top."""
    generator = torch.Generator().manual_seed(2)
    a = torch.randn(16, 1000, generator=generator).to(dtype)
    b = torch.randn(40, 1000, generator=generator).to(dtype)
    want = a.double() @ b.double().T
    magnitude = a.double().abs() @ b.double().abs().T
    error = (_multiplied(a, b, dtype).double() - want).abs()
    assert bool((error <= 2 * half_ulp * want.abs() + 1000 * 2.0**-24 * magnitude).all())


def test_infinities_and_nan_are_kept() -> None:
    a, b = whole(1, 3, 4, BF16), torch.ones(5, 4, dtype=BF16)
    a[1, 2] = float("inf")
    a[2, 0] = NAN
    out = torch.empty(3, 5)
    Eager().multiply(a, b, out)
    assert bool(out[0].isfinite().all())
    assert bool((out[1] == float("inf")).all())
    assert bool(out[2].isnan().all())


# What is widened.


@pytest.mark.parametrize("out_dtype", [BF16, F32])
@pytest.mark.parametrize("m", [1, 33, 64, 256])
def test_a_product_takes_little_scratch_and_keeps_it(
    monkeypatch: pytest.MonkeyPatch, m: int, out_dtype: torch.dtype
) -> None:
    """Under a tenth of B; never a float32 copy of the weights, nor of a large A."""
    sizes: list[int] = []
    real = torch.empty

    def empty(*size: int) -> torch.Tensor:
        made = real(*size)
        sizes.append(made.nbytes)
        return made

    n, k = 2048, 7168
    a, b, out = torch.ones(m, k, dtype=BF16), torch.ones(n, k, dtype=BF16), real(m, n).to(out_dtype)
    monkeypatch.setattr(widened, "_kept", widened._Kept())
    monkeypatch.setattr(torch, "empty", empty)
    widened.multiply(a, b, out)
    assert bool((out == k).all())
    assert len(sizes) == 1
    assert sizes[0] < b.nbytes / 10
    widened.multiply(a[:-1], b, out[:-1])
    assert len(sizes) == 1, "made anew"


def test_scratch_serves_products_of_any_size_in_any_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(widened, "_kept", widened._Kept())
    with torch.inference_mode():
        _multiplied(whole(1, 2, 9, BF16), whole(2, 3, 9, BF16), F32)
    for seed, (m, n, k) in enumerate([(2, 3, 9), (50, 600, 1100), (1, 1, 1), (40, 3, 2000)]):
        a, b = whole(seed, m, k, BF16), whole(seed + 9, n, k, BF16)
        for out_dtype in (BF16, F32):
            assert_equal(_multiplied(a, b, out_dtype), product(a, b, out_dtype), f"{(m, n, k)}")


def test_two_threads_multiply_at_once() -> None:
    a, b = whole(1, 64, 512, BF16), whole(2, 96, 512, BF16)
    want = product(a, b, F32)

    def work() -> list[torch.Tensor]:
        return [_multiplied(a, b, F32) for _ in range(30)]

    with ThreadPoolExecutor(2) as threads:
        for future in [threads.submit(work) for _ in range(2)]:
            for got in future.result():
                assert_equal(got, want, "beside another thread")


@pytest.mark.parametrize(
    ("m", "n", "k"),
    [(1, 2048, 7168), (32, 3, 1 << 21), (33, 2048, 7168), (300, 7, 9), (5000, 5000, 5000)],
)
def test_blocks_are_of_bounded_size(m: int, n: int, k: int) -> None:
    depth, columns = widened.blocks(m, n, k)
    assert 1 <= depth <= k
    assert 1 <= columns <= n
    assert 4 * depth * columns <= max(2 << 20, 4 * k)
    assert 4 * depth * m <= max(512 << 10, 4 * 32 * k, 4 * 256 * m)


@pytest.mark.parametrize(("depth", "columns"), [(1, 1), (5, 3), (32, 2), (31, 7), (7, 4)])
@pytest.mark.parametrize("dtype", [BF16, F16])
def test_blocks_of_any_size_give_the_same(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, depth: int, columns: int
) -> None:
    a, b = whole(1, 4, 32, dtype), whole(2, 7, 32, dtype)
    monkeypatch.setattr(widened, "blocks", lambda m, n, k: (depth, columns))
    for out_dtype in (dtype, F32):
        out = torch.full((4, 7), NAN, dtype=out_dtype)
        widened.multiply(a, b, out)
        assert_equal(out, product(a, b, out_dtype), f"{depth} of K, {columns} rows")


# What the processor multiplies by itself.


@pytest.fixture
def native(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """Which way a product goes on a processor with these flags."""

    def ways(flags: str, dtype: torch.dtype, out_dtype: torch.dtype) -> list[str]:
        taken: list[str] = []
        monkeypatch.setattr(processor, "_flags", lambda: frozenset(flags.split()))
        monkeypatch.setattr(widened, "multiply", lambda *_: taken.append("widened"))
        monkeypatch.setattr(torch, "mm", lambda *_, **__: taken.append("torch"))
        processor._has_instructions.cache_clear()
        Eager().multiply(*(torch.ones(2, 3, dtype=dtype),) * 2, torch.empty(2, 2, dtype=out_dtype))
        processor._has_instructions.cache_clear()
        return taken

    return ways


@pytest.mark.parametrize(
    ("flags", "dtype", "out_dtype", "way"),
    [
        ("avx2 amx_bf16", BF16, BF16, "torch"),
        ("avx512_bf16", BF16, BF16, "torch"),
        ("amx_bf16", BF16, F32, "widened"),
        ("amx_bf16", F16, F16, "widened"),
        ("avx512_fp16", F16, F16, "torch"),
        ("avx512_fp16", F16, F32, "widened"),
        ("avx2 avx512f", BF16, BF16, "widened"),
        ("", F16, F16, "widened"),
        ("", F32, F32, "torch"),
    ],
)
def test_a_processor_with_16_bit_products_uses_them(
    native: Callable[..., list[str]],
    flags: str,
    dtype: torch.dtype,
    out_dtype: torch.dtype,
    way: str,
) -> None:
    assert native(flags, dtype, out_dtype) == [way]


def test_without_onednn_there_are_no_such_products(
    monkeypatch: pytest.MonkeyPatch, native: Callable[..., list[str]]
) -> None:
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)
    assert native("amx_bf16", BF16, BF16) == ["widened"]


def test_flags_are_those_of_this_machine() -> None:
    with open("/proc/cpuinfo") as lines:
        flags = [line for line in lines if line.startswith("flags")]
    assert processor._flags() == (frozenset(flags[0].split()[2:]) if flags else frozenset())


@each_pair
def test_both_ways_give_exact_sums(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, out_dtype: torch.dtype
) -> None:
    """Whatever this machine would take."""
    a, b = whole(1, 40, 300, dtype), whole(2, 70, 300, dtype)
    for answer in (True, False):
        monkeypatch.setattr(processor, "multiplies", lambda dtype, answer=answer: answer)
        assert_equal(_multiplied(a, b, out_dtype), product(a, b, out_dtype), f"{answer}")
