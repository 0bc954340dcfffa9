"""Lives: ranks over a store in which others, or they themselves, have been before."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import gemmlink
from gemmlink import lives
from gemmlink.errors import InvalidArgument, PeerTimeout
from gemmlink.groups import TorchGroup
from gemmlink.lives import Life
from tests.recovery import HEARD_S, Party, failing

#: Limit of what must not come to it, and of what must, in seconds.
LIMIT_S = 20.0
VAIN_S = 0.03

Stores = Callable[[], Any]
#: The ranks that use the library in an attempt; the others die before they do.
Attempt = set[int]


def _file(folder: Path) -> Stores:
    return lambda: dist.FileStore(str(folder / "store"), 3)  # one for each rank, as in processes


def _shared(store: Any) -> Stores:
    return lambda: store


STORES: dict[str, Callable[[Path], Stores]] = {
    "file": _file,
    "hash": lambda _: _shared(dist.HashStore()),
    "tcp": lambda _: _shared(dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)),
    "prefix": lambda _: _shared(dist.PrefixStore("group", dist.HashStore())),
}


@pytest.fixture(params=STORES)
def stores(request: pytest.FixtureRequest, tmp_path: Path) -> Stores:
    """The store of a rank, of each kind that torch has; what is in it is the same for all."""
    return STORES[request.param](tmp_path)


def _attempt(
    stores: Stores,
    world: int,
    act: Callable[[TorchGroup], Any],
    members: Sequence[int] = (),
    delays: Sequence[float] = (0, 0, 0),
) -> list[Any]:
    """One attempt: ``act`` in a new life of each member; what it returns, or its error."""

    def run(rank: int) -> Any:
        group = TorchGroup(Party(stores(), rank, world))
        time.sleep(delays[rank])
        try:
            return act(group)
        except gemmlink.GemmlinkError as error:
            return error

    with ThreadPoolExecutor(world) as pool:
        return list(pool.map(run, members or range(world)))


def _exchange(word: str, limit_s: float = LIMIT_S) -> Callable[[TorchGroup], list[bytes]]:
    return lambda group: group.all_gather(
        f"{word} of {group.rank}".encode(), key="k", timeout_s=limit_s
    )


def _records(word: str, world: int) -> list[list[bytes]]:
    return [[f"{word} of {rank}".encode() for rank in range(world)]] * world


ATTEMPTS: dict[str, tuple[int, list[Attempt]]] = {
    "none": (2, []),
    "rank 0 once more": (2, [{0}]),
    "rank 1 once more": (2, [{1}]),
    "both": (2, [{0, 1}]),
    "rank 0 after both": (2, [{0, 1}, {0}]),
    "three attempts": (2, [{0}, {0}, {1}]),
    "three of one rank": (2, [{1}, {1}, {1}]),
    "two of three": (3, [{0, 2}]),
    "all three differ": (3, [{0, 1, 2}, {1, 2}, {2}]),
    "each once, alone": (3, [{0}, {1}, {2}]),
}


@pytest.mark.parametrize("late", [0, 1])
@pytest.mark.parametrize(("world", "dead"), ATTEMPTS.values(), ids=ATTEMPTS)
def test_ranks_find_each_other_however_many_lives_each_has_had(
    stores: Stores, world: int, dead: list[Attempt], late: int
) -> None:
    """The exchange has the same key in every attempt, so what is left over could be read."""
    for members in dead:
        _attempt(stores, world, _exchange("old", VAIN_S), sorted(members))
    delays = [0.03 * (rank == late) for rank in range(world)]
    found = _attempt(stores, world, _exchange("new"), delays=delays)
    assert found == _records("new", world)


@pytest.mark.parametrize("dead", [[], [{0}], [{0, 1, 2}]], ids=str)
def test_who_has_not_come_is_named_though_an_earlier_life_has(
    stores: Stores, dead: list[Attempt]
) -> None:
    for members in dead:
        _attempt(stores, 3, _exchange("old", VAIN_S), sorted(members))
    began = time.monotonic()
    for error in _attempt(stores, 3, _exchange("new", 0.3), [1, 2]):
        assert isinstance(error, PeerTimeout), repr(error)
        assert error.peer == 0, str(error)
        assert error.operation == "k"
        assert f"nothing from ranks [0] at rank {error.rank}" in str(error)
    assert 0.3 <= time.monotonic() - began < HEARD_S


@pytest.mark.parametrize("seed", range(20))
def test_lives_agree_in_any_order_of_looks(seed: int) -> None:
    """Attempts that end anywhere: never a prefix of another attempt, nor two in one."""
    draw, store, used = random.Random(seed), dist.HashStore(), set[str]()
    for attempt in range(20):
        world = draw.randint(1, 4)
        ranks = [Life(store, rank, world) for rank in range(world)]
        for _ in range(draw.randint(0, 4 * world)):
            draw.choice(ranks).agree()
        if attempt == 19:
            held = [[life.agree() for life in ranks] for _ in range(3)]
            assert all(held[-1]), held
        agreed = {life.prefix for life in ranks if life.agreed}
        assert len(agreed) <= 1, f"attempt {attempt}: {agreed}"
        assert not agreed & used, f"attempt {attempt} has the keys of another"
        used |= agreed


class _NoStore:
    """A store that must not be asked."""

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"{name} of the store was used")


def test_a_group_is_made_without_a_word_to_the_store() -> None:
    TorchGroup(Party(_NoStore(), 0, 2))


# Texts from before the agreement.


def _hear(life: Life, key: str) -> bytes | None:
    """What ``life`` hears, at its second look at the others."""
    life.agree()
    return life.peek(key)


def test_a_text_is_heard_before_the_agreement_and_after(stores: Stores) -> None:
    first, second = (Life(stores(), rank, 2) for rank in range(2))
    first.post("no", b"of 0")
    first.post("kept", b"")
    assert second.peek("no") == b"of 0"
    assert _hear(second, "no") == b"of 0"
    assert second.missing == [0], "a rank that has posted a text is not one that has come"
    second.post("no too", b"of 1")
    assert first.agree()
    first.post("between", b"of 0")
    second.post("between too", b"of 1")
    assert not second.agreed
    for key in ("no", "between"):
        assert second.peek(key) == b"of 0", "the other rank agrees already"
    assert first.peek("between too") == b"of 1", "the other rank does not agree yet"
    assert second.agree()
    for life in (first, second):
        heard = [life.peek(key) for key in ("no", "kept", "no too", "between too", "never")]
        assert heard == [b"of 0", b"", b"of 1", b"of 1", None]


def test_what_a_dead_process_has_posted_is_not_heard(
    stores: Stores, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new rank that comes before its peer does must not take the old refusal for a new one."""
    Life(stores(), 0, 2).post("no", b"old")
    time.sleep(0.01)
    now = time.time()
    monkeypatch.setattr(lives, "process_start", lambda: now)
    first, second = (Life(stores(), rank, 2) for rank in range(2))
    assert _hear(second, "no") is None
    first.post("no", b"new")
    assert _hear(second, "no") == b"new"


