"""`symm_mem` keeps the contracts of a transport: the clauses that every transport is held to."""

from __future__ import annotations

from gemmlink.conformance import LaneContract, TransportContract, WindowContract, WordsContract


class TestTransport(TransportContract):
    """Sessions."""

    transport = "symm_mem"


class TestWindow(WindowContract):
    """Windows of device memory."""

    transport = "symm_mem"
    gaps = "symm_mem.gaps"


class TestWords(WordsContract):
    """Words in device memory, by their host methods."""

    transport = "symm_mem"


class TestLane(LaneContract):
    """Streams as lanes."""

    transport = "symm_mem"
