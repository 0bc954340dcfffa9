"""O-60 to O-66: what PyTorch does around a call, and what must be the same after many."""

from __future__ import annotations

import gc
import hashlib
import os
import random
import time
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import gemmlink
from gemmlink import groups
from gemmlink.calls import calls_of
from tests.cases.kit import (
    BF16,
    F32,
    each_epilogue,
    each_mode,
    eye,
    failing,
    good_call,
    tagged,
)
from tests.conftest import Ranks
from tests.recovery import named
from tests.refs import FEW_MODES, assert_equal


def _compiled(rank: int, compiler: str) -> None:
    b = eye(8, F32)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import torch._dynamo  # which warns of its own parts
    op = gemmlink.GemmAllGather(8, 8, 8, epilogue="split-pull").prepare()
    forms: list[Callable[[torch.Tensor], torch.Tensor]] = [
        lambda a: gemmlink.gemm_all_gather(a * 2, b, epilogue="split-pull") + 1,
        lambda a: op(a * 2, b) + 1,
    ]
    made: list[Any] = [torch.compile(form, backend=compiler) for form in forms]
    numbers = calls_of(groups.resolve())
    before = numbers.number
    for call, m in enumerate((4, 5, 4, 1)):
        blocks = [tagged(call + peer, m, 8, F32) for peer in range(2)]
        for compiled in made:
            assert_equal(compiled(blocks[rank]), torch.cat(blocks) * 2 + 1, f"{compiler}, M={m}")
        assert (numbers.number - before, op.launch.epoch) == (call + 1, call + 1)
    op.close()
    good_call(rank, 2, 1, "split-pull")


@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
def test_o_60_in_a_compiled_function(ranks: Ranks, compiler: str) -> None:
    """pytorch/pytorch#162859, #179144: wrong shapes, or ranks that made another number of calls."""
    ranks(2).run(_compiled, compiler, timeout_s=60)


def _with_gradient(rank: int, mode: str) -> list[str]:
    seen = []
    b = eye(8, F32)
    for which in ("a", "b", "both"):
        a, weights = tagged(rank, 4, 8, F32), b.clone()
        a.requires_grad_(which != "b")
        weights.requires_grad_(which != "a")
        error, _ = failing(lambda a=a, w=weights: gemmlink.gemm_all_gather(a, w, epilogue=mode))  # type: ignore[misc]
        seen.append(f"{type(error).__name__} {error}")
        good_call(rank, 2, 1, mode)
    return seen


@each_epilogue
def test_o_61_inputs_that_require_a_gradient(ranks: Ranks, mode: str) -> None:
    """pytorch/pytorch#152127: the gradient was dropped and nobody was told."""
    for seen in ranks(2).run(_with_gradient, mode):
        for text in seen:
            assert "gradients do not pass through this operation" in text, text
            assert "torch.no_grad()" in text, text


def _inference(rank: int, mode: str) -> None:
    b = eye(8, F32)
    blocks = [tagged(peer, 4, 8, F32) for peer in range(2)]
    want = torch.cat(blocks)
    with gemmlink.GemmAllGather(8, 8, 4, epilogue=mode) as op:
        calls = (op, lambda a, b: gemmlink.gemm_all_gather(a, b, epilogue=mode))
        for call in calls:
            with torch.inference_mode():
                assert_equal(call(blocks[rank], b), want, f"{mode}, inference")
                assert_equal(call(blocks[rank].clone(), b.clone()), want, f"{mode}, its tensors")
            with torch.no_grad():
                leaf = blocks[rank].clone().requires_grad_()
                assert_equal(call(leaf, b), want, f"{mode}, no_grad")
            last = call(blocks[rank], b)
            assert_equal(last.add_(1), want + 1, f"{mode}, added to")
            assert_equal(call(blocks[rank], b), want, f"{mode}, after it")


@each_mode
def test_o_62_inference_mode(ranks: Ranks, mode: str) -> None:
    """pytorch/pytorch#149411: what was made inside could not be used outside."""
    ranks(2).run(_inference, mode)


