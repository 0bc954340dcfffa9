"""The device program over `shm` windows, its two kernels interpreted: no GPU, all the logic."""

from __future__ import annotations

import time
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from gemmlink import groups
from gemmlink.backends.eager import Eager
from gemmlink.conformance import EpilogueContract, devices, quick
from gemmlink.conformance.clauses import Desk, Job
from gemmlink.conformance.exact import run_everywhere
from gemmlink.core.device import launch
from gemmlink.core.device.layout import DeskWord
from tests import device_cases as cases
from tests.conftest import Ranks
from tests.refs import WINDOW_MODES

EMULATED = "cpu"


#: Both results and both numbers of buffers; the rest of the combinations are for GPUs.
WAYS = (("copy", 1), ("view", 2))


@pytest.mark.parametrize("name", cases.OPERATIONS)
def test_every_mode_is_exact(ranks: Ranks, name: str) -> None:
    ranks(2).run(cases.every_way, 2, EMULATED, name, WINDOW_MODES, WAYS, timeout_s=60)


@pytest.mark.parametrize("name", cases.OPERATIONS)
def test_three_ranks_are_exact(ranks: Ranks, name: str) -> None:
    modes = ("auto", "fused-lanes") if name != "all_to_all" else ("auto",)
    ranks(3).run(cases.every_way, 3, EMULATED, name, modes, (("copy", 2),), timeout_s=60)


def _cells(rank: int) -> list[str]:
    enqueued = mock.patch.object(devices, "is_enqueued", return_value=True)
    with cases.on(EMULATED), enqueued:
        suite = quick.Suite("shm", ("fused-lanes",))
        groups = quick.run(suite)
        assert len(groups) == len(cases.OPERATIONS) * len(list(quick.dtype_pairs()))
        return [group.line() for group in groups if group.failed or group.skipped]


def test_the_cells_of_the_kit_are_exact(ranks: Ranks) -> None:
    assert ranks(2).run(_cells, timeout_s=90) == [[], []]


def _every_option(rank: int, epilogue: str) -> None:
    """What the contract of an epilogue asks for on ranks."""
    contract = type("Contract", (EpilogueContract,), {"epilogue": epilogue})
    enqueued = mock.patch.object(devices, "is_enqueued", return_value=True)
    with cases.on(EMULATED), enqueued:
        job = Job("", "", "", False, {"transport": "shm", "device": EMULATED})
        desk = Desk(groups.resolve(), job, lambda: None)
        run_everywhere(contract(), desk, 2)


def test_every_option_of_lanes_is_exact(ranks: Ranks) -> None:
    """The epilogue with the most of them; the others are for GPUs."""
    ranks(2).run(_every_option, "lanes", timeout_s=120)


def test_the_product_is_kept_and_calls_are_send_complete(ranks: Ranks) -> None:
    ranks(2).run(cases.kept_product_and_complete, 2, EMULATED, WINDOW_MODES, timeout_s=60)


def test_a_result_may_have_any_strides(ranks: Ranks) -> None:
    ranks(2).run(cases.own_strides, 2, EMULATED)


def test_the_function_form_grows(ranks: Ranks) -> None:
    ranks(2).run(cases.function_form, 2, EMULATED)


@pytest.mark.parametrize("mode", ["split-push", "split-pull", "fused-lanes"])
def test_an_absent_peer_leaves_nan_and_a_name(ranks: Ranks, mode: str) -> None:
    *present, absent = ranks(3).run(cases.absent_peer, 3, EMULATED, mode, timeout_s=60)
    assert absent == {}
    for rank, seen in enumerate(present):
        assert seen["nan"], f"a result that is no NaN: {seen}"
        assert seen["again"] == "Poisoned", seen
        assert seen["epoch"] == 2, seen
        assert seen["type"] in ("PeerTimeout", "PeerLost"), seen
        assert seen["rank"] == rank, seen
        assert seen["peer"] == 2, seen


