"""What a mode's name promises is proved by cause: who must have sent what before something ends."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

import gemmlink
from gemmlink.backends.eager import Eager
from gemmlink.core.launch import Launch
from gemmlink.epilogues.lanes import Lanes
from gemmlink.epilogues.pull import Pull
from gemmlink.epilogues.push import Push
from gemmlink.errors import GemmlinkError, PeerTimeout
from gemmlink.spec.contracts import INTERFACE, Epilogue, Group, Needs
from gemmlink.spec.operations import Phase, all_gather
from gemmlink.spec.schedule import (
    Action,
    Compute,
    Copy,
    Deliver,
    Join,
    Load,
    Plan,
    Program,
    Region,
    Schedule,
    Set,
    Store,
    Wait,
    Word,
)
from gemmlink.transport.shm import SharedMemory, ShmSession, ShmWindow
from tests.conftest import Ranks
from tests.refs import WINDOW_MODES, a_of, assert_equal, b_of, gathered

N, K, CHUNKS, M = 9, 16, 4, 8
EPILOGUES: Mapping[str, Epilogue] = {"push": Push(), "pull": Pull(), "lanes": Lanes()}
NAN = float("nan")


class Watching(Eager):
    """Before its last rows it looks for chunk 0 of every peer, for at most ``limit_s``."""

    name = "watching"

    def __init__(self, limit_s: float) -> None:
        self.launch: Launch | None = None
        self.seen: list[int] = []
        self._limit_s = limit_s
        self._rows = 0

    def multiply(self, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
        self._rows += a.shape[0]
        if self._rows == M and self.launch is not None:
            self.seen = [
                self._first_chunk_of(self.launch, p) for p in self.launch.schedule.plan.peers
            ]
        super().multiply(a, b, out)

    def _first_chunk_of(self, launch: Launch, peer: int) -> int:
        assert launch.words is not None, "a mode without words"
        offset = launch.layout.word(Word("arrive", peer, 0))
        return launch.words.wait(offset, launch.epoch, self._limit_s)


def _last_chunk_sees_peers_first(rank: int, mode: str, limit_s: float) -> list[int]:
    backend = Watching(limit_s)
    world = dist.get_world_size()
    with gemmlink.GemmAllGather(N, K, M, epilogue=mode, backend=backend, chunks=CHUNKS) as op:
        backend.launch = op.launch
        b = b_of(0, N, K)
        got = op(a_of(rank, 0, M, K), b)
        assert_equal(got, gathered(0, [M] * world, b), mode)
    return backend.seen


@pytest.mark.parametrize("epilogue", EPILOGUES)
def test_fused_a_chunk_has_been_sent_before_the_last_is_computed(
    ranks: Ranks, epilogue: str
) -> None:
    """Every rank holds its last chunk back until all peers' first chunks are there."""
    assert ranks(3).run(_last_chunk_sees_peers_first, f"fused-{epilogue}", 10.0) == [[1, 1]] * 3


@pytest.mark.parametrize("epilogue", EPILOGUES)
def test_split_nothing_is_sent_before_all_is_computed(ranks: Ranks, epilogue: str) -> None:
    """The same construction, which a split form must not satisfy: the test above can fail."""
    seen = ranks(3).run(_last_chunk_sees_peers_first, f"split-{epilogue}", 0.2)
    assert [0, 0] in seen, f"the first rank to give up cannot have seen anything: {seen}"


_COLLECTIVES = (
    "all_gather",
    "all_reduce",
    "all_to_all",
    "allgather",
    "allreduce",
    "alltoall",
    "barrier",
    "batch_isend_irecv",
    "broadcast",
    "gather",
    "monitored_barrier",
    "new_group",
    "new_subgroups",
    "recv",
    "reduce",
    "scatter",
    "send",
)


def _is_collective(name: str) -> bool:
    return name.lstrip("_i").startswith(_COLLECTIVES)


@contextlib.contextmanager
def _no_collectives() -> Iterator[None]:
    """Every way into a collective raises: functions of torch.distributed, methods of its groups."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("a collective of torch.distributed was called")

    classes = {*dist.ProcessGroup.__mro__, *dist.ProcessGroupGloo.__mro__}
    places = (dist, distributed_c10d, *(c for c in classes if c.__module__.startswith("torch")))
    with contextlib.ExitStack() as stack:
        for place in places:
            for name in [name for name in vars(place) if _is_collective(name)]:
                stack.enter_context(mock.patch.object(place, name, refuse))
        yield


def _without_collectives(rank: int, mode: str) -> str:
    b = b_of(0, N, K)
    want = gathered(0, [5, 5], b)
    a = a_of(rank, 0, 5, K)
    with gemmlink.GemmAllGather(N, K, 5, epilogue=mode) as op:
        gemmlink.gemm_all_gather(a, b, epilogue=mode)
        try:
            with _no_collectives():
                assert_equal(op(a, b), want, f"{mode}, object form")
                assert_equal(
                    gemmlink.gemm_all_gather(a, b, epilogue=mode), want, f"{mode}, function"
                )
        except AssertionError as error:
            return str(error)
    return "right"


@pytest.mark.parametrize("mode", [*WINDOW_MODES, "auto"])
def test_once_prepared_no_collective_is_called(ranks: Ranks, mode: str) -> None:
    assert ranks(2).run(_without_collectives, mode) == ["right"] * 2


def test_collective_is_the_mode_that_calls_a_collective(ranks: Ranks) -> None:
    """By definition: it is the product followed by the library's all-gather. So the traps work."""
    seen = ranks(2).run(_without_collectives, "collective")
    assert seen == ["a collective of torch.distributed was called"] * 2


