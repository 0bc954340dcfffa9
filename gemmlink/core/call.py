"""One call on one rank: its arguments, its entry record, its waits and its result.

A call enters by leaving a record in every peer's window (epoch, M, fingerprint of the arguments),
walks the schedule, and sizes its result once it has everybody's record. A wait that lasts looks for
a reason: a peer that refused or failed, a peer in another call, or the limit.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from gemmlink.core.collectives import COLLECTIVES
from gemmlink.core.placing import packed
from gemmlink.core.tickets import Ticket
from gemmlink.core.words import SLICE_S
from gemmlink.errors import GemmlinkError, InvalidArgument, PeerLost, PeerTimeout, Poisoned
from gemmlink.spec.contracts import Lane
from gemmlink.spec.schedule import Word

if TYPE_CHECKING:
    from gemmlink.core.launch import Launch

#: What an ``abort`` word says about its epoch: that rank refused the call, failed in it, or heard
#: in it of a failure in an earlier one.
REFUSED = 1
FAILED = 2
POISONED = 3


class Outgrown(GemmlinkError):
    """Some rank's M is above the capacity; all ranks of the call learn it and none has a result."""

    def __init__(self, rows: int) -> None:
        super().__init__("M must fit the window", f"{rows} rows")
        self.rows = rows


