"""Runs the clauses of a contract on real ranks and keeps the outcome of each.

A clause is a method of a contract class. Marked with ``clause`` it is executed by every rank of one
set of processes, which runs all clauses of the class one after the other; the test method of that
name then only tells its outcome, in the words of the rank that saw it fail. A clause that hangs is
given up after its limit, one that ends a rank's process is charged with that, and the clauses
behind either run on fresh ranks: a bad clause neither hides a good one nor disturbs it.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import os
import shutil
import tempfile
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, cast

import torch

from gemmlink import groups, plugins
from gemmlink.conformance import devices
from gemmlink.conformance.contract import Contract, declared, methods
from gemmlink.spawn import RankFailed, run_ranks
from gemmlink.spec.contracts import Capabilities, Group, Session, Transport, Window

#: Limit of whatever a clause waits for, in seconds, unless the clause is about limits.
LIMIT_S = 10.0

Body = Callable[[Any, "Desk"], None]
_PLAIN = (str, int, float, bool, tuple, type(None))


class _StillRunning(AssertionError):
    """The clause did not end within its limit."""


class PeerGaveUp(Exception):
    """Another rank has failed in this clause; what this rank sees is a consequence."""


def require(holds: bool, text: str) -> None:
    """Raise ``AssertionError`` with ``text`` unless ``holds``."""
    if not holds:
        raise AssertionError(text)


def span(tensor: torch.Tensor) -> tuple[int, int]:
    """The smallest and the largest value of a tensor of whole numbers."""
    return int(tensor.min()), int(tensor.max())


def clause(body: Body) -> Callable[[Any], None]:
    """A test method that tells how ``body`` went on the ranks. Its docstring is the clause."""
    return _test_method(body, ends_ranks=False)


def last_clause(body: Body) -> Callable[[Any], None]:
    """A clause in which a rank ends its process, and so the last of a set of ranks."""
    return _test_method(body, ends_ranks=True)


def _test_method(body: Body, ends_ranks: bool) -> Callable[[Any], None]:
    def check(self: Any) -> None:
        __tracebackhide__ = True
        outcome = type(self).outcomes()[body.__name__]
        if outcome is not None:
            raise AssertionError(f"{_sentence(body)}\n{outcome}")

    functools.update_wrapper(check, body)
    vars(check).pop("__wrapped__")  # pytest would take the parameters of the body for fixtures
    check.body = body  # type: ignore[attr-defined]
    check.ends_ranks = ends_ranks  # type: ignore[attr-defined]
    return check


def _sentence(body: Any) -> str:
    return " ".join((body.__doc__ or body.__name__).split())


class RankContract(Contract):
    """Base of contracts that need ranks. Subclasses set what is under test.

    ``transport``: ``"module:attribute"``, or a name that every process knows (built in, or from an
    installed distribution; what this process alone has registered does not exist on the ranks).
    ``device``: of tensors and windows, ``cpu`` or ``cuda``; there ranks take a device each, as far
    as they go round. ``world``: ranks, at least 2. ``clause_limit_s``: when a clause counts as
    hanging.
    """

    transport: str = "shm"
    device: str = devices.HOST
    world: int = 3
    clause_limit_s: float = 30.0
    _outcomes: ClassVar[dict[str, str | None]]

    @classmethod
    def outcomes(cls) -> dict[str, str | None]:
        """None or a failure's text for each clause; the first use runs all of them."""
        if "_outcomes" not in vars(cls):
            run_together(cls)
        return cls._outcomes

    @classmethod
    def spawn(cls, function: Callable[..., Any], *arguments: Any, timeout_s: float) -> None:
        """Call ``function(*arguments)`` on ``world`` ranks with a default process group."""
        run_ranks(cls.world, function, *arguments, timeout_s=timeout_s)


def failures(contract: type[Contract], ranks: bool = True) -> dict[str, str]:
    """Run a contract class here, without pytest: failed clause -> text of its failure.

    ``ranks=False`` leaves out the clauses that need ranks. A gap of the class counts as failed when
    it passes, and only then.
    """
    found: dict[str, str] = {}
    known = declared(contract)
    for name in methods(contract):
        if not ranks and hasattr(getattr(contract, name), "body"):
            continue
        try:
            getattr(contract(), name)()
        except Exception as error:  # whatever a clause raises is its outcome
            if name not in known:
                found[name] = _told(error)
        else:
            if name in known:
                found[name] = known[name].passes()
    return found


