"""Lanes whose words overtake their copies: announced once drained, the result is right."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist

from gemmlink.epilogues.lanes import Lanes
from gemmlink.spec.contracts import Capabilities, Group, Words
from gemmlink.spec.operations import Phase
from gemmlink.spec.schedule import Plan, Schedule
from gemmlink.transport.shm import SharedMemory, ShmSession, ShmWindow
from tests.conftest import Ranks
from tests.refs import a_of, b_of, gathered
from tests.result_cases import Case, K, M, N


class LateLane:
    """Sets words at once; copies when drained, in any order."""

    def __init__(self, own: torch.Tensor, theirs: torch.Tensor, words: Words, peer: int) -> None:
        self._own = own
        self._theirs = theirs
        self._words = words
        self._peer = peer
        self._left: list[tuple[int, int, int]] = []

    def copy(self, src_offset: int, dst_offset: int, nbytes: int) -> None:
        self._left.append((src_offset, dst_offset, nbytes))

    def set(self, offset: int, value: int) -> None:
        self._words.set(self._peer, offset, value)

    def drain(self, timeout_s: float) -> None:
        random.shuffle(self._left)
        for source, target, nbytes in self._left:
            time.sleep(random.random() * 0.001)
            self._theirs[target : target + nbytes].copy_(self._own[source : source + nbytes])
        self._left.clear()


class LateLanes(SharedMemory):
    """Shared memory with lanes that promise nothing before they have drained."""

    name = "late-lanes"

    def probe(self) -> Capabilities:
        return replace(super().probe(), lanes=("after_drain",))

    def open(self, group: Group, *, key: str, timeout_s: float) -> ShmSession:
        session = super().open(group, key=key, timeout_s=timeout_s)
        make = session.window

        def window(nbytes: int, common_from: int | None = None) -> ShmWindow:
            made = make(nbytes, common_from)
            lanes: dict[tuple[int, int], LateLane] = {}

            def lane(peer: int, index: int) -> LateLane:
                if (peer, index) not in lanes:
                    own, theirs = made.tensor(group.rank), made.tensor(peer)
                    lanes[peer, index] = LateLane(own, theirs, made.words, peer)
                return lanes[peer, index]

            made.lane = lane  # type: ignore[method-assign, assignment]
            return made

        session.window = window  # type: ignore[method-assign]
        return session


class Hasty(Lanes):
    """Announces as if lanes kept their order."""

    name = "hasty"

    def __init__(self, fused: bool) -> None:
        self._fused = fused

    def forms(self) -> tuple[bool, ...]:
        return (self._fused,)

    def schedule(self, phase: Phase, plan: Plan) -> Schedule:
        return super().schedule(phase, replace(plan, lane_order="in_order"))


def _over_late_lanes(rank: int, epilogue: Any, case: Case) -> list[str]:
    """What four calls come to: ``right``, ``wrong``, or the error that ends them."""
    seen = []
    case = replace(case, mode=epilogue)
    with case.op(transport=LateLanes(), timeout_s=10) as op:
        for call in range(4):
            b = b_of(call, N, K)
            got = op(a_of(rank, call, M, K), b)
            seen.append("right" if torch.equal(got, gathered(call, [M] * 3, b)) else "wrong")
            dist.barrier()
    return seen


def _late_cases() -> Iterator[Case]:
    for mode in ("fused-lanes", "split-lanes"):
        for result, complete, lanes in product(
            ("copy", "view"), ("receive", "receive_and_send"), (1, 2, 3)
        ):
            yield Case(mode, result, 1, complete, 4, lanes)


@pytest.mark.parametrize("case", list(_late_cases()), ids=str)
def test_lanes_that_promise_no_order_are_announced_once_drained(ranks: Ranks, case: Case) -> None:
    assert ranks(3).run(_over_late_lanes, case.mode, case) == [["right"] * 4] * 3


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "split"])
def test_announcing_before_lanes_have_drained_gives_wrong_results(
    ranks: Ranks, fused: bool
) -> None:
    """The same transport and a schedule for lanes in order: the test above can fail."""
    case = Case("hasty", "copy", 1, "receive", 4, 2)
    seen = ranks(3).run(_over_late_lanes, Hasty(fused), case)
    assert any("wrong" in calls for calls in seen), seen
