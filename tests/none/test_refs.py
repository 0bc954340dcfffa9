"""The references themselves: exact, different for different seeds, and able to say no."""

from __future__ import annotations

import pytest
import torch

from tests.refs import (
    EXACT_K,
    a_of,
    assert_equal,
    b_of,
    gathered,
    product,
    relative_error,
    seed_of,
    whole,
)


def test_product_is_right_by_hand() -> None:
    a, b = torch.tensor([[1.0, 2.0], [0.0, -1.0]]), torch.tensor([[3.0, 1.0]])
    assert product(a, b, torch.float32).tolist() == [[5.0], [-1.0]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_possible_value_is_exact_in_16_bits(dtype: torch.dtype) -> None:
    values = torch.arange(-4 * EXACT_K, 4 * EXACT_K + 1)
    assert torch.equal(values.to(dtype).long(), values)


def test_entries_are_small_whole_numbers_that_change_with_the_seed() -> None:
    assert set(whole(1, 50, 50).flatten().tolist()) == {-2.0, -1.0, 0.0, 1.0, 2.0}
    assert torch.equal(whole(1, 5, 5), whole(1, 5, 5))
    assert not torch.equal(whole(1, 5, 5), whole(2, 5, 5))


def test_no_seed_is_used_twice() -> None:
    seeds = [seed_of(rank, call) for rank in range(10) for call in range(100)]
    assert len(set(seeds)) == len(seeds)
    assert min(seeds) > 0, "negative seeds are those of B"


def test_gathered_stacks_the_blocks_in_rank_order() -> None:
    b = b_of(3, 4, 8)
    want = [product(a_of(rank, 3, m, 8), b, torch.float32) for rank, m in enumerate([2, 0, 1])]
    assert_equal(gathered(3, [2, 0, 1], b), torch.cat(want), "stacked")


@pytest.mark.parametrize(
    ("got", "text"),
    [
        (torch.tensor([[1.0, 2.0], [3.0, 5.0]]), r"1 of 4 elements differ, first at \(1, 1\): 5.0"),
        (torch.tensor([[1.0, float("nan")], [3.0, 4.0]]), r"first at \(0, 1\): nan, want 2.0"),
        (torch.tensor([[1.0, 2.0]]), r"shape \(1, 2\), want \(2, 2\)"),
        (torch.tensor([[1, 2], [3, 4]]), r"dtype torch.int64, want torch.float32"),
    ],
)
def test_assert_equal_says_where_it_differs(got: torch.Tensor, text: str) -> None:
    want = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    assert_equal(want.clone(), want, "the same")
    with pytest.raises(AssertionError, match=text):
        assert_equal(got, want, "another")


def test_relative_error_is_a_ratio_of_norms() -> None:
    want = torch.tensor([3.0, 4.0])
    assert relative_error(want + torch.tensor([0.0, 0.5]), want) == pytest.approx(0.1)
