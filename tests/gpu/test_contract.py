"""`symm_mem`, and torch's products on a device, keep the contracts that every plugin is held to."""

from __future__ import annotations

import pytest

from gemmlink.conformance import (
    BackendContract,
    LaneContract,
    TransportContract,
    WindowContract,
    WordsContract,
)
from tests.together import Together

pytestmark = pytest.mark.filterwarnings("default")


class OneSet(Together):
    """Classes of this module share one set of ranks."""

    device = "cuda"


class TestTransport(OneSet, TransportContract):
    """Sessions."""

    transport = "symm_mem"


class TestWindow(OneSet, WindowContract):
    """Windows of device memory."""

    transport = "symm_mem"


class TestWords(OneSet, WordsContract):
    """Words in device memory, by their host methods."""

    transport = "symm_mem"


class TestLane(OneSet, LaneContract):
    """Streams as lanes."""

    transport = "symm_mem"


class TestEager(BackendContract):
    """torch.mm on a device."""

    backend = "eager"
    device = "cuda"
