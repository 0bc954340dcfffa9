"""One prepared operation: its epoch, its calls one after another, and how a call ends.

Every call has a number, the epoch. It is used up by the call however that ends, on every rank, so
ranks never drift apart. A rank that refuses a call (bad arguments) or fails in it says so in its
``abort`` word at every peer; a peer that waits for it then raises instead of waiting on.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from gemmlink.core.call import FAILED, POISONED, REFUSED, Call, Outgrown
from gemmlink.core.compose import Composition
from gemmlink.core.entry import Entry
from gemmlink.core.interpret import HostProgram
from gemmlink.core.library import Gloo
from gemmlink.core.reset import reset
from gemmlink.core.tickets import Ticket, fingerprint
from gemmlink.core.words import reader
from gemmlink.errors import (
    GemmlinkError,
    InvalidArgument,
    Overlap,
    PeerTimeout,
    Poisoned,
    Unsupported,
)
from gemmlink.spec.contracts import Group, Session, Window
from gemmlink.spec.operations import Operation
from gemmlink.spec.places import result_shape
from gemmlink.spec.problem import Problem
from gemmlink.spec.schedule import Area, Schedule
from gemmlink.spec.window import WindowLayout

#: An ``abort`` word is ``(epoch * CODES + code) * RANKS + culprit``: it grows with the epoch.
CODES = 16
RANKS = 1 << 16


#: Shapes of results that are remembered: calls of few sizes have few.
_SHAPES = 64

#: How long the lanes of a call that ended badly may take to come to rest, in seconds.
_QUIESCE_S = 5.0


class Outcome(NamedTuple):
    """What a call gives: the result, and the private buffer (see ``Memory.local_cols``)."""

    result: torch.Tensor
    local: torch.Tensor


class Launch:
    """A composed, prepared operation. Made by ``core.prepare``; one call at a time."""

    def __init__(
        self,
        *,
        group: Group,
        request: Mapping[str, Any],
        operation: Operation,
        problem: Problem,
        parts: Composition,
        schedule: Schedule,
        program: HostProgram,
        layout: WindowLayout,
        session: Session | None,
        window: Window | None,
        library: Gloo | None,
        channel: str,
        timeout_s: float,
    ) -> None:
        self.group = group
        self.problem = problem
        self.parts = parts
        self.schedule = schedule
        self.program = program
        self.layout = layout
        self.window = window
        self.words = window.words if window is not None else None
        self.library = library
        self.timeout_s = timeout_s
        self.operation = operation.name
        self.phases = operation.phases
        self.ragged = operation.ragged
        self.deterministic = bool(request["deterministic"])
        self._shapes = operation
        self._known_shapes: dict[tuple[int, ...], tuple[int, int]] = {}
        self.epoch = 0
        self.closed = False
        #: Prefix of this operation's keys on the group's board.
        self.channel = channel
        self._fields = {**request, "capacity": problem.capacity}
        self._session = session
        self._fingerprint = fingerprint(self._fields)
        #: First rows of the blocks where each has a slot of its own.
        self.firsts = [peer * problem.capacity for peer in range(group.world)]
        self.entry: Entry | None = None
        self._read_aborts: Callable[[], tuple[int, ...]] = tuple
        self._bind_entry()
        #: Where a reset that has begun and not ended will go on from, once that is agreed.
        self.cleared_at: int | None = None
        self._generation = 0
        self._poison: str | None = None
        self._watches = schedule.plan.view and not schedule.plan.send_complete
        self._view_version: int | None = None
        self._busy = threading.Lock()

    def _bind_entry(self) -> None:
        if self.words is None:
            return
        rank, world = self.group.rank, self.group.world
        self.entry = Entry(self.words, self.layout, rank, self.schedule.plan.peers)
        aborts = [self.layout.single("abort", peer) for peer in range(world)]
        self._read_aborts = reader(self.words, *aborts)

    def ticket(self) -> Ticket:
        """A ticket for the next call on this operation's own channel."""
        return Ticket(self.group, self.channel, self.epoch + 1, self._fields)

    def fingerprint(self, fields: Mapping[str, Any]) -> int:
        """``tickets.fingerprint``, computed once for the fields of this operation's own tickets."""
        return self._fingerprint if fields is self._fields else fingerprint(fields)

    def call(
        self,
        a: torch.Tensor,
        b: torch.Tensor,
        out: torch.Tensor | None,
        rows: Sequence[int] | None,
        ticket: Ticket,
        problems: InvalidArgument | Unsupported | None = None,
        check_first: bool = False,
    ) -> Outcome:
        """Run one call. ``problems`` is an error that the caller found in its own arguments.

        The call is used up on every rank whether it succeeds or not. With ``check_first`` all ranks
        compare their arguments before any data moves.
        """
        if not self._busy.acquire(False):
            raise Overlap(f"one call of {self.operation} at a time", "a call from another thread")
        try:
            aborts = self.refuse_if_unusable()
            problems = problems or self._written_view()
            self._view_version = None  # the last view ends here, whatever becomes of this call
            self.epoch += 1
            call = Call(self, a, b, out, None if problems else rows, ticket)
            try:
                if problems is not None:
                    raise problems
                result = call.run(check_first, aborts)
            except BaseException as error:
                self._end_badly(call, error)
                raise
            self._remember_view(result)
            return Outcome(result, call.local())
        finally:
            self._busy.release()

    def rehearse(self) -> dict[str, Any]:
        """Do in advance what only a first call would take long for. A host has nothing of that."""
        return {}

    def turn_down(self, refusal: InvalidArgument, ticket: Ticket) -> None:
        """Tell the peers of a call that was not made because it has outgrown the window.

        Here they know: the ranks of a call on a host hear of each other's M in it.
        """

    def reset(self, timeout_s: float) -> None:
        """Collective: make a failed operation usable again. See ``operators``."""
        if self.closed:
            raise InvalidArgument(f"{self.operation} must be open", "a reset after close()")
        if not self._busy.acquire(timeout=timeout_s):
            raise Overlap("a reset waits for the running call", "a call from another thread")
        try:
            reset(self, timeout_s)
        except BaseException:
            # Peers that come later count on what this rank has told them: no calls in between.
            self._poison = self._poison or "a reset to which not every rank has come"
            raise
        finally:
            self._busy.release()

    def reset_key(self) -> str:
        """Prefix of the exchanges of the coming reset; equal on all ranks."""
        return f"{self.channel}/reset{self._generation}"

    def begin_anew(self, epoch: int) -> None:
        """Forget failures and go on as if call ``epoch`` had just ended. Part of ``reset``."""
        self.epoch = epoch
        self._poison = None
        self._view_version = None
        self.cleared_at = None
        self._generation += 1

    def come_to_rest(self, timeout_s: float) -> list[Exception]:
        """Wait until nothing moves in any lane; return what the lanes raise.

        That is ``PeerTimeout`` for one that still moves, else what a copy has raised.
        """
        deadline = time.monotonic() + timeout_s
        told: list[Exception] = []
        for lane in self.program.lanes.values():
            try:
                lane.drain(max(0.0, deadline - time.monotonic()))
            except Exception as error:
                told.append(error)
        return told

    def alive(self, peer: int) -> bool | None:
        """Whether ``peer``'s process exists; None if that cannot be known."""
        return self._session.alive(peer) if self._session is not None else None

    def refuse_if_unusable(self) -> bool:
        """Raise if this operation is closed, has failed here, or has failed on a peer. Local.

        Returns ``has_aborts()``.
        """
        if self.closed:
            raise InvalidArgument(f"{self.operation} must be open", "a use after close()")
        aborts = self.has_aborts()
        if aborts and self._poison is None:
            self._learn_of_failures()
        if self._poison is not None:
            raise Poisoned(
                f"{self.operation} cannot be used after a failed call",
                self._poison,
                "reset() it on every rank, or close() it and prepare a new one.",
            )
        return aborts

    def close(self) -> None:
        """Give the window back. Idempotent; waits for nobody."""
        self.closed = True
        if self.library is not None:
            self.library.close()
        # Before the session: memory that peers have mapped is given back once nobody views it.
        self.program.release()
        self.window = self.words = self.entry = None
        self._read_aborts = tuple
        if self._session is not None:
            self._session.close()

    def result_shape(self, rows: tuple[int, ...]) -> tuple[int, int]:
        """Shape of this rank's result when ``rows[r]`` is rank r's M."""
        shape = self._known_shapes.get(rows)
        if shape is None:
            if len(self._known_shapes) >= _SHAPES:
                self._known_shapes.clear()
            shape = result_shape(self._shapes, self.group.rank, self.group.world, rows)
            self._known_shapes[rows] = shape
        return shape

    def view_grid(self, epoch: int) -> torch.Tensor:
        """The rows of the own window that a result which is a view begins with."""
        last = len(self.phases) - 1
        area: Area = "sum" if self.phases[last].sums else "inbox"
        return self.program.memory.grid(self.group.rank, last, area, epoch)

    def view_rows(self, epoch: int, count: int) -> torch.Tensor:
        """The first ``count`` of these rows: a new view each time."""
        grid = self.view_grid(epoch)
        # Either shares the counter of writes with the grid; the former costs a third of the latter.
        return grid.detach() if count == grid.shape[0] else grid[:count]

    def abort_of(self, peer: int) -> tuple[int, int, int]:
        """The last call that ``peer`` refused or failed in, as epoch, code and culprit.

        The culprit is the rank where the trouble began: ``peer``, or the one that it waited for in
        vain. Epoch and code are 0 if there was no such call.
        """
        if self.words is None:
            return 0, 0, peer
        what, culprit = divmod(self.words.read(self.layout.single("abort", peer)), RANKS)
        return *divmod(what, CODES), culprit

    def has_aborts(self) -> bool:
        """Whether any rank has ever refused or failed; a quick look before the thorough one."""
        return any(self._read_aborts())

    def _learn_of_failures(self) -> None:
        for peer in range(self.group.world):
            epoch, code, _ = self.abort_of(peer)
            # A failure in the coming call is that call's own affair: see core.call.
            if code in (FAILED, POISONED) and epoch <= self.epoch:
                self._poison = f"rank {peer} failed in call {epoch}"
                return

    def _end_badly(self, call: Call, error: BaseException) -> None:
        """Tell the peers, and remember, that the current call has no result here."""
        if isinstance(error, GemmlinkError) and error.call_completed:
            return
        # Nothing of this call may move after it. A failed copy of an earlier one, which nobody may
        # have noticed yet, is told here or never.
        told = self.come_to_rest(_QUIESCE_S)
        lost = [reason for reason in told if not isinstance(reason, PeerTimeout)]
        if isinstance(error, Outgrown) and not lost:  # every rank finds that out for itself
            self._leave()
            return
        clean = isinstance(error, InvalidArgument | Unsupported) and not lost
        if not clean:
            why = lost[0] if lost else error
            self._poison = f"call {self.epoch} ended with {type(why).__name__}: {why}"
        if isinstance(error, InvalidArgument | Unsupported):
            call.ticket.refuse(error)
        code = REFUSED if clean else POISONED if isinstance(error, Poisoned) else FAILED
        if self.words is None:
            call.refuse_collective(code)
            return
        rank = self.group.rank
        blamed = error.peer if isinstance(error, PeerTimeout) else -1
        culprit = blamed if blamed >= 0 else rank
        for peer in range(self.group.world):
            value = (self.epoch * CODES + code) * RANKS + culprit
            self.words.set(peer, self.layout.single("abort", rank), value)
        if clean:
            self._leave()

    def _leave(self) -> None:
        """Tell the peers that this rank reads nothing of the current call any more.

        It may not even have entered: its peers must not wait for that before they enter the next.
        """
        if self.words is not None:
            for peer in range(self.group.world):
                for kind in ("free", "enter"):
                    offset = self.layout.single(kind, self.group.rank)
                    self.words.set(peer, offset, self.epoch)

    # Views are for reading: peers may still be reading what is under them, too.

    def _remember_view(self, result: torch.Tensor) -> None:
        watch = self._watches and not result.is_inference()
        self._view_version = result._version if watch else None

    def _written_view(self) -> InvalidArgument | None:
        if self._view_version is None:
            return None
        grid = self.view_grid(self.epoch)
        if grid._version == self._view_version:
            return None
        return InvalidArgument(
            "a view of the window is for reading",
            f"the result of call {self.epoch} was written to",
            "Copy it first, or prepare with completion='receive_and_send'.",
        )
