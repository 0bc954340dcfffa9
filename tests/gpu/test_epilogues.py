"""The built-in epilogues keep their contract with CUDA tensors: every option, exact on ranks."""

from __future__ import annotations

import pytest

from gemmlink.conformance import EpilogueContract

pytestmark = pytest.mark.filterwarnings("default")


class OnTheDevice(EpilogueContract):
    """What the classes of this module have in common."""

    transport = "symm_mem"
    device = "cuda"
    clause_limit_s = 120.0


class TestPush(OnTheDevice):
    """One read for all peers."""

    epilogue = "push"


class TestPull(OnTheDevice):
    """Loads from all peers."""

    epilogue = "pull"


class TestLanes(OnTheDevice):
    """Copies on streams."""

    epilogue = "lanes"
