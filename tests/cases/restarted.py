"""A program for a launcher that restarts: two attempts fail on one rank, the third is right.

torchrun --nproc-per-node=2 --max-restarts=2 -m tests.cases.restarted

In the first attempt rank 1 dies before it uses the library, while rank 0 waits for it; in the
second it dies after some calls.

Ranks meet in the launcher's own store, which keeps what the first attempt has written. A default
group is not used: the one of torch reads old addresses there, and may not come up again.
"""

from __future__ import annotations

import os
import time
from typing import Any

import torch
import torch.distributed as dist

import gemmlink
from gemmlink.groups import TorchGroup
from tests.refs import a_of, assert_equal, b_of, gathered

N, K, M = 10, 8, 4


class Launched:
    """As much of a process group as ``TorchGroup`` uses, over the launcher's store."""

    def __init__(self) -> None:
        port = int(os.environ["MASTER_PORT"])
        self._store = dist.TCPStore(os.environ["MASTER_ADDR"], port, is_master=False)

    def rank(self) -> int:
        return int(os.environ["RANK"])

    def size(self) -> int:
        return int(os.environ["WORLD_SIZE"])

    def get_group_store(self) -> Any:
        return self._store


def _die_once_awaited(store: Any) -> None:
    deadline = time.monotonic() + 20
    while not store.check(["gemmlink/life/0"]):
        assert time.monotonic() < deadline, "rank 0 has not come"
        time.sleep(0.01)
    os._exit(3)


def main() -> None:
    """One attempt of one rank."""
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    torch.set_num_threads(1)
    launched = Launched()
    store = launched.get_group_store()
    known = store.add(f"attempts of {launched.rank()}", 1)
    assert known == attempt + 1, "an attempt does not get the store of the one before"
    if attempt == 0 and launched.rank() == 1:
        _die_once_awaited(store)
    group: Any = TorchGroup(launched)
    b = b_of(attempt, N, K)
    for mode in ("fused-push", "collective"):
        with gemmlink.GemmAllGather(N, K, M, group=group, epilogue=mode, timeout_s=20) as op:
            got = op(a_of(group.rank, attempt, M, K), b)
            assert_equal(got, gathered(attempt, [M, M], b), f"{mode}, attempt {attempt}")
            got = gemmlink.gemm_all_gather(
                a_of(group.rank, attempt, M, K), b, group=group, epilogue=mode
            )
            assert_equal(got, gathered(attempt, [M, M], b), f"{mode}, attempt {attempt}")
            if attempt == 1 and group.rank == 1 and mode == "collective":
                os._exit(3)
    os.write(1, f"rank {group.rank}: right in attempt {attempt}\n".encode())


if __name__ == "__main__":
    main()
