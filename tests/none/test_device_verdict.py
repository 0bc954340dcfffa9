"""What a kernel has recorded, told as the error that a host's call would have raised."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from gemmlink.core.call import FAILED, POISONED
from gemmlink.core.device.desk import Report
from gemmlink.core.device.layout import NAME_ENTER, Why
from gemmlink.core.device.verdict import exception
from gemmlink.core.launch import CODES, RANKS
from gemmlink.errors import InvalidArgument, Overlap, PeerLost, PeerTimeout, Poisoned
from gemmlink.spec.schedule import Word


def _launch(alive: bool | None = True) -> Any:
    return SimpleNamespace(
        operation="all_gather",
        channel="c",
        group=SimpleNamespace(rank=0, world=4, board=None),
        timeout_s=2.5,
        desk=SimpleNamespace(names=[Word("arrive", 3)]),
        alive=lambda peer: alive,
    )


def _abort(epoch: int, code: int, culprit: int) -> int:
    return (epoch * CODES + code) * RANKS + culprit


def test_a_word_that_did_not_come_is_named() -> None:
    error = exception(_launch(), Report(Why.TIMEOUT, 7, 3, 0, 6, 7))
    assert isinstance(error, PeerTimeout)
    assert (error.epoch, error.rank, error.peer) == (7, 0, 3)
    assert (error.word, error.seen, error.wanted) == (str(Word("arrive", 3)), 6, 7)
    assert "within 2.5 s" in str(error)


def test_a_peer_that_did_not_enter_is_named() -> None:
    error = exception(_launch(), Report(Why.TIMEOUT, 2, 1, NAME_ENTER, 1, 2))
    assert isinstance(error, PeerTimeout)
    assert error.word == str(Word("enter", 1))


def test_a_peer_whose_process_has_ended_is_lost() -> None:
    error = exception(_launch(alive=False), Report(Why.TIMEOUT, 7, 3, 0, 6, 7))
    assert isinstance(error, PeerLost)
    assert error.peer == 3
    assert "a process that has ended" in str(error)


@pytest.mark.parametrize(
    ("said", "kind", "peer", "text"),
    [
        (_abort(5, FAILED, 2), PeerLost, 2, "a failure in its call 5"),
        (_abort(4, FAILED, 2), Poisoned, None, "rank 1 failed in call 4"),
        (_abort(4, POISONED, 1), Poisoned, None, "rank 1 failed in call 4"),
        (_abort(6, FAILED, 1), PeerLost, 1, "a failure of rank 1 in call 6, while data of this"),
    ],
)
def test_what_a_peer_has_said_blames_the_right_rank(
    said: int, kind: type[Exception], peer: int | None, text: str
) -> None:
    error = exception(_launch(), Report(Why.ABORTED, 5, 1, 0, said, 5))
    assert type(error) is kind
    assert text in str(error)
    if peer is not None:
        assert getattr(error, "peer", None) == peer


@pytest.mark.parametrize(
    ("report", "kind", "text"),
    [
        (Report(Why.ROWS, 5, 1, 0, 3, 8), InvalidArgument, "M=8 on rank 0 and M=3 on rank 1"),
        (Report(Why.ARGUMENTS, 5, 1, 0, 11, 12), InvalidArgument, "pass the same rows= in call 5"),
        (Report(Why.OVERLAP, 5, 0, 0, 5, 4), Overlap, "on another stream while call 5 was running"),
        (Report(Why.SLOT, 5, 0, 0, 0, 1), InvalidArgument, "with buffers=2 the host must count"),
        (Report(Why.GONE, 5, 1, 0, 6, 5), InvalidArgument, "has given it up and made call 6 since"),
        (Report(Why.STOPPED, 5, 0, 0, 0, 0), Poisoned, "a use in call 5, after it was ended"),
    ],
)
def test_disagreements_say_what_came(report: Report, kind: type[Exception], text: str) -> None:
    error = exception(_launch(), report)
    assert type(error) is kind
    assert text in str(error)