def _held() -> dict[str, int]:
    gc.collect()
    with open("/proc/self/statm") as file:
        resident = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    with open("/proc/self/maps") as file:
        maps = len(file.readlines())
    return {
        "resident": resident,
        "files": len(os.listdir("/proc/self/fd")),
        "maps": maps,
        "names": len(named([os.getpid()])),
    }


def _many_calls(rank: int, mode: str, function: bool, calls: int) -> dict[str, int]:
    a, b = tagged(rank, 8, 16), eye(16)
    want = torch.cat([tagged(peer, 8, 16) for peer in range(2)])
    before: dict[str, int] = {}
    with gemmlink.GemmAllGather(16, 16, 8, BF16, epilogue=mode) as op:
        for call in range(calls):
            got = gemmlink.gemm_all_gather(a, b, epilogue=mode) if function else op(a, b)
            if call == calls // 10:
                before = _held()
            if call % 100 == 0:
                assert_equal(got, want, f"{mode}, call {call}")
        after = _held()
        dist.barrier()
    return {name: after[name] - before[name] for name in before}


@pytest.mark.parametrize(
    ("mode", "function", "calls"), [("auto", True, 10_000), ("collective", False, 2000)]
)
def test_o_64_ten_thousand_calls(ranks: Ranks, mode: str, function: bool, calls: int) -> None:
    """vllm-project/vllm#46515, ROCm/rccl#302, openucx/ucx#3030: handles were opened, never closed.

    The allocator may map a few blocks more or fewer; a mapping a call would be thousands. The other
    modes are tests/ranks/test_stability.py.
    """
    for grown in ranks(2).run(_many_calls, mode, function, calls, timeout_s=120):
        assert grown["resident"] < 4 << 20, grown
        assert grown["files"] <= 0, grown
        assert grown["names"] <= 0, grown
        assert grown["maps"] <= 4, grown


def _hash(rank: int, world: int, mode: str, dtype: torch.dtype) -> set[str]:
    clock = random.Random(rank)
    generator = torch.Generator().manual_seed(rank)
    a = torch.randn(33, 64, generator=generator).to(dtype)
    b = torch.randn(65, 64, generator=torch.Generator().manual_seed(99)).to(dtype)
    found = set()
    with gemmlink.GemmAllGather(65, 64, 33, dtype, epilogue=mode) as op:
        for _ in range(50):
            time.sleep(clock.random() * 0.001)
            got = op(a, b).contiguous().view(torch.uint8)
            found.add(hashlib.sha256(got.numpy().tobytes()).hexdigest())
    return found


@pytest.mark.parametrize(("world", "dtype"), [(4, F32), (5, BF16)], ids=str)
def test_o_65_the_same_bits_on_all_ranks_every_time(
    ranks: Ranks, world: int, dtype: torch.dtype
) -> None:
    """pytorch/pytorch#129501, #131244: last bits differed, ranks branched differently, and hung."""
    for mode in FEW_MODES:
        found = ranks(world).run(_hash, world, mode, dtype)
        assert len(set().union(*found)) == 1, f"{mode}: {found}"


def _numbered(rank: int, mode: str, calls: int) -> None:
    """64 KiB from each rank, all of it the number of the call."""
    a, b = torch.empty(64, 1), torch.ones(256, 1)
    out = torch.empty(128, 256)
    with gemmlink.GemmAllGather(256, 1, 64, epilogue=mode) as op:
        for call in range(calls):
            op(a.fill_(call), b, out=out)
            low, high = torch.aminmax(out)
            assert float(low) == float(high) == call, f"{mode}, call {call}: {low} to {high}"


@pytest.mark.parametrize(
    ("mode", "calls"), [("split-pull", 20_000), ("fused-push", 5000), ("fused-lanes", 5000)]
)
def test_o_66_a_flag_never_comes_before_its_data(ranks: Ranks, mode: str, calls: int) -> None:
    """vllm-project/vllm-ascend#3988, openucx/ucc#939: on Arm the flag was seen first."""
    ranks(2).run(_numbered, mode, calls, timeout_s=120)
