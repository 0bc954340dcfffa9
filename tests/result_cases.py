"""A way of asking for a result, for tests that try them all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import gemmlink

N, K, M = 9, 16, 6


@dataclass(frozen=True)
class Case:
    """One way of asking for a result; ``str`` names it in a message."""

    mode: str
    result: str
    buffers: int
    completion: str
    chunks: int
    lanes: int

    def op(self, **rest: Any) -> gemmlink.GemmAllGather:
        """An operation for it, not prepared."""
        return gemmlink.GemmAllGather(
            N,
            K,
            M,
            epilogue=self.mode,
            result=self.result,
            buffers=self.buffers,
            completion=self.completion,
            chunks=self.chunks,
            lanes=self.lanes,
            **rest,
        )
