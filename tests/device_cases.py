"""What a device program must do, as functions for ranks: on a GPU, and in emulation on CPUs.

Every function takes the rank and a device type first. Values are whole numbers, results exact, and
outputs poisoned before each call, so that nothing passes by accident.
"""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch

import gemmlink
from gemmlink.prepared import Prepared
from gemmlink.spec.operations import band_rows
from tests.refs import a_of, assert_equal, b_of, product

N, K = 40, 32
#: Columns that travel in an all-to-all: a multiple of 2, 3, 4 and 8 ranks.
EXTENT = 24
OPERATIONS = ("all_gather", "all_to_all", "reduce_scatter", "all_reduce")
CLASSES: dict[str, Any] = {
    "all_gather": gemmlink.GemmAllGather,
    "all_to_all": gemmlink.GemmAllToAll,
    "reduce_scatter": gemmlink.GemmReduceScatter,
    "all_reduce": gemmlink.GemmAllReduce,
}


@contextlib.contextmanager
def on(device: str) -> Iterator[str]:
    """Within, operations on ``device`` are enqueued: also on ``cpu``, in emulation."""
    if device == "cpu":
        from tests.emulated import emulation

        with emulation():
            yield device
    else:
        warnings.resetwarnings()  # torch's own, of things that are new, are no errors here
        torch.cuda.set_device(0)
        yield device


def settle(device: str) -> None:
    """Wait for the device."""
    if device != "cpu":
        torch.cuda.synchronize()


def make(name: str, device: str, capacity: int, **rest: Any) -> Prepared:
    """An operation, not prepared. An all-to-all keeps a tail of columns."""
    if name == "all_to_all":
        rest.setdefault("extent", EXTENT)
    made: Prepared = CLASSES[name](
        rest.pop("n", N), rest.pop("k", K), capacity, device=device, **rest
    )
    return made


def inputs(
    name: str, rank: int, call: int, rows: int, dtype: torch.dtype, n: int = N, k: int = K
) -> tuple[torch.Tensor, torch.Tensor]:
    """A and B of ``rank``; where products are added every rank has its own B."""
    own = 100 * (rank + 1) if name in ("reduce_scatter", "all_reduce") else 0
    return a_of(rank, call, rows, k, dtype), b_of(call + own, n, k, dtype)


def wanted(
    name: str,
    rank: int,
    call: int,
    rows: Sequence[int],
    dtype: torch.dtype,
    out_dtype: torch.dtype,
    n: int = N,
    k: int = K,
) -> torch.Tensor:
    """What ``rank`` must get, from the inputs of all ranks."""
    world = len(rows)
    products = [
        product(*inputs(name, source, call, rows[source], dtype, n, k), out_dtype)
        for source in range(world)
    ]
    if name == "all_gather":
        return torch.cat(products)
    if name == "all_to_all":
        shard = EXTENT // world
        return torch.cat([each[:, rank * shard : (rank + 1) * shard] for each in products])
    total = torch.stack([each.double() for each in products]).sum(0).to(out_dtype)
    if name == "all_reduce":
        return total
    first, last = band_rows(rows[0], world, rank)
    return total[first:last]


def received(result: Any) -> torch.Tensor:
    """The tensor that other ranks took part in."""
    found: torch.Tensor = result if isinstance(result, torch.Tensor) else result.received
    return found


def check_calls(
    op: Prepared,
    rank: int,
    world: int,
    device: str,
    calls: Sequence[tuple[int, ...]],
    dtype: torch.dtype = torch.float32,
    out_dtype: torch.dtype | None = None,
    own_out: bool = False,
) -> None:
    """Calls with the given rows of all ranks, each of them exact."""
    name, out_dtype = op.operation, out_dtype or dtype
    caller: Any = op
    for call, rows in enumerate(calls):
        a, b = (each.to(device) for each in inputs(name, rank, call, rows[rank], dtype))
        want = wanted(name, rank, call, rows, dtype, out_dtype)
        given: dict[str, Any] = {} if len(set(rows)) == 1 else {"rows": list(rows)}
        if own_out:
            given["out"] = torch.full(want.shape, float("nan"), dtype=out_dtype, device=device)
        result = caller(a, b, **given)
        got = received(result)
        what = f"{op.launch.parts.mode} of {name}, call {call}, rows {rows}, rank {rank}"
        assert_equal(got.cpu(), want, what)
        if own_out:
            assert got is given["out"], f"{what}: another tensor than out"
        if not isinstance(result, torch.Tensor):
            full = product(*inputs(name, rank, call, rows[rank], dtype), out_dtype)
            assert_equal(result.local.cpu(), full[:, EXTENT:], f"{what}: local")
            if result.product is not None:
                assert_equal(result.product.cpu(), full, f"{what}: product")
    settle(device)
    op.check()


