"""Every test of this folder that uses ranks runs once for each transport."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.conftest import Ranks
from tests.pool import Outcome, RankPool


class _Over:
    """A pool whose ranks use one transport unless a test names another."""

    def __init__(self, pool: RankPool, transport: str) -> None:
        self._pool = pool
        self._env = {"GEMMLINK_TRANSPORT": transport}

    def run(self, function: Callable[..., Any], *arguments: Any, **rest: Any) -> list[Any]:
        """See ``RankPool.run``."""
        return self._pool.run(function, *arguments, **self._with_env(rest))

    def outcomes(self, function: Callable[..., Any], *arguments: Any, **rest: Any) -> list[Outcome]:
        """See ``RankPool.outcomes``."""
        return self._pool.outcomes(function, *arguments, **self._with_env(rest))

    def _with_env(self, rest: dict[str, Any]) -> dict[str, Any]:
        return {**rest, "env": {**self._env, **(rest.get("env") or {})}}


@pytest.fixture(params=["symm_mem", "ipc"])
def transport(request: pytest.FixtureRequest) -> str:
    """The name of a transport for devices."""
    return str(request.param)


@pytest.fixture
def ranks(ranks: Ranks, transport: str) -> Callable[[int], _Over]:
    """``tests.conftest.ranks``, over ``transport``."""
    return lambda world: _Over(ranks(world), transport)
