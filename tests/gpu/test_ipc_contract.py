"""`ipc` keeps the contracts of a transport on a device, too."""

from __future__ import annotations

import pytest

from gemmlink.conformance import (
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

    transport = "ipc"


class TestWindow(Together, WindowContract):
    """Windows of device memory."""

    transport = "ipc"
    spoil = "tests.gpu.ipc_cases:no_memory"


class TestWords(Together, WordsContract):
    """Words in device memory, by their host methods."""

    transport = "ipc"


class TestLane(Together, LaneContract):
    """Streams as lanes."""

    transport = "ipc"
