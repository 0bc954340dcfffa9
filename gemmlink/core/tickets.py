"""Tickets: what each rank believes it is calling, compared only when a wait stalls.

A ticket costs nothing while all is well: it is a dictionary in this process. A wait that stalls, or
an entry record whose fingerprint is another than the own, posts it on the group's board and looks
at what the peers have posted. Two ranks in different calls both stall, so both find out, and both
raise an error that names both values.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from gemmlink.errors import InvalidArgument
from gemmlink.rendezvous import differ
from gemmlink.spec.contracts import Group

_PEER_ANSWER_S = 10.0


def fingerprint(fields: Mapping[str, Any]) -> int:
    """A 62-bit number that differs when any field differs. Values are hashable."""
    return _fingerprint(tuple(fields.items()))


@lru_cache(maxsize=1024)
def _fingerprint(items: tuple[tuple[str, Any], ...]) -> int:
    text = json.dumps(sorted(items))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 2


class Ticket:
    """One call on one channel of a group.

    ``channel`` names a sequence of calls that all ranks make in the same order; ``number`` is the
    place of this call in it; ``fields`` are the arguments that must be equal on all ranks.
    """

    def __init__(self, group: Group, channel: str, number: int, fields: Mapping[str, Any]) -> None:
        self.group = group
        self.channel = channel
        self.number = number
        self.fields = fields  # replaced where they change, never written to
        self._posted = False

    def stalled(self) -> None:
        """Post this ticket and raise ``InvalidArgument`` if a peer's shows another call."""
        if self.group.board is None:
            return
        if not self._posted:
            self._posted = True
            self._post(self._key(self.group.rank), {"fields": self.fields})
        for peer in range(self.group.world):
            if peer != self.group.rank:
                self._compare(peer)

    def absent(self) -> list[int]:
        """Peers that have posted neither this call nor a later one: dead, late or elsewhere.

        For a wait that does not know whom it waits for, once it has stalled: those that wait, too,
        have posted by then.
        """
        return [
            peer
            for peer in range(self.group.world)
            if peer != self.group.rank and self._reached(peer) < self.number
        ]

    def refuse(self, error: Exception) -> None:
        """Tell the peers why this rank will not take part in the call."""
        self._post(self._refusal_key(self.group.rank), {"refused": str(error)})

    def mismatch(self, peer: int) -> InvalidArgument:
        """The error for a peer whose entry record has another fingerprint."""
        deadline = time.monotonic() + _PEER_ANSWER_S
        while self.group.board is not None and time.monotonic() < deadline:
            try:
                self.stalled()
            except InvalidArgument as error:
                return error
            time.sleep(0.01)
        return InvalidArgument(
            f"all ranks must make the same call number {self.number}",
            f"other arguments on rank {peer} than on rank {self.group.rank}: {self.fields}",
        )

    def refusal(self, peer: int) -> InvalidArgument:
        """The error for a peer that is known to have refused this call."""
        posted = self._peek(self._refusal_key(peer))
        reason = posted["refused"] if posted is not None else "no reason given"
        return InvalidArgument(f"rank {peer} refused call {self.number}: {reason}")

    def refused_by(self, peer: int) -> bool:
        """Whether ``peer`` has said that it refuses this call."""
        return self._peek(self._refusal_key(peer)) is not None

    def _post(self, key: str, record: Mapping[str, Any]) -> None:
        if self.group.board is not None:
            text = json.dumps({"number": self.number, **record})
            self.group.board.post(key, text.encode())

    def _peek(self, key: str) -> dict[str, Any] | None:
        record = self._posted_under(key)
        return record if record is not None and record["number"] == self.number else None

    def _posted_under(self, key: str) -> dict[str, Any] | None:
        data = self.group.board.peek(key) if self.group.board is not None else None
        record: dict[str, Any] | None = json.loads(data) if data else None
        return record

    def _reached(self, peer: int) -> int:
        """The number of the last call in which ``peer`` has stalled; 0 if there is none."""
        record = self._posted_under(self._key(peer))
        return 0 if record is None else int(record["number"])

    def _compare(self, peer: int) -> None:
        if self.refused_by(peer):
            raise self.refusal(peer)
        posted = self._peek(self._key(peer))
        if posted is None:
            return
        own = json.loads(json.dumps(self.fields))
        for name in own.keys() | posted["fields"].keys():
            mine, theirs = own.get(name), posted["fields"].get(name)
            if mine != theirs:
                what = self.fields.get("operation", self.channel)
                raise differ(what, name, self.group.rank, mine, peer, theirs)

    def _key(self, rank: int) -> str:
        return f"{self.channel}/{rank}"

    def _refusal_key(self, rank: int) -> str:
        # A key for each refused call: a rank that refused goes on at once, and what it posts while
        # it waits in a later call must not hide the refusal from peers that still wait in this one.
        return f"{self.channel}/refused{self.number}/{rank}"