class Call:
    """State of one call on one rank; what the interpreter's steps act on."""

    def __init__(
        self,
        launch: Launch,
        a: torch.Tensor,
        b: torch.Tensor,
        out: torch.Tensor | None,
        rows: Sequence[int] | None,
        ticket: Ticket,
    ) -> None:
        self.launch = launch
        self.epoch = launch.epoch
        self.a = a
        self.b = b
        self.value = a
        self.m = 0
        self.ticket = ticket
        self._out = out
        self._rows: tuple[int, ...] | None = None
        if rows is not None:
            self._rows = tuple(rows)
            ticket.fields = {**ticket.fields, "rows": self._rows}
        self._fingerprint = launch.fingerprint(ticket.fields)
        self._result: torch.Tensor | None = None
        self._late: InvalidArgument | None = None
        #: First row of each rank's block in the result.
        self.starts: Sequence[int] = ()
        self._view = launch.schedule.plan.view
        #: First rows of all blocks among the rows of a set of slots.
        self.firsts: Sequence[int] = ()
        self.blocks: dict[int, torch.Tensor] = {}
        self._local: torch.Tensor | None = None
        self.band = a
        self._header_sent = False
        self._deadline = time.monotonic() + launch.timeout_s

    def run(self, check_first: bool, aborts: bool) -> torch.Tensor:
        """Enter, execute the schedule, and return the result. ``aborts``: some rank has failed."""
        self.m = int(self.a.shape[0])
        self.firsts = self._slot_rows()
        if self.launch.words is not None:
            # A peer may have given the call up before this rank came. All the data may be here all
            # the same: without this look a late rank would hold a result that the others lack.
            if aborts:
                self._look_for_aborts()
            self._enter()
            if self.m > self.launch.problem.capacity:
                self._resolve_rows()
        if check_first:
            self._exchange_arguments()
        self.launch.program.run(self)
        if self.launch.has_aborts():  # as above: this rank may have slept since
            self._look_for_aborts()
        return self._finished()

    # What the interpreter asks for (see interpret.CallState).

    def wait_longer(self, word: Word, offset: int, at_least: int) -> None:
        """Wait for a late word; raise as soon as it is known that it will not come."""
        words = self.launch.words
        assert words is not None, f"waiting for {word} without a window"
        seen = at_least - 1
        while seen < at_least:
            self._stalled(str(word), word.source, offset, at_least)
            seen = words.wait(offset, at_least, SLICE_S)

    def drain(self, lane: Lane) -> None:
        """Wait until a lane has drained; raise if it does not within the limit of the call."""
        lane.drain(self._left())

    def rows_of(self, source: int) -> int:
        """M of ``source``, from its entry record; the own one where all must be equal."""
        if not self.launch.ragged:
            return self.m
        if self._rows is None:
            return self._read_record(source)
        return self._rows[source]

    def local(self) -> torch.Tensor:
        """Private buffer for what this rank keeps of its own product, ``(M, columns kept)``."""
        if self._local is None:
            low, high = self.launch.program.memory.local_cols
            problem = self.launch.problem
            shape = (self.m, high - low)
            self._local = torch.empty(shape, dtype=problem.out_dtype, device=problem.device)
        return self._local

    def result(self) -> torch.Tensor:
        """The result; the first time, it is sized from every rank's M."""
        if self._result is None:
            self._result = self._make_result()
        return self._result

    def collective(self, name: str) -> None:
        """Let the communication library move the private buffers into the result."""
        COLLECTIVES[name](self)

    # What the library's collectives ask for (see core.collectives).

    def make_band(self, rows: int) -> torch.Tensor:
        """Private room for the band that this rank sums, where it travels on."""
        self.band = torch.empty(rows, self.launch.problem.n, dtype=self.launch.problem.out_dtype)
        return self.band

    def known_rows(self) -> tuple[int, ...]:
        """Every rank's M, without a window: the ranks tell each other."""
        self._exchange_header()
        assert self._rows is not None, "rows before they were exchanged"
        return self._rows

    def through_library(
        self,
        name: str,
        out: torch.Tensor,
        block: torch.Tensor,
        sent: Sequence[int] = (),
        came: Sequence[int] = (),
    ) -> None:
        """A collective of the library; who is missing, which it does not know, is found out."""
        launch = self.launch
        assert launch.library is not None, "a library collective without a library"
        try:
            launch.library.run(name, out, block, self._left(), self.ticket.stalled, sent, came)
        except PeerTimeout as error:
            absent = self.ticket.absent()
            raise type(error)(
                error.rule,
                f"{error.came}; nothing heard from ranks {absent}" if absent else error.came,
                error.fix,
                operation=launch.operation,
                epoch=self.epoch,
                rank=launch.group.rank,
                peer=absent[0] if len(absent) == 1 else -1,
            ) from error

    def refuse_collective(self, code: int) -> None:
        """Take part in the header exchange of a call that ends badly here, so peers can tell."""
        if self.launch.library is not None and not self._header_sent:
            # The peers have their own reasons by then; ours is being raised already.
            with contextlib.suppress(GemmlinkError):
                self._exchange_header(code)

    # Entering a call.

    def _enter(self) -> None:
        launch = self.launch
        assert launch.entry is not None, "entering without a window"
        # The record of call n-2 is overwritten: nobody may still read it. After a call that was
        # completed this holds already; a refused one is left without waiting for anybody.
        entry, epoch = launch.entry, self.epoch
        for peer in entry.waits:
            self._await_entry(peer, epoch - 1)
        entry.say(epoch, self.m, self._fingerprint)

    def _await_entry(self, peer: int, epoch: int) -> None:
        entry = self.launch.entry
        assert entry is not None, "an entry without a window"
        if entry.waits[peer](epoch) < epoch:
            self.wait_longer(Word("enter", peer), entry.offset(peer), epoch)

    def _slot_rows(self) -> Sequence[int]:
        """First rows of all blocks: a slot apart, or packed where the result is a view of them."""
        launch = self.launch
        if not self._view:
            return launch.firsts
        if self._rows is not None:
            return packed(self._rows).starts
        return packed((min(self.m, launch.problem.capacity),) * launch.group.world).starts

    def _exchange_arguments(self) -> None:
        if self.launch.words is not None:
            self._resolve_rows()
        else:
            self._exchange_header()

    def _resolve_rows(self) -> None:
        """Read every rank's entry record."""
        rows = [self.m] * self.launch.group.world
        for peer in self.launch.schedule.plan.peers:
            rows[peer] = self._read_record(peer)
        self._take_rows(tuple(rows))

    def _read_record(self, peer: int) -> int:
        """M of ``peer``, once it has entered; raise if its other arguments differ from the own."""
        entry = self.launch.entry
        assert entry is not None, "records without a window"
        entered, epoch, rows, other = entry.read(peer, self.epoch)
        if entered < self.epoch:
            self._await_entry(peer, self.epoch)
            _, epoch, rows, other = entry.read(peer, self.epoch)
        if epoch != self.epoch:  # the peer has given this call up and made others since
            raise self.ticket.refusal(peer)
        if other != self._fingerprint:
            raise self.ticket.mismatch(peer)
        return rows

    def _exchange_header(self, code: int = 0) -> None:
        """Without a window: M and fingerprint travel through the library, once a call.

        ``code`` is 0, or ``REFUSED`` or ``FAILED`` where the call has ended badly already.
        """
        group = self.launch.group
        if self._header_sent:
            return
        self._header_sent = True
        mine = [0 if code else self.m, self._fingerprint, code]
        gathered = torch.zeros(group.world, len(mine), dtype=torch.int64)
        self.through_library("all_gather", gathered, torch.tensor(mine))
        headers = gathered.tolist()
        for peer, (_, other, peer_code) in enumerate(headers):
            if code:
                continue
            if peer_code == FAILED:
                raise self._lost(peer)
            if peer_code == REFUSED:
                raise self.ticket.refusal(peer)
            if other != self._fingerprint:
                raise self.ticket.mismatch(peer)
        self._take_rows(tuple(int(header[0]) for header in headers))

    def _take_rows(self, rows: tuple[int, ...]) -> None:
        if self._rows is not None and self._rows != rows:
            raise InvalidArgument(
                "rows must hold every rank's M",
                f"rows={list(self._rows)} where the ranks have {list(rows)}",
            )
        placing = packed(rows)
        if placing.longest > self.launch.problem.capacity:
            raise Outgrown(placing.longest)
        if not self.launch.ragged and not placing.even:
            raise InvalidArgument(
                f"M must be equal on all ranks of {self.launch.operation}",
                f"the ranks' M are {list(rows)}",
                "The ranks' products are added: give every rank an a of the same shape.",
            )
        # Also where the own blocks lie right: those of a rank with another M do not.
        if self._view and self._rows is None and not placing.even:
            raise InvalidArgument(
                "a view of the window needs M equal on all ranks, or rows=",
                f"the ranks' M are {list(rows)}",
                "Pass every rank's M as rows=, or use result='copy'.",
            )
        self._rows = rows

    # The result.

    def _make_result(self) -> torch.Tensor:
        launch = self.launch
        if launch.words is not None:
            self._resolve_rows()
        else:
            self._exchange_header()
        rows = self._rows
        assert rows is not None, "rows before they were exchanged"
        self.starts = packed(rows).starts
        shape = launch.result_shape(rows)
        if self._view:
            return launch.view_rows(self.epoch, shape[0])
        if self._out is not None and self._out.shape == shape:
            return self._out
        if self._out is not None:
            # Known only now that all ranks' M are: by all means finish the call, for the peers
            # wait for what this rank still has to send.
            came = str(tuple(self._out.shape))
            self._late = InvalidArgument(f"out must have shape {shape}", came)
            self._late.call_completed = True
        problem = launch.problem
        return torch.empty(shape, dtype=problem.out_dtype, device=problem.device)

    def _finished(self) -> torch.Tensor:
        # A schedule that delivers nothing still owes a result of the right shape: world 1 of an
        # empty product, for example.
        result = self._result if self._result is not None else self.result()
        if self._late is not None:
            raise self._late
        return result

    # Waiting.

    def _left(self) -> float:
        return max(0.0, self._deadline - time.monotonic())

    def _stalled(self, name: str, source: int, offset: int, wanted: int) -> None:
        """Look for a reason why a word does not come; raise if there is one."""
        self._look_for_aborts()
        self._look_for_departure(source, offset, wanted)
        self._look_for_death(source, offset, wanted)
        self.ticket.stalled()
        if time.monotonic() < self._deadline:
            return
        launch, words = self.launch, self.launch.words
        assert words is not None, "stalled on a word without a window"
        seen = words.read(offset)
        raise PeerTimeout(
            f"rank {source} must set {name} to {wanted} within {launch.timeout_s:g} s",
            f"{seen} at rank {launch.group.rank} in call {self.epoch} of {launch.operation}",
            "Call the operation on every rank, or raise GEMMLINK_TIMEOUT_S.",
            operation=launch.operation,
            epoch=self.epoch,
            rank=launch.group.rank,
            peer=source,
            word=name,
            seen=seen,
            wanted=wanted,
        )

    def _lost(self, peer: int, came: str = "", fix: str = "See that rank's own error.") -> PeerLost:
        launch = self.launch
        return PeerLost(
            f"rank {peer} must complete call {self.epoch} of {launch.operation}",
            came or f"a failure in its call {self.epoch}",
            fix,
            operation=launch.operation,
            epoch=self.epoch,
            rank=launch.group.rank,
            peer=peer,
        )

    def _look_for_aborts(self) -> None:
        launch = self.launch
        # The earliest first: what came of it in later calls says less about what happened.
        for peer in sorted(range(launch.group.world), key=lambda peer: launch.abort_of(peer)[0]):
            epoch, code, culprit = launch.abort_of(peer)
            if (code == FAILED and epoch < self.epoch) or (
                code == POISONED and epoch <= self.epoch
            ):
                raise Poisoned(
                    f"{launch.operation} cannot be used after a failed call",
                    f"rank {peer} failed in call {epoch}",
                    "reset() it on every rank, or close() it and prepare a new one.",
                )
            if code == FAILED and epoch == self.epoch:
                raise self._lost(culprit)
            if code == REFUSED and epoch == self.epoch:
                raise self.ticket.refusal(peer)

    def _look_for_departure(self, source: int, offset: int, wanted: int) -> None:
        """A peer that has ended a later call badly has left this one: its word will never come.

        Its lanes had come to rest before it said so; before that, one might still set the word.
        """
        words = self.launch.words
        assert words is not None, "departures without a window"
        epoch, code, _ = self.launch.abort_of(source)
        if epoch <= self.epoch or words.read(offset) >= wanted:
            return
        if code == FAILED and not self.ticket.refused_by(source):
            raise self._lost(source)  # what it owes to this call was lost without its notice
        raise self.ticket.refusal(source)

    def _look_for_death(self, source: int, offset: int, wanted: int) -> None:
        """A process that has ended sets no more words; what it set before that still counts."""
        launch, words = self.launch, self.launch.words
        assert words is not None, "deaths without a window"
        if launch.alive(source) is False and words.read(offset) < wanted:
            fix = "See why it ended: its own output, or the kernel's log for a kill."
            raise self._lost(source, "a process that has ended", fix)
