"""`transport.handles`: the way from one rank to another's memory, and what is refused by name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from gemmlink.errors import Unsupported
from gemmlink.transport import handles
from gemmlink.transport.handles import Reached, Way
from gemmlink.transport.vendor import Vendor
from tests import fake_cuda
from tests.fake_ipc import NAMES


@pytest.fixture
def vendor() -> Iterator[Vendor]:
    fake_cuda.forget()
    yield Vendor(NAMES)
    fake_cuda.forget()
    assert fake_cuda.held() == (0, 0), "a test left memory behind"


def _place(**rest: Any) -> dict[str, Any]:
    first = {"boot": "b", "host": "h (pid 5)", "vendor": "CUDA", "bus": fake_cuda.BUS[0]}
    return {**first, "pid": 5, "pids": "pid:[1]", **rest}


@pytest.mark.parametrize(
    ("theirs", "is_self", "expected"),
    [
        (_place(), True, Way.OWN),
        (_place(), False, Way.POINTER),
        (_place(bus=fake_cuda.BUS[1]), False, Way.POINTER),
        (_place(pid=6), False, Way.HANDLE),
        (_place(pids="pid:[2]"), False, Way.HANDLE),
    ],
    ids=["self", "thread", "thread on another device", "process", "same pid in another namespace"],
)
def test_the_way_to_a_peer(theirs: dict[str, Any], is_self: bool, expected: Way) -> None:
    assert handles.way(_place(), theirs, is_self) is expected


def test_a_rank_on_another_host_is_refused_with_both_names() -> None:
    places = [_place(), _place(), _place(boot="c", host="g (pid 9)")]
    with pytest.raises(Unsupported, match=r"one host; got rank 0 on h .pid 5.*rank 2 on g .pid 9"):
        handles.refuse_apart(places)


def test_devices_of_two_vendors_are_refused() -> None:
    with pytest.raises(Unsupported, match=r"one vendor; got rank 0 on .*CUDA, and rank 1 on .*HIP"):
        handles.refuse_apart([_place(), _place(vendor="HIP")])


def test_a_device_reaches_itself_without_being_asked(vendor: Vendor) -> None:
    places = [_place(), _place(bus=fake_cuda.BUS[1]), _place(bus="0000:ff:00.0")]
    assert handles.reach(vendor, 0, places) == [True, True, None]
    fake_cuda.DEAF.add((1, 0))
    assert handles.reach(vendor, 0, places) == [True, True, None]
    assert handles.reach(vendor, 1, places) == [False, True, None]


@pytest.mark.parametrize(
    ("back", "words"),
    [(True, "can the reverse"), (False, "cannot the reverse"), (None, "does not know whether")],
)
def test_access_in_one_direction_is_not_enough(back: bool | None, words: str) -> None:
    places = [_place(), _place(bus=fake_cuda.BUS[1])]
    text = rf"rank 1 on 0000:1b:00.0, which cannot access rank 0 on 0000:1a:00.0, which {words}"
    reached: list[list[bool | None]] = [[True, back], [False, True]]
    if back is False:
        text = r"rank 0 on 0000:1a:00.0, which cannot access rank 1 .*, which cannot the reverse"
    with pytest.raises(Unsupported, match=text):
        handles.refuse_unreachable(places, reached)
    handles.refuse_unreachable(places, [[True, None], [None, True]])  # opening will tell


def test_memory_is_told_by_base_and_offset(vendor: Vendor) -> None:
    base = vendor.allocate(4096)
    try:
        record = handles.told(vendor, base + 256, 512, with_handle=True)
        assert (record["base"], record["offset"], record["nbytes"]) == (base, 256, 512)
        assert bytes.fromhex(record["handle"]) == vendor.export(base)
        assert handles.told(vendor, base, 4096, with_handle=False)["handle"] == ""
        with pytest.raises(Unsupported, match=r"in one allocation; got 512 bytes at .* of 4096"):
            handles.told(vendor, base + 4000, 512, with_handle=True)
    finally:
        vendor.release(base)


def test_virtual_memory_is_refused_only_where_a_process_would_open_it(vendor: Vendor) -> None:
    base = vendor.allocate(4096)
    fake_cuda.VIRTUAL.add(base)
    try:
        handles.told(vendor, base, 4096, with_handle=False)
        with pytest.raises(Unsupported, match=r"virtual memory at .*Unset expandable_segments in"):
            handles.told(vendor, base, 4096, with_handle=True)
        # Made of pieces smaller than what is told: that is not what to complain about.
        with pytest.raises(Unsupported, match="Unset expandable_segments"):
            handles.told(vendor, base, 1 << 20, with_handle=True)
    finally:
        vendor.release(base)


def test_a_thread_on_the_same_device_uses_the_pointer_and_nothing_else(vendor: Vendor) -> None:
    record = {"base": 4096, "offset": 64, "handle": ""}
    for how in (Way.OWN, Way.POINTER):
        assert Reached(vendor, how, record, fake_cuda.BUS[0], 0).address == 4160
    assert fake_cuda.called("cudaDeviceEnablePeerAccess") == 0
    assert fake_cuda.called("cudaIpcOpenMemHandle") == 0


def test_a_thread_on_another_device_needs_peer_access(vendor: Vendor) -> None:
    record = {"base": 4096, "offset": 0, "handle": ""}
    for _ in range(2):  # the second time it is enabled already
        assert Reached(vendor, Way.POINTER, record, fake_cuda.BUS[1], 0).address == 4096
    enabled = [entry for entry in fake_cuda.LOG if entry[0] == "cudaDeviceEnablePeerAccess"]
    assert enabled == [("cudaDeviceEnablePeerAccess", 1, 0)] * 2


def test_a_handle_is_opened_once_and_closed_by_its_last_user(vendor: Vendor) -> None:
    fake_cuda.FOREIGN.add("all")
    base = vendor.allocate(4096)
    try:
        records = [handles.told(vendor, base + at, 64, with_handle=True) for at in (0, 128)]
        one, two = (Reached(vendor, Way.HANDLE, each, fake_cuda.BUS[0], 0) for each in records)
        assert two.address == one.address + 128
        assert one.address != base, "another process has addresses of its own"
        assert fake_cuda.called("cudaIpcOpenMemHandle") == 1
        one.close()
        one.close()
        assert fake_cuda.called("cudaIpcCloseMemHandle") == 0
        two.close()
        assert fake_cuda.called("cudaIpcCloseMemHandle") == 1
    finally:
        vendor.release(base)
