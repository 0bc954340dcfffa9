"""Makes an operation usable again after a failed call. Collective, in four steps.

1. Quiesce: this rank's lanes have stopped, and have told of copies that failed. Otherwise a late
   copy could deliver old data after the reset. A lane that does not stop leaves only ``close``.
2. All ranks tell the number of the last call that they have *begun*, and so know that all have
   stopped. The next call is later than any of these: with the last *completed* call instead, an
   arrival of the failed one would satisfy a wait of the next.
3. Each rank clears its own failure words, and sets its view of ``enter``, ``free`` and ``read``
   as if everybody had just finished that call.
4. All ranks wait for each other again; only then may anyone call.

A rank that gives up waiting in step 4 goes on there when it tries again. Its peers may have left
the reset since: they have forgotten what they told in step 2, and write to this rank's words.

A rank whose process has ended will never come. Whoever waits for somebody says so at once.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from gemmlink.errors import PeerLost, PeerTimeout
from gemmlink.rendezvous import agree

if TYPE_CHECKING:
    from gemmlink.core.launch import Launch

_log = logging.getLogger("gemmlink")


def reset(launch: Launch, timeout_s: float) -> None:
    """Run the four steps. Raises ``PeerTimeout`` naming the ranks that have not come.

    ``PeerLost`` if one of the ranks is dead: no attempt can succeed. After any exception the
    operation is as unusable as before; calling again is allowed.
    """

    def look() -> None:
        _look_for_the_dead(launch)

    _quiesce(launch, timeout_s)
    key = launch.reset_key()
    if launch.cleared_at is None:
        issued = {"epoch": launch.epoch}
        records = agree(launch.group, f"{key}/issued", lambda: issued, timeout_s, look)
        launch.cleared_at = max(int(record["epoch"]) for record in records)
        _clear(launch, launch.cleared_at)
    agree(launch.group, f"{key}/cleared", dict, timeout_s, look)
    if launch.library is not None:
        launch.library.renew(f"{key}/gloo")
    launch.begin_anew(launch.cleared_at)


def _quiesce(launch: Launch, timeout_s: float) -> None:
    told = launch.come_to_rest(timeout_s)
    moving = [error for error in told if isinstance(error, PeerTimeout)]
    if told and not moving:
        # That was of the calls which are lost. A lane that says it again has not come to life.
        _log.warning("gemmlink resets %s after a failed copy: %s", launch.operation, told[0])
        told = launch.come_to_rest(timeout_s)
    if told:
        raise (moving or told)[0]


def _look_for_the_dead(launch: Launch) -> None:
    for peer in range(launch.group.world):
        if launch.alive(peer) is False:
            raise PeerLost(
                f"every rank must come to a reset of {launch.operation}",
                f"a process of rank {peer} that has ended",
                "Only close() and a group without that rank help.",
                operation=launch.operation,
                epoch=launch.epoch,
                rank=launch.group.rank,
                peer=peer,
            )


def _clear(launch: Launch, epoch: int) -> None:
    words, layout, rank = launch.words, launch.layout, launch.group.rank
    if words is None:
        return
    for source in range(launch.group.world):
        words.set(rank, layout.single("abort", source), 0)
        for kind in ("enter", "free", "read"):
            words.set(rank, layout.single(kind, source), epoch)
