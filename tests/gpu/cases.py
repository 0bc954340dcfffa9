"""What only a real device shows: graphs, streams, memory, and ends of processes and operations."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from typing import Any
from unittest import mock

import torch

import gemmlink
from gemmlink import settings
from gemmlink.conformance import quick
from gemmlink.core.device import launch
from tests.device_cases import (
    K,
    N,
    check_calls,
    inputs,
    make,
    on,
    raised,
    received,
    wanted,
)
from tests.refs import assert_equal

CUDA = "cuda"
M = 8


def _tensors(name: str, rank: int, call: int) -> tuple[torch.Tensor, torch.Tensor]:
    a, b = inputs(name, rank, call, M, torch.float32)
    return a.to(CUDA), b.to(CUDA)


def _stream() -> Any:
    return torch.cuda.Stream()  # type: ignore[no-untyped-call]


def _captured(op: Any, a: torch.Tensor, b: torch.Tensor, calls: int = 1) -> tuple[Any, list[Any]]:
    """A graph of so many calls, and what they return each time it is replayed."""
    torch.cuda.synchronize()
    graph, results = torch.cuda.CUDAGraph(), []
    with torch.cuda.graph(graph, stream=_stream()):
        for _ in range(calls):
            results.append(op(a, b))
    torch.cuda.synchronize()
    return graph, results


def replays(rank: int, world: int, name: str, modes: list[str], times: int) -> int:
    """A graph, replayed with other inputs each time, each result poisoned before and exact."""
    wrong = 0
    with on(CUDA):
        for mode in modes:
            for result in ("copy", "view"):
                chunks = 2 if mode.startswith("fused") else 1
                rest = {"epilogue": mode, "result": result, "chunks": chunks, "timeout_s": 20.0}
                with make(name, CUDA, M, **rest) as op:
                    caller: Any = op
                    a, b = _tensors(name, rank, 0)
                    for _ in range(3):
                        caller(a, b)
                    graph, (shown,) = _captured(op, a, b)
                    for call in range(1, times + 1):
                        for here, new in zip((a, b), _tensors(name, rank, call), strict=True):
                            here.copy_(new)
                        if result == "copy":
                            received(shown).fill_(float("nan"))
                        graph.replay()
                        want = wanted(name, rank, call, (M,) * world, torch.float32, torch.float32)
                        got = received(shown).cpu()
                        wrong += not torch.equal(got, want)
                    # Eager calls go on from where the graph has come to.
                    check_calls(op, rank, world, CUDA, [(M,) * world, (3,) * world])
                    graph.replay()
                    torch.cuda.synchronize()
                    op.check()
                    del graph
    return wrong


def two_buffers_in_a_graph(rank: int, world: int) -> dict[str, Any]:
    """With two buffers a capture is refused, on every rank, and costs nothing."""
    with on(CUDA), make("all_gather", CUDA, M, buffers=2, timeout_s=20.0) as op:
        caller: Any = op
        a, b = _tensors("all_gather", rank, 0)
        caller(a, b)
        torch.cuda.synchronize()
        with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=_stream()):
            seen = raised(lambda: caller(a, b))
        check_calls(op, rank, world, CUDA, [(M,) * world, (3,) * world])
    return seen


def kit_cells(rank: int, mode: str) -> list[str]:
    """The cells of the kit in one mode: what has failed or not run."""
    with on(CUDA):
        transport = settings.current().transport
        groups = quick.run(quick.Suite(transport, (mode,), "eager", CUDA))
        assert groups, f"no cells in mode {mode}"
        return [group.line() for group in groups if group.failed or group.skipped]


def streams(rank: int, world: int) -> None:
    """Calls on two streams in turn need no order from the caller."""
    with on(CUDA), make("all_gather", CUDA, M, timeout_s=20.0) as op:
        caller: Any = op
        both = [_stream(), _stream()]
        torch.cuda.synchronize()
        results = []
        for call in range(40):
            with torch.cuda.stream(both[call % 2]):
                a, b = _tensors("all_gather", rank, call)
                results.append(caller(a, b).clone())
        torch.cuda.synchronize()
        for call, got in enumerate(results):
            want = wanted("all_gather", rank, call, (M,) * world, torch.float32, torch.float32)
            assert_equal(got.cpu(), want, f"call {call}")
        op.check()


def overlap(rank: int, world: int) -> dict[str, Any]:
    """Rank 0 replays a graph and calls on another stream while the graph's call still waits."""
    with on(CUDA), make("all_gather", CUDA, M, timeout_s=10.0) as op:
        caller: Any = op
        a, b = _tensors("all_gather", rank, 0)
        caller(a, b)
        graph, _ = _captured(op, a, b)
        if rank == 0:
            with torch.cuda.stream(_stream()):
                graph.replay()
            with torch.cuda.stream(_stream()):
                caller(a, b)
        else:
            time.sleep(0.5)
            graph.replay()
        torch.cuda.synchronize()
        seen = raised(op.check)
        op.reset(20.0)
        check_calls(op, rank, world, CUDA, [(M,) * world])
        return seen