#: Whether the result is copied out or shown, and how many buffers there are.
WAYS = (("copy", 1), ("copy", 2), ("view", 1), ("view", 2))


def every_way(
    rank: int,
    world: int,
    device: str,
    name: str,
    modes: Sequence[str],
    ways: Sequence[tuple[str, int]] = WAYS,
    dtype: torch.dtype = torch.float32,
    out_dtype: torch.dtype | None = None,
) -> None:
    """An operation in these modes and ways: equal rows, no rows, and unequal ones."""
    even = [(rows,) * world for rows in (5, 8, 0, 3, 8)]
    ragged = [tuple((5 * r + call) % 9 for r in range(world)) for call in range(3)]
    calls = even if name in ("reduce_scatter", "all_reduce") else [*even, *ragged]
    with on(device):
        for mode in modes:
            for result, buffers in ways:
                rest = {"epilogue": mode, "result": result, "buffers": buffers}
                chunks = 3 if mode.startswith("fused") else 1
                more = {"chunks": chunks, "dtype": dtype, "out_dtype": out_dtype}
                with make(name, device, 8, timeout_s=20.0, **rest, **more) as op:
                    out = result == "copy" and buffers == 2
                    check_calls(op, rank, world, device, calls, dtype, out_dtype, out)


def kept_product_and_complete(rank: int, world: int, device: str, modes: Sequence[str]) -> None:
    """The whole product beside what is exchanged; calls that end when nobody reads any more."""
    with on(device):
        for mode in modes:
            more = {"epilogue": mode, "completion": "receive_and_send", "timeout_s": 20.0}
            with make("all_to_all", device, 8, keep_product=True, **more) as op:
                check_calls(op, rank, world, device, [(8,) * world, (3,) * world])
            with make("all_gather", device, 8, result="view", **more) as op:
                check_calls(op, rank, world, device, [(8,) * world, (3,) * world])


def absent_peer(
    rank: int, world: int, device: str, mode: str, name: str = "all_gather"
) -> dict[str, Any]:
    """The last rank misses the second call: NaN everywhere, an error that says so, and a reset."""
    with on(device), make(name, device, 8, epilogue=mode, timeout_s=1.0) as op:
        check_calls(op, rank, world, device, [(8,) * world])
        caller: Any = op
        seen: dict[str, Any] = {}
        a, b = (each.to(device) for each in inputs(name, rank, 1, 8, torch.float32))
        if rank < world - 1:
            got = received(caller(a, b))
            settle(device)
            seen["nan"] = bool(got.isnan().all())
            seen.update(raised(op.check))
            seen["again"] = raised(lambda: caller(a, b))["type"]
        else:
            time.sleep(2.0)
        op.reset(20.0)
        check_calls(op, rank, world, device, [(8,) * world, (4,) * world])
    return seen


def unequal_rows(rank: int, world: int, device: str) -> dict[str, Any]:
    """Every rank has another M, and nobody says so."""
    with on(device), make("all_gather", device, 8, timeout_s=10.0) as op:
        caller: Any = op
        a, b = (each.to(device) for each in inputs("all_gather", rank, 0, 4 + rank, torch.float32))
        got = caller(a, b)
        settle(device)
        seen = {"nan": bool(got.isnan().all()), **raised(op.check)}
        op.reset(20.0)
        check_calls(op, rank, world, device, [(8,) * world])
    return seen


def other_rows(rank: int, world: int, device: str) -> dict[str, Any]:
    """Every rank passes rows=, but not the same ones."""
    with on(device), make("all_gather", device, 8, timeout_s=10.0) as op:
        caller: Any = op
        rows = [8] * world
        rows[(rank + 1) % world] = 8 - rank
        got = caller(*_tensors(rank, 8, device), rows=rows)
        settle(device)
        seen = {"nan": bool(got.isnan().all()), **raised(op.check)}
        op.reset(20.0)
        check_calls(op, rank, world, device, [(8,) * world])
    return seen


