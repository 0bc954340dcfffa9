"""Problems of the conformance kit: rebuilt alike everywhere, exact where they say so."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from gemmlink.conformance.problems import Case, cancellation, limit_l2, relative_l2
from gemmlink.conformance.quick import row_patterns

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def case(kind: str = "integers", dtype: torch.dtype = torch.bfloat16, k: int = 100) -> Case:
    return Case((3, 0, 2), 7, k, dtype, dtype, kind, 5)  # type: ignore[arg-type]


def test_equal_cases_give_equal_tensors_and_other_seeds_others() -> None:
    assert torch.equal(case().a(2), case().a(2))
    assert not torch.equal(case().b(), replace(case(), seed=6).b())
    assert not torch.equal(case().a(0)[:2], case().a(2))


def test_the_reference_is_the_blocks_of_all_ranks_in_rank_order() -> None:
    whole = case().reference()
    assert torch.equal(whole, torch.cat([case().block(rank) for rank in range(3)]))
    assert whole.shape == (5, 7)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("k", [0, 1, 5000])
def test_whole_numbers_are_exact_in_every_output_dtype_at_any_k(dtype: torch.dtype, k: int) -> None:
    exact = case(dtype=dtype, k=k).reference()
    assert torch.equal(exact.to(torch.bfloat16).double(), exact)
    assert torch.equal(exact.to(torch.float16).double(), exact)
    full = case(dtype=dtype, k=k).a(0).double() @ case(dtype=dtype, k=k).b().double().T
    assert torch.equal(exact[:3], full)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_one_rounding_is_within_the_limit_and_a_sixteenth_of_garbage_is_not(
    dtype: torch.dtype,
) -> None:
    exact = Case((64,), 64, 256, dtype, dtype, "normal", 1).reference()
    limit = limit_l2(256, dtype, exact.numel())
    assert relative_l2(exact.to(dtype), exact) < 0.7 * limit
    stale = exact.to(dtype)
    stale[:1, :16] = 0
    assert relative_l2(stale, exact) > limit


def test_float32_results_get_a_limit_from_k_alone() -> None:
    assert limit_l2(7168, torch.float32, 1) == pytest.approx(1e-5, rel=0.02)
    c = Case((8,), 8, 7168, torch.float32, torch.float32, "normal", 1)
    assert relative_l2(c.a(0) @ c.b().T, c.reference()) < limit_l2(7168, torch.float32, 64)


def test_a_single_rounded_element_never_breaks_the_limit() -> None:
    # 1 + 2**-8 lies half-way between two bfloat16 numbers: the worst that one rounding can do.
    exact = torch.tensor([[1 + 2.0**-8]], dtype=torch.float64)
    assert relative_l2(exact.bfloat16(), exact) <= limit_l2(1, torch.bfloat16, 1)


def summed(case: Case, rank: int) -> tuple[torch.Tensor, torch.Tensor, float]:
    """A right result of ``rank``, the exact one, and the limit between them."""
    blocks = [case.block(source) for source in range(len(case.rows))]
    exact = case.assembled(blocks, rank)
    terms = [
        case.assembled([b if s == t else b * 0 for s, b in enumerate(blocks)], rank)
        for t in range(len(blocks))
    ]
    total = torch.zeros(exact.shape)
    for term in terms:
        total += term.to(case.out_dtype).float()
    cancel = cancellation(terms, exact)
    limit = limit_l2(case.k, case.out_dtype, exact.numel(), len(blocks), cancel)
    return total.to(case.out_dtype), exact, limit


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("operation", ["reduce_scatter", "all_reduce"])
@pytest.mark.parametrize("world", [2, 8])
def test_sums_of_rounded_products_are_within_their_limit_and_garbage_is_not(
    dtype: torch.dtype, operation: str, world: int
) -> None:
    case = Case((64,) * world, 64, 256, dtype, dtype, "normal", 2, operation)
    right, exact, limit = summed(case, world - 1)
    assert relative_l2(right, exact) < 0.7 * limit
    stale = right.clone()
    stale[:1, :16] = 0
    assert relative_l2(stale, exact) > limit


def test_a_sum_of_many_products_gets_little_more_than_one_product() -> None:
    """However many terms: the errors of independent terms grow as their sum does."""
    one, two, many = (limit_l2(256, torch.bfloat16, 4096, terms) for terms in (1, 2, 64))
    assert one < two < 1.5 * one
    assert many < 1.5 * one


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("seed", range(5))
def test_sums_of_few_elements_are_within_their_limit_even_where_they_cancel(
    dtype: torch.dtype, seed: int
) -> None:
    case = Case((4,) * 4, 1, 16, dtype, dtype, "normal", seed, "reduce_scatter")
    right, exact, limit = summed(case, 1)
    assert exact.numel() == 1
    assert relative_l2(right, exact) <= limit


def test_products_that_cancel_widen_the_limit() -> None:
    ones = torch.ones(16, 16, dtype=torch.float64)
    assert cancellation([ones, -ones * 0.5], ones * 0.5) == pytest.approx(5**0.5)
    assert cancellation([ones, -ones], ones * 0) == 1.0
    wide = limit_l2(16, torch.bfloat16, 256, 2, 5**0.5)
    assert wide > 1.5 * limit_l2(16, torch.bfloat16, 256, 2)


def test_what_was_never_written_has_no_error_that_passes() -> None:
    exact = torch.ones(2, 2, dtype=torch.float64)
    error = relative_l2(torch.full((2, 2), torch.nan), exact)
    assert not error <= 1e30
    assert relative_l2(torch.ones(1), torch.zeros(1, dtype=torch.float64)) == 1.0


def test_row_patterns_have_empty_ranks_beside_full_ones() -> None:
    assert (0, 0, 0) in row_patterns(3)
    assert (1, 7, 0) in row_patterns(3)
    assert all(len(rows) == 2 for rows in row_patterns(2))
