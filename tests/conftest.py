"""Fixtures: pools of rank processes, and settings that are the tests' own."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import TypeVar

import hypothesis
import pytest
import torch

import gemmlink
from gemmlink import settings
from gemmlink.transport import atomics
from tests.pool import RankPool

#: Pools alive at a time; a pool takes a process a rank.
_MAX_POOLS = 2
_failed = pytest.StashKey[bool]()

Ranks = Callable[[int], RankPool]
_Report = TypeVar("_Report", pytest.TestReport, pytest.CollectReport)

# An example may take long when the machine is busy; that says nothing about the code.
hypothesis.settings.register_profile("gemmlink", deadline=None)
hypothesis.settings.load_profile("gemmlink")


def pytest_report_header() -> str:
    """What is under test."""
    return (
        f"gemmlink {gemmlink.__version__}, torch {torch.__version__}, "
        f"atomic words: {atomics.IMPLEMENTATION}, processors: {os.cpu_count()}"
    )


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--no-skips``, for CI: there is all that a test may need, so one that is skipped is lost."""
    parser.addoption("--no-skips", action="store_true", help="a test that is skipped has failed")


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """A module that skips itself as a whole."""
    return _judged((yield), collector.config)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Remember a failure, for ``ranks``."""
    report = _judged((yield), item.config)
    if report.failed:
        item.stash[_failed] = True
    return report


def _judged(report: _Report, config: pytest.Config) -> _Report:
    # An expected failure counts as skipped, too; it has run.
    if config.getoption("no_skips") and report.skipped and not hasattr(report, "wasxfail"):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
        report.outcome = "failed"
        report.longrepr = f"--no-skips: {report.nodeid} was not run. {reason}"
    return report


@pytest.fixture(autouse=True, scope="session")
def _own_settings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """No variable, settings file or launcher of the person who runs the tests takes part."""
    home = tmp_path_factory.mktemp("settings")
    with pytest.MonkeyPatch.context() as patch:
        for name in list(os.environ):
            if name.startswith(settings.PREFIX) or name in ("WORLD_SIZE", "RANK"):
                patch.delenv(name)
        patch.setenv("XDG_CONFIG_HOME", str(home))
        yield home


@pytest.fixture
def cpu_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch as a build for CPUs only, whatever build this is."""
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.version, "hip", None)


class _Pools:
    """Pools by world; the one not used for longest is ended when there are too many."""

    def __init__(self) -> None:
        self._pools: OrderedDict[int, RankPool] = OrderedDict()

    def get(self, world: int) -> RankPool:
        pool = self._pools.pop(world, None) or RankPool(world)
        self._pools[world] = pool
        while len(self._pools) > _MAX_POOLS:
            self._pools.popitem(last=False)[1].kill()
        return pool

    def kill(self) -> None:
        for pool in self._pools.values():
            pool.kill()


@pytest.fixture(scope="session")
def _pools() -> Iterator[_Pools]:
    pools = _Pools()
    yield pools
    pools.kill()


@pytest.fixture
def ranks(_pools: _Pools, request: pytest.FixtureRequest) -> Iterator[Ranks]:
    """``ranks(world)`` is a pool of that many rank processes. A failed test costs its pool."""
    used: list[RankPool] = []

    def get(world: int) -> RankPool:
        used.append(_pools.get(world))
        return used[-1]

    yield get
    if request.node.stash.get(_failed, False):
        for pool in used:
            pool.kill()
