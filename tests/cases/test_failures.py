"""O-42 to O-45: ranks that die, disagree, come late or have closed."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import gemmlink
from tests.cases.kit import (
    BF16,
    F32,
    HEARD_S,
    LIMIT,
    LIMIT_S,
    each_epilogue,
    eye,
    failing,
    good_call,
    tagged,
)
from tests.conftest import Ranks
from tests.recovery import named, own_group, started
from tests.refs import assert_equal, whole

# Processes of their own, which nobody but the test ends.


def _until_killed(rank: int, folder: str, mode: str) -> None:
    os.environ["GEMMLINK_TIMEOUT_S"] = f"{LIMIT_S}"
    torch.set_num_threads(1)
    group: Any = own_group(f"{folder}/store", rank, 3)
    try:
        for call in range(1000):
            if (rank, call) == (1, 50):
                _note(folder, rank, "killed")
                os.kill(os.getpid(), signal.SIGKILL)
            good_call(rank, 3, call, mode, group)
    except gemmlink.PeerTimeout as error:
        _note(folder, rank, f"{error.peer} {error.rank} {error.operation} {error.epoch} {error}")
        raise SystemExit(3) from None


def _note(folder: str, rank: int, text: str) -> None:
    Path(folder, f"note{rank}").write_text(f"{time.monotonic()} {text}")


@each_epilogue
def test_o_42_a_rank_is_killed_in_the_middle(tmp_path: Path, mode: str) -> None:
    """NVIDIA/nccl#585, ml-explore/mlx#4060: the others spun for ever and said nothing."""
    processes = [started(_until_killed, rank, str(tmp_path), mode) for rank in range(3)]
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [3, -signal.SIGKILL, 3]
    notes = [(tmp_path / f"note{rank}").read_text().split(maxsplit=1) for rank in range(3)]
    for rank in (0, 2):
        assert float(notes[rank][0]) - float(notes[1][0]) < LIMIT_S + 3
        text = notes[rank][1]
        assert text.startswith(f"1 {rank} all_gather 51 "), f"does not say who and when: {text}"
        assert "rank 1 must" in text or "nothing heard from ranks [1]" in text, text
    assert named([process.pid or 0 for process in processes]) == []


# Disagreement.

Case = tuple[int, int, int, torch.dtype]
#: Shapes (M, N, K) and dtype of B on each rank, and the values that both ranks must name.
DIFFERENT: dict[str, tuple[list[Case], tuple[str, str]]] = {
    "N": ([(8, 64, 32, BF16), (8, 63, 32, BF16)], ("64 on rank 0", "63 on rank 1")),
    "K": ([(8, 64, 32, BF16), (8, 64, 16, BF16)], ("32 on rank 0", "16 on rank 1")),
    "dtype": ([(8, 64, 32, BF16), (8, 64, 32, F32)], ("'bfloat16' on", "'float32' on")),
    "fp8": (
        [(8, 64, 32, BF16), (8, 64, 32, torch.float8_e4m3fn)],
        ("bfloat16", "float8_e4m3fn"),
    ),
    "equal M * N": ([(4, 6, 8, F32), (6, 4, 8, F32)], ("6 on rank 0", "4 on rank 1")),
}


def _call_with(given: Case, mode: str) -> torch.Tensor:
    m, n, k, dtype = given
    of_a = BF16 if dtype.itemsize == 1 else dtype
    return gemmlink.gemm_all_gather(whole(1, m, k, of_a), whole(2, n, k, dtype), epilogue=mode)


def _disagreement(rank: int, mode: str, cached: bool) -> dict[str, str]:
    seen = {}
    for number, (name, (given, _)) in enumerate(DIFFERENT.items()):
        if cached:  # the others then have an operation at hand, and wait in it
            _call_with(given[0], mode)
        error, seconds = failing(lambda given=given: _call_with(given[rank], mode))  # type: ignore[misc]
        seen[name] = f"{type(error).__name__} {error}"
        assert seconds < HEARD_S, f"{name}: heard after {seconds} s"
        good_call(rank, 2, number, mode)
    return seen


