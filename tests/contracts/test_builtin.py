"""The built-in parts keep the contracts that plugins are held to."""

from __future__ import annotations

from gemmlink.conformance import (
    BackendContract,
    EpilogueContract,
    LaneContract,
    TransportContract,
    WindowContract,
    WordsContract,
)
from tests.together import Together


class OneSet(Together):
    """Classes of this module share one set of ranks."""


class TestShmTransport(OneSet, TransportContract):
    """Sessions of shared memory."""

    transport = "shm"


class TestShmWindow(OneSet, WindowContract):
    """Windows of shared memory."""

    transport = "shm"


class TestShmWords(OneSet, WordsContract):
    """Words in shared memory."""

    transport = "shm"


class TestShmLane(OneSet, LaneContract):
    """Worker threads as copy engines."""

    transport = "shm"


class TestPush(OneSet, EpilogueContract):
    """Stores to all peers."""

    epilogue = "push"


class TestPull(OneSet, EpilogueContract):
    """Loads from all peers."""

    epilogue = "pull"


class TestLanes(OneSet, EpilogueContract):
    """Copies by lanes."""

    epilogue = "lanes"


class TestCollective(OneSet, EpilogueContract):
    """The communication library."""

    epilogue = "collective"


class TestEager(BackendContract):
    """Torch's own product."""

    backend = "eager"
