"""The built-in epilogues keep their contract with CUDA tensors: every option, exact on ranks."""

from __future__ import annotations

import pytest

from gemmlink.conformance import EpilogueContract, RankContract, run_together

pytestmark = pytest.mark.filterwarnings("default")


class Together(RankContract):
    """Classes of this module share one set of ranks."""

    transport = "symm_mem"
    device = "cuda"
    clause_limit_s = 120.0

    @classmethod
    def outcomes(cls) -> dict[str, str | None]:
        if "_outcomes" not in vars(cls):
            run_together(*Together.__subclasses__())
        return cls._outcomes


class TestPush(Together, EpilogueContract):
    """One read for all peers."""

    epilogue = "push"


class TestPull(Together, EpilogueContract):
    """Loads from all peers."""

    epilogue = "pull"


class TestLanes(Together, EpilogueContract):
    """Copies on streams."""

    epilogue = "lanes"