def refused_by_one(rank: int, world: int, device: str) -> dict[str, Any]:
    """Rank 0 passes an a of a wrong width."""
    with on(device), make("all_gather", device, 8, timeout_s=10.0) as op:
        check_calls(op, rank, world, device, [(8,) * world])
        caller: Any = op
        a, b = (each.to(device) for each in inputs("all_gather", rank, 1, 8, torch.float32))
        seen = {}
        if rank == 0:
            seen = raised(lambda: caller(a[:, :7], b))
        else:
            got = caller(a, b)
            settle(device)
            seen = {"nan": bool(got.isnan().all()), **raised(op.check)}
        op.reset(20.0)
        check_calls(op, rank, world, device, [(8,) * world])
    return seen


def too_many_rows(rank: int, world: int, device: str) -> dict[str, Any]:
    """Rank 0 has more rows than the window has room for; then all ranks have."""
    with on(device), make("all_gather", device, 8, timeout_s=10.0) as op:
        caller: Any = op
        all_of_them = _tensors(rank, 9, device)
        first = raised(lambda: caller(*all_of_them))["text"]
        check_calls(op, rank, world, device, [(8,) * world])
        seen: dict[str, Any] = {"all": first}
        if rank == 0:
            seen.update(raised(lambda: caller(*all_of_them)))
        else:
            got = caller(*_tensors(rank, 8, device))
            settle(device)
            seen.update(nan=bool(got.isnan().all()), **raised(op.check))
        op.reset(20.0)
        check_calls(op, rank, world, device, [(8,) * world])
    return seen


def _tensors(rank: int, rows: int, device: str) -> list[torch.Tensor]:
    return [each.to(device) for each in inputs("all_gather", rank, 0, rows, torch.float32)]


def refused_by_all(rank: int, world: int, device: str) -> list[str]:
    """A mistake that all ranks make costs a call and nothing else."""
    with on(device), make("all_gather", device, 8, timeout_s=10.0) as op:
        caller: Any = op
        a, b = (each.to(device) for each in inputs("all_gather", rank, 0, 8, torch.float32))
        types = [raised(lambda: caller(a, b[:3]))["type"] for _ in range(3)]
        check_calls(op, rank, world, device, [(8,) * world, (2,) * world])
    return types


def function_form(rank: int, world: int, device: str) -> None:
    """The functions prepare on first use, and again when M grows beyond what there is room for."""
    with on(device):
        for call, rows in enumerate((4, 4, 9, 33, 2)):
            a, b = (
                each.to(device) for each in inputs("all_gather", rank, call, rows, torch.float32)
            )
            got = gemmlink.gemm_all_gather(a, b)
            want = wanted("all_gather", rank, call, (rows,) * world, torch.float32, torch.float32)
            assert_equal(got.cpu(), want, f"call {call}")
        gemmlink.clear_cache()


def own_strides(rank: int, world: int, device: str) -> None:
    """A result of the caller's own strides, in columns and in rows."""
    with on(device), make("all_gather", device, 8, timeout_s=10.0) as op:
        caller: Any = op
        want = wanted("all_gather", rank, 0, (8,) * world, torch.float32, torch.float32)
        a, b = (each.to(device) for each in inputs("all_gather", rank, 0, 8, torch.float32))
        room = torch.full((2 * N, 2 * N), 7.0, device=device)
        for out in (
            room[: 2 * want.shape[0] : 2, :N],
            room[: want.shape[0], ::2],
            room[:N, : want.shape[0]].T,
        ):
            out.fill_(float("nan"))
            caller(a, b, out=out)
            assert_equal(out.cpu(), want, f"strides {out.stride()}")


def raised(function: Any) -> dict[str, Any]:
    try:
        function()
    except gemmlink.errors.GemmlinkError as error:
        names = ("rank", "peer", "epoch", "word", "seen", "wanted")
        found = {name: getattr(error, name) for name in names if hasattr(error, name)}
        return {"type": type(error).__name__, "text": str(error), **found}
    return {"type": "nothing"}
