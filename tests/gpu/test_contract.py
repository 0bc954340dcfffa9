"""`symm_mem`, and torch's products on a device, keep the contracts that every plugin is held to."""

from __future__ import annotations

import pytest

from gemmlink.conformance import (
    BackendContract,
    LaneContract,
    RankContract,
    TransportContract,
    WindowContract,
    WordsContract,
    run_together,
)

pytestmark = pytest.mark.filterwarnings("default")


class Together(RankContract):
    """Classes of this module share one set of ranks."""

    device = "cuda"

    @classmethod
    def outcomes(cls) -> dict[str, str | None]:
        if "_outcomes" not in vars(cls):
            run_together(*Together.__subclasses__())
        return cls._outcomes


class TestTransport(Together, TransportContract):
    """Sessions."""

    transport = "symm_mem"


class TestWindow(Together, WindowContract):
    """Windows of device memory."""

    transport = "symm_mem"


class TestWords(Together, WordsContract):
    """Words in device memory, by their host methods."""

    transport = "symm_mem"


class TestLane(Together, LaneContract):
    """Streams as lanes."""

    transport = "symm_mem"


class TestEager(BackendContract):
    """torch.mm on a device."""

    backend = "eager"
    device = "cuda"
