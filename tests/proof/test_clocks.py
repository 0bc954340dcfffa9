"""What the proof takes to be known, held against the memory and the runs of the adversary."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from gemmlink.conformance.adversary.case import build
from gemmlink.conformance.adversary.machine import Machine
from gemmlink.conformance.adversary.memory import NEVER, Agent, Memory, Message
from gemmlink.conformance.adversary.program import compile_case
from gemmlink.conformance.adversary.sweep import requests
from gemmlink.conformance.adversary.tasks import Task
from gemmlink.conformance.proof.clocks import Clocks, Fences, Use
from gemmlink.conformance.proof.graph import graph
from gemmlink.spec.schedule import Scope

CELLS = 40


class _Both:
    """An agent of the adversary's memory and the proof's fences, told the same."""

    def __init__(self, random: Random) -> None:
        agents = [Agent(0, "nobody", -1, -1, 2), Agent(1, "a", 0, 0, 2)]
        self.agent = agents[1]
        self.memory = Memory([False] * CELLS, agents, lambda seen: seen[-1], str, strict=False)
        self.fences = Fences()
        self.stores: list[tuple[Message, Use]] = []
        self.loads: list[tuple[int, Use]] = []
        self._random = random

    def use(self, cell: int) -> None:
        """Load or store a cell that nobody has used."""
        stores, leader = self._random.random() < 0.5, self._random.random() < 0.5
        use = Use(1, 0, cell, [], stores)
        self.fences.use(use, leader)
        if stores:
            self.memory.store(self.agent, cell, ("value",), leader)
            self.stores.append((self.agent.open[cell], use))
        else:
            self.memory.load(self.agent, cell, leader)
            self.loads.append((cell, use))

    def fence(self) -> None:
        """Any fence."""
        name = self._random.choice(["retire", "barrier", "release", "publish"])
        scopes: list[Scope] = ["device", "system"]
        scope = [self._random.choice(scopes)] if name in ("release", "publish") else []
        getattr(self.memory, name)(self.agent, *scope)
        getattr(self.fences, name)(*scope)

    def load_is_over(self, cell: int) -> int:
        """The release that ends the load of ``cell``, which may not have happened yet."""
        readers = self.memory._readers[cell]
        assert readers is not None, f"nobody has read {cell}"
        return readers[1] if readers[1] <= self.agent.releases else NEVER


@pytest.mark.parametrize("seed", range(60))
def test_fences_cover_what_they_cover_in_the_adversarys_memory(seed: int) -> None:
    random = Random(seed)
    both = _Both(random)
    for cell in range(CELLS):
        both.use(cell)
        while random.random() < 0.6:
            both.fence()
    for message, use in both.stores:
        assert (message.near, message.far) == (use.near, use.far)
    for cell, use in both.loads:
        assert both.load_is_over(cell) == use.near == use.far


class _Listener(Machine):
    """A run that compares what agents know with what the proof says that they know at least."""

    def __init__(self, clocks: Clocks, seed: int) -> None:
        super().__init__(clocks.graph.program, seed)
        self._least = clocks
        self._parts = {(p.code.agent, p.call, id(p.code)): p for p in clocks.graph.parts}
        self._elected = {
            op: setting
            for settings in clocks.graph.settings
            for setting in settings
            for op in setting.ops
            if setting.elected is not None
        }
        self.compared = 0

    def _compare(self, task: Task, node: int) -> None:
        least = self._least.at[node][: self._least.kept]
        assert all(a >= b for a, b in zip(task.agent.know, least, strict=True)), (
            f"{self._least.graph.who(node)} knows {task.agent.know}, must know {least}"
        )
        self.compared += 1

    def _announce(self, task: Task, argument: tuple[int, int, Scope, int | None, bool]) -> int:
        node = self._place(task, argument)
        setting = self._elected.get(node)
        if setting is None or argument[3] in task.elected:
            self._compare(task, node if setting is None else setting.node)
        return super()._announce(task, argument)

    def _place(self, task: Task, argument: Any) -> int:
        """The node of an op: its arguments are objects of their own."""
        part = self._parts[task.agent.number, task.call, id(task.code)]
        ops = task.code.ops
        found = next(i for i, (_, other) in enumerate(ops) if other is argument)
        return part.first + 1 + found

    def _closed(self, task: Task) -> None:
        part = self._parts[task.agent.number, task.call, id(task.code)]
        self._compare(task, part.last)
        super()._closed(task)


@pytest.mark.parametrize("operation", ["all_gather", "all_reduce"])
def test_whoever_runs_knows_at_least_what_the_proof_says(operation: str) -> None:
    wanted = [r for r in requests(2) if r.operation == operation]
    compared = 0
    for request in wanted[:: len(wanted) // 12]:
        made = graph(compile_case(build(request)))
        clocks = Clocks(made, made.order())
        for seed in range(6):
            listener = _Listener(clocks, seed)
            listener.run()
            compared += listener.compared
    assert compared > 5000
