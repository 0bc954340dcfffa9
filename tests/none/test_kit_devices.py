"""Where the kit's tensors lie, and what it asks of a device, as far as none is needed for that."""

from __future__ import annotations

import pytest
import torch

from gemmlink.conformance import devices, windows
from gemmlink.errors import Unavailable


@pytest.mark.parametrize(
    ("transport", "device"),
    [
        (None, "cpu"),
        ("shm", "cpu"),
        ("symm_mem", "cuda"),  # also where it cannot be had
        ("gemmlink.transport.shm:SharedMemory", "cpu"),
        ("no.such:Transport", "cpu"),  # told by whoever describes it
    ],
)
def test_tensors_lie_where_the_transport_serves_them(transport: str | None, device: str) -> None:
    assert devices.served_by(transport) == device


def test_the_default_transport_is_the_one_that_auto_takes_first() -> None:
    assert [devices.default_transport(kind) for kind in devices.KINDS] == ["shm", "symm_mem"]


def test_a_missing_device_is_told_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert devices.lacking("cpu") is None
    assert "none that torch sees. Run it where nvidia-smi" in str(devices.lacking("cuda"))
    with pytest.raises(Unavailable, match="tensors on cuda need a device"):
        devices.require("cuda")


def test_ranks_take_devices_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    for rank in range(3):
        devices.take("cuda", rank)
        devices.take("cpu", rank)
    monkeypatch.setenv("LOCAL_RANK", "1")
    devices.take("cuda", 6)
    assert taken == [0, 1, 0, 1]


def test_what_cannot_be_provided_is_of_the_memory_that_windows_lie_in() -> None:
    assert windows._spoiler("", "cpu") is windows.little_memory
    assert windows._spoiler("", "cuda") is windows.little_device_memory
    named = "gemmlink.conformance.windows:little_memory"
    assert windows._spoiler(named, "cuda") is windows.little_memory


def test_a_device_is_asked_for_the_bytes_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (30, 100))
    assert windows._bytes("cuda") == 70
    assert windows._bytes("cpu") > 1 << 20
