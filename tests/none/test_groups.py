"""Groups: which one is meant, what forgotten set-up says, and exchanges through a callback."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import gemmlink
from gemmlink import groups, rendezvous
from gemmlink.errors import GemmlinkError, InvalidArgument, PeerTimeout, Unavailable
from gemmlink.groups import LAUNCHER_WORLD, SELF, CallbackGroup, TorchGroup
from gemmlink.spec.contracts import Group
from tests.recovery import Party


@pytest.mark.parametrize("environ", [{}, {"WORLD_SIZE": "1"}, {"WORLD_SIZE": ""}], ids=str)
def test_without_a_launcher_the_world_is_one(environ: dict[str, str]) -> None:
    assert groups.resolve(None, environ) is SELF


@pytest.mark.parametrize("name", LAUNCHER_WORLD)
def test_a_launcher_without_a_group_gets_the_line_to_add(name: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        groups.resolve(None, {name: "4"})
    assert str(caught.value) == (
        "torch.distributed must be initialised when a launcher started several ranks; got "
        f"{name}=4 and no process group. Add torch.distributed.init_process_group('gloo') (or "
        "'nccl') before this call, or pass group=gemmlink.SELF to compute alone on purpose."
    )


def test_self_is_one_rank_whatever_a_launcher_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert groups.resolve(SELF) is SELF
    assert SELF.all_gather(b"x", key="k", timeout_s=1) == [b"x"]
    with pytest.raises(InvalidArgument, match="WORLD_SIZE=8 and no process group"):
        groups.resolve(None)


@pytest.mark.parametrize("group", [0, "world", object()], ids=["number", "text", "object"])
def test_what_is_no_group_is_refused(group: Any) -> None:
    with pytest.raises(
        InvalidArgument, match=r"group must be a torch process group, gemmlink.SELF"
    ):
        groups.resolve(group)


class _Threads:
    """Ranks that are threads of this process, exchanging through a barrier."""

    def __init__(self, world: int) -> None:
        self._slots: list[bytes] = [b""] * world
        self._barrier = threading.Barrier(world, timeout=20)
        self._pool = ThreadPoolExecutor(world)
        self.groups = [CallbackGroup(rank, world, self._exchange_of(rank)) for rank in range(world)]

    def _exchange_of(self, rank: int) -> Callable[[bytes], list[bytes]]:
        def exchange(data: bytes) -> list[bytes]:
            self._slots[rank] = data
            self._barrier.wait()
            found = list(self._slots)
            self._barrier.wait()
            return found

        return exchange

    def run(self, part: Callable[[Group], Any]) -> list[Any]:
        """``part`` on every rank; a value, or the exception, for each."""

        def attempt(group: Group) -> Any:
            try:
                return part(group)
            except Exception as error:
                return error

        return list(self._pool.map(attempt, self.groups))


def test_a_callback_group_exchanges_bytes_in_rank_order() -> None:
    seen = _Threads(3).run(
        lambda group: group.all_gather(bytes([group.rank]), key="k", timeout_s=1)
    )
    assert seen == [[b"\0", b"\1", b"\2"]] * 3


def test_a_callback_group_is_a_group() -> None:
    group = CallbackGroup(0, 1, lambda data: [data])
    assert isinstance(group, Group)
    assert groups.resolve(group) is group


@pytest.mark.parametrize(("rank", "world"), [(-1, 2), (2, 2), (0, 0)])
def test_a_callback_group_checks_rank_and_world(rank: int, world: int) -> None:
    with pytest.raises(InvalidArgument, match=f"got rank={rank}, world={world}"):
        CallbackGroup(rank, world, lambda data: [data])


@pytest.mark.parametrize(
    ("records", "came"),
    [
        ([b"me"], "1 records for world 2, own record kept"),
        ([b"a", b"b", b"c"], "3 records for world 2, own record missing"),
        ([b"other", b"me"], "2 records for world 2, own record kept"),
    ],
    ids=["short", "long", "swapped"],
)
def test_a_callback_that_returns_nonsense_is_refused(records: list[bytes], came: str) -> None:
    group = CallbackGroup(0, 2, lambda _: records)
    with pytest.raises(InvalidArgument, match=came):
        group.all_gather(b"me", key="k", timeout_s=1)


def test_agree_returns_all_records_to_all_ranks() -> None:
    seen = _Threads(3).run(
        lambda group: rendezvous.agree(group, "k", lambda: {"rank": group.rank}, 1)
    )
    assert seen == [[{"rank": 0}, {"rank": 1}, {"rank": 2}]] * 3


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (Unavailable("a rule", "this", "Do that."), Unavailable, "a rule; got this. Do that."),
        (ZeroDivisionError("by zero"), GemmlinkError, "ZeroDivisionError: by zero"),
    ],
)
def test_what_fails_on_one_rank_raises_on_all_and_names_it(
    error: Exception, kind: type, text: str
) -> None:
    def part(group: Group) -> Any:
        def mine() -> dict[str, Any]:
            if group.rank == 1:
                raise error
            return {}

        return rendezvous.agree(group, "k", mine, 1)

    first, second, third = _Threads(3).run(part)
    assert second is error, "the rank itself raises its own exception"
    for other in (first, third):
        assert type(other) is kind
        assert str(other) == f"rank 1 refused: {text}"


def test_a_value_that_differs_is_named_with_both_ranks() -> None:
    records = [{"n": 4, "k": 2}, {"n": 4, "k": 2}, {"n": 5, "k": 2}]
    rendezvous.check_equal(records, ["k"], "all_gather")
    with pytest.raises(InvalidArgument) as caught:
        rendezvous.check_equal(records, ["k", "n"], "all_gather")
    assert str(caught.value) == (
        "n must be equal on all ranks of all_gather; got 4 on rank 0 and 5 on rank 2. "
        "Pass the same n on every rank."
    )


def test_a_callback_group_serves_a_whole_operation() -> None:
    """Ranks as threads, windows through shared memory, no torch.distributed at all."""
    import torch

    def part(group: Group) -> list[list[float]]:
        a = torch.full((2, 3), float(1 + group.rank))
        with gemmlink.GemmAllGather(2, 3, 2, group=group, epilogue="push") as op:
            return op(a, torch.ones(2, 3)).tolist()

    want = [[3.0, 3.0]] * 2 + [[6.0, 6.0]] * 2
    assert _Threads(2).run(part) == [want, want]


def test_the_collective_epilogue_needs_a_torch_group() -> None:
    def part(group: Group) -> Any:
        return gemmlink.GemmAllGather(2, 3, 2, group=group, epilogue="collective").prepare()

    for error in _Threads(2).run(part):
        assert isinstance(error, Unavailable)
        assert "needs a torch.distributed group; got CallbackGroup" in str(error)


# Exchanges through stores.

STORES: dict[str, Callable[[Path], Any]] = {
    "file": lambda folder: dist.FileStore(str(folder / "store"), 2),
    "tcp": lambda _: dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False),
    "hash": lambda _: dist.HashStore(),
}


@pytest.fixture(params=STORES)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    """A store of each kind that torch has."""
    return STORES[request.param](tmp_path)


def _in_vain(group: TorchGroup, key: str, timeout_s: float) -> PeerTimeout:
    with pytest.raises(PeerTimeout) as caught:
        group.all_gather(b"", key=key, timeout_s=timeout_s)
    return caught.value


def test_an_exchange_keeps_its_limit_over_any_store(store: Any) -> None:
    """The best of five: a machine that is busy makes any of them late."""
    group, took = TorchGroup(Party(store, 0, 2)), []
    for number in range(5):
        began = time.monotonic()
        error = _in_vain(group, f"k{number}", 0.2)
        took.append(time.monotonic() - began)
        assert (error.rank, error.peer, error.operation) == (0, 1, f"k{number}")
        assert "nothing from ranks [1] at rank 0" in str(error)
    assert min(took) >= 0.2
    assert min(took) < 0.5, f"the limit is 0.2 s; the waits took {took}"


def test_a_long_wait_for_a_record_costs_little(store: Any) -> None:
    group, began = TorchGroup(Party(store, 0, 2)), time.thread_time()
    _in_vain(group, "k", 2.0)
    used = time.thread_time() - began
    assert used < 0.2, f"{used:.2f} s of processor time in 2 s"


def test_a_stalled_exchange_looks_for_a_reason(store: Any) -> None:
    """A few times a second; what the look raises ends the wait."""
    looks: list[float] = []

    def look() -> None:
        looks.append(time.monotonic())
        if len(looks) == 3:
            raise ZeroDivisionError

    group, began = TorchGroup(Party(store, 0, 2)), time.monotonic()
    with pytest.raises(ZeroDivisionError):
        group.all_gather(b"", key="k", timeout_s=60, on_stall=look)
    assert looks[0] - began > 0.1, "a look before there was a stall"


def test_records_come_in_rank_order_over_any_store(store: Any) -> None:
    found = [TorchGroup(Party(store, rank, 2)) for rank in range(2)]
    with ThreadPoolExecutor(2) as pool:
        for key in ("a", "b", "c"):
            want = [key.encode() + bytes([rank]) for rank in range(2)]
            seen = pool.map(
                lambda group, key=key, want=want: group.all_gather(
                    want[group.rank], key=key, timeout_s=30
                ),
                found,
            )
            assert list(seen) == [want, want]
