"""Lanes on CPUs: workers that copy in order, announce behind their copies, and can be drained."""

from __future__ import annotations

import contextlib
import gc
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch

from gemmlink.errors import PeerTimeout
from gemmlink.transport.cpu_lanes import CpuLane

SIZE = 64
#: How long a test waits for something that must come.
LIMIT_S = 20.0


class Bench:
    """Two windows, the words that a lane sets at its peer, and a door in front of every copy."""

    def __init__(self) -> None:
        self.source = torch.arange(SIZE, dtype=torch.uint8)
        self.target = torch.zeros(SIZE, dtype=torch.uint8)
        self.log: list[tuple[int, int, int, int]] = []
        self.open = threading.Event()
        self.failing: BaseException | None = None
        self._lanes: list[CpuLane] = []

    def set(self, peer: int, offset: int, value: int) -> None:
        """Take down peer, offset and value, and how much has been copied by then."""
        self.log.append((peer, offset, value, int(self.target.count_nonzero())))

    def read(self, offset: int) -> int:
        raise NotImplementedError

    def wait(self, offset: int, at_least: int, timeout_s: float) -> int:
        raise NotImplementedError

    def lane(self, peer: int = 1, index: int = 0) -> CpuLane:
        """A lane whose copies go through the door."""
        made = _Doored(self, peer, index)
        self._lanes.append(made)
        return made

    def close(self) -> None:
        """Let everything end."""
        self.open.set()
        for lane in self._lanes:
            lane.close()


class _Doored(CpuLane):
    def __init__(self, bench: Bench, peer: int, index: int) -> None:
        super().__init__(bench.source, bench.target, bench, peer, index)
        self._bench = bench

    def _copy(self, target: torch.Tensor, source: torch.Tensor) -> None:  # type: ignore[override]
        assert self._bench.open.wait(LIMIT_S), "nobody opened the door"
        if self._bench.failing is not None:
            raise self._bench.failing
        super()._copy(target, source)


@pytest.fixture
def bench() -> Iterator[Bench]:
    """A bench with the door open."""
    made = Bench()
    made.open.set()
    yield made
    made.close()


def _workers() -> set[threading.Thread]:
    return {t for t in threading.enumerate() if t.name.startswith("lane ")}


def _until(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + LIMIT_S
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.001)
    return condition()


def test_what_is_copied_is_what_lies_at_the_source(bench: Bench) -> None:
    lane = bench.lane()
    lane.copy(3, 20, 5)
    lane.drain(LIMIT_S)
    want = torch.zeros(SIZE, dtype=torch.uint8)
    want[20:25] = torch.arange(3, 8)
    assert torch.equal(bench.target, want)


def test_a_word_is_set_at_the_peer_behind_all_copies_before_it(bench: Bench) -> None:
    bench.open.clear()
    bench.source.fill_(1)
    lane = bench.lane(peer=5)
    for step in range(4):
        lane.copy(10 * step, 10 * step, 10)
        lane.set(8 * step, 100 + step)
    assert bench.log == [], "a word overtook its copy"
    bench.open.set()
    lane.drain(LIMIT_S)
    assert bench.log == [(5, 8 * step, 100 + step, 10 * (step + 1)) for step in range(4)]


def test_enqueueing_waits_for_nothing(bench: Bench) -> None:
    """All of it is accepted while the first copy cannot end; nothing has moved by then."""
    bench.open.clear()
    lane = bench.lane()
    for _ in range(1000):
        lane.copy(0, 0, SIZE)
    assert not bench.target.any()
    bench.open.set()
    lane.drain(LIMIT_S)
    assert torch.equal(bench.target, bench.source)


def test_copies_to_one_place_take_effect_in_order(bench: Bench) -> None:
    lane = bench.lane()
    for first in (40, 7, 21):
        lane.copy(first, 0, 8)
    lane.copy(0, 4, 8)  # the second half of what the last one wrote
    lane.drain(LIMIT_S)
    assert bench.target[:12].tolist() == [21, 22, 23, 24, 0, 1, 2, 3, 4, 5, 6, 7]


