"""A prepared operation whose calls are enqueued on CUDA streams.

A call returns as soon as it is enqueued. What goes wrong on the device is recorded there and raised
at the next touch by the host: the next call, ``check()`` or ``close()``; the result is then NaN.
After any failure, a peer's refusal included, the operation needs ``reset()``: later calls may be on
their way already.

The number of a call is a word of the device (``desk``): a graph that is replayed counts there. The
host counts only what it enqueues itself, which is enough to choose between two slots.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch

from gemmlink.core.call import FAILED, Outgrown
from gemmlink.core.device.call import DeviceCall
from gemmlink.core.device.layout import Flag
from gemmlink.core.device.program import DeviceProgram
from gemmlink.core.device.verdict import exception
from gemmlink.core.launch import CODES, RANKS, Launch, Outcome
from gemmlink.core.tickets import Ticket
from gemmlink.errors import (
    GemmlinkError,
    InvalidArgument,
    Overlap,
    PeerTimeout,
    Poisoned,
    Unsupported,
)
from gemmlink.spec.schedule import Set, Word

#: How long kernels that have been told to end may take, in seconds.
_REST_S = 5.0
#: How long calls that are on their way when an operation is closed may take to end, in seconds.
_GRACE_S = 5.0
_LOOK_S = 0.05

#: What captured graphs refer to and nobody else does: a graph that is replayed after ``close`` must
#: find that the operation has ended, not memory that is gone. torch does not tell when a graph is.
_captured: list[Any] = []


class DeviceLaunch(Launch):
    """See the module's docstring. Made by ``core.prepare``; one call at a time."""

    program: DeviceProgram

    def __init__(self, **common: Any) -> None:
        super().__init__(**common)
        self.machine = self.program.machine
        self.desk = self.program.desk
        self._ended = self.machine.event()
        self._last_stream: int | None = None
        self._was_captured = False
        self._failure: GemmlinkError | None = None
        self._refusal = self.desk.arguments(self._leaving(), [])
        self._refusal.flags = Flag.ENTERS | Flag.LEAVES | Flag.REFUSES
        self._refusal.rows = -1

    def _bind_entry(self) -> None:
        """Records and abort words are the kernels' business."""

    def rehearse(self) -> dict[str, Any]:
        """Let torch load the kernels of a call of the largest size. Local; ends on the device, too.

        A kernel is loaded by its first launch, and loading waits for whatever runs: in a first call
        the host would wait there for the peers. Other sizes may use kernels of their own.
        Operands are zeros, so that slots stay zero; there may be no memory for them, which is no
        reason not to prepare.
        """
        problem = self.problem
        shapes = (problem.capacity, problem.k), (problem.n, problem.k)
        stream = self.machine.stream()
        with contextlib.suppress(torch.OutOfMemoryError), torch.no_grad():
            a, b = (torch.zeros(s, dtype=problem.dtype, device=problem.device) for s in shapes)
            self.program.rehearse(DeviceCall(self, a, b, None, None, 0, stream))
        self._mark(stream, capturing=False)
        self._rests(self.timeout_s)
        return {}

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
        """Enqueue one call on the current stream. See ``Launch.call``.

        With ``check_first`` the host waits for the end of the call and raises what went wrong in
        it, unless a graph is being captured.
        """
        if not self._busy.acquire(False):
            raise Overlap(f"one call of {self.operation} at a time", "a call from another thread")
        try:
            self.refuse_if_unusable()
            stream = self.machine.stream()
            capturing = self.machine.is_capturing(stream)
            problems = problems or self._unfit(a, out, rows, capturing)
            self._order(stream, capturing)
            if problems is not None:
                self._refuse(problems, ticket, stream, capturing)
            outcome = self._enqueue(a, b, out, rows, ticket, stream, capturing)
            self._mark(stream, capturing)
        finally:
            self._busy.release()
        if check_first and not capturing:
            self._synchronise()
        return outcome

    def turn_down(self, refusal: InvalidArgument, ticket: Ticket) -> None:
        """Use the call up and tell the peers, for theirs may fit. See ``Launch.turn_down``."""
        stream = self.machine.stream()
        capturing = self.machine.is_capturing(stream)
        self._order(stream, capturing)
        with contextlib.suppress(InvalidArgument):
            self._refuse(refusal, ticket, stream, capturing)

    def refuse_if_unusable(self) -> bool:
        """Raise if this operation is closed, or has failed as far as the host has heard. Local."""
        if self.closed:
            raise InvalidArgument(f"{self.operation} must be open", "a use after close()")
        if self._failure is not None:
            raise Poisoned(
                f"{self.operation} cannot be used after a failed call",
                str(self._failure),
                "reset() it on every rank, or close() it and prepare a new one.",
            )
        unheard = self._unheard()
        if unheard is not None:
            raise unheard
        return False

    def come_to_rest(self, timeout_s: float) -> list[Exception]:
        """Stop the kernels of the last call; ``PeerTimeout`` if they do not end in time.

        Graphs that are being replayed are the caller's to wait for.
        """
        self._unheard()
        self.desk.stop()
        if not self._rests(timeout_s):
            late = f"work that has not ended in {timeout_s:g} s"
            return [PeerTimeout("a stream must come to rest", late, operation=self.operation)]
        self.epoch = max(self.epoch, self.desk.issued())
        return []

    def begin_anew(self, epoch: int) -> None:
        """Forget failures and go on as if call ``epoch`` had just ended. Part of ``reset``."""
        super().begin_anew(epoch)
        self.desk.clear(epoch)
        self._failure = None

    def close(self) -> None:
        """Give what is enqueued a few seconds to end, then the window back. Idempotent.

        What has not ended by then, or waits for a peer that is dead, is ended, and its result is
        NaN. Raises what went wrong on the device and has not been raised before, after all that.
        Memory of an operation that was captured into a graph stays for the life of the process.
        """
        if self.closed:
            return
        self._rests(_GRACE_S, self._is_lost)
        unheard = self._unheard() if self._failure is None else None
        self.desk.stop()
        self._rests(_REST_S)
        if self._was_captured:
            _captured.append((self.desk, self.program, self.window))
            self._session = None
        super().close()
        if unheard is not None:
            raise unheard

    # A call.

    def _enqueue(
        self,
        a: torch.Tensor,
        b: torch.Tensor,
        out: torch.Tensor | None,
        rows: Sequence[int] | None,
        ticket: Ticket,
        stream: int,
        capturing: bool,
    ) -> Outcome:
        fields = ticket.fields if rows is None else {**ticket.fields, "rows": tuple(rows)}
        self.epoch += not capturing
        self._was_captured |= capturing
        try:
            call = DeviceCall(self, a, b, out, rows, self.fingerprint(fields), stream)
            self.program.run(call)
        except BaseException as error:
            if not capturing:  # else nothing has run, and the graph is lost
                self._give_up(error)
            raise
        return Outcome(call.result(), call.local())

    def _unfit(
        self,
        a: torch.Tensor,
        out: torch.Tensor | None,
        rows: Sequence[int] | None,
        capturing: bool,
    ) -> InvalidArgument | Unsupported | None:
        """What is wrong with this call on a device, that would not be on a host."""
        counts = tuple(rows) if rows is not None else (int(a.shape[0]),) * self.group.world
        if max(counts) > self.problem.capacity:
            raise Outgrown(max(counts))  # on every rank alike, so that nobody need be told
        if out is not None:
            shape = self.result_shape(counts)
            if tuple(out.shape) != shape:
                return InvalidArgument(f"out must have shape {shape}", str(tuple(out.shape)))
        if capturing and self.schedule.plan.buffers > 1:
            return Unsupported(
                "a captured call uses the same slot each time it is replayed",
                "buffers=2 under graph capture",
                "Prepare with buffers=1.",
            )
        return None

    def _order(self, stream: int, capturing: bool) -> None:
        """Let this call begin behind the last one, on whatever stream that was.

        A stream that is being captured cannot wait for work outside its graph; there the caller
        orders, and two calls at once are found out by the device.
        """
        if not capturing and self._last_stream not in (None, stream):
            self.machine.wait(stream, self._ended)

    def _mark(self, stream: int, capturing: bool) -> None:
        if not capturing:
            self.machine.record(self._ended, stream)
            self._last_stream = stream

    def _leaving(self) -> list[Set]:
        rank = self.group.rank
        return [Set(Word("free", rank), at=peer) for peer in self.schedule.plan.peers]

    def _refuse(
        self,
        problems: InvalidArgument | Unsupported,
        ticket: Ticket,
        stream: int,
        capturing: bool,
    ) -> NoReturn:
        """Use the call up without taking part, and tell the peers; then raise."""
        if not capturing:
            self.epoch += 1
            own = Ticket(self.group, self.channel, self.epoch, ticket.fields)
            own.refuse(problems)
            self._refusal.fingerprint = self.fingerprint(ticket.fields)
            self.machine.words(self._refusal, stream)
            self._mark(stream, capturing)
        raise problems

    # Failure.

    def _unheard(self) -> GemmlinkError | None:
        """What the device has recorded and nobody has raised yet; from then on it is known."""
        report = self.desk.report() if self._failure is None else None
        if report is None:
            return None
        self._failure = exception(self, report)
        return self._failure

    def _give_up(self, error: BaseException) -> None:
        """The host could not enqueue all of a call: end what it did enqueue, and tell the peers."""
        self.desk.stop()
        self._failure = Poisoned(
            f"{self.operation} must enqueue all of a call",
            f"{type(error).__name__}: {error}",
        )
        epoch, rank = max(1, self.desk.issued()), self.group.rank
        assert self.words is not None, "a call without a window"
        for peer in range(self.group.world):
            value = (epoch * CODES + FAILED) * RANKS + rank
            self.words.set(peer, self.layout.single("abort", rank), value)

    def _rests(self, timeout_s: float, give_up: Callable[[], bool] = lambda: False) -> bool:
        """Whether what was enqueued ends in time; looks for ``give_up`` now and then."""
        if self._last_stream is None:
            return True
        now = time.monotonic()
        deadline, look = now + timeout_s, now + _LOOK_S
        while not self.machine.has_happened(self._ended):
            now = time.monotonic()
            if now > deadline or (now > look and give_up()):
                return False
            look = look if now <= look else now + _LOOK_S
            time.sleep(0.0005)
        return True

    def _is_lost(self) -> bool:
        return any(self.alive(peer) is False for peer in range(self.group.world))

    def _synchronise(self) -> None:
        """Wait for the end of the last call, which its own limit bounds; raise what it met."""
        self._rests(2 * self.timeout_s)
        self.refuse_if_unusable()
