"""O-48 to O-56: processes, shared memory, settings, plugins and launchers."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch

import gemmlink
from gemmlink import plugins
from gemmlink.cli import main
from tests.cases.kit import MODES, eye, failing, tagged
from tests.conftest import Ranks
from tests.none.test_plugins import BROKEN, GOOD, Site
from tests.recovery import named, own_group, started
from tests.refs import assert_equal

ROOT = Path(__file__).parents[2]


# Names of parts.


def _chosen(rank: int, given: dict[str, str]) -> str:
    error, _ = failing(lambda: gemmlink.gemm_all_gather(tagged(rank, 2, 8), eye(8), **given))  # type: ignore[arg-type]
    return f"{type(error).__name__} {error}"


@pytest.mark.parametrize("name", ["rocshmem", "hip_ipc", "cuda_ipc", "nccl_window"])
def test_o_48_a_transport_that_is_not_there(ranks: Ranks, name: str) -> None:
    """ROCm/rocSHMEM#343, NousResearch/torchtitan#44: a crash in place of a reason.

    None of these is part of the library yet; each is refused by name, with the list of those that
    are. What is chosen where nothing is asked for is said by ``explain``.
    """
    for text in ranks(2).run(_chosen, {}, env={"GEMMLINK_TRANSPORT": name}):
        assert text.startswith(
            "InvalidArgument transport must be auto, ipc, shm, symm_mem or 'module:"
        ), text
        assert repr(name) in text
    assert main(["explain", "--transport", name]) != 0
    with gemmlink.GemmAllGather(8, 8, 4, group=gemmlink.SELF, epilogue="push") as op:
        assert "transport shm: all ranks compute on CPUs of one host" in op.explain()


# Killed, and started again with all that is left.


def _ready(rank: int, folder: str, killed: bool) -> None:
    torch.set_num_threads(1)
    group: Any = own_group(f"{folder}/store", rank, 2)
    for mode in MODES:
        with gemmlink.GemmAllGather(8, 8, 4, torch.bfloat16, group=group, epilogue=mode) as op:
            blocks = [tagged(peer + 3 * killed, 4, 8) for peer in range(2)]
            assert_equal(op(blocks[rank], eye(8)), torch.cat(blocks), f"{mode}, killed {killed}")
            if killed and mode == "split-lanes":
                Path(folder, f"ready{rank}").touch()
                time.sleep(60)


def _names() -> set[str]:
    return {name for name in os.listdir("/dev/shm") if name.startswith("gemmlink")}


def test_o_50_a_killed_job_leaves_no_segments_and_may_start_again(tmp_path: Path) -> None:
    """sgl-project/sglang#28089, vllm-project/vllm#51317: a file for each kill, until none fits."""
    first = [started(_ready, rank, str(tmp_path), True) for rank in range(2)]
    deadline = time.monotonic() + 60
    while not all((tmp_path / f"ready{rank}").exists() for rank in range(2)):
        assert time.monotonic() < deadline, "the ranks never got ready"
        time.sleep(0.02)
    _ended(first, signal.SIGKILL)
    second = [started(_ready, rank, str(tmp_path), False) for rank in range(2)]
    _ended(second)


def _ended(processes: list[BaseProcess], by: int = 0) -> None:
    for process in processes:
        if by:
            process.kill()
        process.join(60)
    assert [process.exitcode for process in processes] == [-by] * len(processes)
    assert named([process.pid or 0 for process in processes]) == []


# Two jobs at once.


def _job(rank: int, folder: str, tag: int, user: int) -> None:
    torch.set_num_threads(1)
    gemmlink.gemm_all_gather(tagged(0, 2, 8), eye(8), epilogue="push")  # loads what it will need
    if user:
        os.setgid(user)
        os.setuid(user)
    group: Any = own_group(f"{folder}/store", rank, 2)
    with gemmlink.GemmAllGather(8, 8, 2, torch.bfloat16, group=group, epilogue="split-pull") as op:
        assert op.launch.parts.transport_name == "shm"
        for call in range(200):
            blocks = [tagged(tag + call + peer, 2, 8) for peer in range(2)]
            assert_equal(op(blocks[rank], eye(8)), torch.cat(blocks), f"job {tag}, call {call}")


@pytest.fixture
def folders() -> Iterator[list[str]]:
    """One for each job, open to every user, and equal but for its path."""
    made = [tempfile.mkdtemp(prefix="gemmlink-job-") for _ in range(2)]
    for folder in made:
        os.chmod(folder, 0o777)
    yield made
    for folder in made:
        shutil.rmtree(folder)


