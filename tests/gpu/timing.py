"""First times on one device, as a table: ``python -m tests.gpu.timing WORLD M N K [percent]``.

bfloat16 in, float32 out; ten calls to a graph, median of 30 replays, the slowest rank counts. Ranks
share the device, under MPS: this prices the protocol and the traffic, and says nothing of links.

"Copies" is a push whose mover is one driver's copy for each peer, where ours reads once for all of
them. torch's own way, a product and the low-contention gather of its symmetric memory, is measured
as it is called and, if it can be captured, in a graph.
"""

from __future__ import annotations

import contextlib
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

import gemmlink
from gemmlink.core.device.arguments import MovesArguments
from gemmlink.core.device.machine import Gpu
from tests.pool import RankPool
from tests.refs import WINDOW_MODES

_CALLS = 10
_REPLAYS = 30
Shape = tuple[int, int, int]
COPIES = "split-push by copies"
RIVAL = "torch.mm + low-contention gather"


def _operands(rank: int, shape: Shape) -> tuple[torch.Tensor, torch.Tensor]:
    m, n, k = shape
    torch.manual_seed(rank)
    a = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
    return a, torch.randn(n, k, device="cuda", dtype=torch.bfloat16)


def _event() -> Any:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def _graph_us(call: Callable[[], Any]) -> float:
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.graph(graph, stream=stream):
        kept = [call() for _ in range(_CALLS)]
    del kept
    times = []
    dist.barrier()
    for _ in range(_REPLAYS + 3):
        start, end = _event(), _event()
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / _CALLS)
    return float(statistics.median(times[3:]))


def _eager_us(call: Callable[[], Any], times: int = 200) -> tuple[float, float]:
    """Host time of a call, and time of a call in all."""
    for _ in range(10):
        call()
    torch.cuda.synchronize()
    dist.barrier()
    started = time.perf_counter()
    for _ in range(times):
        call()
    enqueued = time.perf_counter()
    torch.cuda.synchronize()
    ended = time.perf_counter()
    return (enqueued - started) / times * 1e6, (ended - started) / times * 1e6


def _rows(rank: int, shape: Shape) -> dict[str, float]:
    warnings.resetwarnings()
    torch.cuda.set_device(0)
    m, n, _ = shape
    a, b = _operands(rank, shape)
    product = torch.empty(m, n, device="cuda")
    rows = {
        "torch.mm": _graph_us(lambda: torch.mm(a, b.T, out_dtype=torch.float32, out=product)),
        "words only (M = 0)": _mode(shape, a[:0], b, "split-push", "copy"),
    }
    for mode in WINDOW_MODES:
        for result in ("copy", "view"):
            rows[f"{mode}, {result}"] = _mode(shape, a, b, mode, result)
    with mock.patch.object(Gpu, "moves", _one_by_one):
        for result in ("copy", "view"):
            rows[f"{COPIES}, {result}"] = _mode(shape, a, b, "split-push", result)
    for chunks in (1, 2, 4, 8):
        rows[f"fused-lanes, copy, {chunks} chunks"] = _mode(
            shape, a, b, "fused-lanes", "copy", chunks
        )
    short = (m, n, 64), a[:, :64], b[:, :64]
    for mode, result in (("split-push", "view"), ("split-lanes", "copy"), ("split-pull", "copy")):
        rows[f"K = 64: {mode}, {result}"] = _mode(*short, mode, result)
    with mock.patch.object(Gpu, "moves", _one_by_one):
        rows[f"K = 64: {COPIES}, view"] = _mode(*short, "split-push", "view")
    rows.update(_eager(shape, a, b))
    torch_way = _torch_way(shape, a, b)
    rows[f"{RIVAL}, eager: in all"] = _eager_us(torch_way)[1]
    with contextlib.suppress(RuntimeError):  # last: a capture that fails may cost the device
        rows[f"{RIVAL}, graph"] = _graph_us(torch_way)
    return rows


def _one_by_one(gpu: Gpu, arguments: MovesArguments, stream: int) -> None:
    """In place of ``Gpu.moves``: a copy for each destination, which nothing guards."""
    for item in arguments.items[: arguments.count]:
        assert item.rows <= 1, "rows that lie apart"
        for place in arguments.to[item.first : item.first + item.fan]:
            gpu.copy(place, item.from_, item.row_bytes, stream)


def _op(shape: Shape, mode: str, result: str, chunks: int | None = None) -> Any:
    m, n, k = shape
    more: dict[str, Any] = {"epilogue": mode, "result": result, "chunks": chunks}
    return gemmlink.GemmAllGather(
        n, k, m, torch.bfloat16, torch.float32, "cuda", timeout_s=20.0, **more
    )


def _mode(
    shape: Shape,
    a: torch.Tensor,
    b: torch.Tensor,
    mode: str,
    result: str,
    chunks: int | None = None,
) -> float:
    with _op(shape, mode, result, chunks) as op:
        took = _graph_us(lambda: op(a, b))
        op.check()
    return took


def _eager(shape: Shape, a: torch.Tensor, b: torch.Tensor) -> dict[str, float]:
    rows = {}
    for mode in ("split-push", "split-pull", "fused-push", "split-lanes"):
        with _op(shape, mode, "copy") as op:
            host, both = _eager_us(lambda: op(a, b))
            op.check()
        rows[f"{mode}, copy, eager: host"], rows[f"{mode}, copy, eager: in all"] = host, both
    return rows


def _torch_way(shape: Shape, a: torch.Tensor, b: torch.Tensor) -> Callable[[], Any]:
    import torch.distributed._symmetric_memory as symmetric

    name: Any = dist.group.WORLD.group_name  # type: ignore[union-attr]
    mine = symmetric.empty(*shape[:2], dtype=torch.float32, device=a.device)
    symmetric.rendezvous(mine, name)

    def call() -> Any:
        torch.mm(a, b.T, out_dtype=torch.float32, out=mine)
        gathered = torch.ops.symm_mem._low_contention_all_gather(mine, name)
        return torch.ops._c10d_functional.wait_tensor(gathered)

    return call


def main() -> None:
    """Measure and print."""
    world, m, n, k = (int(text) for text in sys.argv[1:5])
    env = {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": sys.argv[5]} if len(sys.argv) > 5 else {}
    pool = RankPool(world)
    try:
        found = pool.run(_rows, (m, n, k), timeout_s=240.0, env=env)
    finally:
        pool.kill()
    limit = f", {sys.argv[5]} % each" if len(sys.argv) > 5 else ""
    print(f"\n| us a call, W={world}, M={m}, N={n}, K={k}{limit} | slowest rank |\n|---|---:|")
    slowest = {name: max(rows[name] for rows in found) for name in found[0]}
    for name, took in slowest.items():
        print(f"| {name} | {took:.1f} |")
    print("\n".join(_ratios(slowest)))


def _ratios(us: dict[str, float]) -> Iterator[str]:
    """What the table is for: reading once, and the best way in all, each against its rival."""
    for result in ("copy", "view"):
        share = us[f"split-push, {result}"] / us[f"{COPIES}, {result}"]
        yield f"split-push, {result}: {share:.2f} of one copy for each peer"
    for kind in ("eager: in all", "graph"):
        rival = us.get(f"{RIVAL}, {kind}")
        ways = [f"{mode}, copy" for mode in WINDOW_MODES]
        ours = [us[name] for way in ways if (name := f"{way}, {kind}") in us]
        if rival and kind == "graph":
            ours = [us[way] for way in ways]
        if rival:
            yield f"best copied result, {kind}: {min(ours) / rival:.2f} of {RIVAL}"


if __name__ == "__main__":
    main()
