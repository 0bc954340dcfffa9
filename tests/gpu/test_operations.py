"""Every operation in every mode on CUDA devices: exact."""

from __future__ import annotations

import pytest
import torch

from tests import device_cases
from tests.conftest import Ranks
from tests.gpu import cases
from tests.refs import WINDOW_MODES

pytestmark = pytest.mark.filterwarnings("default")

PAIRS = [(torch.bfloat16, torch.bfloat16), (torch.bfloat16, torch.float32)]


def test_the_transport_by_itself(ranks: Ranks) -> None:
    ranks(2).run(cases.words, 2, timeout_s=60)


@pytest.mark.parametrize("name", device_cases.OPERATIONS)
@pytest.mark.parametrize("world", [2, 4])
def test_every_mode_and_way_is_exact(ranks: Ranks, world: int, name: str) -> None:
    ranks(world).run(device_cases.every_way, world, "cuda", name, WINDOW_MODES, timeout_s=60)


@pytest.mark.parametrize("name", device_cases.OPERATIONS)
@pytest.mark.parametrize(("dtype", "out_dtype"), PAIRS)
def test_bfloat16_is_exact(
    ranks: Ranks, name: str, dtype: torch.dtype, out_dtype: torch.dtype
) -> None:
    modes, ways = ("auto", "fused-push"), (("copy", 1), ("view", 1))
    ranks(2).run(
        device_cases.every_way, 2, "cuda", name, modes, ways, dtype, out_dtype, timeout_s=60
    )


@pytest.mark.parametrize(
    ("world", "mode"),
    [*((2, mode) for mode in WINDOW_MODES), (1, "split-push"), (3, "fused-lanes")],
)
def test_the_cells_of_the_kit_are_exact(ranks: Ranks, mode: str, world: int) -> None:
    assert ranks(world).run(cases.kit_cells, mode, timeout_s=180) == [[]] * world


def test_sizes_that_fill_the_device(ranks: Ranks) -> None:
    ranks(2).run(cases.larger, 2, list(WINDOW_MODES), timeout_s=60)


def test_the_product_is_kept_and_calls_are_send_complete(ranks: Ranks) -> None:
    ranks(2).run(device_cases.kept_product_and_complete, 2, "cuda", WINDOW_MODES, timeout_s=60)


def test_a_result_may_have_any_strides(ranks: Ranks) -> None:
    ranks(2).run(device_cases.own_strides, 2, "cuda", timeout_s=60)


def test_the_function_form_grows(ranks: Ranks) -> None:
    ranks(2).run(device_cases.function_form, 2, "cuda", timeout_s=60)


def test_world_one(ranks: Ranks) -> None:
    ranks(2).run(cases.alone, 2, timeout_s=60)


def test_transports_of_the_other_kind_are_refused(ranks: Ranks) -> None:
    for first, second in ranks(2).run(cases.wrong_transport, 2, timeout_s=60):
        assert "'shm' serves cpu tensors; got tensors on cuda" in first
        assert "'symm_mem' serves cuda tensors; got tensors on cpu" in second


@pytest.mark.parametrize("name", device_cases.OPERATIONS)
def test_eight_ranks_are_exact(ranks: Ranks, name: str) -> None:
    modes, ways = ("auto", "split-push", "fused-lanes"), (("copy", 1), ("view", 1))
    ranks(8).run(device_cases.every_way, 8, "cuda", name, modes, ways, timeout_s=60)
