"""Cases as they show in an all-to-all, a reduce-scatter and an all-reduce."""

from __future__ import annotations

import hashlib
import random
import time
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist

import gemmlink
from tests.cases.kit import BF16, DTYPES, F16, F32, HEARD_S, LIMIT, NAN, bits, eye, failing, tagged
from tests.conftest import Ranks
from tests.operations import FUNCTIONS, NAMES, OBJECTS, Asked, check
from tests.recovery import synchronised
from tests.refs import FEW_MODES, MODES, assert_equal, whole

#: The shapes of O-01: what lies past the last whole tile must neither be lost nor leak in.
ODD = ((33, 65, 17), (64, 63, 32), (65, 64, 31), (1, 127, 32), (127, 1, 32))


def _exact(rank: int, asked: Asked, what: str, group: Any = None, **given: Any) -> None:
    """A call of the function form in every mode, whose inputs are left alone."""
    for mode in given.pop("modes", FEW_MODES):
        a, b = asked.a(rank), asked.b(rank)
        if asked.name == "all_to_all":
            given["extent"] = asked.extent
        got = FUNCTIONS[asked.name](
            a, b, epilogue=mode, group=group, out_dtype=asked.out_dtype, **given
        )
        check(got, asked, rank, f"{mode}, {what}")
        assert torch.equal(bits(a), bits(asked.a(rank))), f"{mode} changed a"
        assert torch.equal(bits(b), bits(asked.b(rank))), f"{mode} changed b"


def _extent(name: str, n: int, world: int) -> int | None:
    return n - n % world if name == "all_to_all" else None


def _reduced(rank: int, values: Sequence[float], dtype: torch.dtype, mode: str) -> torch.Tensor:
    """All-reduce of ``(1, 1)`` products, ``values[r]`` on rank r."""
    a, b = torch.tensor([[values[rank]]], dtype=dtype), torch.ones(1, 1, dtype=dtype)
    return gemmlink.gemm_all_reduce(a, b, epilogue=mode)


def _shapes(rank: int) -> None:
    for number, (m, n, k) in enumerate(ODD):
        for turn, name in enumerate(NAMES):
            dtype = DTYPES[(number + turn) % 3]
            asked = Asked(name, (m, m), n, number, _extent(name, n, 2), dtype, F32, k)
            _exact(rank, asked, f"{m} x {n} x {k}", modes=("fused-push", "split-pull"))


def test_o_01_shapes_around_a_tile(ranks: Ranks) -> None:
    """triton-lang/triton#630: wrong once N and K were no multiples of the tile."""
    ranks(2).run(_shapes, timeout_s=60)


def _slices(rank: int) -> None:
    for number, k in enumerate((64, 128, 192, 320, 576)):
        a = whole(number + 7 * rank, 6, k).clamp(-1, 1)
        b = whole(50 + number, 4, k).clamp(-1, 1)
        others = [whole(number + 7 * r, 6, k).clamp(-1, 1) for r in range(2)]
        want = (others[0].double() + others[1].double()) @ b.double().T
        for mode in FEW_MODES:
            got = gemmlink.gemm_all_reduce(a, b, epilogue=mode)
            assert_equal(got, want.float(), f"{mode}, K={k}")


def test_o_03_an_odd_number_of_slices_of_k(ranks: Ranks) -> None:
    """HazyResearch/HipKittens#65: a loop unrolled by two read past the end of K."""
    ranks(2).run(_slices)


def _little(rank: int, sizes: Sequence[tuple[int, int]]) -> None:
    for number, (m, n) in enumerate(sizes):
        for name in NAMES:
            asked = Asked(name, (m,) * 3, n, number, _extent(name, n, 3), BF16, BF16)
            _exact(rank, asked, f"M={m}, N={n}")


def test_o_04_no_rows_at_all(ranks: Ranks) -> None:
    """pytorch/pytorch#85234, deepseek-ai/DeepEP#374: no rows: SIGFPE, an assertion."""
    ranks(3).run(_little, [(0, 8)])


def test_o_05_less_data_than_ranks(ranks: Ranks) -> None:
    """flashinfer-ai/flashinfer#4393: a share of nothing was awaited for ever."""
    ranks(3).run(_little, [(1, 1), (1, 4), (1, 8), (2, 3)], timeout_s=60)


