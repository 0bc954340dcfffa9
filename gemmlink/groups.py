"""Groups: the ranks of an operation, and how they exchange records while it is being set up.

``TorchGroup`` wraps a ``torch.distributed`` process group and uses only its *store*, never a
collective: set-up cannot collide with the user's own collectives. ``SELF`` is world 1.
``CallbackGroup`` serves MPI and other launchers through one function of the caller.
"""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch.distributed as dist

from gemmlink.errors import GemmlinkError, InvalidArgument, PeerLost, PeerTimeout
from gemmlink.lives import Life
from gemmlink.spec.contracts import Board, Group

#: How often a wait for records looks for a reason to end, in seconds.
_STALL_S = 0.25
#: Pauses between two looks into a store, in seconds.
_SHORTEST_NAP_S = 0.0005
_LONGEST_NAP_S = 0.05

#: Variables by which launchers announce the number of ranks.
LAUNCHER_WORLD = (
    "WORLD_SIZE",
    "OMPI_COMM_WORLD_SIZE",
    "PMI_SIZE",
    "SLURM_STEP_NUM_TASKS",
)


class SelfGroup:
    """A group of one: this process alone, whatever a launcher says."""

    rank = 0
    world = 1
    board: Board | None = None

    def all_gather(
        self,
        data: bytes,
        *,
        key: str,
        timeout_s: float,
        on_stall: Callable[[], None] | None = None,
    ) -> list[bytes]:
        """The own record."""
        return [data]


SELF = SelfGroup()


class TorchGroup:
    """A ``torch.distributed`` process group, used through its store alone."""

    def __init__(self, process_group: Any) -> None:
        self.rank: int = process_group.rank()
        self.world: int = process_group.size()
        self._group = weakref.ref(process_group)
        #: The group's key-value store; keys of this library start with ``gemmlink/``.
        self.store = _store_of(process_group)
        # A store may outlive a group of the same name (re-initialisation, elastic restart).
        self._life = Life(self.store, self.rank, self.world)
        self.board: Board | None = self._life
        self._stale: str | None = None

    @property
    def process_group(self) -> Any:
        """The wrapped group. Raises ``InvalidArgument`` if it has been destroyed."""
        group = self._group()
        if group is None:
            raise InvalidArgument("the process group must still exist", "one that was destroyed")
        return group

    @property
    def key_prefix(self) -> str:
        """How keys begin that the ranks share; there is none before the first exchange."""
        return self._life.prefix

    def all_gather(
        self,
        data: bytes,
        *,
        key: str,
        timeout_s: float,
        on_stall: Callable[[], None] | None = None,
    ) -> list[bytes]:
        """Exchange through the store; see ``contracts.Group``."""
        try:
            return self._exchange(data, key, _Wait(self.rank, key, timeout_s, on_stall))
        except RuntimeError as error:
            if isinstance(error, GemmlinkError):
                raise
            raise PeerLost(
                f"the group's store must answer during {key}",
                str(error).splitlines()[0],
                "The rank that hosts it has probably died.",
            ) from error

    def _exchange(self, data: bytes, key: str, wait: _Wait) -> list[bytes]:
        wait.until(self._life.agree, lambda: self._life.missing)
        names = [f"{self.key_prefix}{key}/{rank}" for rank in range(self.world)]
        self.store.set(names[self.rank], data)
        wait.until(lambda: bool(self.store.check(names)), lambda: self._absent(names))
        records = [bytes(self.store.get(name)) for name in names]
        self._forget_previous(names[self.rank])
        return records

    def _absent(self, names: list[str]) -> list[int]:
        return [rank for rank, name in enumerate(names) if not self.store.check([name])]

    def _forget_previous(self, name: str) -> None:
        # Whoever has all records of this exchange knows that all ranks have read the last one.
        if self._stale is not None:
            self.store.delete_key(self._stale)
        self._stale = name


class _Wait:
    """The waits of one exchange, which have one limit together.

    The store's own ``wait`` is of no use: a ``FileStore`` rounds its limit up to whole seconds, a
    ``TCPStore`` writes two lines to stderr whenever one passes.
    """

    def __init__(
        self, rank: int, key: str, timeout_s: float, on_stall: Callable[[], None] | None
    ) -> None:
        self._rank = rank
        self._key = key
        self._timeout_s = timeout_s
        self._on_stall = on_stall
        now = time.monotonic()
        self._deadline = now + timeout_s
        self._stall = now + _STALL_S

    def until(self, done: Callable[[], bool], absent: Callable[[], list[int]]) -> None:
        """Return once ``done``; after the limit, raise for the ranks that are ``absent``."""
        started = time.monotonic()
        while not done():
            now = time.monotonic()
            self._look_for_reason(now)
            if now > self._deadline and (ranks := absent()):  # else the last one has come since
                raise self._late(ranks)
            # Late by a small part of the time waited, so that set-up is quick and waiting cheap.
            nap = min(max(_SHORTEST_NAP_S, (now - started) / 8), _LONGEST_NAP_S)
            time.sleep(min(nap, max(0.0, self._deadline - now)))

    def _look_for_reason(self, now: float) -> None:
        if now >= self._stall and self._on_stall is not None:
            self._on_stall()
            self._stall = now + _STALL_S

    def _late(self, absent: list[int]) -> PeerTimeout:
        return PeerTimeout(
            f"every rank must come to {self._key} within {self._timeout_s:g} s",
            f"nothing from ranks {absent} at rank {self._rank}",
            "Call it on every rank of the group, in the same order, or raise GEMMLINK_TIMEOUT_S.",
            operation=self._key,
            rank=self._rank,
            peer=absent[0] if len(absent) == 1 else -1,
        )


