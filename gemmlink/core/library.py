"""The communication library behind the ``collective`` epilogue, on CPU tensors: gloo.

Each operation gets a gloo context of its own over the group's store. A call that ends in an error
can leave a collective half done; in the user's own process group that would mis-pair every later
collective, here it goes away with the operation.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from gemmlink.errors import PeerLost, PeerTimeout, Unavailable
from gemmlink.groups import TorchGroup
from gemmlink.spec.contracts import Group

_SLICE = timedelta(milliseconds=250)
_REASON_S = 0.5


class Gloo:
    """Collectives on CPU tensors over a private gloo context. Making one is collective."""

    def __init__(self, group: Group, key: str, timeout_s: float) -> None:
        self._world = group.world
        self._group = group
        self._timeout_s = timeout_s
        self._context: Any = None
        self.renew(key)

    def renew(self, key: str) -> None:
        """Collective: begin with a context in which nothing is half done."""
        group, timeout_s = self._group, self._timeout_s
        self._context = None
        if group.world == 1:
            return
        if not isinstance(group, TorchGroup):
            raise Unavailable(
                "epilogue 'collective' needs a torch.distributed group",
                type(group).__name__,
                "Call torch.distributed.init_process_group('gloo') first.",
            )
        if not dist.is_gloo_available():
            raise Unavailable(
                "epilogue 'collective' on CPU tensors needs gloo",
                "a torch without it",
                "Install a torch built with USE_GLOO=1, as PyPI's are.",
            )
        store = dist.PrefixStore(group.key_prefix + key, group.store)
        self._context = dist.ProcessGroupGloo(
            store, group.rank, group.world, timedelta(seconds=timeout_s)
        )

    def run(
        self,
        name: str,
        out: torch.Tensor,
        block: torch.Tensor,
        timeout_s: float,
        on_stall: Callable[[], None],
        sent: Sequence[int] = (),
        came: Sequence[int] = (),
    ) -> None:
        """The collective ``name`` from ``block`` into ``out``, both contiguous, of one dtype.

        - ``all_gather``: ``out[r] = block of rank r``; blocks have the same size on all ranks.
        - ``all_to_all``: flat tensors; ``sent[r]`` elements go to rank r, ``came[r]`` come from it.
        - ``reduce_scatter``: ``block`` is ``(world, ...)``; ``out`` the sum of all ranks' own part.

        Raises ``PeerTimeout`` when some rank does not come; which one gloo does not say.
        """
        if self._world == 1:
            out.view(-1).copy_(block.view(-1))
            return
        if name != "all_to_all" and block.numel() == 0:
            return  # on every rank alike
        work = self._begin(name, out, block, sent, came)
        deadline = time.monotonic() + timeout_s
        while not _ended(work, on_stall, name):
            on_stall()
            if time.monotonic() > deadline:
                raise PeerTimeout(
                    f"every rank must come to the library's {name} within {timeout_s:g} s",
                    "at least one rank missing",
                    "Call the operation on every rank, or raise GEMMLINK_TIMEOUT_S.",
                )

    def _begin(
        self,
        name: str,
        out: torch.Tensor,
        block: torch.Tensor,
        sent: Sequence[int],
        came: Sequence[int],
    ) -> Any:
        if name == "reduce_scatter":
            return self._context._reduce_scatter_base(out, block.view(-1, *out.shape[1:]))
        # What only moves may be of any dtype: it goes as bytes.
        size = block.element_size()
        source, target = block.view(-1).view(torch.uint8), out.view(-1).view(torch.uint8)
        if name == "all_gather":
            return self._context._allgather_base(target, source)
        return self._context.alltoall_base(
            target, source, [count * size for count in came], [count * size for count in sent]
        )

    def close(self) -> None:
        """Drop the context."""
        self._context = None


def _ended(work: Any, on_stall: Callable[[], None], name: str) -> bool:
    # "not within the slice" and "the peer has gone" are both RuntimeErrors, and a collective may
    # end between the first and a look at whether it has: how it ended is told by waiting again.
    with contextlib.suppress(RuntimeError):
        work.wait(_SLICE)
        return True
    if not work.is_completed():
        return False
    try:
        work.wait(_SLICE)
    except RuntimeError as error:
        _look_for_reason(on_stall)
        raise PeerLost(
            f"every rank must complete the library's {name}", str(error).splitlines()[0]
        ) from error
    return True


def _look_for_reason(on_stall: Callable[[], None]) -> None:
    # A peer that refuses the call drops its context, and only then do we see the connection close:
    # its reason is on the board, or will be at once.
    deadline = time.monotonic() + _REASON_S
    while time.monotonic() < deadline:
        on_stall()
        time.sleep(0.01)
