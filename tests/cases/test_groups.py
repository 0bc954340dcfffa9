"""O-37 to O-41: several groups, odd numbers of ranks, ranks in another order, ranks apart."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import gemmlink
from tests.cases.kit import (
    BF16,
    F32,
    MODES,
    each_epilogue,
    eye,
    failing,
    gather,
    stacked,
    tagged,
)
from tests.conftest import Ranks
from tests.recovery import own_group
from tests.refs import FEW_MODES, assert_equal, whole

ROOT = Path(__file__).parents[2]


def _two_groups(rank: int, folder: str, mode: str, calls: int) -> None:
    clock = random.Random(rank)
    pairs = [pair for pair in ((0, 1), (1, 2)) if rank in pair]
    groups = [own_group(f"{folder}/{pair[0]}", pair.index(rank), 2) for pair in pairs]
    for call in range(calls):
        for pair, group in zip(pairs, groups, strict=True):
            if rank != 1 and call % 3 == 0:
                time.sleep(clock.random() * 0.001)
            blocks = [tagged(100 * pair[0] + call + peer, 2, 8) for peer in pair]
            mine = blocks[pair.index(rank)]
            got = gemmlink.gemm_all_gather(mine, eye(8), epilogue=mode, group=group)
            assert_equal(got, torch.cat(blocks), f"{mode}, call {call} over ranks {pair}")
    for group in groups:
        gemmlink.clear_cache(group)


@each_epilogue
def test_o_37_two_groups_that_share_a_rank(ranks: Ranks, tmp_path: Path, mode: str) -> None:
    """pytorch/pytorch#192581, #130756: a signal in one group released a wait in the other."""
    ranks(3).run(_two_groups, str(tmp_path), mode, 200)


def _subgroup_first(rank: int) -> None:
    made = [([0, 1], dist.new_group([0, 1])), ([0, 1, 2], None), ([1, 2], dist.new_group([1, 2]))]
    for mode in MODES:
        for turn, (members, group) in enumerate(made):
            if rank in members:
                blocks = [tagged(turn + peer, 3, 8) for peer in members]
                mine = blocks[members.index(rank)]
                want = torch.cat(blocks)
                with gemmlink.GemmAllGather(8, 8, 3, BF16, group=group, epilogue=mode) as op:
                    assert_equal(op(mine, eye(8)), want, f"{mode}, operation over {members}")
                got = gather(mine, eye(8), mode, group=group)
                assert_equal(got, want, f"{mode}, function over {members}")
    dist.barrier()


def test_o_38_a_subgroup_first_and_then_everyone(ranks: Ranks) -> None:
    """pytorch/pytorch#196082, #196350: keys were named by a number that only members counted on."""
    ranks(3).run(_subgroup_first)


def _many_ranks(rank: int, world: int, modes: Sequence[str]) -> None:
    for mode in modes:
        blocks = [whole(1 + peer, 9, 32) for peer in range(world)]
        b = whole(0, 35, 32)
        for dtype in (F32, BF16):
            mine, want = blocks[rank].to(dtype), stacked(blocks, b, dtype)
            assert_equal(gather(mine, b.to(dtype), mode), want, f"{mode} on {world} ranks")


@pytest.mark.parametrize(
    ("world", "modes"), [(2, MODES), (3, MODES), (5, FEW_MODES), (7, FEW_MODES)], ids=str
)
def test_o_39_odd_numbers_of_ranks_and_more_than_cores(
    ranks: Ranks, world: int, modes: Sequence[str]
) -> None:
    """pytorch/pytorch#165653, vllm-project/vllm#6385, ByteDance-Seed/Triton-distributed#79: rows
    dropped by a division, sizes refused, a box hung by waits that never yield."""
    ranks(world).run(_many_ranks, world, modes, timeout_s=90)


def _reordered(rank: int, folder: str, mode: str) -> None:
    order = [2, 0, 3, 1]
    of_torch = dist.new_group(order)
    kept = own_group(f"{folder}/store", order.index(rank), 4)
    for group, members in ((of_torch, dist.get_process_group_ranks(of_torch)), (kept, order)):
        got = gather(tagged(rank, 2 + rank, 8), eye(8), mode, group=group)
        assert_equal(got, torch.cat([tagged(r, 2 + r, 8) for r in members]), f"{mode} {members}")
    gemmlink.clear_cache(kept)
    dist.barrier()
    dist.destroy_process_group(of_torch)


@each_epilogue
def test_o_40_ranks_listed_out_of_order(ranks: Ranks, tmp_path: Path, mode: str) -> None:
    """pytorch/pytorch#176126, #176578: a list of ranks was sorted and nobody was told.

    Blocks come in the order of the group, whichever order torch has given it.
    """
    ranks(4).run(_reordered, str(tmp_path), mode)


def _may_mount() -> bool:
    unshare = shutil.which("unshare")
    command = [unshare or "", "-rm", "mount", "-t", "tmpfs", "tmpfs", "/dev/shm"]
    return unshare is not None and not subprocess.run(command, capture_output=True).returncode


def apart(rank: int, folder: str) -> None:
    """What a rank does that shares neither /dev/shm nor /proc with the other."""
    torch.set_num_threads(1)
    group: Any = own_group(f"{folder}/store", rank, 2)
    op = gemmlink.GemmAllGather(8, 8, 4, BF16, group=group, transport="shm", epilogue="pull")
    error, seconds = failing(op.prepare)
    assert isinstance(error, gemmlink.Unsupported), repr(error)
    assert "ranks that see each other's /dev/shm or /proc" in str(error), str(error)
    assert seconds < 20
    blocks = [tagged(peer, 4, 8) for peer in range(2)]
    with gemmlink.GemmAllGather(8, 8, 4, BF16, group=group) as op:
        assert_equal(op(blocks[rank], eye(8)), torch.cat(blocks), "over what is left")
        assert op.launch.parts.mode == "collective"
    group.all_gather(b"", key="end", timeout_s=20)
    print("right")


@pytest.mark.parametrize("rank", [1] if _may_mount() else [])
def test_o_41_peers_that_cannot_see_each_others_memory(tmp_path: Path, rank: int) -> None:
    """vllm-project/vllm#46716: a name was the same on two hosts, the check passed, a sum hung.

    Where this user may mount: one rank has a /dev/shm, a list of processes and users of its own.
    Elsewhere the same is simulated in tests/ranks/test_shm.py.
    """
    script = "mount -t tmpfs tmpfs /dev/shm && exec "
    run = [sys.executable, "-c", "import sys; from tests.cases.test_groups import apart; "]
    environ = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "GEMMLINK_TIMEOUT_S": "10"}
    processes = []
    for number in range(2):
        python = [*run[:2], f"{run[2]}apart({number}, {str(tmp_path)!r})"]
        wall = ["unshare", "-Urmpf", "--mount-proc", "sh", "-c", f'{script}"$@"', "sh"]
        processes.append(
            subprocess.Popen(
                [*(wall if number == rank else []), *python],
                cwd=ROOT,
                env=environ,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    for process in processes:
        out, err = process.communicate(timeout=60)
        assert (process.returncode, out.strip()) == (0, "right"), err
