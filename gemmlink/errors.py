"""Every exception gemmlink raises on purpose.

A message has three parts, in this order: the rule that was broken, what came instead, and what to
do about it. Exceptions that concern a call name the operation, the rank and the epoch.
"""

from __future__ import annotations

from typing import Any


class GemmlinkError(Exception):
    """Base of all errors of this library.

    ``rule`` is the sentence that was broken, ``came`` what was passed or seen, ``fix`` what helps.
    """

    #: True if the call ran to its end all the same and the other ranks have their results.
    call_completed = False

    def __init__(self, rule: str, came: str = "", fix: str = "") -> None:
        self.rule = rule
        self.came = came
        self.fix = fix
        super().__init__(self._text())

    def __reduce__(self) -> tuple[type[GemmlinkError], tuple[str, str, str], dict[str, Any]]:
        return (type(self), (self.rule, self.came, self.fix), vars(self))

    def _text(self) -> str:
        text = f"{self.rule}; got {self.came}" if self.came else self.rule
        return f"{text}. {self.fix}" if self.fix else text


class InvalidArgument(GemmlinkError, ValueError):
    """The caller passed something wrong, or ranks passed things that do not agree."""


class Unsupported(GemmlinkError, NotImplementedError):
    """A correct request that this combination of transport, epilogue and backend cannot serve."""


class Unavailable(GemmlinkError, RuntimeError):
    """A library, device or system resource is missing; ``fix`` holds the line that provides it."""


class Poisoned(GemmlinkError, RuntimeError):
    """An earlier call of this operation failed after data began to move."""


class Overlap(GemmlinkError, RuntimeError):
    """A call began while another call of the same operation was still running."""


class PeerTimeout(GemmlinkError, TimeoutError):
    """A peer did not set a word within the limit.

    Attributes say which call and which word: ``operation``, ``epoch``, ``rank`` (who waited),
    ``peer`` (who was awaited), ``word`` (its name with the chunk, such as ``arrive[2,chunk 1]``),
    ``seen`` and ``wanted`` (values of the word). ``peer`` is -1 where several peers are missing.
    """

    def __init__(
        self,
        rule: str,
        came: str = "",
        fix: str = "",
        *,
        operation: str = "",
        epoch: int = 0,
        rank: int = -1,
        peer: int = -1,
        word: str = "",
        seen: int = 0,
        wanted: int = 0,
    ) -> None:
        super().__init__(rule, came, fix)
        self.operation = operation
        self.epoch = epoch
        self.rank = rank
        self.peer = peer
        self.word = word
        self.seen = seen
        self.wanted = wanted


class PeerLost(PeerTimeout):
    """A peer is known to be dead, or has told us that it failed in this call."""