def replay_after_failure_and_close(rank: int, world: int) -> dict[str, Any]:
    """A graph of a failed operation, and of a closed one, gives NaN at once and no fault."""
    with on(CUDA):
        op: Any = make("all_gather", CUDA, M, timeout_s=1.0).prepare()
        a, b = _tensors("all_gather", rank, 0)
        op(a, b)
        graph, (shown,) = _captured(op, a, b)
        graph.replay()
        torch.cuda.synchronize()
        seen: dict[str, Any] = {"first": bool(shown.isnan().any())}
        if rank == 0:
            graph.replay()  # nobody else comes
            torch.cuda.synchronize()
            started = time.monotonic()
            shown.zero_()
            graph.replay()
            torch.cuda.synchronize()
            seen["again_s"] = time.monotonic() - started
            seen["again"] = bool(shown.isnan().all())
        else:
            time.sleep(1.5)
        seen["check"] = raised(op.check)["type"]
        seen["close"] = raised(op.close)["type"]
        shown.zero_()
        graph.replay()
        torch.cuda.synchronize()
        seen["closed"] = bool(shown.isnan().all())
        return seen


def killed(rank: int, world: int) -> dict[str, Any]:
    """The last rank is killed between calls; the others learn its name."""
    with on(CUDA), make("all_gather", CUDA, M, timeout_s=2.0) as op:
        check_calls(op, rank, world, CUDA, [(M,) * world])
        caller: Any = op
        a, b = _tensors("all_gather", rank, 0)
        torch.cuda.synchronize()
        if rank == world - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.5)
        got = caller(a, b)
        torch.cuda.synchronize()
        seen = {"nan": bool(got.isnan().all()), **raised(op.check)}
        seen["reset"] = raised(lambda: op.reset(2.0))["type"]
        return seen


def closing_order(rank: int, world: int) -> None:
    """Operations closed on each rank at another time and in another order, with work enqueued."""
    with on(CUDA):
        for turn in range(3):
            ops: list[Any] = [make("all_gather", CUDA, M).prepare() for _ in range(3)]
            for op in ops:
                got = op(*_tensors("all_gather", rank, turn))
            torch.cuda.synchronize()
            assert not got.isnan().any()
            time.sleep(0.1 * ((rank + turn) % world))
            for op in ops if rank % 2 else ops[::-1]:
                op.close()
                op.close()


def many_calls(rank: int, world: int, times: int) -> dict[str, Any]:
    """So many calls, none of which may take memory for good."""
    with on(CUDA), make("all_gather", CUDA, M, epilogue="fused-push", chunks=2) as op:
        caller: Any = op
        a, b = _tensors("all_gather", rank, 0)
        for _ in range(20):
            got = caller(a, b)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
        started = time.perf_counter()
        for _ in range(times):
            got = caller(a, b)
        enqueued = time.perf_counter() - started
        torch.cuda.synchronize()
        after = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
        op.check()
        want = wanted("all_gather", rank, 0, (M,) * world, torch.float32, torch.float32)
        assert_equal(got.cpu(), want, "the last call")
        seconds = time.perf_counter() - started
        grown = [now - then for now, then in zip(after, before, strict=True)]
        return {"grown": grown, "host_us": enqueued / times * 1e6, "us": seconds / times * 1e6}


def larger(rank: int, world: int, modes: list[str]) -> None:
    """Shapes of many tiles and odd widths, in 16 bits, where accesses are not 16 bytes wide."""
    with on(CUDA):
        for mode in modes:
            for n, dtype, out_dtype in (
                (1024, torch.bfloat16, torch.float32),
                (513, torch.bfloat16, torch.bfloat16),
                (1000, torch.float16, torch.float16),
            ):
                op: Any = gemmlink.GemmAllGather(
                    n, 64, 700, dtype, out_dtype, CUDA, epilogue=mode, timeout_s=20.0
                )
                with op:
                    for call, m in enumerate((700, 333, 1)):
                        a, b = inputs("all_gather", rank, call, m, dtype, n, 64)
                        rows = (m,) * world
                        want = wanted("all_gather", rank, call, rows, dtype, out_dtype, n, 64)
                        got = op(a.to(CUDA), b.to(CUDA))
                        assert_equal(got.cpu(), want, f"{mode} {n} {dtype} {m}")
                    op.check()


def wrong_transport(rank: int, world: int) -> list[str]:
    """A CPU transport for CUDA tensors, and the reverse."""
    with on(CUDA):
        first = raised(lambda: make("all_gather", CUDA, M, transport="shm").prepare())
        second = raised(lambda: make("all_gather", "cpu", M, transport="symm_mem").prepare())
        return [first["text"], second["text"]]


def alone(rank: int, world: int) -> None:
    """World 1 needs no window."""
    with on(CUDA):
        a, b = torch.randn(4, K, device=CUDA), torch.randn(N, K, device=CUDA)
        got = gemmlink.gemm_all_gather(a, b, group=gemmlink.SELF)
        assert torch.equal(got, a @ b.T)


