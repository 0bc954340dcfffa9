"""How far all others may get while some stand still: what could come before what those do next.

It is looked up by letting the others run, and telling them too much rather than too little: a word
has every value that anybody could have set it to, and whoever could be elected is. So what is not
found here cannot happen, whatever the others do.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from gemmlink.conformance.adversary.program import Code
from gemmlink.conformance.adversary.tasks import Delivery, Flight, Task
from gemmlink.conformance.explore.outline import NOTICED
from gemmlink.conformance.explore.walker import Walker

#: What two actions may both concern: a counter, a word, who sets a word, a queue; and its number.
Concern = tuple[str, int]


class _Runner:
    """A strand, as far as it may get: ``at`` is the index of its next event."""

    __slots__ = ("at", "call", "code", "elected", "events", "rank", "still")

    def __init__(self, code: Code, rank: int, call: int, events: Any, at: int) -> None:
        self.code = code
        self.rank = rank
        self.call = call
        self.events = events
        self.at = at
        self.elected: Collection[int] = ()
        self.still = False


class Ahead:
    """What others may change, and may look at, while those whose ids are ``still`` stand still."""

    def __init__(self, walker: Walker, still: Collection[int]) -> None:
        self.changed: set[Concern] = set()
        self.seen: set[Concern] = set()
        self._still = still
        self._outline = walker.outline
        self._codes = walker.program.codes
        self._now = [written.value for written in walker.words]
        self._best = self._now.copy()
        self._counts = [count for count, _ in walker.counters]
        #: Counters by which somebody may be elected, and what is set when somebody is.
        self._electable: set[int] = set()
        self._owed: dict[int, list[tuple[int, int]]] = {}
        self._running, self._live, self._arrived = walker.tallies()
        self._runners: list[_Runner] = []
        self._queues: dict[int, list[_Runner]] = {}
        #: Queues with copies that stand still.
        self._held: set[int] = set()
        self._enter(walker)
        while self._round():
            pass

    def meets(self, changes: set[Concern], looks: set[Concern]) -> bool:
        """Whether anything here may not change places with what changes, and looks at, these."""
        return not (
            self.changed.isdisjoint(changes)
            and self.changed.isdisjoint(looks)
            and self.seen.isdisjoint(changes)
        )

    def _enter(self, walker: Walker) -> None:
        for turn in walker.ready:
            if isinstance(turn, Delivery) and id(turn) not in self._still:
                self._best[turn.word] = max(self._best[turn.word], turn.written.value)
                self.changed.add(("word", turn.word))
            elif isinstance(turn, Flight):
                number = turn.task.agent.number
                if id(turn) in self._still:
                    self._held.add(number)
                else:
                    self.seen.add(("queue", number))
        for tasks in walker.queues.values():
            for task in tasks:
                self._enter_task(task)
        for task in walker.tasks():
            if task.code.strand.kind != "queue":
                self._enter_task(task)

    def _enter_task(self, task: Task) -> None:
        runner = self._add(task.code, task.rank, task.call, task.pc)
        runner.still = id(task) in self._still
        runner.elected = task.elected
        ops = task.code.ops
        if not runner.still and task.pc < len(ops) and ops[task.pc][0] not in NOTICED:
            self._moves(runner)

    def _add(self, code: Code, rank: int, call: int, pc: int) -> _Runner:
        lines = self._outline.of(code)
        runner = _Runner(code, rank, call, lines.events, lines.first[pc])
        if code.strand.kind == "queue":
            self._queues.setdefault(code.agent, []).append(runner)
        else:
            self._runners.append(runner)
        return runner

    def _round(self) -> bool:
        """Everybody goes as far as he gets; False when nobody has got anywhere."""
        went = False
        for number, queue in self._queues.items():
            while queue and not queue[0].still:
                went = self._advance(queue[0]) or went
                if queue[0].at < len(queue[0].events):
                    break
                went = True
                ended = queue.pop(0)
                if number not in self._held:
                    self._close(ended)
        runners, self._runners = self._runners, []
        for runner in runners:
            went = self._advance(runner) or went
            if runner.still or runner.at < len(runner.events):
                self._runners.append(runner)
            else:
                went = True
                self._end(runner)
        return went

    def _close(self, runner: _Runner) -> None:
        self._running[runner.rank, runner.call, runner.code.strand.actor] -= 1

    def _end(self, runner: _Runner) -> None:
        self._close(runner)
        rank, call = runner.rank, runner.call
        self._live[rank, call] -= 1
        if self._live[rank, call] or call == len(self._codes[rank]):
            return
        codes = self._codes[rank][call]
        self._live[rank, call + 1] = sum(code.strand.kind != "queue" for code in codes)
        for code in codes:
            key = (rank, call + 1, code.strand.actor)
            self._running[key] = self._running.get(key, 0) + 1
            self._add(code, rank, call + 1, 0)

    def _advance(self, runner: _Runner) -> bool:
        """Whether it got anywhere."""
        if runner.still:
            return False
        start = runner.at
        while runner.at < len(runner.events):
            name, argument = runner.events[runner.at]
            if not getattr(self, f"_{name}")(runner, argument):
                break
            runner.at += 1
        if runner.at == start:
            return False
        self._moves(runner)
        return True

    def _moves(self, runner: _Runner) -> None:
        if not runner.code.strand.in_order:
            self.changed.add(("queue", runner.code.agent))

    # Events: whether it gets beyond.

    def _wait(self, runner: _Runner, argument: tuple[int, int, Any, bool]) -> bool:
        word, wanted = argument[:2]
        if wanted <= self._now[word]:
            self.seen.add(("word", word))
        return wanted <= self._best[word]

    def _join(self, runner: _Runner, actor: str) -> bool:
        return not self._running.get((runner.rank, runner.call, actor), 1)

    def _announce(self, runner: _Runner, argument: tuple[int, int, Any, int | None, bool]) -> bool:
        word, value, _, by, _ = argument
        if by is None or by in self._electable or by in runner.elected:
            self._set(word, value)
        else:
            self._owed.setdefault(by, []).append((word, value))
        return True

    def _set(self, word: int, value: int) -> None:
        self._best[word] = max(self._best[word], value)
        self.changed.add(("word", word))
        self.changed.add(("setters", word))

    def _elect(self, runner: _Runner, argument: tuple[int, int]) -> bool:
        counter, of = argument
        self.changed.add(("counter", counter))
        self._counts[counter] += 1
        if self._counts[counter] % of == 0:
            self._electable.add(counter)
            for word, value in self._owed.pop(counter, []):
                self._set(word, value)
        return True

    def _collective(self, runner: _Runner, argument: tuple[str, Any, Any]) -> bool:
        arrived = self._arrived.setdefault((runner.call, argument[0]), set())
        arrived.add(runner.rank)
        return len(arrived) == len(self._codes)

    def _copy(self, runner: _Runner, argument: Any) -> bool:
        if not runner.code.strand.in_order:
            self.seen.add(("queue", runner.code.agent))
        return True
