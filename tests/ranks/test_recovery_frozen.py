"""A rank that is stopped at any point of a call, given up by the others, and then goes on."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from gemmlink.errors import PeerLost, PeerTimeout, Poisoned
from tests.conftest import Ranks
from tests.recovery import (
    LIMIT_S,
    MODES,
    OPERATIONS,
    WORLD,
    Clock,
    Place,
    Scene,
    at_the_same_time,
    attempt,
    before,
    exact,
    failing,
    in_threads,
    lane_places,
    no_patience,
    own_clock,
    own_group,
    places,
    poisoned,
    prepared,
    synchronised,
)

#: The rank of the pool whose process is stopped.
FROZEN = 1


class Case:
    """One place at which a rank freezes, in an operation over a group of its own.

    From case to case the process that freezes has another rank in the group.
    """

    def __init__(self, rank: int, folder: str, mode: str, number: int) -> None:
        self.rank = (rank + number) % WORLD
        self.frozen = (FROZEN + number) % WORLD
        group = own_group(f"{folder}/all{number}", self.rank, WORLD)
        self.op = prepared(mode, group=group)
        found: list[Place | None] = [None, *places(self.op), *lane_places(self.op)]
        self.place = found[number]
        self.what = f"rank {self.frozen} is frozen at {self.place or 'the door'}"
        self.completed = False
        exact(self.op, 0, f"before {self.what}")

    def freeze(self, scene: Scene) -> None:
        """On the rank that freezes: a call in which it does so."""
        if self.place is None:
            scene.stop()
            error = attempt(self.op, 1, self.what)
        else:
            with before(self.op, self.place, scene.stop):
                error = attempt(self.op, 1, self.what)
        assert isinstance(error, PeerTimeout | Poisoned | None), f"{self.what}: {error!r}"
        self.completed = error is None

    def give_up(self, stopped: threading.Event, clock: Clock) -> None:
        """On the others: a call that lacks the frozen rank, and those after it."""
        with no_patience(self.op, self.frozen, stopped, clock):
            error = attempt(self.op, 1, self.what)
            self.completed = error is None
            if error is None:  # it had sent everything
                error = failing(lambda: exact(self.op, 2, self.what))
        if not isinstance(error, Poisoned):
            assert isinstance(error, PeerTimeout), f"{self.what}: {error!r}"
            self._timed_out(error)
        poisoned(self.op, self.what)

    def _timed_out(self, error: PeerTimeout) -> None:
        epoch, frozen, what = self.op.launch.epoch, self.frozen, self.what
        found = (error.peer, error.rank, error.epoch)
        assert found == (frozen, self.rank, epoch), f"{what}: {error}"
        if isinstance(error, PeerLost):  # the other one has told
            return
        assert error.operation == self.op.operation
        assert error.seen < error.wanted, f"{what}: {error}"
        kind, _, rest = error.word.partition("[")
        assert kind in ("enter", "free", "arrive", "read"), error.word
        assert rest.startswith(str(frozen))
        assert ("chunk" in rest) == (kind == "arrive"), error.word
        assert f"rank {frozen} must set {error.word} to {error.wanted} within" in str(error)
        place = f"at rank {self.rank} in call {epoch} of {self.op.operation}"
        assert f"got {error.seen} {place}" in str(error)

    def reset_in_vain(self) -> None:
        """A reset while the rank is frozen."""
        error = failing(lambda: self.op.reset(timeout_s=0.3))
        assert type(error) is PeerTimeout, f"{self.what}: {error!r}"
        assert error.peer in (self.frozen, -1), f"{self.what}: {error}"  # others may be late, too
        _, _, absent = str(error).partition("nothing from ranks [")
        assert str(self.frozen) in absent.partition("]")[0].split(", "), f"{self.what}: {error}"
        poisoned(self.op, self.what)

    def compare(self, have: list[bool]) -> None:
        """After the thaw: ``have`` says which ranks of the pool have a result."""
        # A rank whose lane froze may have completed the call before.
        in_a_lane = self.place is not None and self.place in lane_places(self.op)
        if not in_a_lane:
            what = f"{self.what}: it has a result that others gave up"
            assert all(have) or not have[FROZEN], what
        error = failing(lambda: exact(self.op, 2, self.what))  # the others have failed in it
        assert isinstance(error, PeerLost | Poisoned), f"{self.what}: {error!r}"
        poisoned(self.op, self.what)

    def recover(self) -> None:
        """Collective: the operation is as good as new."""
        self.op.reset()
        for call in (3, 4):
            exact(self.op, call, f"after the reset; {self.what}")
        self.op.close()


def _freeze() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def _wait_until_stopped(pid: int) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not _stopped(pid):
        assert time.monotonic() < deadline, "the rank never froze"
        time.sleep(0.01)


def _stopped(pid: int) -> bool:
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rsplit(")", 1)[1].split()[0] in "Tt"


def _others(rank: int, pid: int, few: Any, cases: list[Case]) -> None:
    """What the ranks do that are not frozen, until they have thawed the other one."""
    stopped = threading.Event()

    def notice() -> None:
        _wait_until_stopped(pid)
        stopped.set()

    with own_clock() as clock:
        at_the_same_time(lambda i: cases[i].give_up(stopped, clock), len(cases), notice)
    dist.barrier(few)
    assert _stopped(pid)
    in_threads(lambda i: cases[i].reset_in_vain(), len(cases))
    dist.barrier(few)
    with prepared("fused-push", group=few) as other:
        for number in range(60):
            if rank == 0 and number == 10:
                os.kill(pid, signal.SIGCONT)
            exact(other, 1000 + number, "beside the frozen rank")


def _freezing(rank: int, folder: str, mode: str, count: int) -> None:
    pid = synchronised(os.getpid())[FROZEN]
    few = dist.new_group([r for r in range(WORLD) if r != FROZEN])
    cases = in_threads(lambda number: Case(rank, folder, mode, number), count)
    synchronised()
    if rank == FROZEN:
        scene = Scene(count)
        freeze_all = lambda: scene.when_all_have_stopped(_freeze)  # noqa: E731
        at_the_same_time(lambda i: cases[i].freeze(scene), count, freeze_all)
    else:
        _others(rank, pid, few, cases)
        dist.destroy_process_group(few)
    for case, *have in zip(cases, *synchronised([c.completed for c in cases]), strict=True):
        case.compare(have)
    in_threads(lambda i: cases[i].recover(), count)


def _count(rank: int, mode: str) -> int:
    with prepared(mode) as op:
        return 1 + len(places(op)) + len(lane_places(op))


@pytest.mark.parametrize("mode", [*MODES, OPERATIONS[0], OPERATIONS[-1]])
def test_a_rank_that_thaws_harms_nobody(ranks: Ranks, tmp_path: Path, mode: str) -> None:
    """The others time out, go on without it, and all of them recover the operation together.

    Tried at all places at once: the process has an operation and a thread for each.
    """
    count = ranks(WORLD).run(_count, mode)[0]
    ranks(WORLD).run(_freezing, str(tmp_path), mode, count, timeout_s=4 * LIMIT_S)
