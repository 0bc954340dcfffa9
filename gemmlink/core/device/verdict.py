"""Turns what a kernel has recorded into the exception that a host's call would have raised."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gemmlink.core.call import REFUSED
from gemmlink.core.device.desk import Report
from gemmlink.core.device.layout import Why
from gemmlink.core.launch import CODES, RANKS
from gemmlink.core.tickets import Ticket
from gemmlink.errors import (
    GemmlinkError,
    InvalidArgument,
    Overlap,
    PeerLost,
    PeerTimeout,
    Poisoned,
)
from gemmlink.spec.schedule import Word

if TYPE_CHECKING:
    from gemmlink.core.device.launch import DeviceLaunch


def exception(launch: DeviceLaunch, report: Report) -> GemmlinkError:
    """The error that ``report`` is. Local; asks at most whether a process is alive."""
    if report.why == Why.TIMEOUT:
        return _late(launch, report)
    if report.why == Why.ABORTED:
        return _told(launch, report)
    return _disagreement(launch, report)


def _late(launch: DeviceLaunch, report: Report) -> PeerTimeout:
    peer, rank = report.peer, launch.group.rank
    name = str(_word(launch, report))
    if launch.alive(peer) is False:
        return _lost(
            launch,
            report.epoch,
            peer,
            "a process that has ended",
            "See why it ended: its own output, or the kernel's log for a kill.",
        )
    return PeerTimeout(
        f"rank {peer} must set {name} to {report.wanted} within {launch.timeout_s:g} s",
        f"{report.seen} at rank {rank} in call {report.epoch} of {launch.operation}",
        "Call the operation on every rank, or raise GEMMLINK_TIMEOUT_S. The result is NaN.",
        operation=launch.operation,
        epoch=report.epoch,
        rank=rank,
        peer=peer,
        word=name,
        seen=report.seen,
        wanted=report.wanted,
    )


def _told(launch: DeviceLaunch, report: Report) -> GemmlinkError:
    what, culprit = divmod(report.seen, RANKS)
    epoch, code = divmod(what, CODES)
    peer = report.peer
    if code == REFUSED:
        return Ticket(launch.group, launch.channel, epoch, {}).refusal(peer)
    if epoch < report.epoch:
        return Poisoned(
            f"{launch.operation} cannot be used after a failed call",
            f"rank {peer} failed in call {epoch}",
            "reset() it on every rank, or close() it and prepare a new one.",
        )
    if epoch > report.epoch:
        came = f"a failure of rank {peer} in call {epoch}, while data of this one was being read"
        return _lost(launch, report.epoch, peer, came)
    return _lost(launch, report.epoch, culprit, f"a failure in its call {epoch}")


def _disagreement(launch: DeviceLaunch, report: Report) -> GemmlinkError:
    peer, rank, call = report.peer, launch.group.rank, f"call {report.epoch}"
    if report.why == Why.ROWS:
        return InvalidArgument(
            "on devices M must be equal on all ranks, or passed as rows=",
            f"M={report.wanted} on rank {rank} and M={report.seen} on rank {peer} in {call}",
            "Pass every rank's M as rows=; then reset() the operation.",
        )
    if report.why == Why.ARGUMENTS:
        return InvalidArgument(
            f"all ranks must pass the same rows= in {call} of {launch.operation}",
            f"another one on rank {peer} than on rank {rank}",
            "Pass every rank's M, in rank order; then reset() the operation.",
        )
    if report.why == Why.OVERLAP:
        return Overlap(
            f"one call of {launch.operation} at a time",
            f"a call that began on another stream while call {report.seen} was running",
            "Let the streams wait for each other, replayed graphs included; then reset().",
        )
    if report.why == Why.STOPPED:
        return Poisoned(f"{launch.operation} must be open", f"a use in {call}, after it was ended")
    if report.why == Why.SLOT:
        return InvalidArgument(
            "with buffers=2 the host must count the calls", f"{call}, of which it does not know"
        )
    return InvalidArgument(
        f"all ranks must make {call} of {launch.operation}",
        f"rank {peer}, which has given it up and made call {report.seen} since",
    )


def _lost(launch: DeviceLaunch, epoch: int, peer: int, came: str, fix: str = "") -> PeerLost:
    return PeerLost(
        f"rank {peer} must complete call {epoch} of {launch.operation}",
        came,
        fix or "See that rank's own error. The result is NaN.",
        operation=launch.operation,
        epoch=epoch,
        rank=launch.group.rank,
        peer=peer,
    )


def _word(launch: DeviceLaunch, report: Report) -> Word:
    names = launch.desk.names
    known = 0 <= report.name < len(names)
    return names[report.name] if known else Word("enter", report.peer)