class CallbackGroup:
    """Ranks that exchange bytes through a function of the caller.

    ``all_gather(data)`` gets this rank's bytes and returns the list of all ranks' bytes, in rank
    order. It is called only during set-up, on all ranks in the same order, and must bring its own
    limit: a callback that never returns cannot be interrupted.
    """

    board: Board | None = None

    def __init__(self, rank: int, world: int, all_gather: Callable[[bytes], list[bytes]]) -> None:
        if not 0 <= rank < world:
            raise InvalidArgument("rank must be in 0..world-1", f"rank={rank}, world={world}")
        self.rank = rank
        self.world = world
        self._exchange = all_gather

    def all_gather(
        self,
        data: bytes,
        *,
        key: str,
        timeout_s: float,
        on_stall: Callable[[], None] | None = None,
    ) -> list[bytes]:
        """Call the caller's function and check what it returned."""
        records = self._exchange(data)
        if len(records) != self.world or records[self.rank] != data:
            raise InvalidArgument(
                "a group's all_gather must return every rank's bytes in rank order",
                f"{len(records)} records for world {self.world}, own record "
                f"{'kept' if data in records else 'missing'}",
            )
        return records


class WatchedGroup:
    """A group whose exchanges call ``on_stall`` wherever the caller of one gives none itself."""

    def __init__(self, group: Group, on_stall: Callable[[], None] | None) -> None:
        self.rank = group.rank
        self.world = group.world
        self.board: Board | None = group.board
        self._group = group
        self._on_stall = on_stall

    @property
    def process_group(self) -> Any:
        """The torch process group, or None for a group that is none."""
        return getattr(self._group, "process_group", None)

    def all_gather(
        self,
        data: bytes,
        *,
        key: str,
        timeout_s: float,
        on_stall: Callable[[], None] | None = None,
    ) -> list[bytes]:
        """Exchange through the group; see ``contracts.Group``."""
        return self._group.all_gather(
            data, key=key, timeout_s=timeout_s, on_stall=on_stall or self._on_stall
        )


_wrapped: weakref.WeakKeyDictionary[Any, TorchGroup] = weakref.WeakKeyDictionary()


def resolve(group: Any = None, environ: Mapping[str, str] = os.environ) -> Group:
    """The group to use: a ``Group``, a torch process group, or None for the default one.

    Without an initialised default group the world is 1, unless a launcher has announced more ranks:
    silently computing with one of them would be wrong.
    """
    if group is None:
        if dist.is_available() and dist.is_initialized():
            return _wrap(dist.group.WORLD)
        _refuse_forgotten_init(environ)
        return SELF
    if isinstance(group, Group):
        return group
    if dist.is_available() and isinstance(group, dist.ProcessGroup):
        return _wrap(group)
    if dist.is_available() and group is dist.GroupMember.NON_GROUP_MEMBER:
        raise InvalidArgument("this rank must belong to the group", "a group without this rank")
    raise InvalidArgument(
        "group must be a torch process group, gemmlink.SELF, or an object with rank, world, board "
        "and all_gather",
        repr(group),
    )


def _wrap(process_group: Any) -> TorchGroup:
    found = _wrapped.get(process_group)
    if found is None:
        found = _wrapped[process_group] = TorchGroup(process_group)
    return found


def _refuse_forgotten_init(environ: Mapping[str, str]) -> None:
    for name in LAUNCHER_WORLD:
        text = environ.get(name, "")
        if text.isdigit() and int(text) > 1:
            raise InvalidArgument(
                "torch.distributed must be initialised when a launcher started several ranks",
                f"{name}={text} and no process group",
                "Add torch.distributed.init_process_group('gloo') (or 'nccl') before this call, or "
                "pass group=gemmlink.SELF to compute alone on purpose.",
            )


def _store_of(process_group: Any) -> Any:
    if hasattr(process_group, "get_group_store"):
        return process_group.get_group_store()
    from torch.distributed.distributed_c10d import _get_process_group_store

    return _get_process_group_store(process_group)
