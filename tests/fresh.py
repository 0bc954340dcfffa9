"""Programs in fresh interpreters that have imported torch already.

Importing torch takes longer than most programs of the tests. One server process has imported it,
and nothing else; every program is a fork of it that becomes ``__main__``, with the folder and the
variables of an interpreter that was started for it, and ends as one does: exit handlers run, and
what is left open is told on stderr. What a program must import it still has to name, and what it
imports besides torch it loads itself.

Not for programs where the import of torch is the point, or is to see other variables.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType, TracebackType
from typing import IO, Any

_ROOT = Path(__file__).parents[1]
_SERVER = "from tests.fresh import serve; serve()"


class Interpreters:
    """Starts programs. Every warning in them is an error."""

    def __init__(self) -> None:
        self._server = subprocess.Popen(
            [sys.executable, "-W", "error", "-c", _SERVER],
            cwd=_ROOT,
            env={**os.environ, "PYTHONPATH": str(_ROOT)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> Interpreters:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for pipe in (self._server.stdin, self._server.stdout):
            if pipe is not None:
                pipe.close()
        self._server.wait()

    def run(
        self, script: Path, folder: Path, env: Mapping[str, str], timeout_s: float = 120.0
    ) -> subprocess.CompletedProcess[str]:
        """What ``python -W error script`` does in ``folder``; output goes beside the script.

        A program that outlives ``timeout_s`` is ended by a signal.
        """
        out, err = script.with_suffix(".out"), script.with_suffix(".err")
        task = {"script": script, "cwd": folder, "out": out, "err": err}
        told = {name: str(path) for name, path in task.items()}
        _say(self._server.stdin, {**told, "env": {**env}, "limit": timeout_s})
        code = json.loads(_line(self._server.stdout))
        return subprocess.CompletedProcess([str(script)], code, out.read_text(), err.read_text())


def _say(pipe: IO[str] | None, value: Any) -> None:
    assert pipe is not None
    pipe.write(json.dumps(value) + "\n")
    pipe.flush()


def _line(pipe: IO[str] | None) -> str:
    assert pipe is not None
    line = pipe.readline()
    assert line, "the server of interpreters has ended"
    return line


# The server's side.


def serve() -> None:
    """Fork a process for every line of stdin, and tell how it ended.

    A fork returns from here when its program is over, so that its interpreter ends by itself.
    """
    import torch  # noqa: F401

    own = {name for name in sys.modules if name == "tests" or name.startswith("tests.")}
    for name in own:  # a program finds the tests, and whatever they import, not loaded
        del sys.modules[name]
    gc.collect()
    gc.freeze()  # else every fork looks through all of torch when it ends, for a second
    for line in sys.stdin:
        task = json.loads(line)
        pid = os.fork()
        if pid == 0:
            _become(task)
            return
        _, status = os.waitpid(pid, 0)
        _say(sys.stdout, os.waitstatus_to_exitcode(status))


def _become(task: Mapping[str, Any]) -> None:
    signal.setitimer(signal.ITIMER_REAL, task["limit"])  # the signal ends a process by default
    _redirect(task)
    os.chdir(task["cwd"])
    os.environ.clear()
    os.environ.update(task["env"])
    script = Path(task["script"])
    sys.argv = [str(script)]
    sys.path[0] = str(script.parent)
    # A module of its own: what is frozen is not garbage, nor what only it refers to.
    main = ModuleType("__main__")
    main.__file__ = str(script)
    vars(main)["__builtins__"] = __builtins__
    sys.modules["__main__"] = main
    exec(compile(script.read_text(), str(script), "exec"), vars(main))


def _redirect(task: Mapping[str, Any]) -> None:
    for number, path, flags in (
        (0, os.devnull, os.O_RDONLY),
        (1, task["out"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC),
        (2, task["err"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC),
    ):
        opened = os.open(path, flags, 0o600)
        os.dup2(opened, number)
        os.close(opened)
