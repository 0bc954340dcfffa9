"""`ipc` over a fake runtime keeps the contracts of a transport, between processes.

Its rules are tested so, and its bookkeeping: memory that is freed while a process has it open ends
the rank that frees it.
"""

from __future__ import annotations

from gemmlink.conformance import (
    LaneContract,
    TransportContract,
    WindowContract,
    WordsContract,
)
from tests.together import Together

FAKE = "tests.fake_ipc:FakeIpc"


class OneSet(Together):
    """Classes of this module share one set of ranks."""


class TestTransport(OneSet, TransportContract):
    """Sessions."""

    transport = FAKE


class TestWindow(OneSet, WindowContract):
    """Windows of memory that is opened by its handle."""

    transport = FAKE


class TestWords(OneSet, WordsContract):
    """Words in such memory."""

    transport = FAKE


class TestLane(OneSet, LaneContract):
    """Lanes between such windows."""

    transport = FAKE
