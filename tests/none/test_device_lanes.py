"""Lanes of a device program: a stream each, or the call's own where ranks share a context."""

from __future__ import annotations

import threading
from typing import Any
from unittest import mock

import pytest
import torch

from gemmlink.core import prepare
from gemmlink.core.device import build
from gemmlink.threads import thread_groups
from tests.device_cases import check_calls, make
from tests.emulated import Emulated, emulation

WORLD = 2


def _rank(group: Any, name: str, failures: list[BaseException]) -> None:
    try:
        rest = {"group": group, "transport": "shm", "epilogue": "fused-lanes", "chunks": 2}
        with make(name, "cpu", 8, timeout_s=10.0, **rest) as op:
            check_calls(op, group.rank, WORLD, "cpu", [(8,) * WORLD, (3,) * WORLD])
    except BaseException as error:
        failures.append(error)


def _launched(name: str) -> str:
    """What two ranks that are threads have launched, all of them exact."""
    made: list[Emulated] = []
    failures: list[BaseException] = []

    def machine(device: torch.device) -> Emulated:
        made.append(Emulated(device))
        return made[-1]

    with emulation(), mock.patch.dict(build.MACHINES, cpu=machine):
        threads = [
            threading.Thread(target=_rank, args=(group, name, failures))
            for group in thread_groups(WORLD)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
    assert not failures, failures
    assert len(made) == WORLD
    return "\n".join(line for each in made for line in each.launches)


@pytest.mark.parametrize("name", ["all_gather", "all_reduce"])
def test_ranks_that_share_a_context_share_no_queue_for_lanes(name: str) -> None:
    launched = _launched(name)
    assert "copy on 0" in launched
    assert "copy on 1" not in launched
    assert "waits" not in launched


def test_other_ranks_have_a_stream_for_each_lane(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare, "_is_shared", lambda asked, rank: False)
    launched = _launched("all_gather")
    assert "copy on 0" not in launched
    assert "stream 1 waits" in launched


@pytest.mark.parametrize(
    ("other", "shared"),
    [
        ({}, True),
        ({"index": 1}, False),
        ({"pid": 6}, False),
        ({"pids": "pid:[2]"}, False),
    ],
    ids=["a thread", "on another device", "a process", "the same number elsewhere"],
)
def test_who_shares_a_context(other: dict[str, Any], shared: bool) -> None:
    first = {"pid": 5, "pids": "pid:[1]", "index": 0}
    assert prepare._is_shared([first, {**first, **other}], 0) is shared