def _no_k(rank: int) -> None:
    for dtype in DTYPES:
        for fill in (NAN, 7.0):
            for name in NAMES:
                rows = {"all_to_all": 8, "reduce_scatter": 2, "all_reduce": 4}[name]
                cols = 3 if name == "all_to_all" else 6
                for mode in FEW_MODES:
                    out = torch.full((rows, cols), fill, dtype=dtype)
                    a, b = torch.empty(4, 0, dtype=dtype), torch.empty(6, 0, dtype=dtype)
                    FUNCTIONS[name](a, b, epilogue=mode, out=out)
                    zero = torch.zeros(rows, cols, dtype=dtype)
                    assert torch.equal(bits(out), bits(zero)), f"{name} {mode} {dtype}"


def test_o_06_a_product_over_nothing_is_positive_zero(ranks: Ranks) -> None:
    """pytorch/pytorch#31421, microsoft/onnxruntime#21483: it was what the buffer held."""
    ranks(2).run(_no_k, timeout_s=60)


@pytest.mark.parametrize("mode", MODES)
def test_o_07_one_rank_without_a_launcher(mode: str) -> None:
    """vllm-project/vllm#2674, NVIDIA/Megatron-LM#5337: a warning; the caller's own tensor."""
    for name in NAMES:
        asked = Asked(name, (5,), 6, 1, 4 if name == "all_to_all" else None)
        kept: list[torch.Tensor] = []
        for _ in range(2):
            rest = {"extent": 4} if name == "all_to_all" else {}
            a, b = asked.a(0), asked.b(0)
            got = FUNCTIONS[name](a, b, group=gemmlink.SELF, epilogue=mode, **rest)
            mine = check(got, asked, 0, mode)
            others = {x.untyped_storage().data_ptr() for x in (a, b, *kept)}
            assert mine.untyped_storage().data_ptr() not in others, f"{name} {mode} is shared"
            mine.fill_(NAN)
            kept.append(mine)


