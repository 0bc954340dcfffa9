"""Prepared operations: allocate and agree once, then call many times.

``GemmAllGather`` is the object form of ``gemm_all_gather``. Set-up (``prepare``) is collective and
may take seconds; a call allocates nothing but its result and meets its peers only through words in
shared windows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any

import torch

from gemmlink import groups
from gemmlink import settings as settings_module
from gemmlink.core.call import Outgrown
from gemmlink.core.compose import Choice, compose
from gemmlink.core.launch import Launch
from gemmlink.core.prepare import Request, prepare, schedule_for
from gemmlink.core.tickets import Ticket
from gemmlink.errors import GemmlinkError, InvalidArgument, Unsupported
from gemmlink.rendezvous import next_key
from gemmlink.settings import Settings
from gemmlink.spec.problem import Problem, dtype_name
from gemmlink.untraced import untraced


class GemmAllGather:
    """``out[rows of rank r] = a_r @ b.T`` on every rank: a product followed by an all-gather.

    Arguments
        n, k: b is ``(n, k)``, the same on every rank; a is ``(M, k)``, each rank's own.
        max_m: largest M of any rank in any call; ranks may pass different values, the largest
            counts. The window takes ``world * max_m * n`` elements of ``out_dtype`` on every rank.
        dtype: of a and b: float32, bfloat16 or float16.
        out_dtype: float32 or ``dtype`` (the default). Sums are kept in float32 or better.
        device: of all tensors; ``"cpu"``.
        group: a torch process group (default: the default group), ``gemmlink.SELF``, or an object
            that fulfils ``gemmlink.spec.contracts.Group``.
        transport, epilogue, backend: a name, an object, ``"module:attribute"`` or ``"auto"``.
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
        timeout_s: limit of each call in seconds; five times as much for ``prepare``.

    Arguments left out come from ``GEMMLINK_*`` variables, then from the settings file.
    Use ``with GemmAllGather(...) as op:`` or call ``prepare`` and ``close``.
    """

    operation = "all_gather"

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
        transport: Any = "auto",
        epilogue: Any = "auto",
        backend: Any = "auto",
        chunks: int | None = None,
        lanes: int | None = None,
        buffers: int = 1,
        result: str = "copy",
        completion: str = "receive",
        timeout_s: float | None = None,
    ) -> None:
        self._settings = settings_module.current()
        choice = choose(self._settings, transport, epilogue, backend, chunks)
        self._choice = replace(
            choice,
            lanes=choice.lanes if lanes is None else lanes,
            buffers=buffers,
            view=one_of("result", result, ("copy", "view")) == "view",
            send_complete=one_of("completion", completion, ("receive", "receive_and_send"))
            == "receive_and_send",
        )
        self.group = groups.resolve(group)
        self._problem = Problem(n, k, max_m, dtype, out_dtype or dtype, torch.device(device))
        self._timeout_s = self._settings.timeout_s if timeout_s is None else timeout_s
        if not self._timeout_s > 0:
            raise InvalidArgument("timeout_s must be above 0", f"{timeout_s}")
        self._launch: Launch | None = None
        self._closed = False

    def prepare(self) -> GemmAllGather:
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
        limit = 5 * self._timeout_s
        request = Request(self.operation, self._problem, self._choice, self._timeout_s, limit)
        stalled = ticket.stalled if ticket is not None else None
        # Tensors made under inference_mode could never be written outside it again.
        with torch.inference_mode(False):
            self._launch = prepare(self.group, request, key, stalled)

    @untraced
    def __call__(
        self,
        a: torch.Tensor,
        b: torch.Tensor,
        *,
        out: torch.Tensor | None = None,
        rows: Sequence[int] | None = None,
    ) -> torch.Tensor:
        """Collective: multiply and gather. Returns a ``(sum of all M, n)`` tensor.

        a: ``(M, k)``, M from 0 to max_m; b: ``(n, k)``; any strides. ``out``: where to put the
        result, any strides, not overlapping an input; the same tensor is returned. ``rows``: every
        rank's M, if the caller knows them; otherwise ranks tell each other.

        The result is the caller's own memory. Synchronous on CPU tensors. Raises, on every rank,
        ``InvalidArgument`` when some rank's arguments are wrong or do not agree (the operation
        stays usable) and ``PeerTimeout`` or ``PeerLost`` when a rank does not come (it does not).
        """
        self._refuse_if_closed()
        if self._launch is None:
            raise InvalidArgument(
                f"{type(self).__name__} must be prepared before it is called",
                "a call before prepare()",
                "Call prepare() on every rank, or use 'with'.",
            )
        try:
            return self.run(a, b, out, rows, self._launch.ticket())
        except Outgrown as error:
            raise InvalidArgument(
                f"M must be at most max_m={self.capacity} on every rank",
                f"M={error.rows} on some rank",
                "Prepare with a larger max_m.",
            ) from None

    def run(
        self,
        a: torch.Tensor,
        b: torch.Tensor,
        out: torch.Tensor | None,
        rows: Sequence[int] | None,
        ticket: Ticket,
    ) -> torch.Tensor:
        """One call under ``ticket``. Raises ``Outgrown`` on every rank if an M is too large."""
        assert self._launch is not None, "run before prepare"
        view = self._launch.schedule.plan.view
        problems = check_arguments(
            self._launch.problem, self.group.world, a, b, out, rows, self.group.rank, view
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
        """Raise ``Poisoned`` if this operation failed here or on a peer. Local, never waits."""
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
            compose(self._problem, self.group.world, self._choice)
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
            parts, problem = compose(self._problem, world, self._choice), self._problem
            request = Request(self.operation, problem, self._choice, 1.0, 1.0)
            schedule, nbytes = schedule_for(request, parts, rank, world), -1
        window = f"window: {nbytes} bytes on each rank" if nbytes >= 0 else "window: not made yet"
        lines = [
            f"{self.operation}: M <= {problem.capacity}, N = {problem.n}, K = {problem.k}, "
            f"{dtype_name(problem.dtype)} -> {dtype_name(problem.out_dtype)}, "
            f"rank {rank} of {world}",
            f"mode: {parts.mode} over {parts.transport_name}, multiplied by {parts.backend.name}",
            *(f"  because {reason}" for reason in parts.reasons),
            window,
            f"schedule {schedule.digest()}, n = number of the call:",
            schedule.render(),
        ]
        return "\n".join(lines)

    def close(self) -> None:
        """Give everything back. Local, idempotent; a peer, dead or alive, is never waited for."""
        self._closed = True
        if self._launch is not None:
            self._launch.close()

    def __enter__(self) -> GemmAllGather:
        return self.prepare()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _refuse_if_closed(self) -> None:
        if self._closed:
            raise InvalidArgument(
                f"{type(self).__name__} must be open",
                "a use after close()",
                "Make a new one; closing is final.",
            )


def one_of(name: str, value: str, good: tuple[str, ...]) -> str:
    """``value`` if it is one of ``good``, else ``InvalidArgument``."""
    if value not in good:
        raise InvalidArgument(f"{name} must be {' or '.join(map(repr, good))}", repr(value))
    return value


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


def check_arguments(
    problem: Problem,
    world: int,
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor | None,
    rows: Sequence[int] | None,
    rank: int,
    view: bool,
) -> InvalidArgument | Unsupported | None:
    """The first thing that is wrong with the arguments of one call, or None. Local."""
    try:
        _check_input("a", a, None, problem)
        _check_input("b", b, problem.n, problem)
        if out is not None:
            _check_out(out, problem)
        if view and out is not None:
            raise InvalidArgument("out is for result='copy'", "out with result='view'")
        if rows is not None:
            _check_rows(rows, world, rank, a.shape[0])
        if rows is not None and out is not None and out.shape[0] != sum(rows):
            raise InvalidArgument(f"out must have {sum(rows)} rows", f"{out.shape[0]}")
    except (InvalidArgument, Unsupported) as error:
        return error
    return None


def _check_input(name: str, tensor: torch.Tensor, rows: int | None, problem: Problem) -> None:
    # Each question to torch costs: most calls pass on the first device comparison.
    shape = tensor.shape if isinstance(tensor, torch.Tensor) else ()
    device = problem.device
    fits = (
        len(shape) == 2
        and shape[1] == problem.k
        and (rows is None or shape[0] == rows)
        and tensor.dtype == problem.dtype
        and (tensor.device == device or tensor.device.type == device.type)
        and tensor.layout == torch.strided
    )
    if not fits:
        raise _unfit(name, tensor, rows, problem)
    if tensor.requires_grad and torch.is_grad_enabled():
        raise Unsupported(
            "gradients do not pass through this operation",
            f"{name} with requires_grad",
            "Call it under torch.no_grad(), or detach the tensor.",
        )


def _unfit(name: str, tensor: torch.Tensor, rows: int | None, problem: Problem) -> InvalidArgument:
    shape = f"({'M' if rows is None else rows}, {problem.k})"
    want = f"{name} must be a {dtype_name(problem.dtype)} tensor of shape {shape}"
    if not isinstance(tensor, torch.Tensor):
        return InvalidArgument(want, type(tensor).__name__)
    if tensor.dim() != 2 or tensor.shape[1] != problem.k or rows not in (None, tensor.shape[0]):
        return InvalidArgument(want, f"shape {tuple(tensor.shape)}")
    if tensor.dtype != problem.dtype:
        return InvalidArgument(want, dtype_name(tensor.dtype), f"Convert {name} first.")
    return InvalidArgument(
        f"{name} must be a dense tensor on {problem.device}", f"{tensor.layout} on {tensor.device}"
    )


def _check_out(out: torch.Tensor, problem: Problem) -> None:
    shape = out.shape if isinstance(out, torch.Tensor) else ()
    if len(shape) != 2 or shape[1] != problem.n or out.dtype != problem.out_dtype:
        raise _unfit_out(out, problem)
    if out.device != problem.device and out.device.type != problem.device.type:
        raise InvalidArgument(f"out must be on {problem.device}", str(out.device))
    if out.requires_grad and torch.is_grad_enabled():
        raise Unsupported("gradients do not pass through this operation", "out with requires_grad")


def _unfit_out(out: torch.Tensor, problem: Problem) -> InvalidArgument:
    want = f"out must be a {dtype_name(problem.out_dtype)} tensor of shape (sum of M, {problem.n})"
    if not isinstance(out, torch.Tensor):
        return InvalidArgument(want, type(out).__name__)
    return InvalidArgument(want, f"{dtype_name(out.dtype)} of shape {tuple(out.shape)}")


def _check_rows(rows: Sequence[int], world: int, rank: int, mine: int) -> None:
    if not isinstance(rows, Sequence) or not all(type(count) is int for count in rows):
        raise InvalidArgument("rows must be a list of whole numbers", repr(rows))
    if len(rows) != world or any(count < 0 for count in rows):
        raise InvalidArgument(f"rows must hold M of each of the {world} ranks", f"{list(rows)}")
    if rows[rank] != mine:
        raise InvalidArgument(
            "rows must hold this rank's M at its place",
            f"rows[{rank}]={rows[rank]} with an a of {mine} rows",
        )
