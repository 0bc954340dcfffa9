"""For tests in which a rank goes wrong: places in a call to do that at, and groups of their own.

A *place* is a point of the protocol on one rank: before one of the words that it sets to enter a
call, before a step of its schedule, or beside a copy in one of its lanes. ``before`` does something
there, once.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.process import BaseProcess
from typing import Any, TypeVar
from unittest import mock

import torch
import torch.distributed as dist

import gemmlink
from gemmlink.core import call as call_module
from gemmlink.core.entry import Entry
from gemmlink.core.interpret import CallState
from gemmlink.groups import TorchGroup
from gemmlink.prepared import Prepared
from gemmlink.spec.contracts import Lane, Words
from gemmlink.spec.schedule import Set, Wait, Word
from tests.operations import OBJECTS, Asked, check
from tests.pool import PRELOAD

MODES = ("fused-push", "split-push", "fused-pull", "split-pull", "fused-lanes", "split-lanes")
N, K, M = 10, 8, 4
#: Columns that an all-to-all deals out, to two ranks or to three; the others stay.
EXTENT = 6
WORLD, CHUNKS = 3, 2
#: The other operations, each with a mode of another kind.
OPERATIONS = (
    "all_to_all fused-push",
    "reduce_scatter split-pull",
    "all_reduce fused-lanes",
    "all_reduce split-lanes+pull",
)
#: Limit of a call where no rank is to reach it, in seconds; hearing of a failure takes far less.
LIMIT_S = 30.0
HEARD_S = 10.0

#: Words that a rank sets at each peer to enter a call: an entry record, and that it is there.
ENTRY_WORDS = 4

Place = tuple[str, int]
AnyPlace = TypeVar("AnyPlace", Place, Place | None)
Deed = Callable[[], None]


class Planned(Exception):
    """The error that a test raises in the middle of a call."""


def fail() -> None:
    """A deed: raise."""
    raise Planned("as the test planned")


def fail_when_others_have_ended() -> None:
    """A deed: raise, once the other ranks have completed the call and are ``synchronised``."""
    synchronised()
    fail()


def prepared(how: str, **choices: Any) -> Any:
    """Collective: an operation of the size that these tests use.

    ``how`` is a mode, for an all-gather, or an operation and a mode: ``"all_reduce fused-push"``.
    """
    name, _, mode = how.rpartition(" ")
    given = {"chunks": CHUNKS, "timeout_s": LIMIT_S, **choices}
    if name == "all_to_all":
        given["extent"] = EXTENT
    return OBJECTS[name or "all_gather"](N, K, 2 * M, epilogue=mode, **given).prepare()


def exact(op: Any, call: int, what: str, rows: Sequence[int] | None = None) -> None:
    """A call with the inputs number ``call``, right in every element."""
    rank = op.group.rank
    rows = tuple(rows or [M] * op.group.world)
    asked = Asked(op.operation, rows, N, call, EXTENT, k=K)
    check(op(asked.a(rank), asked.b(rank)), asked, rank, f"inputs {call}, {what}")


def attempt(op: Prepared, call: int, what: str) -> Exception | None:
    """A call that may fail: its error, or None after an exact result."""
    try:
        exact(op, call, what)
    except AssertionError:
        raise
    except Exception as error:
        return error
    return None


def failing(bad: Callable[[], Any]) -> Exception:
    """The error of what must fail."""
    try:
        value = bad()
    except AssertionError:
        raise
    except Exception as error:
        return error
    raise AssertionError(f"returned {value!r} where an error was due")


def poisoned(op: Prepared, what: str) -> None:
    """After a failure neither a call nor a look finds the operation usable."""
    for use in (lambda: exact(op, 0, what), op.check):
        error = failing(use)
        assert isinstance(error, gemmlink.Poisoned), f"{what}: {error!r}"


# Places.


def steps(op: Prepared) -> list[Place]:
    """Every step of this rank's schedule."""
    return [("step", index) for index in range(len(op.launch.program.steps))]


