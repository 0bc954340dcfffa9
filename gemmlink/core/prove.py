"""Proof at set-up that a window moves bytes: every peer, both ends of every slot, words.

A transport can succeed at everything and still move nothing (a disabled copy engine, a window that
is a private copy). Results would then be whatever the memory held. So each rank writes a pattern
made from a fresh number into each peer's window, and each rank checks what it received.
"""

from __future__ import annotations

import secrets

import torch

from gemmlink.errors import Unavailable
from gemmlink.rendezvous import agree
from gemmlink.spec.contracts import Group, Session, Window
from gemmlink.spec.window import WindowLayout

_WORD_LIMIT_S = 5.0
_SAMPLE = 64


def prove(
    group: Group,
    session: Session,
    window: Window,
    layout: WindowLayout,
    *,
    transport: str,
    common: bool,
    key: str,
    timeout_s: float,
) -> None:
    """Collective. Raises ``Unavailable`` on every rank if any window or word is not reached.

    Leaves slots and the proof word as it found them: zero.
    """
    reach(window, transport)
    nonces = agree(group, f"{key}/nonce", lambda: {"nonce": secrets.randbits(40) + 1}, timeout_s)
    _write(window, layout, group, int(nonces[group.rank]["nonce"]), common)
    session.barrier(timeout_s)
    agree(
        group,
        f"{key}/proof",
        lambda: _check(window, layout, group, [int(n["nonce"]) for n in nonces], transport, common),
        timeout_s,
    )
    _erase(window, layout, group)
    session.barrier(timeout_s)


def reach(window: Window, transport: str) -> None:
    """Raise ``Unavailable`` unless every peer has an address."""
    for peer, address in enumerate(window.addresses):
        if not address:
            raise Unavailable(
                f"transport {transport!r} must give an address for every peer's window",
                f"{address!r} for rank {peer}",
                "The transport reported success without reaching that peer; see its own log.",
            )


def _places(layout: WindowLayout, source: int) -> list[tuple[int, int]]:
    """Offset and size of the samples of ``source``: both ends of its piece of every area."""
    places = []
    for area in layout.areas:
        piece = area.nbytes // layout.world
        size = min(_SAMPLE, max(piece // 2, 1)) if piece else 0  # so that the two never overlap
        for buffer in range(layout.buffers):
            first = layout.area(area.phase, area.area, buffer) + source * piece
            places += [(first, size), (first + piece - size, size)]
    return places


def _pattern(nonce: int, source: int, peer: int, nbytes: int) -> torch.Tensor:
    seed = (nonce * 1000003 + source * 1009 + peer) % (1 << 62)
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, 256, (nbytes,), dtype=torch.uint8, generator=generator)


def _write(window: Window, layout: WindowLayout, group: Group, nonce: int, common: bool) -> None:
    # Where slots are common, what a rank stores in its own window must show in all; elsewhere every
    # window gets a pattern of its own, so that two that are one memory by mistake are found out.
    for peer in [group.rank] if common else range(group.world):
        for place, size in _places(layout, group.rank):
            data = _pattern(nonce, group.rank, 0 if common else peer, size)
            window.tensor(peer)[place : place + size].copy_(data)
    for peer in range(group.world):
        window.words.set(peer, layout.single("proof", group.rank), nonce)


def _check(
    window: Window,
    layout: WindowLayout,
    group: Group,
    nonces: list[int],
    transport: str,
    common: bool,
) -> dict[str, bool]:
    for source, nonce in enumerate(nonces):
        word = window.words.wait(layout.single("proof", source), nonce, _WORD_LIMIT_S)
        if word != nonce:
            raise _unmoved(transport, source, group.rank, "word", word, nonce)
        for place, size in _places(layout, source):
            want = _pattern(nonce, source, 0 if common else group.rank, size)
            seen = window.tensor(group.rank)[place : place + size]
            if not torch.equal(seen.cpu(), want):
                raise _unmoved(transport, source, group.rank, "data", seen[:4], want[:4])
    return {"proved": True}


def _unmoved(
    transport: str, source: int, rank: int, what: str, seen: object, want: object
) -> Unavailable:
    return Unavailable(
        f"transport {transport!r} must move bytes",
        f"{what} from rank {source} to rank {rank} reads {seen} where {want} was stored",
        "The transport reported success without moving data; check its library and variables.",
    )


def _erase(window: Window, layout: WindowLayout, group: Group) -> None:
    for source in range(group.world):
        for place, size in _places(layout, source):
            window.tensor(group.rank)[place : place + size].zero_()
        window.words.set(group.rank, layout.single("proof", source), 0)
