"""`ipc` on a device: what is not a matter of every transport."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import Ranks
from tests.gpu import ipc_cases as cases

ROOT = Path(__file__).parents[2]

pytestmark = [
    pytest.mark.filterwarnings("default"),
    pytest.mark.parametrize("transport", ["ipc"]),
]


@pytest.mark.parametrize("world", [2, 4])
def test_foreign_processes_store_in_the_window(ranks: Ranks, world: int) -> None:
    found = ranks(world).run(cases.foreign_processes, world, timeout_s=60)
    assert len(set(found[0])) == world, found
    assert found == [found[0]] * world


def test_windows_that_come_and_go_take_no_memory(ranks: Ranks) -> None:
    for seen in ranks(3).run(cases.windows_come_and_go, 3, 50, 16 << 20, timeout_s=60):
        print(seen)
        assert seen["lost"] < 64 << 20, seen
        assert seen["after close"] == 0, seen


def test_a_view_keeps_memory_and_then_lets_it_go(ranks: Ranks) -> None:
    for rank, seen in enumerate(ranks(2).run(cases.a_kept_view, 2, timeout_s=60)):
        assert seen == {"seen": 2 - rank, "held": 1, "after": 0}, seen


def test_memory_of_the_caching_allocator_is_told_by_base_and_offset(ranks: Ranks) -> None:
    assert ranks(2).run(cases.sub_allocation, 2, timeout_s=60) == [7, 7]


def test_virtual_memory_is_refused_by_name(ranks: Ranks) -> None:
    for seen in ranks(2).run(cases.virtual_memory, 2, timeout_s=60):
        assert seen["type"] == "Unsupported", seen
        assert "expandable_segments" in seen["text"], seen


def test_windows_are_none_of_expandable_segments(ranks: Ranks) -> None:
    ranks(2).run(cases.under_expandable_segments, 2, timeout_s=60)


@pytest.mark.parametrize("mode", ["split-push", "split-pull", "fused-lanes"])
def test_threads_are_ranks(mode: str, transport: str) -> None:
    # A process of its own: the streams of all ranks in it need a hardware queue each, and how many
    # there are is fixed when a process first uses its device.
    script = f"from tests.gpu.ipc_cases import threads; threads(2, {mode!r})"
    path = os.pathsep.join([str(ROOT), *filter(None, sys.path)])
    environment = {**os.environ, "PYTHONPATH": path, "CUDA_DEVICE_MAX_CONNECTIONS": "32"}
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=environment, cwd=ROOT, capture_output=True, text=True, timeout=150,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]


def test_doctor_finds_every_step_good(ranks: Ranks) -> None:
    (steps,) = ranks(1).run(cases.doctor_steps, 1, timeout_s=120)
    print(steps)
    assert all(ok for _, ok, _ in steps), steps
