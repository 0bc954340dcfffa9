"""Ranks for contracts, forked from the server that the pools of the tests use.

Spawned ranks import torch, which takes longer than most clauses, and again after each clause that
hangs or ends its rank. Forked ones have one seed of hashes, and objects at the same addresses: the
clause about digests needs ranks that were spawned, as those in ``test_builtin`` are.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from typing import Any

from gemmlink.conformance import RankContract
from gemmlink.spawn import run_ranks
from tests.pool import PRELOAD


class Forked(RankContract):
    """To be put before the contract."""

    @classmethod
    def spawn(cls, function: Callable[..., Any], *arguments: Any, timeout_s: float) -> None:
        run_ranks_forked(cls.world, function, *arguments, timeout_s=timeout_s)


def run_ranks_forked(
    world: int, function: Callable[..., Any], *arguments: Any, timeout_s: float
) -> None:
    """``run_ranks`` without the imports."""
    multiprocessing.get_context("forkserver").set_forkserver_preload(PRELOAD)
    run_ranks(world, function, *arguments, timeout_s=timeout_s, method="forkserver")
