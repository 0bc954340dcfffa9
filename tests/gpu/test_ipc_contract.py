"""`ipc` keeps the contracts of a transport on a device, too."""

from __future__ import annotations

import pytest

from gemmlink.conformance import (
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

    transport = "ipc"


class TestWindow(OneSet, WindowContract):
    """Windows of device memory."""

    transport = "ipc"
    spoil = "tests.gpu.ipc_cases:no_memory"


class TestWords(OneSet, WordsContract):
    """Words in device memory, by their host methods."""

    transport = "ipc"


class TestLane(OneSet, LaneContract):
    """Streams as lanes."""

    transport = "ipc"