class Backwards:
    """Chunks last to first, sent by two movers that share them; known to this test alone."""

    name = "backwards"
    interface = INTERFACE
    needs = Needs(window=True)
    complete = True
    phases: tuple[str, ...] = ("gather",)

    def forms(self) -> tuple[bool, ...]:
        return (False,)

    def schedule(self, phase: Phase, plan: Plan) -> Schedule:
        order = range(plan.chunks - 1, -1, -1)
        producer: list[Action] = [Wait(Word("free", peer), lag=1) for peer in plan.peers]
        for chunk in order:
            producer += [Compute(chunk), Store(Region(plan.rank, chunk), to=plan.rank)]
        movers = [
            Program(
                f"mover{part}",
                (Join("producer"), *_sent(plan, [c for c in order if c % 2 == part])),
            )
            for part in (0, 1)
        ]
        consumer: list[Action] = []
        for source in range(plan.world):
            for chunk in order:
                consumer += [
                    Wait(Word("arrive", source, chunk)),
                    Deliver(Region(source, chunk), plan.rank),
                ]
        consumer += [Join("mover0"), Join("mover1")]
        consumer += [Set(Word("free", plan.rank), at=peer) for peer in plan.peers]
        programs = (
            Program("producer", tuple(producer)),
            *movers,
            Program("consumer", tuple(consumer)),
        )
        return Schedule(phase, plan, programs)


def _sent(plan: Plan, chunks: Sequence[int]) -> list[Action]:
    actions: list[Action] = []
    for chunk in chunks:
        region = Region(plan.rank, chunk)
        actions += [Load(region, plan.rank), *(Store(region, to=peer) for peer in plan.peers)]
        actions += [Set(Word("arrive", plan.rank, chunk), at=r) for r in plan.everyone]
    return actions


def _backwards(rank: int, chunks: int) -> str:
    op = gemmlink.GemmAllGather(N, K, 13, epilogue=Backwards(), chunks=chunks)
    with op:
        for call, rows in enumerate([[13, 5, 0], [1, 13, 7], [13, 13, 13]]):
            b = b_of(call, N, K)
            got = op(a_of(rank, call, rows[rank], K), b)
            assert_equal(got, gathered(call, rows, b), f"chunks {chunks}, call {call}")
        return op.launch.parts.mode


@pytest.mark.parametrize("chunks", [1, 2, 5])
def test_an_epilogue_is_data_that_the_library_need_not_know(ranks: Ranks, chunks: int) -> None:
    assert ranks(3).run(_backwards, chunks) == ["backwards"] * 3


class Without:
    """A mode without the ``index``-th action of ``kind`` of every rank."""

    interface = INTERFACE
    complete = True

    def __init__(self, mode: str, kind: type, index: int) -> None:
        form, _, name = mode.partition("-")
        self._whole = EPILOGUES[name]
        self._fused, self._kind, self._index = form == "fused", kind, index
        self.name = f"without-{name}"
        self.needs = self._whole.needs
        self.phases = self._whole.phases

    def forms(self) -> tuple[bool, ...]:
        return (self._fused,)

    def schedule(self, phase: Phase, plan: Plan) -> Schedule:
        whole = self._whole.schedule(phase, plan)
        count = -1
        programs = []
        for program in whole.programs:
            kept: list[Action] = []
            for action in program.actions:
                count += isinstance(action, self._kind)
                if not (isinstance(action, self._kind) and count == self._index):
                    kept.append(action)
            programs.append(replace(program, actions=tuple(kept)))
        return replace(whole, programs=tuple(programs))


def _count(mode: str, kind: type, **rest: bool) -> int:
    """How many actions of ``kind`` a rank of two has, with two chunks."""
    form, _, name = mode.partition("-")
    plan = Plan(0, 2, 2, form == "fused", **rest)  # type: ignore[arg-type]
    schedule = EPILOGUES[name].schedule(all_gather(2, N).phases[0], plan)
    return sum(isinstance(action, kind) for action in schedule.actions())


