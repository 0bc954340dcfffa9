"""The pool itself: what goes wrong on a rank is reported, and costs no other test anything."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

import gemmlink
from tests.pool import RankFailed, RankPool


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    """A pool of its own: these tests break it."""
    made = RankPool(2)
    yield made
    made.kill()


def _identity(rank: int, value: object) -> tuple[int, int, int, object]:
    return rank, dist.get_rank(), dist.get_world_size(), value


def _fails_on_rank_1(rank: int, how: str) -> str:
    if rank == 1 and how == "raise":
        raise KeyError("a message of rank 1") from ValueError("the cause")
    if rank == 1 and how == "die":
        os._exit(7)
    if rank == 1 and how == "hang":
        time.sleep(60)
    if rank == 1 and how == "warn":
        warnings.warn("a warning of rank 1", stacklevel=1)
    return "a value"


def test_values_come_in_rank_order_from_a_group_of_the_right_size(pool: RankPool) -> None:
    assert pool.run(_identity, "x") == [(0, 0, 2, "x"), (1, 1, 2, "x")]


def test_ranks_live_on_between_calls(pool: RankPool) -> None:
    before = pool.pids()
    pool.run(_identity, 1)
    pool.outcomes(_fails_on_rank_1, "raise")
    assert pool.pids() == before


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ("raise", "--- rank 1:\n(.|\n)*KeyError: 'a message of rank 1'"),
        ("warn", "UserWarning: a warning of rank 1"),
        ("die", "rank 1 died with exit code 7"),
        ("hang", "rank 1 did not end in time"),
    ],
    ids=["raise", "warn", "die", "hang"],
)
def test_a_failure_names_the_rank_and_costs_the_pool(pool: RankPool, how: str, text: str) -> None:
    before = pool.pids()
    with pytest.raises(RankFailed, match=text):
        pool.run(_fails_on_rank_1, how, timeout_s=1)
    assert not any(os.path.exists(f"/proc/{pid}/exe") for pid in before), "a rank is left"
    assert pool.run(_identity, "again")[1] == (1, 1, 2, "again")
    assert not set(before) & set(pool.pids())


def test_outcomes_keep_values_and_errors_apart(pool: RankPool) -> None:
    good, bad = pool.outcomes(_fails_on_rank_1, "raise")
    assert (good.value, good.failure) == ("a value", None)
    assert (bad.error.type, bad.error.text) == ("KeyError", "'a message of rank 1'")
    assert bad.error.cause == "ValueError('the cause')"
    with pytest.raises(AssertionError, match="rank 0 returned 'a value', not an error"):
        _ = good.error


def _timeout_error(rank: int) -> None:
    raise gemmlink.PeerTimeout("a rule", epoch=7, peer=rank)


def test_attributes_of_an_error_come_along(pool: RankPool) -> None:
    attributes = [outcome.error.attributes for outcome in pool.outcomes(_timeout_error)]
    assert [(seen["epoch"], seen["peer"]) for seen in attributes] == [(7, 0), (7, 1)]


def _variable(rank: int) -> str:
    return os.environ.get("GEMMLINK_LANES", "unset")


def test_variables_hold_for_one_call(pool: RankPool) -> None:
    assert pool.run(_variable, env={"GEMMLINK_LANES": "3"}) == ["3", "3"]
    assert pool.run(_variable) == ["unset", "unset"]


def _threads(rank: int) -> int:
    return torch.get_num_threads()


def test_a_rank_has_one_torch_thread(pool: RankPool) -> None:
    assert pool.run(_threads) == [1, 1]
