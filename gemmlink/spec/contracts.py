"""The contracts of gemmlink. These docstrings are the specification that plugins are held to.

In one sentence: a transport gives every rank a *symmetric window* (same size, same offsets,
reachable for every peer) whose words only grow; an epilogue says, as a schedule, which bytes go to
whose window and which word announces them; a backend computes tiles; a consumer waits for words,
never for time.

Ranks are *group ranks* 0..world-1. Offsets and sizes are bytes. Times are seconds. Unless a
docstring says otherwise a method is local (no peer takes part), synchronous and thread-compatible
(one thread at a time).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch

from gemmlink.spec.operations import Phase
from gemmlink.spec.problem import Problem
from gemmlink.spec.schedule import Plan, Schedule

#: Version of the contracts in this module. A plugin states the version that it was written for.
INTERFACE = 1


@dataclass(frozen=True)
class Capabilities:
    """What a transport can do on this machine, stated by ``Transport.probe``.

    ``memory``: device types whose tensors the window may be used beside (``"cpu"``, ``"cuda"``).
    ``host_words``: the CPU may call the methods of ``Words``.
    ``host_data``: the CPU may read and write ``Window.tensor``.
    ``lanes``: what lanes promise, best first: ``"in_order"`` (a word set in a lane follows the
    copies enqueued before it), ``"after_drain"`` (only ``drain`` proves that copies are there), or
    nothing for a transport without lanes.
    ``common``: ``Session.window`` takes ``common_from``.
    ``one_host``: peers must share a host (and its IPC namespace).
    ``details``: facts for ``doctor``, as text.
    """

    memory: tuple[str, ...]
    host_words: bool
    host_data: bool
    lanes: tuple[str, ...] = ()
    common: bool = False
    one_host: bool = True
    details: Mapping[str, str] = field(default_factory=dict)


@runtime_checkable
class Board(Protocol):
    """A place where ranks leave short texts for each other; used only when something is wrong."""

    def post(self, key: str, data: bytes) -> None:
        """Leave ``data`` under ``key``, readable by all ranks; overwrites."""

    def peek(self, key: str) -> bytes | None:
        """The data under ``key``, or None when nobody has posted it. Never blocks."""


@runtime_checkable
class Group(Protocol):
    """The ranks that take part in an operation, and a way to exchange small records.

    ``board`` may be None; then a mismatch that shows only after set-up is reported without the
    peer's values.
    """

    rank: int
    world: int
    board: Board | None

    def all_gather(
        self,
        data: bytes,
        *,
        key: str,
        timeout_s: float,
        on_stall: Callable[[], None] | None = None,
    ) -> list[bytes]:
        """Collective: the ``data`` of every rank, in rank order.

        ``key`` names this exchange and is equal on all ranks, never used twice. ``on_stall`` is
        called a few times a second while peers are awaited and may raise to end the wait. Raises
        ``PeerTimeout`` that names the ranks which have not come. Records are at most 64 KiB.
        """


@runtime_checkable
class Words(Protocol):
    """The words of a window: aligned signed 64-bit cells, each with one writer, that only grow.

    The core never lowers a word except to zero a window that no peer uses yet.
    """

    def set(self, peer: int, offset: int, value: int) -> None:
        """Write ``value`` to the word at ``offset`` in ``peer``'s window with *release* order.

        Whoever reads this value (or a later one) also sees all stores that this thread made before,
        in whatever window. Returns without waiting for the peer.
        """

    def read(self, offset: int) -> int:
        """The own word at ``offset``, with *acquire* order."""

    def wait(self, offset: int, at_least: int, timeout_s: float) -> int:
        """Wait until the own word at ``offset`` is at least ``at_least``; return what was read.

        Returns a smaller value once ``timeout_s`` has passed; never raises for that. Acquire order
        for the value returned. A long wait uses less than a tenth of a core.
        """


@runtime_checkable
class BoundWords(Protocol):
    """What ``Words`` may offer on top: the same three operations, bound to their places once.

    Optional, each method by itself: the core looks for them at set-up and does without what is
    absent or returns None. What is returned does exactly what the methods of ``Words`` do, with the
    same order of memory, and keeps the memory under its words alive.
    """

    def reader(self, *offsets: int) -> Callable[[], tuple[int, ...]] | None:
        """What reads the own words at ``offsets``, the first of them first."""

    def setter(self, *groups: tuple[tuple[int, int], ...]) -> Callable[..., None] | None:
        """What takes one value a group and writes it to the group's words, (peer, offset) each.

        Groups and the words in them are written in the order given.
        """

    def waiter(self, offset: int, timeout_s: float) -> Callable[[int], int] | None:
        """What waits for ``at_least`` at the own word at ``offset``, at most ``timeout_s``."""


@runtime_checkable
class Lane(Protocol):
    """An ordered queue of copies from the own window to one peer's window, run by a copy engine.

    A copy that fails takes with it whatever is enqueued behind it, until ``drain`` tells: none of
    that is copied, and above all no word is set. So nothing is ever announced that is not there.
    """

    def copy(self, src_offset: int, dst_offset: int, nbytes: int) -> None:
        """Enqueue a copy from the own window to the peer's window. Asynchronous."""

    def set(self, offset: int, value: int) -> None:
        """Enqueue a word write at the peer, ordered as ``Capabilities.lanes`` says."""

    def drain(self, timeout_s: float) -> None:
        """Wait until all sources enqueued may be overwritten, else ``PeerTimeout``.

        Raises what a copy raised, once, when the lane has come to rest: nothing enqueued before
        then moves any more, and the lane takes new work. A lane that cannot do so (its engine is
        broken) raises each time. A ``PeerTimeout`` tells only that the lane still moves.
        """