def _ragged(rank: int) -> list[str]:
    told = []
    for mode in MODES:
        rows = (5, 2, 7)
        a, b = tagged(rank, rows[rank], 12), eye(12)
        for extent in (6, 12):
            got = gemmlink.gemm_all_to_all(a, b, extent, epilogue=mode)
            blocks = [tagged(source, rows[source], 12) for source in range(3)]
            mine = slice(rank * extent // 3, (rank + 1) * extent // 3)
            assert_equal(got.received, torch.cat(blocks)[:, mine], f"{mode}, received")
            assert_equal(got.local, blocks[rank][:, extent:], f"{mode}, local")
        error, _ = failing(lambda: gemmlink.gemm_all_reduce(a, b, epilogue=mode))  # noqa: B023
        assert isinstance(error, gemmlink.InvalidArgument), repr(error)
        told.append(str(error))
    return told


def test_o_08_another_m_on_each_rank(ranks: Ranks) -> None:
    """pytorch/xla#8660, pytorch/pytorch#156627: a hang or a refusal, by back end."""
    for told in ranks(3).run(_ragged):
        assert all("[5, 2, 7]" in text for text in told), told


def _with_nan(rank: int) -> None:
    for mode in MODES:
        for holder in range(3):
            a = torch.ones(4, 4)
            if rank == holder:
                a[2] = NAN
            got = gemmlink.gemm_all_reduce(a, torch.ones(5, 4) / 4, epilogue=mode)
            want = torch.full((4, 5), 3.0)
            want[2] = NAN
            assert torch.equal(got.isnan(), want.isnan()), f"{mode}, NaN on rank {holder}"
            assert torch.equal(got[~got.isnan()], want[~want.isnan()]), mode


def test_o_15_a_nan_counts_whoever_holds_it(ranks: Ranks) -> None:
    """ml-explore/mlx#4072: a reduction kept a NaN of one rank and dropped that of another."""
    ranks(3).run(_with_nan)


def _sums(rank: int, values: Sequence[float], dtype: torch.dtype, wanted: float) -> None:
    for mode in MODES:
        got = _reduced(rank, values, dtype, mode)
        assert got.dtype == dtype
        assert float(got) == wanted, f"{mode}: {float(got)}"


def test_o_17_sums_of_bfloat16_are_float32(ranks: Ranks) -> None:
    """NVIDIA/nccl#1026, NVIDIA/TensorRT-LLM#16753: 16-bit sums cost points of model score."""
    ranks(3).run(_sums, [256, 1, 1], BF16, 258)


def test_o_18_a_partial_sum_may_exceed_float16(ranks: Ranks) -> None:
    """NVIDIA-NeMo/Automodel#825: 60000 + 60000 was infinite before -60000 came."""
    ranks(3).run(_sums, [60000, 60000, -60000], F16, 60000)


def _zeros(rank: int) -> list[str]:
    seen = []
    a, b = torch.tensor([[-0.0], [1.0]]), torch.ones(2, 1)
    for mode in MODES:
        got = gemmlink.gemm_all_to_all(a, b, epilogue=mode, keep_product=True)
        held = [product[:, rank : rank + 1] for product in synchronised(got.product)]
        assert torch.equal(bits(got.received), bits(torch.cat(held))), f"{mode}: a zero's sign"
        for alike in (False, True):
            total = gemmlink.gemm_all_reduce(a, b, epilogue=mode, bit_identical=alike)
            seen.append(hashlib.sha256(bits(total).numpy().tobytes()).hexdigest())
    return seen


def test_o_19_signed_zeros_travel_unchanged(ranks: Ranks) -> None:
    """pytorch/pytorch#195851, numpy/numpy#21218: a sum that began at +0 lost the sign."""
    seen = ranks(2).run(_zeros)
    assert seen[0] == seen[1], "ranks differ"
    assert len(set(seen[0][1::2])) == 1, "modes differ where they must not"


def _eighths(rank: int) -> None:
    fp8 = torch.float8_e4m3fn
    a, b = torch.ones(2, 2), torch.ones(2, 2)
    for mode in FEW_MODES:
        for given in ((a.to(fp8), b.to(fp8), None), (a, b, fp8)):
            for name in ("reduce_scatter", "all_reduce"):
                call = lambda: FUNCTIONS[name](*given[:2], out_dtype=given[2], epilogue=mode)  # noqa: B023, E731
                error, _ = failing(call)
                assert isinstance(error, gemmlink.InvalidArgument), repr(error)
                assert "float8_e4m3fn" in str(error), str(error)


def test_o_24_bytes_of_fp8_are_not_added(ranks: Ranks) -> None:
    """pytorch/pytorch#152706, #126556: a reducer took fp8 and summed the raw bytes."""
    ranks(2).run(_eighths)


def _ones(rank: int) -> None:
    for mode in MODES:
        for name in ("all_reduce", "reduce_scatter"):
            got = FUNCTIONS[name](torch.ones(3, 4), torch.ones(2, 4), epilogue=mode)
            rows = 3 if name == "all_reduce" else 1
            assert_equal(got, torch.full((rows, 2), 12.0), f"{mode} {name}")


def test_o_27_a_sum_is_no_mean(ranks: Ranks) -> None:
    """vllm-project/vllm#33088: off by the number of ranks."""
    ranks(3).run(_ones)


def _many_shapes(rank: int) -> None:
    drawn = random.Random(5)
    for number in range(150):
        name = drawn.choice(["all_gather", *NAMES])
        m, n = drawn.choice([1, 3, 16, 17, 64]), drawn.choice([8, 24, 96])
        asked = Asked(name, (m,) * 3, n, number, _extent(name, n, 3), BF16, BF16)
        modes = (drawn.choice(("fused-push", "split-pull", "collective")),)
        _exact(rank, asked, f"call {number}", modes=modes)


def test_o_28_shapes_and_operations_that_change(ranks: Ranks) -> None:
    """vllm-project/vllm#25892, ROCm/aiter#1191: words of one call lay in data of the next."""
    ranks(3).run(_many_shapes, timeout_s=90)


def _worlds(rank: int, world: int) -> None:
    n = 35
    for number, extent in enumerate((0, world, n // world * world)):
        asked = Asked("all_to_all", (9,) * world, n, number, extent)
        _exact(rank, asked, f"extent {extent}", modes=("fused-lanes", "split-pull"))
    _exact(rank, Asked("all_reduce", (9,) * world, n, 9, k=8), "nothing is dropped")
    for mode in FEW_MODES:
        asked = Asked("all_to_all", (9,) * world, n, 3, 8)
        error, took = failing(
            lambda: gemmlink.gemm_all_to_all(asked.a(rank), asked.b(rank), 8, epilogue=mode)  # noqa: B023
        )
        assert "extent=8" in str(error), str(error)
        assert f"multiple of the world, {world}" in str(error), str(error)
        assert took < HEARD_S


def test_o_39_odd_worlds_larger_than_the_machine(ranks: Ranks) -> None:
    """pytorch/pytorch#165653: a division by the world dropped rows."""
    ranks(5).run(_worlds, 5, timeout_s=60)


def _out_of_order(rank: int) -> None:
    group = dist.new_group([2, 0, 1], use_local_synchronization=False)
    order = dist.get_process_group_ranks(group)
    place = order.index(rank)
    for mode in FEW_MODES:
        blocks = [tagged(member, 4, 6, F32) for member in order]
        got = gemmlink.gemm_all_to_all(blocks[place], eye(6, F32), epilogue=mode, group=group)
        mine = slice(2 * place, 2 * place + 2)
        assert_equal(got.received, torch.cat(blocks)[:, mine], f"{mode}, order {order}")


def test_o_40_ranks_listed_out_of_order(ranks: Ranks) -> None:
    """pytorch/pytorch#176126: a group that was listed in another order was sorted."""
    ranks(3).run(_out_of_order)


def _mismatched(rank: int) -> None:
    right: dict[str, Any] = {"name": "all_to_all", "n": 8, "extent": 8, "k": 8, "dtype": F32}
    wrong: list[tuple[dict[str, Any], tuple[str, str]]] = [
        ({"n": 10}, ("8 on rank", "10 on rank")),
        ({"k": 4}, ("8 on rank", "4 on rank")),
        ({"dtype": BF16}, ("float32", "bfloat16")),
        ({"name": "all_reduce", "extent": None}, ("all_to_all", "all_reduce")),
        ({"extent": 4}, ("8 on rank", "4 on rank")),
    ]
    for mode in FEW_MODES:
        for number, (other, parts) in enumerate(wrong):
            mine = right | (other if rank == 1 else {})
            asked = Asked(rows=(4, 4), call=1, out_dtype=F32, **mine)
            error, took = failing(lambda: _exact(rank, asked, "", modes=(mode,)))  # noqa: B023
            assert isinstance(error, gemmlink.InvalidArgument), f"{mode} {other}: {error!r}"
            assert all(part in str(error) for part in parts), f"{mode} {other}: {error}"
            assert took < HEARD_S
            _exact(rank, Asked("all_to_all", (4, 4), 8, 50 + number, 8), "after", modes=(mode,))


def test_o_43_arguments_that_differ_between_ranks(ranks: Ranks) -> None:
    """NVIDIA/nccl#1417, #531: a hang or wrong tails, by luck of size."""
    ranks(2).run(_mismatched, timeout_s=60, env=LIMIT)


def _same_bits(rank: int, dtype: torch.dtype) -> list[str]:
    generator, clock = torch.Generator().manual_seed(rank), random.Random(rank)
    a, b = (torch.randn(r, 64, generator=generator).to(dtype) for r in (33, 65))
    seen: list[str] = []
    for mode in FEW_MODES:
        with OBJECTS["all_reduce"](65, 64, 33, dtype, epilogue=mode) as op:
            digests: set[str] = set()
            for _ in range(20):
                time.sleep(clock.random() * 0.002)
                digests.add(hashlib.sha256(bits(op(a, b)).numpy().tobytes()).hexdigest())
        assert len(digests) == 1, f"{mode}: other bits in another call"
        seen += digests
    return seen


def test_o_65_the_same_bits_on_all_ranks(ranks: Ranks) -> None:
    """pytorch/pytorch#129501, #131244: each rank began its sum with itself."""
    for dtype in (F32, BF16):
        seen = ranks(3).run(_same_bits, dtype, timeout_s=60)
        assert all(found == seen[0] for found in seen), seen
