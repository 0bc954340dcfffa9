"""Segments: memory of one process that others on the same host can map.

A segment is a file in ``/dev/shm`` when that has room, else a memory file of the kernel's. Peers
reach it through ``/proc/<pid>/fd``, so that it needs no name and nothing is left whenever a process
is killed; a name is given only where peers cannot see each other there. Its space is reserved at
once: a mapping of a file that cannot be backed would kill the process (SIGBUS) at the first store,
long after the cause.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
from dataclasses import dataclass
from typing import Any

from gemmlink.errors import Unavailable, Unsupported

SHM = "/dev/shm"


@dataclass
class Segment:
    """A reserved file. ``path`` is None for one without a name. The creator owns ``fd``."""

    fd: int
    path: str | None
    nbytes: int

    def record(self) -> dict[str, Any]:
        """What a peer needs to open it and to be sure that it is the right one."""
        stat = os.fstat(self.fd)
        return {
            "pid": os.getpid(),
            "fd": self.fd,
            "path": self.path,
            "nbytes": self.nbytes,
            "inode": [stat.st_dev, stat.st_ino],
        }

    def unlink(self) -> None:
        """Remove the name; mappings stay. Afterwards nothing can be left behind. Idempotent."""
        if self.path is not None:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.path)
            self.path = None

    def close(self) -> None:
        """Remove the name and close the file; mappings stay. Idempotent."""
        self.unlink()
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def create(nbytes: int, named: bool) -> Segment:
    """A new segment with ``nbytes`` bytes of zeroed, reserved memory, mode 0600.

    ``named``: for peers that do not share this process's ``/proc``. Raises ``Unavailable`` with the
    bytes needed and free when neither place has room.
    """
    segment = _in_shm(nbytes, named) or _in_memory(nbytes)
    if segment is None:
        raise Unavailable(
            f"a window needs {nbytes} bytes of shared memory",
            f"{shm_free()} bytes free in {SHM} and {memory_free()} bytes of free memory",
            "Lower max_m, or enlarge /dev/shm (mount -o remount,size=8g /dev/shm; docker run "
            "--shm-size=8g).",
        )
    return segment


def open_peer(record: dict[str, Any], rank: int) -> int:
    """Open the segment that ``record`` of rank ``rank`` describes; the caller closes it.

    Raises ``Unsupported`` when this process cannot see it: another host, container or user.
    """
    for path in (record["path"], f"/proc/{record['pid']}/fd/{record['fd']}"):
        fd = _open_same(path, record["inode"])
        if fd is not None:
            return fd
    raise Unsupported(
        "transport 'shm' needs ranks that see each other's /dev/shm or /proc",
        f"rank {rank} (pid {record['pid']}), whose segment pid {os.getpid()} cannot open",
        "Start the ranks in one container as one user, or use epilogue='collective'.",
    )


def _open_same(path: str | None, inode: list[int]) -> int | None:
    if path is None:
        return None
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return None
    stat = os.fstat(fd)
    if [stat.st_dev, stat.st_ino] == inode:
        return fd
    os.close(fd)  # another container's file of the same name, or a reused pid
    return None


def _in_shm(nbytes: int, named: bool) -> Segment | None:
    flags, path = os.O_RDWR | os.O_CLOEXEC, None
    if named:
        # Short (31 characters is the limit elsewhere), with no user input in it, unique by chance.
        path = f"{SHM}/gemmlink-{os.getpid()}-{secrets.token_hex(4)}"
    try:
        if path is not None:
            fd = os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o600)
        else:
            fd = os.open(SHM, flags | os.O_TMPFILE, 0o600)
    except OSError:
        return None
    return _reserved(Segment(fd, path, nbytes))


def _in_memory(nbytes: int) -> Segment | None:
    if nbytes > memory_free():
        return None
    return _reserved(Segment(os.memfd_create("gemmlink"), None, nbytes))


def _reserved(segment: Segment) -> Segment | None:
    try:
        os.posix_fallocate(segment.fd, 0, segment.nbytes)
    except OSError as error:
        segment.close()
        if error.errno in (errno.ENOSPC, errno.ENOMEM, errno.EFBIG):
            return None
        raise
    except BaseException:
        segment.close()
        raise
    return segment


def shm_free() -> int:
    """Free bytes in ``/dev/shm``; 0 if there is none."""
    try:
        stat = os.statvfs(SHM)
    except OSError:
        return 0
    return stat.f_bavail * stat.f_frsize


def memory_free() -> int:
    """Bytes of memory that can be had without swapping, as the kernel estimates it."""
    with open("/proc/meminfo") as lines:
        for line in lines:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return 0
