"""The built-in parts keep the contracts that plugins are held to."""

from __future__ import annotations

from gemmlink.conformance import (
    BackendContract,
    EpilogueContract,
    LaneContract,
    RankContract,
    TransportContract,
    WindowContract,
    WordsContract,
    run_together,
)


class Together(RankContract):
    """Classes of this module share one set of ranks: starting them takes longer than the rest."""

    @classmethod
    def outcomes(cls) -> dict[str, str | None]:
        if "_outcomes" not in vars(cls):
            run_together(*Together.__subclasses__())
        return cls._outcomes


class TestShmTransport(Together, TransportContract):
    """Sessions of shared memory."""

    transport = "shm"


class TestShmWindow(Together, WindowContract):
    """Windows of shared memory."""

    transport = "shm"


class TestShmWords(Together, WordsContract):
    """Words in shared memory."""

    transport = "shm"


class TestShmLane(Together, LaneContract):
    """Worker threads as copy engines."""

    transport = "shm"


class TestPush(Together, EpilogueContract):
    """Stores to all peers."""

    epilogue = "push"


class TestPull(Together, EpilogueContract):
    """Loads from all peers."""

    epilogue = "pull"


class TestLanes(Together, EpilogueContract):
    """Copies by lanes."""

    epilogue = "lanes"


class TestCollective(Together, EpilogueContract):
    """The communication library."""

    epilogue = "collective"


class TestEager(BackendContract):
    """Torch's own product."""

    backend = "eager"
