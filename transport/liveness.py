"""Whether a peer's process still exists, through a pidfd.

A pid alone may be given to another process after the first has ended; a pidfd keeps meaning the
process that it was opened for.
"""

from __future__ import annotations

import os
import select
from typing import Any


def process() -> dict[str, Any]:
    """What a peer needs to watch this process: pid, and the namespace in which that means it."""
    return {"pid": os.getpid(), "pids": os.readlink("/proc/self/ns/pid")}


class Watch:
    """Watches the process of ``record`` (of ``process``). Open it while the process is alive."""

    def __init__(self, record: dict[str, Any]) -> None:
        self._fd = -1
        self._ended = False
        if record["pids"] != os.readlink("/proc/self/ns/pid"):
            return  # the number means nothing here
        try:
            self._fd = os.pidfd_open(record["pid"])
        except ProcessLookupError:
            self._ended = True
        except OSError:
            return  # a kernel before 5.3, or a sandbox that forbids it

    def alive(self) -> bool | None:
        """False once the process has ended, also if nobody has reaped it; None if unknown."""
        if self._ended:
            return False
        if self._fd < 0:
            return None
        poll = select.poll()  # select() refuses descriptors above 1023
        poll.register(self._fd, select.POLLIN)
        self._ended = bool(poll.poll(0))
        return not self._ended

    def close(self) -> None:
        """Stop watching. Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
