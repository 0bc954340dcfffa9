"""Watching a peer's process: ended is ended, whoever reaps it and whoever gets its number next."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from unittest import mock

import pytest

from gemmlink.transport.liveness import Watch, process


def _record(pid: int) -> dict[str, object]:
    return {**process(), "pid": pid}


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    """A process that lives until it is ended."""
    started = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    with started:
        yield started
        started.kill()


def _end_unreaped(child: subprocess.Popen[bytes]) -> None:
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)


def _end(child: subprocess.Popen[bytes]) -> None:
    child.kill()
    child.wait()


def _open_files() -> set[str]:
    gc.collect()  # what other tests left must not be closed in between
    return {f"{fd}: {os.readlink(f'/proc/self/fd/{fd}')}" for fd in _numbers()}


def _numbers() -> list[str]:
    return [fd for fd in os.listdir("/proc/self/fd") if os.path.lexists(f"/proc/self/fd/{fd}")]


def test_this_process_lives() -> None:
    watch = Watch(process())
    assert watch.alive() is True
    watch.close()


def test_a_process_lives_until_it_ends(child: subprocess.Popen[bytes]) -> None:
    watch = Watch(_record(child.pid))
    assert [watch.alive(), watch.alive()] == [True, True]
    _end(child)
    assert [watch.alive(), watch.alive()] == [False, False]
    watch.close()


def test_a_stopped_process_lives(child: subprocess.Popen[bytes]) -> None:
    watch = Watch(_record(child.pid))
    child.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, child.pid, os.WSTOPPED)
    assert watch.alive() is True
    watch.close()


def test_a_process_that_nobody_has_reaped_has_ended(child: subprocess.Popen[bytes]) -> None:
    watch = Watch(_record(child.pid))
    _end_unreaped(child)
    os.kill(child.pid, 0)  # its number still exists
    assert watch.alive() is False
    watch.close()


def test_a_watch_may_begin_after_the_end(child: subprocess.Popen[bytes]) -> None:
    _end_unreaped(child)
    zombie = Watch(_record(child.pid))
    assert zombie.alive() is False
    child.wait()
    assert Watch(_record(child.pid)).alive() is False
    zombie.close()


def test_the_number_of_an_ended_process_may_be_given_away(child: subprocess.Popen[bytes]) -> None:
    """Looking the number up again would find another process; that is never done."""
    opened = os.pidfd_open
    with mock.patch.object(os, "pidfd_open", side_effect=opened) as opening:
        watch = Watch(_record(child.pid))
        _end(child)
        opening.side_effect = lambda pid: opened(os.getpid())  # the number now means this process
        with mock.patch.object(os, "kill"), mock.patch.object(os.path, "exists", return_value=True):
            assert watch.alive() is False
    assert opening.call_count == 1
    watch.close()


def test_a_number_of_another_namespace_says_nothing(child: subprocess.Popen[bytes]) -> None:
    """Neither where it means a living process here, nor where it means none."""
    before = _open_files()
    living = Watch({**_record(child.pid), "pids": "pid:[1]"})
    _end(child)
    absent = Watch({**_record(child.pid), "pids": "pid:[1]"})
    assert (living.alive(), absent.alive()) == (None, None)
    assert _open_files() == before


@pytest.mark.parametrize("error", [PermissionError, OSError])
def test_a_system_without_pidfds_says_nothing(error: type[OSError]) -> None:
    with mock.patch.object(os, "pidfd_open", side_effect=error):
        watch = Watch(process())
    assert watch.alive() is None
    watch.close()


def test_closing_gives_the_descriptor_back(child: subprocess.Popen[bytes]) -> None:
    before = _open_files()
    watch = Watch(_record(child.pid))
    assert len(_open_files() - before) == 1
    watch.close()
    watch.close()
    assert _open_files() == before
    assert watch.alive() is None


def test_what_was_seen_stays_known_after_closing(child: subprocess.Popen[bytes]) -> None:
    watch = Watch(_record(child.pid))
    _end(child)
    assert watch.alive() is False
    watch.close()
    assert watch.alive() is False


def test_a_watch_is_not_inherited() -> None:
    before = set(_numbers())
    watch = Watch(process())
    (fd,) = [n for n in set(_numbers()) - before if "pidfd" in os.readlink(f"/proc/self/fd/{n}")]
    assert not os.get_inheritable(int(fd))
    watch.close()


def test_a_process_with_many_files_open_can_watch(child: subprocess.Popen[bytes]) -> None:
    """Descriptors above 1023 are no exception."""
    opened = os.pidfd_open
    with mock.patch.object(os, "pidfd_open", side_effect=lambda pid: _high(opened(pid))):
        watch = Watch(_record(child.pid))
    assert watch.alive() is True
    _end(child)
    assert watch.alive() is False
    watch.close()


def _high(fd: int) -> int:
    import fcntl
    import resource

    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    high = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 1500)
    os.close(fd)
    return high
