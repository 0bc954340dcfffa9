"""Every case leaves nothing behind."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.conftest import Ranks
from tests.pool import RankPool
from tests.recovery import named


@pytest.fixture
def ranks(ranks: Ranks) -> Iterator[Ranks]:
    """Pools of ranks that have no name in ``/dev/shm`` once a case is over."""
    pids = {os.getpid()}

    def get(world: int) -> RankPool:
        pool = ranks(world)
        pids.update(pool.pids())
        return pool

    yield get
    assert named(sorted(pids)) == []
