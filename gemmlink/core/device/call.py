"""One call on one rank, as it is enqueued. Unlike a host's call it never waits and never asks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from gemmlink.core.placing import packed
from gemmlink.errors import Unsupported
from gemmlink.spec.contracts import Lane
from gemmlink.spec.schedule import Word

if TYPE_CHECKING:
    from gemmlink.core.device.launch import DeviceLaunch


class DeviceCall:
    """What the steps of a ``DeviceProgram`` act on.

    M of the peers is ``rows``, or else the own one: the last kernel of the call checks that.
    ``epoch`` only says which of two slots is used; the device counts for itself.
    """

    def __init__(
        self,
        launch: DeviceLaunch,
        a: torch.Tensor,
        b: torch.Tensor,
        out: torch.Tensor | None,
        rows: Sequence[int] | None,
        fingerprint: int,
        stream: int,
    ) -> None:
        world, view = launch.group.world, launch.schedule.plan.view
        self._launch = launch
        self.epoch = launch.epoch
        self.a, self.b = a, b
        self.value = a
        self.m = int(a.shape[0])
        self.stream = stream
        self.fingerprint = fingerprint
        self.same_rows = rows is None
        self.rows = tuple(rows) if rows is not None else (self.m,) * world
        self.starts: Sequence[int] = packed(self.rows).starts
        self.firsts: Sequence[int] = self.starts if view else launch.firsts
        self.blocks: dict[int, torch.Tensor] = {}
        self._local: torch.Tensor | None = None
        # Before anything is launched: if there is no memory for it, the call has not begun.
        self._result = out if out is not None else self._made()

    def rows_of(self, source: int) -> int:
        """M of ``source``."""
        return self.rows[source]

    def result(self) -> torch.Tensor:
        """The result."""
        return self._result

    def local(self) -> torch.Tensor:
        """Private buffer for what this rank keeps of its own product, ``(M, columns kept)``."""
        if self._local is None:
            low, high = self._launch.program.memory.local_cols
            problem = self._launch.problem
            self._local = torch.empty(
                self.m, high - low, dtype=problem.out_dtype, device=problem.device
            )
        return self._local

    def wait_longer(self, word: Word, offset: int, at_least: int) -> None:
        """Only hosts wait."""
        raise Unsupported("a kernel waits for words", str(word))

    def drain(self, lane: Lane) -> None:
        """Only hosts drain."""
        raise Unsupported("a stream joins its lanes", repr(lane))

    def collective(self, name: str) -> None:
        """Not yet."""
        raise Unsupported("library collectives on devices are not done yet", name)

    def _made(self) -> torch.Tensor:
        launch = self._launch
        shape = launch.result_shape(self.rows)
        if launch.schedule.plan.view:
            return launch.view_rows(self.epoch, shape[0])
        return torch.empty(shape, dtype=launch.problem.out_dtype, device=launch.problem.device)