def run_together(*contracts: type[RankContract]) -> None:
    """Run the clauses of several classes of one world on one set of ranks; saves their starts."""
    jobs = [job for contract in contracts for job in _jobs(contract)]
    jobs.sort(key=lambda job: job.ends_ranks)
    for contract in contracts:
        contract._outcomes = {}
    owners = {_label(contract): contract for contract in contracts}
    while jobs:
        done = _on_one_set(contracts[0], jobs)
        for job in jobs:
            if job.number in done:
                owners[job.owner]._outcomes[job.name] = done[job.number]
        jobs = [job for job in jobs if job.number not in done]


# What travels to the ranks.

_numbers = iter(range(1 << 30))


@dataclass(frozen=True)
class Job:
    """One clause: the class that defines it, and the attributes that its subclass has set."""

    owner: str
    defined_in: str
    name: str
    ends_ranks: bool
    attributes: dict[str, Any]
    number: int = field(default_factory=lambda: next(_numbers))

    def run(self, desk: Desk) -> None:
        """Execute the clause on this rank."""
        module, _, name = self.defined_in.partition(":")
        contract = functools.reduce(getattr, name.split("."), importlib.import_module(module))
        made = cast(Any, contract)()
        vars(made).update(self.attributes)
        getattr(contract, self.name).body(made, desk)


def _label(contract: type) -> str:
    return f"{contract.__module__}:{contract.__qualname__}"


def _jobs(contract: type[RankContract]) -> list[Job]:
    found = []
    for name in methods(contract):
        method = getattr(contract, name)
        if hasattr(method, "body"):
            home = next(base for base in contract.__mro__ if _defines(base, name))
            values = _attributes(contract)
            found.append(Job(_label(contract), _label(home), name, method.ends_ranks, values))
    return found


def _defines(base: type, name: str) -> bool:
    # A gap's stand-in lies in a class of the tests, which ranks could not import.
    return name in vars(base) and not hasattr(vars(base)[name], "gap")


def _attributes(contract: type) -> dict[str, Any]:
    names = {name for base in contract.__mro__ for name in vars(base) if not name.startswith("_")}
    values = {name: getattr(contract, name) for name in names}
    return {name: value for name, value in values.items() if isinstance(value, _PLAIN)}


# The parent's side.


def _on_one_set(contract: type[RankContract], jobs: list[Job]) -> dict[int, str | None]:
    """Outcomes by job number, of all jobs or of those up to the one that ended a rank."""
    folder = tempfile.mkdtemp(prefix="gemmlink-clauses-")
    failed: RankFailed | None = None
    try:
        limit = 2 * contract.clause_limit_s + 5 * len(jobs)
        try:
            contract.spawn(run_jobs, folder, jobs, contract.clause_limit_s, timeout_s=limit)
        except RankFailed as error:
            failed = error
        journals = [_Journal(folder, rank).read() for rank in range(contract.world)]
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    done: dict[int, str | None] = {}
    for job in jobs:
        told = [journal.get(job.number) for journal in journals]
        if all(entry is None for entry in told):
            break
        done[job.number] = _outcome(told, failed)
    if not done:
        raise failed or RuntimeError("the ranks ended without running a clause")
    return done


def _outcome(told: list[dict[str, Any] | None], failed: RankFailed | None) -> str | None:
    """The ranks' entries as one text. A rank that began a clause and said no more has ended in it.

    A rank that did not even begin has been ended because of another one.
    """
    reasons: list[str] = []
    echoes: list[str] = []
    for rank, entry in enumerate(told):
        if entry is not None and not entry["ended"]:
            why = failed.failures.get(rank, "ended") if failed is not None else "ended"
            where = reasons if "died" in why or "Error" in why else echoes
            where.append(f"rank {rank}: {why.strip()}")
        elif entry is not None and entry["failed"] is not None:
            (echoes if entry["echo"] else reasons).append(f"rank {rank}: {entry['failed']}")
    texts = reasons or echoes
    return "\n".join(texts) if texts else None


class _Journal:
    """What one rank has begun and ended, in a file that outlives it."""

    def __init__(self, folder: str, rank: int) -> None:
        self._path = os.path.join(folder, f"rank{rank}")

    def write(
        self, number: int, ended: bool, failed: str | None = None, echo: bool = False
    ) -> None:
        with open(self._path, "a") as file:
            entry = {"number": number, "ended": ended, "failed": failed, "echo": echo}
            file.write(json.dumps(entry) + "\n")

    def read(self) -> dict[int, dict[str, Any]]:
        with contextlib.suppress(FileNotFoundError), open(self._path) as file:
            return {entry["number"]: entry for entry in map(json.loads, file)}
        return {}


