"""Where the ranks of a command come from.

Alone, a command spawns ranks on this machine. Started by a launcher that sets ``RANK`` and
``WORLD_SIZE`` (torchrun), every process of it is a rank.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from typing import Any

from gemmlink.errors import InvalidArgument

#: Limit of a whole command on its ranks, in seconds. Calls have limits of their own.
_LIMIT_S = 1800.0


def launched_world() -> int | None:
    """Ranks that a launcher started, this process being one of them; None without a launcher."""
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        return int(os.environ["WORLD_SIZE"])
    return None


def world_for(asked: int | None, default: int) -> int:
    """The world to use. Raises ``InvalidArgument`` if the launcher has another one."""
    launched = launched_world()
    if launched is None:
        return default if asked is None else asked
    if asked not in (None, launched):
        raise InvalidArgument(
            "--world must be the launcher's number of ranks",
            f"--world {asked} with WORLD_SIZE={launched}",
            "Leave --world out under a launcher.",
        )
    return launched


def on_ranks(world: int, function: Callable[..., Any], *arguments: Any, threads: int = 1) -> Any:
    """``[function(*arguments) on rank r for r in range(world)]``, in every process that asks.

    ``function`` is importable and returns something picklable. Ranks have a gloo default group and
    ``threads`` torch threads.
    """
    if launched_world() is None:
        from gemmlink.spawn import run_ranks

        return run_ranks(world, function, *arguments, timeout_s=_LIMIT_S, threads=threads)
    return _as_a_rank(function, arguments, threads)


def _as_a_rank(function: Callable[..., Any], arguments: tuple[Any, ...], threads: int) -> Any:
    import torch
    import torch.distributed as dist

    from gemmlink import groups
    from gemmlink.rendezvous import next_key

    ours = not dist.is_initialized()
    if ours:
        dist.init_process_group("gloo")
    torch.set_num_threads(threads)
    try:
        value = function(*arguments)
        group = groups.resolve(None)
        texts = group.all_gather(
            pickle.dumps(value), key=next_key(group, "command"), timeout_s=_LIMIT_S
        )
        # The store lives in rank 0, which must not leave while others still read.
        dist.barrier()
        return [pickle.loads(text) for text in texts]
    finally:
        if ours:
            dist.destroy_process_group()