def places(op: Prepared) -> list[Place]:
    """Every word by which this rank enters a call, then every step of its schedule."""
    entry = range(ENTRY_WORDS * (op.group.world - 1) if op.launch.words is not None else 0)
    return [*(("word", index) for index in entry), *steps(op)]


def lane_places(op: Prepared) -> list[Place]:
    """Before and after the first copy of each of this rank's lanes, in the lane."""
    lanes = range(len(op.launch.program.lanes))
    return [(kind, index) for index in lanes for kind in ("copy", "copied")]


def spread(found: Sequence[AnyPlace], count: int) -> list[AnyPlace]:
    """``count`` of the places, the first and the last among them."""
    return [found[round(i * (len(found) - 1) / (count - 1))] for i in range(count)]


@contextlib.contextmanager
def before(op: Prepared, place: Place, deed: Deed) -> Iterator[None]:
    """Within, this rank does ``deed`` before it goes on at ``place``."""
    kind, index = place
    launch = op.launch
    if kind == "word":
        assert launch.words is not None
        trap = _Trap(launch.words, index, deed)
        entry = Entry(trap, launch.layout, op.group.rank, launch.schedule.plan.peers)
        with mock.patch.object(launch, "words", trap), mock.patch.object(launch, "entry", entry):
            yield
        return
    if kind in ("copy", "copied"):
        with _in_lane([*launch.program.lanes.values()][index], kind, deed):
            yield
        return
    step = launch.program.steps[index]
    run = step.run

    def first(call: CallState) -> None:
        deed()
        run(call)

    with mock.patch.object(step, "run", first):
        yield


@contextlib.contextmanager
def _in_lane(lane: Lane, kind: str, deed: Deed) -> Iterator[None]:
    copy, reached = lane._copy, threading.Event()  # type: ignore[attr-defined]

    def once() -> None:
        if not reached.is_set():
            reached.set()
            deed()

    def run(target: torch.Tensor, source: torch.Tensor) -> None:
        read = source.clone()  # what it has read it writes, however late
        if kind == "copy":
            once()
        copy(target, read)
        once()

    with mock.patch.object(lane, "_copy", run):
        yield
        assert reached.wait(LIMIT_S), "the lane had nothing to copy"  # its rank may be ahead of it


class _Trap:
    """Words that do a deed before the one numbered ``index`` is set."""

    def __init__(self, words: Words, index: int, deed: Deed) -> None:
        self._words = words
        self._left = index
        self._deed = deed

    def set(self, peer: int, offset: int, value: int) -> None:
        self._left -= 1
        if self._left == -1:
            self._deed()
        self._words.set(peer, offset, value)

    def read(self, offset: int) -> int:
        return self._words.read(offset)

    def wait(self, offset: int, at_least: int, timeout_s: float) -> int:
        return self._words.wait(offset, at_least, timeout_s)


def served(op: Prepared, place: Place) -> list[int]:
    """The ranks to which this one has announced all its data when it comes to ``place``."""
    kind, index = place
    left = op.launch.program.steps[index if kind == "step" else 0 :]
    announced = [step.placed.action for step in left if isinstance(step.placed.action, Set)]
    owed = {action.at for action in announced if action.word.kind == "arrive"}
    return [rank for rank in range(op.group.world) if rank not in owed]


@contextlib.contextmanager
def call_limit(op: Prepared, limit_s: float) -> Iterator[None]:
    """Within, calls of ``op`` have another limit."""
    with mock.patch.object(op.launch, "timeout_s", limit_s):
        yield


# Many places at once.