def test_the_source_is_read_when_the_copy_is_executed(bench: Bench) -> None:
    """So it must be left alone until the lane has drained."""
    bench.open.clear()
    lane = bench.lane()
    lane.copy(0, 0, 4)
    bench.source.fill_(77)
    bench.open.set()
    lane.drain(LIMIT_S)
    assert bench.target[:4].tolist() == [77] * 4


def test_drain_ends_only_when_everything_enqueued_has_been_done(bench: Bench) -> None:
    bench.open.clear()
    lane = bench.lane()
    lane.copy(0, 0, SIZE)
    lane.set(0, 1)
    threading.Timer(0.1, bench.open.set).start()
    lane.drain(LIMIT_S)
    assert torch.equal(bench.target, bench.source)
    assert len(bench.log) == 1


def test_a_lane_that_does_not_drain_in_time_says_what_is_left(bench: Bench) -> None:
    bench.open.clear()
    lane = bench.lane(peer=3, index=1)
    lane.copy(0, 0, 8)
    lane.set(0, 1)
    with pytest.raises(PeerTimeout) as caught:
        lane.drain(0.05)
    assert "lane 1 to rank 3 must drain within 0.05 s; got 0 of 2 steps done" in str(caught.value)
    assert (caught.value.peer, caught.value.seen, caught.value.wanted) == (3, 0, 2)
    with pytest.raises(PeerTimeout):
        lane.drain(0)
    bench.open.set()
    lane.drain(LIMIT_S)
    assert bench.log[0][:3] == (3, 0, 1), "a drain that ended in time-out stopped the lane"


def test_an_idle_lane_is_drained(bench: Bench) -> None:
    lane = bench.lane()
    lane.drain(0)
    lane.copy(0, 0, 8)
    lane.drain(LIMIT_S)
    lane.drain(0)
    assert bench.target[:8].tolist() == list(range(8))


def test_a_failed_copy_takes_what_follows_with_it_until_drain_has_told(bench: Bench) -> None:
    """Nothing that is not there is ever announced, whenever the failure is noticed."""
    bench.open.clear()
    bench.failing = ArithmeticError("the engine broke")
    lane = bench.lane()
    lane.set(0, 1)
    lane.copy(0, 0, 8)
    lane.set(8, 1)
    lane.copy(8, 8, 8)
    lane.set(16, 1)
    bench.open.set()
    assert _until(lambda: lane._failed is not None)
    bench.failing = None
    lane.copy(16, 16, 8)  # of the next call, made before anybody has noticed
    lane.set(24, 1)
    with pytest.raises(ArithmeticError, match="the engine broke"):
        lane.drain(LIMIT_S)
    assert [offset for _, offset, _, _ in bench.log] == [0]
    assert not bench.target.any()


def test_a_lane_works_again_once_drain_has_told_of_a_failure(bench: Bench) -> None:
    bench.failing = ArithmeticError("the engine broke")
    lane = bench.lane()
    for turn in (1, 2, 3):
        lane.copy(0, 0, 8)
        with pytest.raises(ArithmeticError, match="the engine broke"):
            lane.drain(LIMIT_S)
        assert not bench.target.any(), turn
    lane.drain(LIMIT_S)
    bench.failing = None
    lane.copy(0, 0, 8)
    lane.set(24, 1)
    lane.drain(LIMIT_S)
    assert bench.target[:8].tolist() == list(range(8))
    assert [offset for _, offset, _, _ in bench.log] == [24]