class _Counting(Eager):
    """Remembers the sizes of products."""

    name = "counting"

    def __init__(self) -> None:
        self.sizes: list[tuple[int, ...]] = []

    def multiply(self, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
        self.sizes.append((a.shape[0], b.shape[0], a.shape[1]))
        super().multiply(a, b, out)


def _rehearsed(rank: int, name: str, mode: str) -> tuple[list[Any], list[Any], bool]:
    with cases.on(EMULATED):
        backend = _Counting()
        with cases.make(name, EMULATED, 8, epilogue=mode, chunks=2, backend=backend) as op:
            before, backend.sizes = backend.sizes, []
            launch, window = op.launch, op.launch.window
            assert window is not None
            zero = not window.tensor(rank)[launch.layout.data :].any()
            dist.barrier()
            cases.check_calls(op, rank, 2, EMULATED, [(8, 8)])
            return before, backend.sizes, zero


@pytest.mark.parametrize("mode", ["split-push", "fused-push", "fused-lanes"])
@pytest.mark.parametrize("name", cases.OPERATIONS)
def test_products_of_the_largest_size_are_rehearsed(ranks: Ranks, name: str, mode: str) -> None:
    for before, in_a_call, zero in ranks(2).run(_rehearsed, name, mode):
        assert before == in_a_call
        assert before
        assert zero, "what is left of a rehearsal shows in the window"


def _without_memory(rank: int) -> int:
    no_memory = mock.patch.object(torch, "zeros", _refuse_operands)
    with cases.on(EMULATED), no_memory, cases.make("all_gather", EMULATED, 8) as op:
        cases.check_calls(op, rank, 2, EMULATED, [(8, 8)])
        return op.launch.epoch


def _refuse_operands(*shape: Any, **rest: Any) -> torch.Tensor:
    if shape == ((8, cases.K),):
        raise torch.OutOfMemoryError("no memory for operands")
    return _zeros(*shape, **rest)


_zeros = torch.zeros


def test_no_memory_to_rehearse_with_is_no_failure(ranks: Ranks) -> None:
    assert ranks(2).run(_without_memory) == [1, 1]


def _captured_with_two_buffers(rank: int) -> dict[str, Any]:
    with cases.on(EMULATED), cases.make("all_gather", EMULATED, 8, buffers=2) as op:
        caller: Any = op
        launched: Any = op.launch
        machine, operands = launched.machine, cases.inputs("all_gather", rank, 0, 8, torch.float32)
        caller(*operands)
        machine.is_capturing = lambda stream: True
        before = len(machine.launches)
        seen = cases.raised(lambda: caller(*operands))
        assert len(machine.launches) == before, "something is left in the graph"
        machine.is_capturing = lambda stream: False
        cases.check_calls(op, rank, 2, EMULATED, [(8, 8), (3, 3)])
        return seen


def test_two_buffers_are_refused_under_capture_and_go_on(ranks: Ranks) -> None:
    for seen in ranks(2).run(_captured_with_two_buffers):
        assert seen["type"] == "Unsupported", seen
        assert "buffers=2 under graph capture. Prepare with buffers=1." in seen["text"], seen


def _miscounted(rank: int, word: DeskWord | None) -> dict[str, Any]:
    """Before a call, a call is begun behind the host's back, or the host counts one too many."""
    with cases.on(EMULATED), cases.make("all_gather", EMULATED, 8, buffers=2) as op:
        caller: Any = op
        launched: Any = op.launch
        cases.check_calls(op, rank, 2, EMULATED, [(8, 8)])
        if word is None:
            launched.epoch += 1
        else:
            launched.desk._words[word] += 1
        dist.barrier()
        got = caller(*cases.inputs("all_gather", rank, 0, 8, torch.float32))
        seen = {"nan": bool(got.isnan().all()), **cases.raised(op.check)}
        op.reset(20.0)
        cases.check_calls(op, rank, 2, EMULATED, [(8, 8), (3, 3)])
        return seen


@pytest.mark.parametrize(
    ("word", "kind", "text"),
    [
        (DeskWord.EPOCH, "Overlap", "one call of all_gather at a time"),
        (None, "InvalidArgument", "with buffers=2 the host must count the calls"),
    ],
)
def test_calls_that_are_miscounted_are_found_out(
    ranks: Ranks, word: DeskWord | None, kind: str, text: str
) -> None:
    seen = ranks(2).run(_miscounted, word)
    assert all(each["nan"] for each in seen), seen
    assert any(each["type"] == kind and text in each["text"] for each in seen), seen


def _closed_on_the_way(rank: int) -> tuple[float, bool]:
    with cases.on(EMULATED):
        op: Any = cases.make("all_gather", EMULATED, 8).prepare()
        op(*cases.inputs("all_gather", rank, 0, 8, torch.float32))
        desk, machine = op.launch.desk, op.launch.machine
        machine.has_happened = lambda event: False
        started = time.monotonic()
        with mock.patch.multiple(launch, _GRACE_S=0.2, _REST_S=0.1):
            op.close()
            op.close()
        stopped = bool(machine.peek(desk._words)[DeskWord.STOP])
        return time.monotonic() - started, stopped


def test_close_gives_calls_on_their_way_some_time(ranks: Ranks) -> None:
    for took, stopped in ranks(2).run(_closed_on_the_way):
        assert 0.3 <= took < 5, took
        assert stopped


def test_unequal_rows_are_refused_with_both_numbers(ranks: Ranks) -> None:
    for rank, seen in enumerate(ranks(2).run(cases.unequal_rows, 2, EMULATED)):
        assert seen["nan"], seen
        assert seen["type"] in ("InvalidArgument", "PeerLost"), seen
        if seen["type"] == "InvalidArgument":
            assert f"M={4 + rank} on rank {rank}" in seen["text"], seen


def test_other_rows_on_another_rank_are_refused(ranks: Ranks) -> None:
    seen = ranks(2).run(cases.other_rows, 2, EMULATED, timeout_s=60)
    assert all(each["nan"] for each in seen), seen
    assert {each["type"] for each in seen} <= {"InvalidArgument", "PeerLost"}, seen
    assert any("all ranks must pass the same rows= in call 1" in each["text"] for each in seen)


def test_a_refusal_reaches_the_peers(ranks: Ranks) -> None:
    refuser, other = ranks(2).run(cases.refused_by_one, 2, EMULATED)
    assert refuser["type"] == "InvalidArgument", refuser
    assert other["nan"], other
    assert other["type"] == "InvalidArgument", other
    assert "rank 0 refused call 2" in other["text"], other
    assert "shape (8, 7)" in other["text"], other


def test_too_many_rows_are_told(ranks: Ranks) -> None:
    large, other = ranks(2).run(cases.too_many_rows, 2, EMULATED)
    for seen in (large, other):
        assert "M must be at most max_m=8" in seen["all"], seen
    assert "M=9 on some rank" in large["text"], large
    assert other["nan"], other
    assert "rank 0 refused call 3: M must be at most max_m=8" in other["text"], other


def test_a_mistake_of_all_ranks_leaves_the_operation_usable(ranks: Ranks) -> None:
    for types in ranks(2).run(cases.refused_by_all, 2, EMULATED):
        assert types == ["InvalidArgument"] * 3
