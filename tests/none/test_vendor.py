"""`transport.vendor`: statuses that become errors, and what is asked of the libraries."""

from __future__ import annotations

import dataclasses
import importlib.util
import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest

from gemmlink.errors import Unavailable
from gemmlink.transport import vendor
from gemmlink.transport.vendor import CUDA, HIP, Names, Vendor
from tests import fake_cuda
from tests.fake_ipc import NAMES


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    fake_cuda.forget()
    yield
    fake_cuda.forget()
    assert fake_cuda.held() == (0, 0), "a test left memory behind"


@pytest.mark.parametrize("names", [CUDA, HIP], ids=["CUDA", "HIP"])
def test_a_missing_library_is_told_with_the_line_that_installs_it(
    names: Names, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Some builds of torch bring the library along, and have imported it.
    for module in (names.module.split(".")[0], names.module, names.queries):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(Unavailable) as caught:
        Vendor(names)
    assert f"transport 'ipc' needs {names.module}; got ModuleNotFoundError" in str(caught.value)
    assert f"pip install {names.package} (or gemmlink[{names.extra}])" in caught.value.fix


@pytest.mark.usefixtures("cpu_torch")
def test_a_torch_for_cpus_has_no_vendor() -> None:
    with pytest.raises(Unavailable, match=r"'ipc' needs CUDA or ROCm; got a torch for CPUs only"):
        vendor.names()


def test_a_release_that_lacks_a_function_is_told_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(fake_cuda, "cudaIpcOpenMemHandle")
    with pytest.raises(Unavailable, match=r"needs cudaIpcOpenMemHandle of cuda-bindings.*upgrade"):
        Vendor(NAMES)


@pytest.mark.parametrize(
    ("call", "code", "text"),
    [
        ("cudaMalloc", 2, r"cudaMalloc\(64\) must succeed; got cudaErrorMemoryAllocation \(2\)\. "),
        ("cudaMalloc", 35, r"got cudaErrorUnknown \(35\)\. Install a newer driver, or the cuda-bi"),
        ("cudaMemset", 700, r"cudaMemset\(.*got cudaErrorUnknown \(700\)\. The device has failed"),
    ],
)
def test_a_refusal_names_call_code_and_remedy(call: str, code: int, text: str) -> None:
    fake_cuda.FAILS[call] = code
    with pytest.raises(Unavailable, match=text):
        Vendor(NAMES).allocate(64)
    # Also what had been allocated before is given back: see the fixture.
    assert fake_cuda.called("cudaGetLastError") == 1, "the next user of the runtime meets the error"


def test_bindings_without_the_library_behind_them(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent() -> Any:
        raise RuntimeError("failed to dlopen 'libamdhip64.so'")

    monkeypatch.setattr(fake_cuda, "cudaGetDeviceCount", absent)
    with pytest.raises(Unavailable, match=r"needs the CUDA library; got failed to dlopen.*driver"):
        Vendor(NAMES).count()


def test_memory_is_zeroed() -> None:
    runtime = Vendor(NAMES)
    address = runtime.allocate(64)
    try:
        assert fake_cuda.called("cudaMemset") == 1
        assert fake_cuda.LOG[-1] == ("cudaDeviceSynchronize",), "others may look at once"
    finally:
        runtime.release(address)


def test_peer_access_that_is_there_already_is_no_error() -> None:
    runtime = Vendor(NAMES)
    for _ in range(2):
        runtime.enable(1)
    with pytest.raises(Unavailable, match=r"cudaDeviceEnablePeerAccess\(0, 0\) must succeed"):
        runtime.enable(0)


def test_devices_are_found_by_their_bus() -> None:
    runtime = Vendor(NAMES)
    assert [runtime.find(bus) for bus in (*fake_cuda.BUS, "0000:ff:00.0")] == [0, 1, None]


def test_the_device_of_the_thread_is_put_back() -> None:
    runtime = Vendor(NAMES)
    with runtime.on(1):
        assert fake_cuda.cudaGetDevice()[1] == 1
    assert fake_cuda.cudaGetDevice()[1] == 0


def test_hip_asks_for_fine_grained_memory_and_knows_virtual_memory_by_its_handle() -> None:
    asked: list[tuple[str, tuple[Any, ...]]] = []
    virtual = {"yes": 0, "no": 1}

    def stands_in(name: str) -> Any:
        def call(*arguments: Any) -> tuple[int, ...]:
            asked.append((name, arguments))
            if name == "hipMemRetainAllocationHandle":
                return virtual[arguments[0]], 77
            return 0, 4096

        return call

    module = types.ModuleType("stands_in_for_hip")
    for name in HIP.calls.values():
        setattr(module, name, stands_in(name))
    sys.modules[module.__name__] = module
    try:
        names = dataclasses.replace(HIP, module=module.__name__, queries=module.__name__)
        runtime: Any = Vendor(names)
        runtime.allocate(64)
        assert asked[0] == ("hipExtMallocWithFlags", (64, 1))
        assert not runtime.has_handle("yes")
        assert asked[-1] == ("hipMemRelease", (77,))
        assert runtime.has_handle("no")
    finally:
        del sys.modules[module.__name__]


@pytest.mark.parametrize("names", [CUDA, HIP], ids=["CUDA", "HIP"])
def test_the_installed_bindings_have_every_name(names: Names) -> None:
    if importlib.util.find_spec(names.module.split(".")[0]) is None:
        # Nothing to hold the table against; the fake has CUDA's names.
        assert set(CUDA.calls) - {"attribute"} == set(HIP.calls) - {"retain", "drop"}
        return
    runtime = Vendor(names)
    handle = getattr(runtime._runtime, names.handle)()
    assert vendor._place(handle) > 0