@runtime_checkable
class Window(Protocol):
    """Memory of ``nbytes`` on every rank of a session, zeroed, at the same offsets everywhere.

    ``addresses[p]`` is the address of rank p's memory *as this process may use it*, or None when
    it cannot be reached.
    """

    nbytes: int
    addresses: Sequence[int | None]
    words: Words

    def tensor(self, peer: int) -> torch.Tensor:
        """All of ``peer``'s window as a uint8 tensor of shape ``(nbytes,)``.

        A view, not a copy: what is stored in it lies in the peer's memory. It stays readable after
        ``free`` for as long as the caller holds it.
        """

    def lane(self, peer: int, index: int) -> Lane:
        """Lane ``index`` to ``peer``, the same object each time.

        Raises ``Unsupported`` if the transport has no lanes. Lanes end with the window.
        """

    def free(self) -> None:
        """Give the memory back. Idempotent; never waits for a peer."""


@runtime_checkable
class Session(Protocol):
    """A transport that has been opened over one group."""

    rank: int
    world: int

    def window(self, nbytes: int, common_from: int | None = None) -> Window:
        """Collective: a new window, the same ``nbytes`` on every rank.

        On return every peer's memory is mapped and zero. If any rank cannot provide its part, every
        rank raises, and nothing is left behind.

        With ``common_from`` (a multiple of 4096 below ``nbytes``), bytes from there on are *one*
        memory that all ranks share: what a rank stores at an offset, every rank reads at that
        offset of its own window. Passed only to transports whose capabilities say ``common``.
        """

    def barrier(self, timeout_s: float) -> None:
        """Collective: return once every rank has called it, else ``PeerTimeout``."""

    def alive(self, peer: int) -> bool | None:
        """Whether ``peer``'s process still exists; None if that cannot be known. Never waits."""

    def close(self) -> None:
        """Free all windows. Idempotent; never waits for a peer, dead or alive."""


@runtime_checkable
class Transport(Protocol):
    """How a rank gets pointers into its peers' memory, and words that peers can set.

    Stateless: all state lives in sessions, of which there may be several at once.
    """

    name: str
    interface: int

    def probe(self) -> Capabilities:
        """What this machine offers. Raises ``Unavailable`` with the line that installs what lacks.

        Local and cheap; touches no device and allocates nothing that outlives the call.
        """

    def open(self, group: Group, *, key: str, timeout_s: float) -> Session:
        """Collective: start a session. ``key`` prefixes the exchanges it makes on the group.

        Raises ``Unsupported`` naming two ranks when they cannot reach each other.
        """


@dataclass(frozen=True)
class Needs:
    """What an epilogue needs of the rest: a window (with words), and lanes.

    ``common``: not a need but an offer: the epilogue understands ``Plan.common``.
    """

    window: bool = True
    lanes: bool = False
    common: bool = False


@runtime_checkable
class Epilogue(Protocol):
    """How finished tiles travel, as data.

    ``complete`` is False for something that leaves peers without results (a pricing aid).
    ``phases``: the kinds of phase (``spec.operations.Phase.name``) that it has schedules for.
    """

    name: str
    interface: int
    needs: Needs
    complete: bool
    phases: tuple[str, ...]

    def forms(self) -> tuple[bool, ...]:
        """The values of ``Plan.fused`` that this epilogue has a schedule for."""

    def schedule(self, phase: Phase, plan: Plan) -> Schedule:
        """The schedule of rank ``plan.rank``. Pure: equal arguments give equal schedules."""


@runtime_checkable
class Backend(Protocol):
    """Who multiplies. The core walks the schedule and calls ``multiply`` for each ``Compute``."""

    name: str
    interface: int

    def supports(self, problem: Problem) -> str | None:
        """None if the problem can be served, else the reason why not, as a sentence."""

    def multiply(self, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
        """``out[:] = a @ b.T`` for a ``(m, k)``, b ``(n, k)``, out ``(m, n)``.

        Accumulates in float32 at least and rounds once, to ``out``'s dtype. ``out`` never overlaps
        an input, has unit column stride, and may lie in a window. ``m``, ``n`` and ``k`` may be 0;
        with ``k == 0`` the result is +0.0. Strides of ``a`` and ``b`` are arbitrary. On a device
        the work is enqueued on the current stream.
        """


#: Anything that a plugin may provide.
Strategy = Transport | Epilogue | Backend

KINDS: Mapping[str, Any] = {"transport": Transport, "epilogue": Epilogue, "backend": Backend}
