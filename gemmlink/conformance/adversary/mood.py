"""The adversary's mood: all that a seed decides. Same seed, same choices."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Protocol

from gemmlink.conformance.adversary.memory import Message


class Ready(Protocol):
    """Something that could be next. ``weight``: how much it presses; ``rank``: whose it is."""

    weight: float
    rank: int


#: How it chooses who is next: anyone; who presses most, for a while; anyone but one poor rank.
_STYLES = ("even", "pressing", "starving")
#: How it chooses what a load returns, of what it may return.
_TASTES = ("oldest", "newest", "any")
#: How often a store gets on by itself.
_LEAKS = (0.0, 0.05, 0.3)
#: How often the one who is neglected has his turn all the same.
_MERCY = 0.04


class Mood:
    """Draws every choice of a run from one stream of random numbers."""

    def __init__(self, seed: int, world: int) -> None:
        self.random = Random(seed)
        draw = self.random.random
        self._draw = draw
        self.style = _STYLES[int(draw() * len(_STYLES))]
        self.taste = _TASTES[int(draw() * len(_TASTES))]
        self.leaks = _LEAKS[int(draw() * len(_LEAKS))]
        self.victim = int(draw() * world)

    def weight(self) -> float:
        """How much somebody new presses."""
        return self._draw()

    def next(self, ready: Sequence[Ready]) -> int:
        """The index of who is next."""
        draw, count = self._draw, len(ready)
        chosen = int(draw() * count)
        if self.style == "even" or count == 1:
            return chosen
        if self.style == "starving":
            for _ in range(count):
                if ready[chosen].rank != self.victim or draw() < _MERCY:
                    break
                chosen = int(draw() * count)
            return chosen
        if draw() < _MERCY:
            return chosen
        most = -1.0
        for index, each in enumerate(ready):
            if each.weight > most:
                chosen, most = index, each.weight
        if draw() < _MERCY:
            ready[chosen].weight = draw()
        return chosen

    def among(self, count: int) -> int:
        """One of so many that make no difference to a mood."""
        return int(self._draw() * count)

    def leaking(self) -> bool:
        """Whether a store gets on by itself now."""
        return self.leaks > 0.0 and self._draw() < self.leaks

    def pick(self, messages: Sequence[Message]) -> Message:
        """What a load returns that may return any of these, oldest first."""
        if self.taste == "oldest":
            return messages[0]
        if self.taste == "newest":
            return messages[-1]
        return messages[int(self._draw() * len(messages))]
