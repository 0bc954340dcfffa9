"""`symm_mem` and `ipc` keep the contracts of a transport: the clauses that every one is held to."""

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


class TestIpcTransport(TransportContract):
    """Sessions."""

    transport = "ipc"


class TestIpcWindow(WindowContract):
    """Windows of device memory."""

    transport = "ipc"
    spoil = "tests.gpu.ipc_cases:no_memory"


class TestIpcWords(WordsContract):
    """Words in device memory, by their host methods."""

    transport = "ipc"


class TestIpcLane(LaneContract):
    """Streams as lanes."""

    transport = "ipc"