def test_what_an_earlier_life_has_posted_is_not_heard_in_the_same_process(stores: Stores) -> None:
    Life(stores(), 0, 2).post("no", b"old")
    first, second = (Life(stores(), rank, 2) for rank in range(2))
    first.agree()
    assert _hear(second, "no") is None
    assert [first.agree(), second.agree()] == [True, True]
    assert second.peek("no") is None


def test_a_text_of_lives_that_agreed_ends_with_them(stores: Stores) -> None:
    old = [Life(stores(), rank, 2) for rank in range(2)]
    old[0].post("no", b"old")
    for life in (*old, *old):
        life.agree()
    assert old[1].peek("no") == b"old"
    assert _hear(Life(stores(), 1, 2), "no") is None


def test_a_process_knows_when_it_began() -> None:
    assert time.time() - 24 * 3600 < lives.process_start() < lives._LOADED
    assert abs(lives.process_start() - lives.process_start()) < 0.1


# A whole operation.


def _product(group: Any, bad: bool = False) -> list[list[float]]:
    a = torch.full((2, 3), float(1 + group.rank))
    b = torch.ones(6) if bad else torch.ones(2, 3)
    return gemmlink.gemm_all_gather(a, b, group=group, epilogue="push").tolist()


def test_a_first_call_that_one_rank_refuses_is_heard_by_a_rank_of_other_lives(
    stores: Stores, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GEMMLINK_TIMEOUT_S", "4")  # five times as much for set-up

    def act(group: TorchGroup) -> Any:
        began = time.monotonic()
        error = failing(lambda: _product(group, bad=group.rank == 1))
        assert time.monotonic() - began < HEARD_S
        right = _product(group)
        gemmlink.clear_cache(group)
        return error, right

    _attempt(stores, 2, _exchange("old", VAIN_S), [0])
    (error, right), (own, also) = _attempt(stores, 2, act)
    assert isinstance(error, InvalidArgument)
    assert isinstance(own, InvalidArgument)
    assert str(error) == f"rank 1 refused call 1: {own}"
    assert right == also == [[3.0, 3.0]] * 2 + [[6.0, 6.0]] * 2
