"""A rank that comes late or raises at any point of a call: what the others hear, and after.

Every place of the protocol is tried: each word by which a rank enters a call, and each step of its
schedule.
"""

from __future__ import annotations

import time
from typing import Any

import pytest

import gemmlink
from gemmlink.errors import PeerLost, Poisoned
from tests.conftest import Ranks
from tests.recovery import (
    ENTRY_WORDS,
    HEARD_S,
    MODES,
    OPERATIONS,
    WORLD,
    Place,
    Planned,
    attempt,
    before,
    exact,
    fail,
    fail_when_others_have_ended,
    failing,
    places,
    poisoned,
    prepared,
    served,
    spread,
    steps,
    synchronised,
)

each_mode = pytest.mark.parametrize("mode", MODES)

#: Everything else that an operation may be asked for, with a mode that it means something to.
CHOICES: list[tuple[str, dict[str, Any]]] = [
    ("fused-push", {"result": "view"}),
    ("split-pull", {"result": "view", "completion": "receive_and_send"}),
    ("fused-pull", {"completion": "receive_and_send"}),
    ("fused-lanes", {"result": "view", "lanes": 2}),
    ("split-lanes", {"buffers": 2, "completion": "receive_and_send", "lanes": 2}),
    ("fused-push", {"buffers": 2, "result": "view"}),
    ("fused-pull", {"buffers": 2}),
]


# Late.


def _late(rank: int, mode: str) -> None:
    with prepared(mode) as op:
        for number, place in enumerate([None, *places(op)]):
            late = rank == number % WORLD
            if late and place is None:
                time.sleep(0.1)
            if late and place is not None:
                with before(op, place, lambda: time.sleep(0.06)):
                    exact(op, number, f"late at {place}")
            else:
                exact(op, number, f"another is late at {place}")


@each_mode
def test_a_rank_may_be_late_at_any_point(ranks: Ranks, mode: str) -> None:
    """Long enough for the others to look for a reason, and to find none."""
    ranks(WORLD).run(_late, mode, timeout_s=60)


# Failed.


def _raising(rank: int, mode: str, count: int, choices: dict[str, Any]) -> None:
    with prepared(mode, **choices) as op:
        entry = [place for place in places(op) if place not in steps(op)]
        found = [*spread(entry, 4), *steps(op)]
        found = spread(found, count) if count else found
        can_complete = synchronised([served(op, place) for place in found])[1]
        for number, place in enumerate(found):
            may_complete = rank in can_complete[number]
            _raise_and_go_on(rank, op, place, 3 * number + 1, may_complete)


def _raise_and_go_on(
    rank: int, op: gemmlink.GemmAllGather, place: Place, call: int, may_complete: bool
) -> None:
    what = f"rank 1 raises at {place}"
    epoch = op.launch.epoch + 1
    began = time.monotonic()
    if rank == 1:
        with before(op, place, fail):
            error = attempt(op, call, what)
        assert isinstance(error, Planned), f"{what}, where it has {error!r}"
    else:
        error = attempt(op, call, what)
        assert may_complete or error is not None, f"{what}: a result from nothing"
        if error is not None:
            assert isinstance(error, PeerLost), f"{what}: {error!r}"
            assert (error.peer, error.rank, error.epoch) == (1, rank, epoch), f"{what}: {error}"
            assert "rank 1 must complete" in str(error)
            assert f"call {epoch} of {op.operation}" in str(error)
    assert time.monotonic() - began < HEARD_S, what
    poisoned(op, what)
    op.reset()
    op.check()
    exact(op, call + 1, f"after a reset: {what}")


@pytest.mark.parametrize("mode", [*MODES, *OPERATIONS, "all_to_all split-pull"])
def test_a_rank_may_raise_at_any_point(ranks: Ranks, mode: str) -> None:
    """It has its own exception, the others ``PeerLost``; then nothing works but ``reset``."""
    ranks(WORLD).run(_raising, mode, 0, {}, timeout_s=60)


@pytest.mark.parametrize(("mode", "choices"), CHOICES)
def test_a_reset_serves_every_kind_of_result(
    ranks: Ranks, mode: str, choices: dict[str, Any]
) -> None:
    ranks(WORLD).run(_raising, mode, 9, choices, timeout_s=60)


def _completed(rank: int, mode: str) -> None:
    with prepared(mode) as op:
        exact(op, 0, "before")
        if rank == 1:
            with before(op, steps(op)[-1], fail_when_others_have_ended):
                assert isinstance(attempt(op, 1, "last step"), Planned)
        else:
            exact(op, 1, "rank 1 fails after it has sent everything")
            synchronised()
        synchronised()
        error = failing(op.check)
        assert isinstance(error, Poisoned)
        assert "call 2" in str(error), error
        poisoned(op, "after it")
        epochs = synchronised(op.launch.epoch)
        assert epochs == [2] * WORLD, f"a call that is refused at once uses no number: {epochs}"
        op.reset()
        exact(op, 2, "after the reset")


@each_mode
def test_a_completed_call_keeps_its_result_when_another_rank_fails(ranks: Ranks, mode: str) -> None:
    """It learns of the failure at the next look or call."""
    ranks(WORLD).run(_completed, mode)


def _heard_late(rank: int, mode: str) -> None:
    """Rank 1 fails in a call that the others completed, and tells rank 2 late, in their next."""
    last_told = ENTRY_WORDS * (WORLD - 1) + 2

    def fail_in_their_next_call() -> None:
        synchronised()
        time.sleep(0.2)
        fail()

    with prepared(mode) as op:
        if rank == 1:
            with (
                before(op, steps(op)[-1], fail_in_their_next_call),
                before(op, ("word", last_told), lambda: time.sleep(0.5)),
            ):
                assert isinstance(attempt(op, 1, "last step"), Planned)
        else:
            exact(op, 1, "completed")
            synchronised()
            error = attempt(op, 2, "while rank 1 fails")
            assert isinstance(error, Poisoned), f"rank {rank}: {error!r}"
        poisoned(op, "after it")
        op.reset()
        exact(op, 3, "after the reset")


@each_mode
def test_a_failure_that_is_heard_of_from_another_is_not_that_ones(ranks: Ranks, mode: str) -> None:
    ranks(WORLD).run(_heard_late, mode)