class Scene:
    """Threads of one process that stop at a place of their own each, all at the same time.

    What is done to the process then is done to it at all these places: it can be killed only once.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._stopped = threading.Semaphore(0)
        self._go = threading.Event()

    def stop(self) -> None:
        """The deed of each thread: say that it is there, and stay."""
        self._stopped.release()
        assert self._go.wait(2 * LIMIT_S), "nobody let this thread go on"

    def when_all_have_stopped(self, deed: Deed) -> None:
        """Do ``deed``, then let all go on."""
        deadline = time.monotonic() + LIMIT_S
        for number in range(self._count):
            came = self._stopped.acquire(timeout=max(0.0, deadline - time.monotonic()))
            assert came, f"{number} of {self._count} threads came to their places"
        deed()
        self._go.set()


def in_threads(act: Callable[[int], Any], count: int) -> list[Any]:
    """``act(0)`` to ``act(count - 1)``, each in a thread of its own; their values."""
    return at_the_same_time(act, count, lambda: None)


def at_the_same_time(act: Callable[[int], Any], count: int, beside: Deed) -> list[Any]:
    """``in_threads``, while this thread does ``beside``."""
    with ThreadPoolExecutor(count) as pool:
        begun = [pool.submit(act, number) for number in range(count)]
        beside()
        return [one.result() for one in begun]


class Clock:
    """The clock by which calls measure their limit. A thread may put its own forward."""

    def __init__(self) -> None:
        self._ahead = threading.local()

    def monotonic(self) -> float:
        """As ``time.monotonic``."""
        return time.monotonic() + float(getattr(self._ahead, "seconds", 0.0))

    def forward(self, seconds: float) -> None:
        """In this thread it is ``seconds`` later from now on."""
        self._ahead.seconds = getattr(self._ahead, "seconds", 0.0) + seconds


@contextlib.contextmanager
def own_clock() -> Iterator[Clock]:
    """Within, calls measure their limit by this clock. Entered by one thread for all."""
    clock = Clock()
    with mock.patch.object(call_module, "time", clock):
        yield clock


@contextlib.contextmanager
def no_patience(op: Prepared, peer: int, when: threading.Event, clock: Clock) -> Iterator[None]:
    """Within, and from ``when`` on, the limit passes as soon as a call waits for ``peer``.

    What is awaited of any other rank has all the time that it needs, however busy the machine is.
    ``clock`` is of ``own_clock``.
    """
    launch = op.launch
    actions = [step.placed.action for step in launch.program.steps]
    waits = [action.word for action in actions if isinstance(action, Wait)]
    words = [Word("enter", peer), *(word for word in waits if word.source == peer)]
    offsets = {launch.layout.word(word) for word in words}
    assert launch.words is not None

    def in_vain(offset: int) -> None:
        if offset in offsets and when.is_set():
            clock.forward(2 * LIMIT_S)

    with mock.patch.object(launch, "words", _Impatient(launch.words, in_vain)):
        yield


class _Impatient:
    """Words that tell of each wait that was in vain."""

    def __init__(self, words: Words, in_vain: Callable[[int], None]) -> None:
        self.set = words.set
        self.read = words.read
        self._wait = words.wait
        self._in_vain = in_vain

    def wait(self, offset: int, at_least: int, timeout_s: float) -> int:
        seen = self._wait(offset, at_least, timeout_s)
        if seen < at_least:
            self._in_vain(offset)
        return seen


# Groups.


class Party:
    """As much of a process group as ``TorchGroup`` uses."""

    def __init__(self, store: Any, rank: int, world: int) -> None:
        self._rank = rank
        self._world = world
        self._store = store

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._world

    def get_group_store(self) -> Any:
        return self._store


def own_group(path: str, rank: int, world: int) -> TorchGroup:
    """A group over the file ``path``, whatever process groups there are."""
    return TorchGroup(Party(dist.FileStore(path, world), rank, world))


def started(target: Callable[..., None], *arguments: Any) -> BaseProcess:
    """A process of its own for a rank that is to be killed: no pool has to start anew for it."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)  # for a test that comes before any pool
    process = context.Process(target=target, args=arguments, daemon=True)
    process.start()
    return process


# What a process holds.


def named(pids: Sequence[int]) -> list[str]:
    """What these processes have in /dev/shm by name; others may be at work there too."""
    return [n for n in os.listdir("/dev/shm") if any(f"gemmlink-{pid}-" in n for pid in pids)]


def timed(act: Callable[[], Any]) -> float:
    """Seconds that ``act`` takes."""
    started = time.monotonic()
    act()
    return time.monotonic() - started


def synchronised(value: Any = None) -> list[Any]:
    """Collective over the default group: every rank's value."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values
