"""Transport `ipc` over `tests.fake_cuda`: windows of memory files, where there is no device."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from gemmlink.spec.contracts import Lane, Words
from gemmlink.transport.cpu_lanes import CpuLane
from gemmlink.transport.ipc import Ipc
from gemmlink.transport.shm import ShmWords
from gemmlink.transport.site import Site
from gemmlink.transport.vendor import CUDA, Vendor
from tests import fake_cuda

NAMES = dataclasses.replace(CUDA, module="tests.fake_cuda", queries="tests.fake_cuda")


class FakeSite(Site):
    """The current device of the fake runtime; torch sees a CPU."""

    memory = ("cpu",)

    def __init__(self) -> None:
        self.vendor = Vendor(NAMES)
        self.index = int(fake_cuda.cudaGetDevice()[1])
        self.device = torch.device("cpu")

    @classmethod
    def probe(cls) -> dict[str, str]:
        return {"fake CUDA": Vendor(NAMES).version()}

    def finish_stream(self) -> None:
        """Everything has ended already."""

    def words(self, tensors: list[torch.Tensor], rank: int) -> Words:
        return _Words(tensors, rank)

    def lane(
        self, own: torch.Tensor, theirs: torch.Tensor, words: Words, peer: int, index: int
    ) -> Lane:
        plain: Any = words
        return CpuLane(own, theirs, plain, peer, index)


class ClosedSite(FakeSite):
    """One whose processes cannot open what another has exported."""

    def __init__(self) -> None:
        super().__init__()
        fake_cuda.FAILS["cudaIpcOpenMemHandle"] = 400


class _Words(ShmWords):
    def close(self) -> None:
        """What was bound holds this very list."""
        self._mapped.clear()


class FakeIpc(Ipc):
    """See the module's docstring."""

    name = "fake_ipc"
    site = FakeSite