def _two_calls_without(
    rank: int, mode: str, kind: type, index: int, complete_view: bool = False
) -> list[str]:
    """What two calls come to: ``right``, ``wrong``, or the type of the error that ends them."""
    seen = []
    rest: dict[str, Any] = {}
    if complete_view:
        rest = {"result": "view", "completion": "receive_and_send"}
    op = gemmlink.GemmAllGather(
        N, K, 6, epilogue=Without(mode, kind, index), chunks=2, timeout_s=0.5, **rest
    )
    try:
        with op:
            for call in (0, 1):
                b = b_of(call, N, K)
                out = None if complete_view else torch.full((12, N), NAN)
                got = op(a_of(rank, call, 6, K), b, out=out)
                seen.append("right" if torch.equal(got, gathered(call, [6, 6], b)) else "wrong")
    except PeerTimeout:
        seen.append("timeout")
    except GemmlinkError as error:
        seen.append(str(error))
    return seen


@pytest.mark.parametrize("complete_view", [False, True], ids=["copy", "complete view"])
@pytest.mark.parametrize("mode", WINDOW_MODES)
def test_nothing_missing_is_right(ranks: Ranks, mode: str, complete_view: bool) -> None:
    """The control for the tests that take actions away."""
    seen = ranks(2).run(_two_calls_without, mode, Set, -5, complete_view)
    assert seen == [["right", "right"]] * 2


@pytest.mark.parametrize(
    ("mode", "index", "complete_view"),
    [
        *((mode, i, False) for mode in WINDOW_MODES for i in range(_count(mode, Set))),
        *(
            ("fused-pull", i, True)
            for i in range(_count("fused-pull", Set, view=True, send_complete=True))
        ),
    ],
)
def test_every_word_that_is_set_is_needed(
    ranks: Ranks, mode: str, index: int, complete_view: bool
) -> None:
    """Without it somebody waits in vain, in that call or (for ``free``) in the next.

    A lane whose copy nothing releases is refused when prepared.
    """
    for seen in ranks(2).run(_two_calls_without, mode, Set, index, complete_view):
        refused = len(seen) == 1 and "a lane waits only for words" in seen[0]
        late = seen in (["timeout"], ["right", "timeout"])
        assert late or (refused and mode == "fused-lanes"), f"without Set {index}: {seen}"


@pytest.mark.parametrize(
    ("mode", "kind", "index"),
    [
        (mode, kind, index)
        for mode in WINDOW_MODES
        for kind in (Store, Copy, Deliver)
        for index in range(_count(mode, kind))
    ],
)
def test_every_store_copy_and_delivery_is_needed(
    ranks: Ranks, mode: str, kind: type, index: int
) -> None:
    """Without it the result is wrong on some rank, or the schedule is refused."""
    seen = ranks(2).run(_two_calls_without, mode, kind, index)
    assert any("right" not in calls for calls in seen), f"without {kind.__name__} {index}: {seen}"


class _Bad(SharedMemory):
    """Shared memory with windows that ``spoil`` has been at."""

    name = "bad-transport"

    def open(self, group: Group, *, key: str, timeout_s: float) -> ShmSession:
        session = super().open(group, key=key, timeout_s=timeout_s)
        make = session.window

        def window(nbytes: int, common_from: int | None = None) -> ShmWindow:
            made = make(nbytes, common_from)
            self.spoil(made, group.rank)
            return made

        session.window = window  # type: ignore[method-assign]
        return session

    def spoil(self, window: ShmWindow, rank: int) -> None:
        raise NotImplementedError


class Unmoving(_Bad):
    """What is stored for a peer stays here."""

    def spoil(self, window: ShmWindow, rank: int) -> None:
        own = window.tensor(rank)
        copies = [own if p == rank else own.clone() for p in range(len(window.addresses))]
        window.tensor = copies.__getitem__  # type: ignore[method-assign, assignment]


class Mute(_Bad):
    """Words set at a peer do not come there."""

    def spoil(self, window: ShmWindow, rank: int) -> None:
        real = window.words.set

        def set_own(peer: int, offset: int, value: int) -> None:
            if peer == rank:
                real(peer, offset, value)

        window.words.set = set_own  # type: ignore[method-assign]


class Unreached(_Bad):
    """Mapping succeeded and gave no address, on rank 1 alone."""

    def __init__(self, address: int | None) -> None:
        self._address = address

    def spoil(self, window: ShmWindow, rank: int) -> None:
        if rank == 1:
            window.addresses = [self._address, *window.addresses[1:]]


def _prepare_with(rank: int, transport: _Bad) -> None:
    b = b_of(0, N, K)
    op = gemmlink.GemmAllGather(N, K, 5, transport=transport, epilogue="push")
    try:
        op.prepare()
    finally:  # and the next operation, over a good transport, is not disturbed
        got = gemmlink.gemm_all_gather(a_of(rank, 0, 5, K), b)
        assert_equal(got, gathered(0, [5, 5], b), "after a refused transport")


@pytest.mark.parametrize(
    "transport",
    [Unmoving(), Mute(), Unreached(None), Unreached(0)],
    ids=["unmoving", "mute", "no address", "null address"],
)
def test_a_transport_that_moves_nothing_is_refused_when_prepared(
    ranks: Ranks, transport: _Bad
) -> None:
    for outcome in ranks(2).outcomes(_prepare_with, transport):
        assert outcome.error.type == "Unavailable", outcome.error.trace
        assert "transport 'bad-transport'" in outcome.error.text
