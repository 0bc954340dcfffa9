"""Importing costs nothing: no torch, no thread, no device, no file."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
CALL = "print(gemmlink.gemm_all_gather(torch.ones(1, 2), torch.ones(1, 2)).item())"


def _python(script: str, cwd: Path = ROOT, **environ: str) -> str:
    """What ``script`` prints in a fresh interpreter that turns warnings into errors."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", script],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1", **environ},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout.strip()


def test_import_loads_nothing_but_its_own_file() -> None:
    loaded = _python(
        "import sys; before = set(sys.modules); import gemmlink; gemmlink.__version__; "
        "dir(gemmlink); print(*sorted(n for n in set(sys.modules) - before if 'torch' in n or "
        "n.startswith('gemmlink')))"
    )
    assert loaded == "gemmlink"


def test_import_starts_no_thread_and_touches_no_device() -> None:
    """Even with every public name used, so that the process may still fork.

    What torch itself loads does not count: its GPU builds bring libraries of their own.
    """
    script = """
import os, torch, torch.distributed

def libraries():
    names = ("libcuda.so", "libamdhip64", "libnccl", "librccl")
    with open("/proc/self/maps") as lines:
        maps = lines.read()
    return {name for name in names if name in maps}

before = libraries()
import gemmlink
for name in gemmlink.__all__:
    getattr(gemmlink, name)
print(len(os.listdir("/proc/self/task")), *(libraries() - before))
assert not torch.cuda.is_initialized()
"""
    assert _python(script, OPENBLAS_NUM_THREADS="1") == "1"


def test_import_needs_no_home_and_writes_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "read-only"
    folder.mkdir()
    folder.chmod(0o500)
    script = f"import torch, gemmlink; {CALL}"
    printed = _python(
        script,
        folder,
        HOME="/nonexistent",
        XDG_CONFIG_HOME="",
        CUDA_VISIBLE_DEVICES="",
        HIP_VISIBLE_DEVICES="",
    )
    assert printed == "2.0"
    assert list(folder.iterdir()) == []


def test_optional_libraries_that_break_on_import_are_not_in_the_way(tmp_path: Path) -> None:
    for library in ("triton", "flydsl", "hip", "cuda", "matplotlib"):
        (tmp_path / f"{library}.py").write_text("raise ImportError('broken installation')\n")
    script = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import torch, gemmlink; "
        f"from gemmlink import plugins; assert len(plugins.entries()) >= 4; {CALL}"
    )
    assert _python(script) == "2.0"


def test_a_process_may_fork_after_the_import() -> None:
    script = """
import os, torch, gemmlink
gemmlink.gemm_all_gather
child = os.fork()
if child == 0:
    got = gemmlink.gemm_all_gather(torch.ones(2, 3), torch.ones(4, 3), epilogue="push")
    os._exit(0 if got.tolist() == [[3.0] * 4] * 2 else 1)
print(os.waitpid(child, 0)[1])
"""
    assert _python(script) == "0"
