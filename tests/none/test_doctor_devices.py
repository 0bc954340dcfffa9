"""`doctor` walks the set-up of `symm_mem` and names the step that fails."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from gemmlink.cli import devices
from gemmlink.core.device import compiled, driver
from gemmlink.errors import Unavailable
from gemmlink.spawn import RankFailed
from gemmlink.transport import symm_mem

NAMES = [name for name, _ in devices.STEPS]


def _fail() -> str:
    raise Unavailable("a step must hold", "one that does not", "Do this.")


@pytest.mark.parametrize("at", range(len(NAMES)))
def test_the_step_that_fails_is_named_with_its_remedy(
    at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = [(name, _fail if number >= at else lambda: "fine") for number, name in enumerate(NAMES)]
    monkeypatch.setattr(devices, "STEPS", steps)
    *good, bad = [found for found in devices.walk() if found.name in NAMES]
    assert [found.name for found in good] == NAMES[:at]
    assert all(found.ok for found in good)
    text = "a step must hold; got one that does not. Do this."
    assert bad == (NAMES[at], text, False)
    behind = [found for found in devices.walk() if found.name not in NAMES]
    assert [found.text for found in behind] == [
        f"not looked at: {', '.join(NAMES[at + 1 :])}" for _ in NAMES[at + 1 : at + 2]
    ]


@pytest.mark.usefixtures("cpu_torch")
def test_a_torch_for_cpus_is_where_it_ends_here() -> None:
    first, second = devices.walk()
    assert (first.name, first.ok) == ("torch", False)
    assert "a torch for CPUs only. Install a torch with CUDA" in first.text
    assert second.text.startswith("not looked at: symmetric memory, driver, device")


def test_what_a_rank_met_is_told_in_a_line() -> None:
    trace = "Traceback (most recent call last):\n  ...\nUnavailable: torch must map every peer's\n"
    assert devices._last_line(RankFailed({1: trace})) == "Unavailable: torch must map every peer's"
    assert devices._last_line(KeyError()) == "KeyError"


class _Two:
    """Two devices, as torch would tell of them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.capability = (9, 0)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda each: f"device {each}")
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda each: self.capability)
        monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda one, two: one < two)
        monkeypatch.setattr(compiled, "function", lambda name, each: 1)


@pytest.fixture
def two(monkeypatch: pytest.MonkeyPatch) -> _Two:
    return _Two(monkeypatch)


def test_devices_are_looked_at(two: _Two) -> None:
    steps = dict(devices.STEPS)
    assert steps["device"]() == "device 0, device 1"
    assert steps["compute capability"]() == "9.0"
    assert steps["kernels"]() == "compiled and loaded on 2 devices"
    with pytest.raises(Unavailable, match=r"cuda:1, which cannot reach cuda:0\. See nvidia-smi"):
        steps["peer access"]()
    two.capability = (6, 1)
    with pytest.raises(Unavailable, match=r"capability 7\.0 or more; got 6\.1 of cuda:0"):
        steps["compute capability"]()


def test_no_device_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(Unavailable, match=r"none that torch sees\. See what nvidia-smi lists"):
        dict(devices.STEPS)["device"]()


def test_how_ranks_may_be_spread_is_told(
    two: _Two, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    look = dict(devices.STEPS)["ranks"]
    monkeypatch.delenv(symm_mem.OVERLAP, raising=False)
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    assert look() == "one on each of 2 devices, CUDA_DEVICE_MAX_CONNECTIONS: 32"
    monkeypatch.setenv(symm_mem.OVERLAP, "1")
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))
    assert f"no MPS, so that they take turns ({tmp_path})" in look()
    (tmp_path / "control").touch()
    assert f"MPS runs ({tmp_path})" in look()


def test_the_driver_is_asked_for_its_version(monkeypatch: pytest.MonkeyPatch) -> None:
    class _Library:
        @staticmethod
        def cuDriverGetVersion(number: object) -> int:
            number._obj.value = 13020  # type: ignore[attr-defined]
            return 0

    monkeypatch.setattr(driver, "library", _Library)
    assert dict(devices.STEPS)["driver"]() == "CUDA 13.2"
