"""`ipc` over a fake runtime keeps the contracts of a transport, between processes.

Its rules are tested so, and its bookkeeping: memory that is freed while a process has it open ends
the rank that frees it.
"""

from __future__ import annotations

from gemmlink.conformance import (
    LaneContract,
    RankContract,
    TransportContract,
    WindowContract,
    WordsContract,
    run_together,
)

FAKE = "tests.fake_ipc:FakeIpc"


class Together(RankContract):
    """Classes of this module share one set of ranks."""

    @classmethod
    def outcomes(cls) -> dict[str, str | None]:
        if "_outcomes" not in vars(cls):
            run_together(*Together.__subclasses__())
        return cls._outcomes


class TestTransport(Together, TransportContract):
    """Sessions."""

    transport = FAKE


class TestWindow(Together, WindowContract):
    """Windows of memory that is opened by its handle."""

    transport = FAKE


class TestWords(Together, WordsContract):
    """Words in such memory."""

    transport = FAKE


class TestLane(Together, LaneContract):
    """Lanes between such windows."""

    transport = FAKE
