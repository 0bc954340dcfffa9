"""Bits: the same on all ranks, in all repeats, in all modes if that is asked for; rows in fp8."""

from __future__ import annotations

import hashlib
import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist

import gemmlink
from gemmlink.core import wire
from tests.conftest import Ranks
from tests.operations import BF16, F16, F32, FUNCTIONS, NAMES, OBJECTS, PAIRS, Asked, K, call, check
from tests.recovery import in_threads, synchronised
from tests.refs import FEW_MODES, MODES, a_of, relative_error
from tests.simulator import band

FP8 = torch.float8_e4m3fn
EVERY = ("all_gather", *NAMES)
#: Modes of an operation of two phases beside those of one.
PAIRED = ("split-lanes+pull", "fused-push+lanes", "push+pull", "fused-pull+push", "lanes+push")
#: Odd, so that bands, shards and chunks have unequal sizes.
M, N, LONG = 7, 12, 64


def _normal(seed: int, rows: int, dtype: torch.dtype = F32) -> torch.Tensor:
    return torch.randn(rows, LONG, generator=torch.Generator().manual_seed(seed)).to(dtype)


def _inputs(
    name: str, rank: int, dtype: torch.dtype = F32, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    adds = name in ("reduce_scatter", "all_reduce")
    a, b = _normal(1000 + 10 * seed + rank, M, dtype), _normal(10 * seed + rank * adds, N, dtype)
    return a, b


def _first(got: Any) -> torch.Tensor:
    return got.received if isinstance(got, gemmlink.AllToAllResult) else torch.as_tensor(got)


def _digest(got: Any) -> str:
    tensor = _first(got).contiguous()
    return hashlib.sha256(tensor.view(torch.uint8).numpy().tobytes()).hexdigest()


# Equal in all modes.


def _in_every_mode(rank: int, name: str) -> dict[str, list[str]]:
    """What each mode gives, where that must be the same bits, for each pair of dtypes."""
    modes = (*MODES, *(PAIRED if name == "all_reduce" else ()))
    return {
        str(pair): [
            _digest(
                FUNCTIONS[name](
                    *_inputs(name, rank, pair[0]),
                    epilogue=mode,
                    out_dtype=pair[1],
                    bit_identical=True,
                )
            )
            for mode in modes
        ]
        for pair in PAIRS
    }


@pytest.mark.parametrize("name", EVERY)
def test_bit_identical_is_in_all_modes_and_dtypes(ranks: Ranks, name: str) -> None:
    seen = ranks(3).run(_in_every_mode, name, timeout_s=60)
    for pair in seen[0]:
        for rank, found in enumerate(seen):
            assert len(set(found[pair])) == 1, f"rank {rank}, {pair}: {found[pair]}"
        same = len({found[pair][0] for found in seen}) == 1
        assert same == (name in ("all_gather", "all_reduce")), f"{pair}: {seen}"


def _in_bands(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """A product cut as all modes cut it: of other rows at a time the bits may be others."""
    bands = [band(M, 3, rank) for rank in range(3)]
    parts = [a[rows.start : rows.stop] for rows in bands]
    return torch.cat([gemmlink.gemm_all_gather(part, b, group=gemmlink.SELF) for part in parts])


def _sum_by_hand(rank: int, name: str) -> None:
    """Products in the dtype of the result, added in float32 from rank 0 on, rounded once."""
    for dtype in (F32, BF16, F16):
        first, second, third = (_in_bands(*_inputs(name, r, dtype)).float() for r in range(3))
        want = (first + second + third).to(dtype)
        if dtype == F32:
            other = second + third + first
        else:
            other = ((first + second).to(dtype).float() + third).to(dtype)
        assert not torch.equal(want, other), f"{dtype}: these values would not tell"
        rows = band(M, 3, rank) if name == "reduce_scatter" else range(M)
        for mode in MODES:
            got = FUNCTIONS[name](*_inputs(name, rank, dtype), epilogue=mode, bit_identical=True)
            assert torch.equal(got, want[rows.start : rows.stop]), f"{mode} {dtype}: other bits"


@pytest.mark.parametrize("name", ["reduce_scatter", "all_reduce"])
def test_sums_run_from_rank_0_on_and_are_rounded_once(ranks: Ranks, name: str) -> None:
    ranks(3).run(_sum_by_hand, name, timeout_s=60)


def _repeated(rank: int, name: str, mode: str) -> tuple[set[str], int]:
    """Fifty calls with the same inputs, between them others with other ones."""
    seen = set()
    others = set()
    with OBJECTS[name](N, LONG, M, epilogue=mode) as op:
        for turn in range(50):
            seen.add(_digest(op(*_inputs(name, rank))))
            if turn % 10 == rank:
                threading.Event().wait(0.002)
            if turn < 3:
                others.add(_digest(op(*_inputs(name, rank, seed=1 + turn))))
    return seen, len(others - seen)


@pytest.mark.parametrize("mode", FEW_MODES)
def test_fifty_calls_give_the_same_bits(ranks: Ranks, mode: str) -> None:
    for name in NAMES:
        found = ranks(3).run(_repeated, name, mode)
        assert [(len(seen), others) for seen, others in found] == [(1, 3)] * 3, name
        if name == "all_reduce":
            assert len(set.union(*(seen for seen, _ in found))) == 1, "ranks differ"


def _in_any_order(rank: int) -> None:
    for call_number, (name, mode) in enumerate(
        (name, mode) for name in ("reduce_scatter", "all_reduce") for mode in FEW_MODES
    ):
        for pair in PAIRS:
            asked = Asked(name, (5, 5, 5), 7, call_number, None, *pair)
            with OBJECTS[name](7, K, 5, *pair, epilogue=mode, deterministic=False) as op:
                call(op, asked, rank, f"{mode}, in any order")
                call(op, asked, rank, f"{mode}, again")
            got = FUNCTIONS[name](
                asked.a(rank), asked.b(rank), out_dtype=pair[1], epilogue=mode, deterministic=False
            )
            check(got, asked, rank, f"{mode}, function form in any order")


def test_sums_in_any_order_are_right(ranks: Ranks) -> None:
    ranks(3).run(_in_any_order)


# On the wire.


@contextmanager
def _warnings() -> Iterator[list[str]]:
    """What the library warns of, as text."""
    told: list[str] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            told.append(record.getMessage())

    logger, listener = logging.getLogger("gemmlink"), Listener(logging.WARNING)
    logger.addHandler(listener)
    try:
        yield told
    finally:
        logger.removeHandler(listener)


def _narrow(rank: int, name: str, mode: str, n: int, m: int) -> tuple[str, float]:
    """Digest and error of the result with rows in fp8."""
    a = _normal(7 + rank, m)
    products = []
    for source in range(dist.get_world_size()):
        b = _normal(100 + source * (name == "all_reduce"), n)
        products.append(_normal(7 + source, m).double() @ b.double().T)
    want = sum(products) if name == "all_reduce" else torch.cat(products)
    mine = _normal(100 + rank * (name == "all_reduce"), n)
    with (
        _warnings() as told,
        OBJECTS[name](n, LONG, 8, epilogue=mode, chunks=3, wire_dtype=FP8) as op,
    ):
        assert len(told) == 1, told
        assert "float8_e4m3fn" in told[0]
        assert wire.ERROR in told[0]
        assert "rows travel as float8_e4m3fn" in op.explain()
        assert wire.ERROR in op.explain()
        first = op(a, mine)
        again = op(a, mine, out=torch.full(first.shape, torch.nan))
    assert _digest(first) == _digest(again), "another call, other bits"
    return _digest(first), relative_error(first, torch.as_tensor(want)) if m else 0.01


def _narrow_in_all(rank: int, name: str) -> list[tuple[str, str, float]]:
    """In every mode; rows of odd lengths, fewer rows than chunks and than ranks."""
    modes = (*MODES, *(PAIRED if name == "all_reduce" else ()))
    return [
        (f"{mode} {n} {m}", *_narrow(rank, name, mode, n, m))
        for mode in modes
        for n, m in ((33, 8), (5, 1), (64, 7))
    ]


@pytest.mark.parametrize("name", ["all_gather", "all_reduce"])
def test_rows_in_fp8_are_the_same_bits_on_all_ranks(ranks: Ranks, name: str) -> None:
    """The owner's own rows, too. The error is as said: no less, for then nothing was narrowed."""
    seen = ranks(3).run(_narrow_in_all, name, timeout_s=60)
    for (what, digest, error), *others in zip(*seen, strict=True):
        assert {digest} == {other for _, other, _ in others}, f"{what}: ranks differ"
        assert 5e-3 < error < 3e-2 + 2e-2 * (" 5 1" in what), f"{what}: {error}"


def _not_narrow(rank: int) -> str:
    with _warnings() as told:
        with gemmlink.GemmAllReduce(N, K, M, epilogue="push") as op:
            assert "travel as" not in op.explain()
        assert told == []
    made = gemmlink.GemmAllGather(N, K, M, epilogue="push", result="view", wire_dtype=FP8)
    try:
        made.prepare()
    except gemmlink.Unsupported as error:
        return str(error)
    raise AssertionError("a view of rows in fp8")


def test_a_view_of_rows_in_fp8_is_refused(ranks: Ranks) -> None:
    for text in ranks(2).run(_not_narrow):
        assert "decoded into the caller's memory; got result='view' with a wire_dtype" in text


# Several at a time.


def _interleaved(rank: int, world: int) -> None:
    """Four operations over one group and one of them over two, call by call in turn."""
    pair = dist.new_group([0, 1])
    given = {name: (mode, 2 * world) for name, mode in zip(EVERY, FEW_MODES, strict=True)}
    ops = {
        name: OBJECTS[name](n, K, 5, epilogue=mode, chunks=2).prepare()
        for name, (mode, n) in given.items()
    }
    few = OBJECTS["all_reduce"](4, K, 5, group=pair, epilogue="pull") if rank < 2 else None
    if few is not None:
        few.prepare()
    for number in range(12):
        for name, op in ops.items():
            asked = Asked(name, (number % 6,) * world, given[name][1], number)
            call(op, asked, rank, "between others")
            if few is not None and number % 2:
                asked = Asked("all_reduce", (3, 3), 4, 100 + few.launch.epoch)
                call(few, asked, rank, "over two ranks")
    while few is not None and few.launch.epoch < 24:
        call(few, Asked("all_reduce", (3, 3), 4, 100 + few.launch.epoch), rank, "after the others")
    for op in (*ops.values(), *([few] if few else [])):
        op.close()
    synchronised()


def test_operations_do_not_disturb_each_other(ranks: Ranks) -> None:
    ranks(3).run(_interleaved, 3)


def _grown(rank: int) -> None:
    """The function form makes room for more rows, and keeps what it has for fewer."""
    for mode in FEW_MODES:
        for number, m in enumerate((1, 9, 3, 40, 0, 40)):
            for name in NAMES:
                asked = Asked(name, (m,) * 3, 6, number)
                got = FUNCTIONS[name](asked.a(rank), asked.b(rank), epilogue=mode)
                check(got, asked, rank, f"{mode}, M={m}")


def test_the_function_form_grows_with_m(ranks: Ranks) -> None:
    ranks(3).run(_grown, timeout_s=60)


@pytest.mark.parametrize("world", [2, 4])
def test_ranks_may_be_threads(world: int) -> None:
    """In the window modes, which need nothing but memory and words."""
    groups = gemmlink.thread_groups(world)

    def act(rank: int) -> int:
        for name, mode in zip(NAMES, ("fused-lanes", "split-pull", "fused-push"), strict=True):
            with OBJECTS[name](2 * world, K, 5, group=groups[rank], epilogue=mode) as op:
                for number, m in enumerate((5, 0, 3)):
                    call(op, Asked(name, (m,) * world, 2 * world, number), rank, mode)
        return rank

    assert in_threads(act, world) == list(range(world))


def test_the_inputs_tell_ranks_apart() -> None:
    """Else a result of the wrong rank would pass."""
    assert not torch.equal(a_of(0, 1, 4, K), a_of(1, 1, 4, K))
    for name in NAMES:
        asked = Asked(name, (4, 4), 4, 1)
        assert asked.name == "all_reduce" or not torch.equal(asked.want(0), asked.want(1))