# The ranks' side.


def run_jobs(folder: str, jobs: list[Job], limit_s: float) -> None:
    """On every rank: run the clauses in order, up to one that ends or haunts a rank's process."""
    group = groups.resolve()
    journal = _Journal(folder, group.rank)
    for job in jobs:
        journal.write(job.number, ended=False)
        desk = Desk(group, job, functools.partial(journal.write, job.number, ended=True))
        error = _attempt(job, desk, limit_s)
        if error is not None:
            desk.give_up()
        told = None if error is None else _told(error)
        journal.write(job.number, True, told, isinstance(error, PeerGaveUp))
        if job.ends_ranks:
            return
        # A clause that was given up goes on in its thread, and would be seen by those behind it.
        hangs = b"hangs" if isinstance(error, _StillRunning) else b""
        if any(group.all_gather(hangs, key=f"clause{job.number}/end", timeout_s=2 * limit_s)):
            return


def _attempt(job: Job, desk: Desk, limit_s: float) -> Exception | None:
    """Run a clause in a thread of its own, which is left alone if it does not end."""
    errors: list[Exception] = []

    def work() -> None:
        try:
            devices.take(desk.device, desk.rank)
            job.run(desk)
        except Exception as error:  # is the outcome
            errors.append(error)
        finally:
            desk.close()

    worker = threading.Thread(target=work, name=job.name, daemon=True)
    worker.start()
    worker.join(limit_s)
    if worker.is_alive():
        return _StillRunning(f"still running after {limit_s:g} s")
    return errors[0] if errors else None


def _told(error: Exception) -> str:
    if isinstance(error, AssertionError | PeerGaveUp):
        return str(error)
    return "".join(traceback.format_exception(error))


class Desk:
    """What a clause has at hand on one rank: the group, the transport, and ways to meet the others.

    ``meet`` and ``group`` work through the process group's store and need nothing that is under
    test. A peer that has failed in the clause ends them with ``PeerGaveUp``.
    """

    def __init__(self, group: Group, job: Job, say_ended: Callable[[], None]) -> None:
        self.rank = group.rank
        self.world = group.world
        #: The kind of device of tensors and windows.
        self.device: str = job.attributes["device"]
        self.group: Group = groups.WatchedGroup(group, self._look)
        self._board = group.board
        self._job = job
        self._key = f"clause{job.number}"
        self._say_ended = say_ended
        self._made = 0
        self._sessions: list[Session] = []

    @property
    def transport(self) -> Transport:
        """The transport under test."""
        name = self._job.attributes["transport"]
        return cast(Transport, plugins.find("transport", name))

    @property
    def capabilities(self) -> Capabilities:
        """What the transport says of itself on this machine."""
        return self.transport.probe()

    @property
    def peers(self) -> list[int]:
        """The other ranks, the next one first."""
        return [(self.rank + step) % self.world for step in range(1, self.world)]

    def key(self) -> str:
        """A fresh name for an exchange; equal on all ranks that ask in the same order."""
        self._made += 1
        return f"{self._key}/{self._made}"

    def open(self) -> Session:
        """Collective: a session of its own, closed when the clause ends."""
        session = self.transport.open(self.group, key=self.key(), timeout_s=LIMIT_S)
        self._sessions.append(session)
        return session

    def window(self, nbytes: int) -> Window:
        """Collective: a window in a session of its own."""
        return self.open().window(nbytes)

    def meet(self, value: Any = None) -> list[Any]:
        """Collective: wait for all ranks; the values of all, in rank order. Orders memory, too."""
        data = json.dumps(value).encode()
        return [
            json.loads(text)
            for text in self.group.all_gather(data, key=self.key(), timeout_s=LIMIT_S)
        ]

    def agree(self, holds: bool, text: str) -> None:
        """``require``, and go on only when it holds on every rank."""
        require(holds, text)
        self.meet()

    def die(self) -> None:
        """End this process at once, as a kill would."""
        self._say_ended()
        os._exit(0)

    def give_up(self) -> None:
        """Tell the others that the clause has failed here."""
        if self._board is not None:
            self._board.post(f"{self._key}/failed/{self.rank}", b"failed")

    def close(self) -> None:
        """Close the sessions that the clause has opened."""
        for session in self._sessions:
            with contextlib.suppress(Exception):  # the clause has had its say
                session.close()

    def _look(self) -> None:
        for peer in self.peers if self._board is not None else ():
            if self._board is not None and self._board.peek(f"{self._key}/failed/{peer}"):
                raise PeerGaveUp(f"rank {peer} failed in this clause")
