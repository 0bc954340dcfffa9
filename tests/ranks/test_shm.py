"""Transport ``shm``: leaves nothing behind, says what it lacks, and keeps the window's contract."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import gemmlink
from gemmlink import groups
from gemmlink.errors import PeerTimeout
from gemmlink.rendezvous import agree
from gemmlink.transport import segments, shm
from gemmlink.transport.shm import SharedMemory, ShmSession
from tests.conftest import Ranks
from tests.pool import RankPool
from tests.refs import a_of, assert_equal, b_of, gathered

ROOT = Path(__file__).parents[2]
N, K, M = 1024, 8, 600
#: Bytes of a window for N columns of float32 from two ranks, at least.
WINDOW = 2 * M * N * 4


def _names(pids: list[int]) -> list[str]:
    """What these processes have in /dev/shm by name; others may be at work there too."""
    return [n for n in os.listdir("/dev/shm") if any(f"gemmlink-{pid}-" in n for pid in pids)]


def _call(rank: int, transport: str = "shm", epilogue: str = "push") -> str:
    with gemmlink.GemmAllGather(N, K, M, transport=transport, epilogue=epilogue) as op:
        b = b_of(0, N, K)
        assert_equal(op(a_of(rank, 0, M, K), b), gathered(0, [M, M], b), "over shm")
        return op.launch.parts.mode


# What is left behind.


def _names_while_open(rank: int) -> list[list[str]]:
    mine = [os.getpid()]
    op = gemmlink.GemmAllGather(N, K, M, epilogue="push").prepare()
    during = _names(mine)
    op.close()
    return [during, _names(mine)]


def test_a_window_has_no_name_once_it_is_mapped(ranks: Ranks) -> None:
    assert ranks(2).run(_names_while_open) == [[[], []]] * 2


_kept: list[gemmlink.GemmAllGather] = []


def _names_ever(rank: int, sight: str) -> tuple[str, list[int]]:
    """Mode used, and how many names each exchange of the set-up saw."""
    seen: list[int] = []
    real = agree

    def counted(*arguments: Any) -> Any:
        seen.append(len(_names([os.getpid()])))
        found = real(*arguments)
        seen.append(len(_names([os.getpid()])))
        return found

    with mock.patch.object(shm, "agree", counted), contextlib.ExitStack() as stack:
        if sight == "other namespace":
            record = {"pid": os.getpid(), "pids": f"pid:[{rank}]"}
            stack.enter_context(mock.patch.object(shm, "process", return_value=record))
        if sight == "closed /proc" and rank == 1:
            stack.enter_context(mock.patch.object(segments, "_open_same", _open_by_name))
        mode = _call(rank)
    return mode, [*seen, len(_names([os.getpid()]))]


def _open_by_name(path: str | None, inode: list[int]) -> int | None:
    return None if path is None or path.startswith("/proc/") else _open_same(path, inode)


_open_same = segments._open_same


def test_ranks_that_share_proc_never_make_a_name(ranks: Ranks) -> None:
    for mode, seen in ranks(2).run(_names_ever, ""):
        assert mode != "collective"
        assert max(seen) == 0, seen


@pytest.mark.parametrize("sight", ["other namespace", "closed /proc"])
def test_ranks_that_cannot_see_each_others_proc_use_names(ranks: Ranks, sight: str) -> None:
    for mode, seen in ranks(2).run(_names_ever, sight):
        assert mode != "collective"
        assert max(seen) == 1, seen
        assert seen[-1] == 0, seen


def _keep_open(rank: int) -> None:
    _kept.append(gemmlink.GemmAllGather(N, K, M, epilogue="push").prepare())


def test_killed_ranks_leave_nothing(ranks: Ranks) -> None:
    pool = ranks(2)
    pids = pool.pids()
    pool.run(_keep_open)
    pool.kill()
    assert _names(pids) == []


def _names_after_failure(rank: int) -> list[str]:
    with contextlib.suppress(gemmlink.Unsupported), _unseen_by(1, rank):
        gemmlink.GemmAllGather(N, K, M, transport="shm", epilogue="push").prepare()
    return _names([os.getpid()])


def test_a_failed_set_up_leaves_nothing(ranks: Ranks) -> None:
    assert ranks(2).run(_names_after_failure) == [[], []]


# What may be missing.


@contextlib.contextmanager
def _no_shm(rank: int, only: int | None = None) -> Iterator[None]:
    if only in (None, rank):
        with mock.patch.object(segments, "SHM", "/nonexistent"):
            yield
    else:
        yield


@contextlib.contextmanager
def _no_memory(rank: int, only: int) -> Iterator[None]:
    with _no_shm(rank, only), contextlib.ExitStack() as stack:
        if rank == only:
            stack.enter_context(mock.patch.object(segments, "memory_free", return_value=1000))
        yield


@contextlib.contextmanager
def _other_host(rank: int, only: int) -> Iterator[None]:
    place = shm._place() | ({"boot": "another", "host": "elsewhere"} if rank == only else {})
    with mock.patch.object(shm, "_place", return_value=place):
        yield


@contextlib.contextmanager
def _unseen_by(only: int, rank: int) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        if rank == only:
            stack.enter_context(mock.patch.object(segments, "_open_same", return_value=None))
        yield


def _without_shm(rank: int, only: int | None) -> str:
    with _no_shm(rank, only):
        return _call(rank)


@pytest.mark.parametrize("only", [None, 1])
def test_without_dev_shm_windows_are_anonymous_memory(ranks: Ranks, only: int | None) -> None:
    assert set(ranks(2).run(_without_shm, only)) == {"split-push"}


def _may_mount() -> bool:
    unshare = shutil.which("unshare")
    return (
        unshare is not None
        and not subprocess.run(
            [unshare, "-rm", "mount", "-t", "tmpfs", "tmpfs", "/dev/shm"], capture_output=True
        ).returncode
    )


def _main() -> None:
    """What runs under a small /dev/shm."""
    free = segments.shm_free()
    assert 0 < free < WINDOW, f"{free} bytes free: /dev/shm is not the small one"
    pool = RankPool(2)
    try:
        print(*pool.run(_call))
    finally:
        pool.kill()


@pytest.mark.parametrize("megabytes", [4] if _may_mount() else [])
def test_a_full_dev_shm_is_no_bus_error(megabytes: int) -> None:
    """Where this user may mount: the file can be made there, but not be given its space."""
    script = (
        f"mount -t tmpfs -o size={megabytes}m tmpfs /dev/shm && "
        f"exec {sys.executable} -c 'from tests.ranks.test_shm import _main; _main()'"
    )
    done = subprocess.run(
        ["unshare", "-rm", "sh", "-c", script],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["split-push"] * 2


def _refused(rank: int, spoil: str) -> None:
    spoilers = {"memory": _no_memory, "host": _other_host}
    manager = _unseen_by(1, rank) if spoil == "sight" else spoilers[spoil](rank, 1)
    try:
        with manager:
            _call(rank)
    finally:
        _call(rank)


def test_too_little_memory_names_needed_and_free_bytes_on_every_rank(ranks: Ranks) -> None:
    for outcome in ranks(2).outcomes(_refused, "memory"):
        assert outcome.error.type == "Unavailable", outcome.error.trace
        needed = int(outcome.error.text.split("window needs ")[1].split()[0])
        assert WINDOW <= needed < WINDOW + (1 << 20)
        assert "0 bytes free in /nonexistent and 1000 bytes of free memory" in outcome.error.text
        assert "--shm-size" in outcome.error.text


def test_ranks_on_two_hosts_are_refused_naming_both(ranks: Ranks) -> None:
    for outcome in ranks(2).outcomes(_refused, "host"):
        assert outcome.error.type == "Unsupported", outcome.error.trace
        assert "needs all ranks on one host; got rank 0 on " in outcome.error.text
        assert "and rank 1 on elsewhere" in outcome.error.text


def test_a_segment_that_one_rank_cannot_open_is_refused_on_every_rank(ranks: Ranks) -> None:
    """Two containers of one host: the boot id is the same, /dev/shm is not."""
    for outcome in ranks(2).outcomes(_refused, "sight"):
        assert outcome.error.type == "Unsupported", outcome.error.trace
        assert "ranks that see each other's /dev/shm or /proc" in outcome.error.text


def _fallback(rank: int, spoil: str) -> tuple[str, list[str]]:
    spoilers = {"memory": _no_memory, "host": _other_host}
    manager = _unseen_by(1, rank) if spoil == "sight" else spoilers[spoil](rank, 1)
    records: list[logging.LogRecord] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = records.append  # type: ignore[method-assign, assignment]
    logger = logging.getLogger("gemmlink")
    logger.addHandler(handler)
    try:
        with manager:
            mode = _call(rank, transport="auto", epilogue="auto")
    finally:
        logger.removeHandler(handler)
    return mode, [record.getMessage() for record in records]


@pytest.mark.parametrize("spoil", ["memory", "host", "sight"])
def test_auto_falls_back_to_the_collective_and_says_so_once(ranks: Ranks, spoil: str) -> None:
    for mode, messages in ranks(2).run(_fallback, spoil):
        assert mode == "collective"
        assert len(messages) == 1, messages
        assert "falls back to the library collective" in messages[0]


# The contract of windows and words.

_keys = itertools.count()


@contextlib.contextmanager
def _session() -> Iterator[ShmSession]:
    group = groups.resolve()
    session = SharedMemory().open(group, key=f"test_shm{next(_keys)}", timeout_s=20)
    try:
        yield session
    finally:
        session.close()


def _zeroed(rank: int) -> None:
    with _session() as session:
        for nbytes in (64, 4096, 1 << 20, 100_000):
            window = session.window(nbytes)
            assert window.nbytes == nbytes
            for peer in range(session.world):
                view = window.tensor(peer)
                assert view.shape == (nbytes,)
                assert view.dtype == torch.uint8
                assert not view.any(), f"{nbytes} bytes at rank {peer} are not zero"
            session.barrier(20)
            window.tensor(rank).fill_(255)
            window.free()


def test_a_window_is_zero_at_first_even_after_another_was_filled(ranks: Ranks) -> None:
    ranks(2).run(_zeroed)


def _addressed(rank: int) -> None:
    with _session() as session:
        window = session.window(4096)
        peers = range(session.world)
        assert list(window.addresses) == [window.tensor(peer).data_ptr() for peer in peers]
        for peer in peers:
            window.tensor(peer)[64 * rank] = 1 + rank
        session.barrier(20)
        assert window.tensor(rank)[: 64 * session.world : 64].tolist() == [1 + p for p in peers]
        other = session.window(4096)
        assert not other.tensor(rank).any(), "two windows of a session share memory"
        session.barrier(20)


def test_what_is_stored_in_a_peers_tensor_lies_in_its_window(ranks: Ranks) -> None:
    ranks(3).run(_addressed)


def _extreme_words(rank: int) -> None:
    with _session() as session:
        words = session.window(4096).words
        peer = 1 - rank
        for place, value in enumerate([-(1 << 63), -5, 0, (1 << 31), (1 << 32) + 7, (1 << 63) - 1]):
            words.set(peer, 64 * place, value)
            session.barrier(20)
            assert words.read(64 * place) == value
            assert words.wait(64 * place, value, 5) == value
        assert words.wait(64, -5, 0) == -5, "a limit of zero is one look"
        assert words.wait(64, 1, 0.01) == -5, "a wait in vain returns what it saw"
        with pytest.raises(OverflowError):
            words.set(peer, 0, 1 << 63)


def test_a_word_is_a_signed_64_bit_number(ranks: Ranks) -> None:
    ranks(2).run(_extreme_words)


def _announced(rank: int, rounds: int) -> None:
    """A payload without locks: whoever sees the word sees all that was stored before it."""
    with _session() as session:
        window = session.window(1 << 17)
        data = window.tensor(1 - rank)[4096:].view(torch.int64)
        mine = window.tensor(rank)[4096:].view(torch.int64)
        for call in range(1, rounds):
            data.fill_(call)
            window.words.set(1 - rank, 0, call)
            assert window.words.wait(0, call, 10) == call
            low, high = int(mine.min()), int(mine.max())
            assert (low, high) == (call, call), f"round {call}: between {low} and {high}"
            window.words.set(1 - rank, 64, call)
            assert window.words.wait(64, call, 10) == call


def test_a_word_announces_all_stores_before_it(ranks: Ranks) -> None:
    ranks(2).run(_announced, 2000)


def _idle(rank: int) -> float:
    with _session() as session:
        words = session.window(4096).words
        used = time.process_time()
        assert words.wait(0, 1, 2.0) == 0
        used = time.process_time() - used
        session.barrier(20)
    return used / 2.0


def test_a_long_wait_uses_less_than_a_tenth_of_a_processor(ranks: Ranks) -> None:
    assert max(ranks(2).run(_idle)) < 0.1


def _alone_at_the_barrier(rank: int) -> dict[str, Any]:
    with _session() as session:
        session.barrier(20)
        try:
            if rank == 0:
                session.barrier(0.3)
        except PeerTimeout as error:
            return {"peer": error.peer, "seen": error.seen, "wanted": error.wanted}
        finally:
            dist.barrier()
    return {}


def test_a_barrier_that_a_rank_does_not_reach_names_it(ranks: Ranks) -> None:
    expected = {"peer": 1, "seen": 1, "wanted": 2}
    assert ranks(2).run(_alone_at_the_barrier) == [expected, {}]


def _closed(rank: int) -> None:
    with _session() as session:
        window = session.window(4096)
        window.tensor(1 - rank).fill_(7)
        session.barrier(20)
        own, peers = window.tensor(rank), window.tensor(1 - rank)
        window.free()
        window.free()
        session.close()
        session.close()
        assert bool((own == 7).all()), "a view that is kept stays readable"
        assert bool((peers == 7).all()), "also one of a peer that may be gone"


def test_close_is_idempotent_and_views_stay_readable(ranks: Ranks) -> None:
    ranks(2).run(_closed)


def _unmapped(rank: int) -> tuple[int, int]:
    def mapped() -> int:
        with open("/proc/self/maps") as lines:
            return sum("/dev/shm/" in line for line in lines)

    before = mapped()
    op = gemmlink.GemmAllGather(N, K, M, epilogue="push").prepare()
    during = mapped()
    op.close()
    del op
    return during - before, mapped() - before


def test_close_gives_the_memory_back(ranks: Ranks) -> None:
    for during, after in ranks(2).run(_unmapped):
        assert during >= 2, "the window of each rank is mapped"
        assert after == 0