@pytest.mark.parametrize(
    "user",
    [0, 65534] if os.geteuid() == 0 else [0],
    ids=["same", "other"][: 2 if os.geteuid() == 0 else 1],
)
def test_o_52_two_jobs_on_one_host(folders: list[str], user: int) -> None:
    """open-mpi/ompi#7206, FairRootGroup/FairMQ#98, FairRootGroup/DDS#267: names without a user or
    a job in them. As another user, too, where the tests may become one."""
    jobs = [(folders[0], 0, 0), (folders[1], 100, user)]
    _ended([started(_job, rank, *job) for job in jobs for rank in range(2)])


# Settings.


@pytest.mark.parametrize(
    ("variable", "value", "part"),
    [
        (
            "TRANSPORT",
            "smh",
            "transport must be auto, ipc, shm, symm_mem or 'module:attribute'; got 'smh'. Did",
        ),
        ("TRANSPORT", "SHM", "transport must be auto, ipc, shm, symm_mem or"),
        ("EPILOGUE", "pul", "Did you mean 'pull'?"),
        ("BACKEND", "eagre", "Did you mean 'eager'?"),
        ("PLUGINS", "no-such-plugin", "name entry points of installed distributions; got 'no-such"),
        ("TRANSPORT", " shm ", ""),
        ("TRANSPORT", "", ""),
        ("PLUGINS", "", ""),
    ],
)
def test_o_53_a_misspelt_setting(ranks: Ranks, variable: str, value: str, part: str) -> None:
    """NVIDIA/nccl#1837, vllm-project/vllm#43987, microsoft/msccl-tools#18: an unrelated error, or
    none at all. Unknown names are tests/none/test_settings.py."""
    for text in ranks(2).run(_with_setting, env={f"GEMMLINK_{variable}": value}):
        assert (part in text) if part else (text == "right"), text


def _with_setting(rank: int) -> str:
    plugins._registry = None  # as in a process that has just started
    blocks = [tagged(peer, 2, 8) for peer in range(2)]
    try:
        got = gemmlink.gemm_all_gather(blocks[rank], eye(8))
    except gemmlink.GemmlinkError as error:
        return str(error)
    finally:
        plugins._registry = None
    assert_equal(got, torch.cat(blocks), "with that setting")
    return "right"


# Plugins.


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    """Three distributions, of which the second breaks."""
    monkeypatch.setattr(plugins, "_registry", None)
    monkeypatch.syspath_prepend(str(tmp_path))
    made = Site(tmp_path)
    for name, source in (("a", GOOD), ("b", BROKEN), ("c", GOOD)):
        made.install(f"{name}-dist", f"case-{name}", source.replace("NAME", f"case-{name}"))
    return made


def test_o_55_a_plugin_that_fails_to_import(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """vllm-project/vllm#48277, simonw/llm#1351, pytest-dev/pytest#1479: swallowed for hours, or all
    stopped by one. One that ``GEMMLINK_PLUGINS`` asks for by name must load: that is strict."""
    found = {entry.name for entry in plugins.entries("backend")}
    assert {"case-a", "case-c"} <= found
    assert list(plugins.failures()) == ["case-b"]
    error, _ = failing(lambda: plugins.find("backend", "case-b"))
    assert isinstance(error, gemmlink.Unavailable)
    assert isinstance(error.__cause__, ModuleNotFoundError)
    assert error.__cause__.__traceback__ is not None
    monkeypatch.setattr(plugins, "_registry", None)
    monkeypatch.setenv("GEMMLINK_PLUGINS", "case-a,case-b")
    error, _ = failing(lambda: plugins.entries("backend"))
    assert isinstance(error, gemmlink.InvalidArgument)
    assert "'case-b' (b-dist 1.5), where ModuleNotFoundError: No module named" in str(error)
    assert isinstance(error.__cause__, ModuleNotFoundError)


# A launcher that restarts.


def test_o_56_a_restart_by_the_launcher() -> None:
    """pytorch/pytorch#135712, #191957: keys of the attempt before were read, and waited on.

    One rank has used the library in more attempts than the other, too.
    """
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [sys.executable, *launcher, "--max-restarts=2", "-m", "tests.cases.restarted"],
        cwd=ROOT,
        env={**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert done.returncode == 0, done.stderr
    lines = [line for line in sorted(done.stdout.splitlines()) if "attempt 2" in line]
    assert lines == ["rank 0: right in attempt 2", "rank 1: right in attempt 2"]