def words(rank: int, world: int) -> None:
    """The transport by itself: zeroed windows, words, lanes, barrier, liveness."""
    from gemmlink import groups, plugins, settings

    with on(CUDA):
        group = groups.resolve()
        transport: Any = plugins.find("transport", settings.current().transport)
        session = transport.open(group, key=f"words{time.time_ns() >> 40}", timeout_s=20.0)
        window = session.window(1 << 16)
        assert not window.tensor(rank).any(), "a window that is not zero"
        session.barrier(20.0)
        peer, before = (rank + 1) % world, (rank - 1) % world
        window.tensor(peer)[4096:8192].fill_(rank + 1)
        window.words.set(peer, 64, 7 + rank)
        assert window.words.wait(64, 7 + before, 5.0) == 7 + before
        assert (window.tensor(rank)[4096:8192] == before + 1).all()
        lane = window.lane(peer, 0)
        lane.copy(4096, 16384, 4096)
        lane.set(128, 5)
        lane.drain(5.0)
        assert window.words.wait(128, 5, 5.0) == 5
        assert (window.tensor(rank)[16384:20480] == (before - 1) % world + 1).all()
        assert window.words.wait(192, 1, 0.1) == 0
        assert session.alive(peer) is True
        session.barrier(20.0)
        session.close()
        session.close()


def closed_while_waiting(rank: int, world: int) -> dict[str, Any]:
    """Rank 0 closes, in a hurry, while its call waits for rank 1, which calls a second later."""
    with on(CUDA):
        op: Any = make("all_gather", CUDA, M, timeout_s=20.0).prepare()
        check_calls(op, rank, world, CUDA, [(M,) * world])
        a, b = _tensors("all_gather", rank, 0)
        torch.cuda.synchronize()
        seen: dict[str, Any] = {}
        started = time.monotonic()
        if rank == 0:
            got = op(a, b)
            with mock.patch.object(launch, "_GRACE_S", 0.1):
                op.close()
            torch.cuda.synchronize()
            seen["nan"] = bool(got.isnan().all())
        else:
            time.sleep(1.0)
            got = op(a, b)
            torch.cuda.synchronize()
            seen = {"nan": bool(got.isnan().all()), **raised(op.check)}
        seen["took_s"] = time.monotonic() - started
        op.close()
        return seen


def view_after_close(rank: int, world: int, mode: str) -> None:
    """A view that the caller holds is memory, whoever has closed."""
    with on(CUDA):
        op: Any = make("all_gather", CUDA, M, epilogue=mode, result="view").prepare()
        shown = op(*_tensors("all_gather", rank, 0))
        want = wanted("all_gather", rank, 0, (M,) * world, torch.float32, torch.float32)
        op.close()
        del op
        gc.collect()
        assert_equal(shown.cpu(), want, f"{mode}: a view after close")


def function_form_in_a_graph(rank: int, world: int) -> None:
    """The functions may be captured, once they have prepared what they need."""
    with on(CUDA):
        a, b = _tensors("all_gather", rank, 0)
        gemmlink.gemm_all_gather(a, b)
        graph, (shown,) = _captured(gemmlink.gemm_all_gather, a, b)
        for call in range(1, 20):
            a.copy_(_tensors("all_gather", rank, call)[0])
            b.copy_(_tensors("all_gather", rank, call)[1])
            graph.replay()
            want = wanted("all_gather", rank, call, (M,) * world, torch.float32, torch.float32)
            assert_equal(shown.cpu(), want, f"replay {call}")
        torch.cuda.synchronize()
        gemmlink.clear_cache()


def another_thread_and_inference(rank: int, world: int) -> None:
    """A call from a thread that has never used CUDA, and one without gradients."""
    with on(CUDA), make("all_gather", CUDA, M, timeout_s=10.0) as op:
        caller: Any = op
        a, b = _tensors("all_gather", rank, 0)
        want = wanted("all_gather", rank, 0, (M,) * world, torch.float32, torch.float32)
        torch.cuda.synchronize()
        results = []
        thread = threading.Thread(target=lambda: results.append(caller(a, b)))
        thread.start()
        thread.join()
        with torch.inference_mode():
            results.append(caller(a, b))
        for got in results:
            assert_equal(got.cpu(), want, "a thread, or inference")
        assert len(results) == 2


def debug(rank: int, world: int) -> dict[str, Any]:
    """With GEMMLINK_DEBUG a failed call raises itself."""
    with on(CUDA), make("all_gather", CUDA, M, timeout_s=1.0) as op:
        check_calls(op, rank, world, CUDA, [(M,) * world])
        caller: Any = op
        seen = {}
        if rank == 0:
            seen = raised(lambda: caller(*_tensors("all_gather", rank, 0)))
        else:
            time.sleep(1.5)
        op.reset(20.0)
        return seen
