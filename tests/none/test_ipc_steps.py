"""`transport.ipc_steps`: the step that fails is named, with what helps, and nothing is left."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from gemmlink.errors import Unavailable
from gemmlink.transport.ipc_steps import Step, walk
from tests import fake_cuda
from tests.fake_ipc import FakeSite

SITE = "tests.fake_ipc:FakeSite"
NAMES = ["library", "device", "allocation", "export", "another process", "peer access"]


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    fake_cuda.forget()
    yield
    fake_cuda.forget()
    assert fake_cuda.held() == (0, 0), "the walk left memory behind"


def _failed(steps: list[Step]) -> Step:
    assert [step.ok for step in steps] == [True] * (len(steps) - 1) + [False]
    assert [step.name for step in steps] == NAMES[: len(steps)]
    return steps[-1]


def test_every_step_is_walked_and_another_process_really_writes() -> None:
    steps = walk(SITE)
    assert [(step.name, step.ok) for step in steps] == [(name, True) for name in NAMES], steps
    assert "opened it, read it and wrote it" in steps[4].text


def test_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent() -> dict[str, str]:
        raise Unavailable("transport 'ipc' needs cuda.bindings.runtime", "", "pip install it")

    monkeypatch.setattr(FakeSite, "probe", absent)
    assert "pip install it" in _failed(walk(SITE)).text


@pytest.mark.parametrize(
    ("call", "code", "name", "text"),
    [
        ("cudaGetDeviceCount", 35, "device", "cudaGetDeviceCount() must succeed; got cudaErrorUnk"),
        ("cudaMalloc", 2, "allocation", "cudaErrorMemoryAllocation (2). Lower max_m"),
        ("cudaIpcGetMemHandle", 801, "export", "docker run --ipc=host"),
    ],
)
def test_a_call_of_this_process(call: str, code: int, name: str, text: str) -> None:
    fake_cuda.FAILS[call] = code
    failed = _failed(walk(SITE))
    assert failed.name == name
    assert text in failed.text, failed


def test_a_process_that_cannot_open_it() -> None:
    failed = _failed(walk("tests.fake_ipc:ClosedSite"))
    assert failed.name == "another process"
    assert "cudaIpcOpenMemHandle(1) must succeed; got cudaErrorInvalidResourceHandle" in failed.text
    assert "Start the ranks in one container" in failed.text


def test_a_device_that_does_not_reach_this_one() -> None:
    fake_cuda.DEAF.add((1, 0))
    failed = _failed(walk(SITE))
    assert failed.name == "peer access"
    assert "1 cannot access 0. See nvidia-smi topo" in failed.text
