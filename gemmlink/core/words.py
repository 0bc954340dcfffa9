"""Reads, writes and waits on words that are known at set-up, bound to their places.

A small call is made of little else, so what a transport offers for it (``contracts.BoundWords``) is
used. The three methods of ``contracts.Words`` do the same, only slower.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gemmlink.spec.contracts import Words

#: How long a word is awaited before the first look for a reason, in seconds.
SLICE_S = 0.05

#: A word at a peer: rank and offset in bytes.
Place = tuple[int, int]


def reader(words: Words, *offsets: int) -> Callable[[], tuple[int, ...]]:
    """What reads the own words at ``offsets``, the first of them first."""
    bound = _offered(words, "reader", *offsets)
    if bound is not None:
        return bound
    return lambda: tuple(map(words.read, offsets))


def setter(words: Words, *groups: tuple[Place, ...]) -> Callable[..., None]:
    """What takes one value a group and writes it to every word of that group, in order."""
    bound = _offered(words, "setter", *groups)
    if bound is not None:
        return bound

    def write(*values: int) -> None:
        for places, value in zip(groups, values, strict=True):
            for peer, offset in places:
                words.set(peer, offset, value)

    return write


def waiter(words: Words, offset: int, timeout_s: float) -> Callable[[int], int]:
    """What waits as ``Words.wait`` for the own word at ``offset``, for ``timeout_s`` each time."""
    bound = _offered(words, "waiter", offset, timeout_s)
    if bound is not None:
        return bound

    def wait(at_least: int) -> int:
        # Most words are there already; reading is cheaper than waiting.
        seen = words.read(offset)
        return seen if seen >= at_least else words.wait(offset, at_least, timeout_s)

    return wait


def _offered(words: Words, name: str, *arguments: Any) -> Callable[..., Any] | None:
    make = getattr(words, name, None)
    bound: Callable[..., Any] | None = make(*arguments) if make is not None else None
    return bound