@pytest.mark.parametrize("cached", [False, True], ids=["first call", "later call"])
@pytest.mark.parametrize("mode", ["split-pull", "collective"])
def test_o_43_arguments_differ_between_ranks(ranks: Ranks, mode: str, cached: bool) -> None:
    """NVIDIA/nccl#1417, #531: a hang or a wrong tail, as the sizes would have it."""
    for rank, seen in enumerate(ranks(2).run(_disagreement, mode, cached, env=LIMIT)):
        for name, (_, values) in DIFFERENT.items():
            assert seen[name].startswith("InvalidArgument"), seen[name]
            assert all(value in seen[name] for value in values), f"rank {rank}, {name}: {seen}"


# Late.


def _late(rank: int, mode: str) -> tuple[str, int, float]:
    blocks = [tagged(peer, 4, 8) for peer in range(3)]
    with gemmlink.GemmAllGather(8, 8, 4, BF16, epilogue=mode, timeout_s=1.0) as op:
        time.sleep(0.3 * (rank == 2))
        assert_equal(op(blocks[rank], eye(8)), torch.cat(blocks), f"{mode}, a little late")
        time.sleep(2.5 * (rank == 2))
        error, seconds = failing(lambda: op(blocks[rank], eye(8)))
        dist.barrier()
        op.reset()
        assert_equal(op(blocks[rank], eye(8)), torch.cat(blocks), f"{mode}, after a reset")
    return f"{type(error).__name__} {error}", getattr(error, "peer", -2), seconds


@each_epilogue
def test_o_44_a_late_rank(ranks: Ranks, mode: str) -> None:
    """marin-community/marin#8538 waited for hours; sgl-project/sglang#23185 for a compiler.

    Set-up has a limit of its own, and a call that has been prepared compiles nothing.
    """
    one, two, late = ranks(3).run(_late, mode)
    for text, peer, seconds in (one, two):
        assert text.split()[0] in ("PeerTimeout", "PeerLost"), text
        assert peer == 2, text
        assert "rank 2 must" in text or "nothing heard from ranks [2]" in text, text
        assert 0.5 < seconds < 1 + 3, text
    assert late[0].split()[0] in ("PeerTimeout", "PeerLost", "Poisoned"), late


# Closed.


def _closed(rank: int, mode: str) -> None:
    blocks = [tagged(peer, 4, 8) for peer in range(2)]
    want = torch.cat(blocks)
    op = gemmlink.GemmAllGather(8, 8, 4, BF16, epilogue=mode).prepare()
    kept = op(blocks[rank], eye(8))
    uses: Sequence[Callable[[], Any]] = (lambda: op(blocks[rank], eye(8)), op.prepare, op.reset)
    op.close()
    op.close()
    for use in uses:
        error, seconds = failing(use)
        assert isinstance(error, gemmlink.InvalidArgument), repr(error)
        assert seconds < 1, "waited for a peer"
    with gemmlink.GemmAllGather(8, 8, 4, BF16, epilogue=mode) as again:
        assert_equal(again(blocks[rank], eye(8)), want, f"{mode}, opened again")
        again.close()
    assert_equal(kept, want, f"{mode}, kept")
    if mode != "collective":
        with gemmlink.GemmAllGather(8, 8, 4, BF16, epilogue=mode, result="view") as op:
            view = op(blocks[rank], eye(8))
        assert_equal(view, want, f"{mode}, a view after close")


@each_epilogue
def test_o_45_closed_twice_and_used_after(ranks: Ranks, mode: str) -> None:
    """openucx/ucx#4431 unmapped a handle twice; pytorch/pytorch#195499 used a library after its
    end."""
    ranks(2).run(_closed, mode)
