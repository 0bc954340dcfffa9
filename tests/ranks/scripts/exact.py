"""What a rank checks, however it was started. As a program it starts ranks in the way named.

python -m tests.ranks.scripts.exact (fork | multiprocessing-fork | spawn) FOLDER
torchrun --nproc-per-node=2 -m tests.ranks.scripts.exact torchrun FOLDER
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import traceback
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

import gemmlink
from tests.refs import MODES, WINDOW_MODES, a_of, assert_equal, b_of, gathered

N, K, M = 9, 16, 6
WORLD = 2
LIMIT_S = 20.0


def function_form(group: Any, rank: int, world: int, modes: Sequence[str]) -> None:
    """Ragged rows, told by the ranks to each other, that outgrow the window more than once."""
    for mode in modes:
        for call, longest in enumerate([1, 5, 40, 3, 0, 41, 700, 2]):
            rows = [longest // (1 + (r + call) % world) for r in range(world)]
            b = b_of(call, N, K)
            a = a_of(rank, call, rows[rank], K)
            got = gemmlink.gemm_all_gather(a, b, group=group, epilogue=mode)
            assert_equal(got, gathered(call, rows, b), f"{mode}, rows {rows}")


def object_form(group: Any, rank: int, world: int, modes: Sequence[str]) -> None:
    """Many calls of one operation; views where there is a window."""
    for mode in modes:
        for result in ("copy",) if mode == "collective" else ("copy", "view"):
            op = gemmlink.GemmAllGather(
                N, K, M, group=group, epilogue=mode, result=result, chunks=3, lanes=2, timeout_s=20
            )
            with op:
                for call in range(20):
                    b = b_of(call, N, K)
                    rows = [M - call % 3] * world
                    got = op(a_of(rank, call, rows[rank], K), b)
                    assert_equal(got, gathered(call, rows, b), f"{mode} {result}, call {call}")


def interleaved(groups: Sequence[Any], rank: int, world: int, modes: Sequence[str]) -> None:
    """Operations over several groups, one of each in turn."""
    ops = [
        gemmlink.GemmAllGather(N + i, K, M, group=groups[i % len(groups)], epilogue=mode)
        for i, mode in enumerate(modes)
    ]
    for op in ops:
        op.prepare()
    for call in range(20):
        for i, op in enumerate(ops):
            b = b_of(100 * i + call, N + i, K)
            got = op(a_of(rank, 100 * i + call, M, K), b)
            want = gathered(100 * i + call, [M] * world, b)
            assert_equal(got, want, f"{modes[i]}, operation {i}, call {call}")
        b = b_of(call, N, K)
        got = gemmlink.gemm_all_gather(a_of(rank, call, M, K), b, group=groups[call % len(groups)])
        assert_equal(got, gathered(call, [M] * world, b), f"function form, call {call}")
    for op in ops:
        op.close()


def everything() -> None:
    """On a rank of an initialised default group."""
    rank, world = dist.get_rank(), dist.get_world_size()
    assert world == WORLD, f"{world} ranks"
    function_form(None, rank, world, (*MODES, "auto"))
    object_form(None, rank, world, MODES)
    interleaved([None, dist.new_group(list(range(world)))], rank, world, WINDOW_MODES)
    gemmlink.clear_cache()


def _rank(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(os.path.join(folder, "store"), WORLD)
    limit = timedelta(seconds=LIMIT_S)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD, timeout=limit)
    everything()
    _say(rank)
    dist.destroy_process_group()


def _say(rank: int) -> None:
    # In one write: ranks share their output.
    os.write(1, f"rank {rank}: right\n".encode())


def _forked(folder: str) -> int:
    """As a program does it that has used the library and then forks."""
    children = []
    for rank in range(WORLD):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                _rank(rank, folder)
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        children.append(pid)
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children]
    return int(any(code != 0 for code in codes))


def _processes(method: str, folder: str) -> int:
    context: Any = multiprocessing.get_context(method)
    children = [context.Process(target=_rank, args=(rank, folder)) for rank in range(WORLD)]
    for child in children:
        child.start()
    for child in children:
        child.join()
    return int(any(child.exitcode != 0 for child in children))


def _launched() -> int:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=LIMIT_S))
    everything()
    _say(dist.get_rank())
    dist.destroy_process_group()
    return 0


def _use() -> None:
    """So that every part has been loaded, and has been at work, before ranks are forked."""
    torch.set_num_threads(1)
    for mode in (*MODES, "auto"):
        got = gemmlink.gemm_all_gather(
            a_of(0, 0, M, K), b_of(0, N, K), group=gemmlink.SELF, epilogue=mode
        )
        assert_equal(got, gathered(0, [M], b_of(0, N, K)), f"{mode}, alone")


def main(style: str, folder: str) -> int:
    """Start ranks, or be one; 0 if all went right."""
    if style == "torchrun":
        return _launched()
    _use()
    if style == "fork":
        return _forked(folder)
    return _processes(style.removeprefix("multiprocessing-"), folder)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