def test_drain_tells_of_a_failure_when_nothing_moves_any_more(bench: Bench) -> None:
    """What is still enqueued then must be passed over, not done after the lane has been mended."""
    bench.failing = ArithmeticError("the engine broke")
    lane = bench.lane()
    for _ in range(500):
        lane.copy(0, 0, 8)
        lane.set(0, 1)
    with pytest.raises(ArithmeticError, match="the engine broke"):
        lane.drain(LIMIT_S)
    bench.failing = None
    lane.copy(8, 8, 8)
    lane.drain(LIMIT_S)
    assert bench.log == []
    assert not bench.target[:8].any()


def test_a_failed_lane_does_not_stop_another(bench: Bench) -> None:
    bench.failing = ArithmeticError("the engine broke")
    broken = bench.lane(index=0)
    broken.copy(0, 0, 8)
    with pytest.raises(ArithmeticError):
        broken.drain(LIMIT_S)
    bench.failing = None
    good = bench.lane(index=1)
    good.copy(8, 8, 8)
    good.drain(LIMIT_S)
    assert bench.target[8:16].tolist() == list(range(8, 16))


def test_close_is_idempotent_and_lets_what_is_enqueued_end(bench: Bench) -> None:
    bench.open.clear()
    lane = bench.lane()
    lane.copy(0, 0, SIZE)
    lane.set(0, 1)
    for _ in range(3):
        lane.close()
    assert bench.log == [], "closing waited for the copy"
    bench.open.set()
    assert _until(lambda: len(bench.log) == 1)
    assert torch.equal(bench.target, bench.source)
    assert _until(lambda: not _workers()), "the worker of a closed lane goes on"


def test_a_lane_that_was_never_used_has_no_worker(bench: Bench) -> None:
    before = _workers()
    lane = bench.lane()
    lane.close()
    lane.close()
    assert _workers() <= before


def test_an_idle_lane_uses_no_processor(bench: Bench) -> None:
    """A lane that polled would take most of a core of the time that it is watched."""
    lanes = [bench.lane(index=index) for index in range(4)]
    for lane in lanes:
        lane.copy(0, 0, 8)
        lane.drain(LIMIT_S)
    gc.collect()
    used, waited = time.process_time(), 0.4
    time.sleep(waited)
    assert time.process_time() - used < waited / 2


def test_several_lanes_go_on_beside_each_other() -> None:
    """One that is stopped holds up no other; each announces its own copies only."""
    stopped, others = Bench(), Bench()
    others.open.set()
    with contextlib.closing(stopped), contextlib.closing(others):
        first = stopped.lane(index=0)
        first.copy(0, 0, SIZE)
        first.set(0, 1)
        lanes = [others.lane(peer=peer, index=index) for peer in (1, 2) for index in (0, 1)]
        for number, lane in enumerate(lanes):
            for part in range(8):
                offset = 16 * number + 2 * part
                lane.copy(offset, offset, 2)
                lane.set(offset, part)
        for lane in lanes:
            lane.drain(LIMIT_S)
        assert torch.equal(others.target, others.source)
        for number, (peer, _) in enumerate([(1, 0), (1, 1), (2, 0), (2, 1)]):
            mine = [entry[:3] for entry in others.log if entry[1] // 16 == number]
            assert mine == [(peer, 16 * number + 2 * part, part) for part in range(8)]
        assert stopped.log == []
        stopped.open.set()
        first.drain(LIMIT_S)
        assert len(stopped.log) == 1


def test_several_lanes_may_be_fed_from_several_threads(bench: Bench) -> None:
    bench.source.fill_(1)
    lanes = [bench.lane(index=index) for index in range(4)]

    def feed(index: int) -> None:
        for step in range(16):
            lanes[index].copy(16 * index + step, 16 * index + step, 1)
            lanes[index].set(index, step)

    feeders = [threading.Thread(target=feed, args=(index,)) for index in range(4)]
    for feeder in feeders:
        feeder.start()
    for feeder in feeders:
        feeder.join()
    for lane in lanes:
        lane.drain(LIMIT_S)
    assert bench.target.all()
    for index in range(4):
        assert [e[2] for e in bench.log if e[1] == index] == list(range(16))
