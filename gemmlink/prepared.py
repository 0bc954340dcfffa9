"""A prepared operation: what the four object forms have in common.

Set-up (``prepare``) is collective and may take seconds; a call allocates nothing but its result and
meets its peers only through words in shared windows.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, ClassVar, TypedDict

import torch

from gemmlink import groups
from gemmlink import settings as settings_module
from gemmlink.arguments import check_arguments, flag, one_of
from gemmlink.core import wire
from gemmlink.core.call import Outgrown
from gemmlink.core.compose import Choice, compose
from gemmlink.core.launch import Launch, Outcome
from gemmlink.core.prepare import Request, prepare, schedule_for
from gemmlink.core.tickets import Ticket
from gemmlink.errors import GemmlinkError, InvalidArgument
from gemmlink.rendezvous import next_key
from gemmlink.settings import Settings
from gemmlink.spec.problem import Problem, dtype_name

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack

_log = logging.getLogger("gemmlink")


class Common(TypedDict, total=False):
    """Arguments that all object forms take by name; see ``Prepared``."""

    transport: Any
    epilogue: Any
    backend: Any
    chunks: int | None
    lanes: int | None
    buffers: int
    result: str
    completion: str
    bit_identical: bool
    timeout_s: float | None


class Prepared:
    """An operation over a group, set up once and called many times. See its subclasses.

    Arguments
        n, k: b is ``(n, k)``, the same on every rank; a is ``(M, k)``, each rank's own.
        max_m: largest M of any rank in any call; ranks may pass different values, the largest
            counts. The window takes ``world * max_m * n`` elements of ``out_dtype`` on every rank.
        dtype: of a and b: float32, bfloat16 or float16.
        out_dtype: float32 or ``dtype`` (the default). Sums are kept in float32 or better.
        device: of all tensors: ``"cpu"``, or ``"cuda"`` for the current CUDA device. There a call
            is enqueued on the current stream and returns at once; what goes wrong on the device is
            raised by the next call, ``check`` or ``close``, and the result is NaN.
        group: a torch process group (default: the default group), ``gemmlink.SELF``, or an object
            that fulfils ``gemmlink.spec.contracts.Group``.
        transport, epilogue, backend: a name, an object, ``"module:attribute"`` or ``"auto"``.
            For an operation of two phases ``epilogue`` may be a pair, ``"lanes+pull"``.
        chunks: chunks per rank's product, or None to let the library decide.
        lanes: lanes to each peer, for the epilogue ``lanes``.
        buffers: 1, or 2 slots used in turn: twice the memory, and a rank that is ahead need not
            wait until its peers have finished reading their last results.
        result: ``"copy"``: the caller's own memory. ``"view"``: the own window, without a copy;
            valid until this rank's next call begins, and not to be written to. A view needs M equal
            on all ranks, or ``rows=``.
        completion: ``"receive"``: a call ends when all results are here. ``"receive_and_send"``:
            and when no peer or copy engine still reads what this rank sends, so that a view may be
            written to.
        bit_identical: every mode gives the same bits: products are cut alike in all of them (into
            ``chunks``, or not at all) and sums run in the order of the ranks. May be slower.
        timeout_s: limit of each call in seconds; five times as much for ``prepare``.

    Arguments left out come from ``GEMMLINK_*`` variables, then from the settings file.
    Use ``with GemmAllGather(...) as op:`` or call ``prepare`` and ``close``.
    """

    operation: ClassVar[str]

    def __init__(
        self,
        n: int,
        k: int,
        max_m: int,
        dtype: torch.dtype = torch.float32,
        out_dtype: torch.dtype | None = None,
        device: torch.device | str = "cpu",
        group: Any = None,
        *,
        options: Mapping[str, Any],
        flags: Mapping[str, bool],
        **common: Unpack[Common],
    ) -> None:
        unknown = common.keys() - Common.__annotations__.keys()
        if unknown:
            name = f"{type(self).__name__}.__init__()"
            raise TypeError(f"{name} got an unexpected keyword argument {min(unknown)!r}")
        self._settings = settings_module.current()
        self._choice = replace(
            chosen(self._settings, common),
            **{name: flag(name, value) for name, value in flags.items()},
        )
        self.group = groups.resolve(group)
        where = _with_index(torch.device(device))
        self._problem = Problem(n, k, max_m, dtype, out_dtype or dtype, where)
        limit = common.get("timeout_s")
        self._timeout_s = self._settings.timeout_s if limit is None else limit
        if not self._timeout_s > 0:
            raise InvalidArgument("timeout_s must be above 0", f"{limit}")
        self._options = dict(options)
        wire.check_wire_dtype(self._options.get("wire"))
        self._operation = self._request(1.0).for_world(self.group.world)
        self._launch: Launch | None = None
        self._closed = False

    def prepare(self) -> Self:
        """Collective: agree with all ranks, make and prove the window. Returns self.

        Ranks must prepare their operations over a group in the same order. Raises
        ``InvalidArgument`` on every rank when they were not given the same arguments.
        """
        self._refuse_if_closed()
        if self._launch is None:
            self.prepare_at(next_key(self.group, self.operation))
        return self

    def prepare_at(self, key: str, ticket: Ticket | None = None) -> None:
        """Collective: ``prepare`` under a key that the caller has agreed on with all ranks."""
        request = self._request(self._timeout_s)
        stalled = ticket.stalled if ticket is not None else None
        # Tensors made under inference_mode could never be written outside it again.
        for note in self._wire_note():
            _log.warning("gemmlink %s: %s", self.operation, note)
        with torch.inference_mode(False):
            self._launch = prepare(self.group, request, key, stalled)

    def _call(
        self,
        a: torch.Tensor,
        b: torch.Tensor,
        out: torch.Tensor | None,
        rows: Sequence[int] | None,
    ) -> Outcome:
        self._refuse_if_closed()
        if self._launch is None:
            raise InvalidArgument(
                f"{type(self).__name__} must be prepared before it is called",
                "a call before prepare()",
                "Call prepare() on every rank, or use 'with'.",
            )
        ticket = self._launch.ticket()
        try:
            return self.run(a, b, out, rows, ticket)
        except Outgrown as error:
            refusal = InvalidArgument(
                f"M must be at most max_m={self.capacity} on every rank",
                f"M={error.rows} on some rank",
                "Prepare with a larger max_m.",
            )
        self._launch.turn_down(refusal, ticket)
        raise refusal

    def run(
        self,
        a: torch.Tensor,
        b: torch.Tensor,
        out: torch.Tensor | None,
        rows: Sequence[int] | None,
        ticket: Ticket,
    ) -> Outcome:
        """One call under ``ticket``. Raises ``Outgrown`` on every rank if an M is too large."""
        assert self._launch is not None, "run before prepare"
        view = self._launch.schedule.plan.view
        problems = check_arguments(
            self._launch.problem,
            self._operation,
            self.group.world,
            a,
            b,
            out,
            rows,
            self.group.rank,
            view,
        )
        return self._launch.call(a, b, out, rows, ticket, problems, self._settings.debug)

    @property
    def capacity(self) -> int:
        """Largest M that the window has room for, in rows."""
        problem = self._launch.problem if self._launch is not None else self._problem
        return problem.capacity

    @property
    def launch(self) -> Launch:
        """The prepared core: composition, schedule, window. For tools and tests."""
        if self._launch is None:
            raise InvalidArgument("the operation must be prepared", "one that is not")
        return self._launch

    def check(self) -> None:
        """Raise ``Poisoned`` if this operation failed here or on a peer. Local, never waits.

        On a device, first the error of what failed there; synchronise to have all of it heard.
        """
        self._refuse_if_closed()
        if self._launch is not None:
            self._launch.refuse_if_unusable()

    def reset(self, timeout_s: float | None = None) -> None:
        """Collective: make the operation usable again after ``PeerTimeout``, ``PeerLost`` and such.

        Every rank of the group must come within ``timeout_s`` (default: the limit of a call).
        Raises ``PeerTimeout`` naming the ranks that have not come (may be tried again), and
        ``PeerLost`` as soon as one is known to have died: then only ``close`` and a new group help.
        """
        self._refuse_if_closed()
        self.launch.reset(self._timeout_s if timeout_s is None else timeout_s)

    def supports(self) -> str | None:
        """None if the arguments can be served by the parts asked for, else the reason. Local."""
        try:
            compose(self._problem, self.group.world, self._choice, self._operation)
        except GemmlinkError as error:
            return str(error)
        return None

    def explain(self) -> str:
        """What was chosen and why, what it costs, and the schedule of this rank, as text."""
        world, rank = self.group.world, self.group.rank
        if self._launch is not None:
            parts, problem, schedule = (
                self._launch.parts,
                self._launch.problem,
                self._launch.schedule,
            )
            nbytes = self._launch.window.nbytes if self._launch.window is not None else 0
        else:
            problem = self._problem
            parts = compose(problem, world, self._choice, self._operation)
            schedule, nbytes = schedule_for(self._request(1.0), parts, rank, world), -1
        window = f"window: {nbytes} bytes on each rank" if nbytes >= 0 else "window: not made yet"
        lines = [
            f"{self.operation}: M <= {problem.capacity}, N = {problem.n}, K = {problem.k}, "
            f"{dtype_name(problem.dtype)} -> {dtype_name(problem.out_dtype)}, "
            f"rank {rank} of {world}",
            f"mode: {parts.mode} over {parts.transport_name}, multiplied by {parts.backend.name}",
            *(f"  because {reason}" for reason in parts.reasons),
            *self._wire_note(),
            window,
            f"schedule {schedule.digest()}, n = number of the call:",
            schedule.render(),
        ]
        return "\n".join(lines)

    def close(self) -> None:
        """Give everything back. Local, idempotent; a peer, dead or alive, is never waited for.

        On a device, calls that are on their way get a few seconds to end, and what failed there
        and has not been raised yet is raised at the end.
        """
        self._closed = True
        if self._launch is not None:
            self._launch.close()

    def __enter__(self) -> Self:
        return self.prepare()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _request(self, timeout_s: float) -> Request:
        return Request(
            self.operation, self._problem, self._choice, timeout_s, 5 * timeout_s, self._options
        )

    def _wire_note(self) -> list[str]:
        dtypes = {phase.wire for phase in self._operation.phases if phase.wire is not None}
        return [f"gathered rows travel as {dtype_name(dtype)}: {wire.ERROR}" for dtype in dtypes]

    def _refuse_if_closed(self) -> None:
        if self._closed:
            raise InvalidArgument(
                f"{type(self).__name__} must be open",
                "a use after close()",
                "Make a new one; closing is final.",
            )


def choose(
    settings: Settings, transport: Any, epilogue: Any, backend: Any, chunks: int | None
) -> Choice:
    """Arguments where given, settings where not."""
    return Choice(
        transport=settings.transport if transport == "auto" else transport,
        epilogue=settings.epilogue if epilogue == "auto" else epilogue,
        backend=settings.backend if backend == "auto" else backend,
        chunks=settings.chunks if chunks is None else chunks,
        lanes=settings.lanes,
    )


def chosen(settings: Settings, common: Common) -> Choice:
    """``choose`` from the arguments of an object form."""
    choice = choose(
        settings,
        common.get("transport", "auto"),
        common.get("epilogue", "auto"),
        common.get("backend", "auto"),
        common.get("chunks"),
    )
    lanes = common.get("lanes")
    result = one_of("result", common.get("result", "copy"), ("copy", "view"))
    completions = ("receive", "receive_and_send")
    completion = one_of("completion", common.get("completion", completions[0]), completions)
    return replace(
        choice,
        lanes=choice.lanes if lanes is None else lanes,
        buffers=common.get("buffers", 1),
        view=result == "view",
        send_complete=completion == "receive_and_send",
        bit_identical=flag("bit_identical", common.get("bit_identical", False)),
    )


def _with_index(device: torch.device) -> torch.device:
    """``cuda`` as the device that is current now."""
    if device.type != "cuda" or device.index is not None or not torch.cuda.is_available():
        return device
    return torch.device("cuda", torch.cuda.current_device())
