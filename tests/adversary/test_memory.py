"""Litmus tests of the adversary's memory: what it grants, and above all what it does not."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import pytest

from gemmlink.conformance.adversary.faults import Fault
from gemmlink.conformance.adversary.memory import Agent, Memory, Message
from gemmlink.conformance.adversary.values import POISON, Value

X, Y = 0, 1
NEW: Value = ("C", 1, 0, 0, 0)
NEWER: Value = ("C", 2, 0, 0, 0)


class World:
    """Rank 0 has agents ``a`` and ``near``, rank 1 has ``b``; ``lane`` is rank 0's copy engine."""

    def __init__(self, newest: bool = False, strict: bool = False) -> None:
        told = (("nobody", -1, -1), ("a", 0, 0), ("near", 0, 0), ("b", 1, 1), ("lane", 0, -9))
        agents = [Agent(i, *each, agents=len(told)) for i, each in enumerate(told)]
        _, self.a, self.near, self.b, self.lane = agents

        def taste(messages: Sequence[Message]) -> Message:
            return messages[-1 if newest else 0]

        self.memory = Memory([False] * 3, agents, taste, "cell {}".format, strict)

    def tell(self, one: Agent, other: Agent) -> None:
        """As a word of wide enough scope would."""
        other.learn(one.know)


def test_a_released_store_is_seen_by_whoever_knows() -> None:
    world = World()
    world.memory.store(world.a, X, NEW)
    world.memory.publish(world.a, "system")
    assert world.memory.load(world.b, X) == POISON, "b was told nothing and need not look"
    world.tell(world.a, world.b)
    assert world.memory.load(world.b, X) == NEW


def test_without_a_release_nothing_helps() -> None:
    world = World()
    world.memory.store(world.a, X, NEW)
    world.tell(world.a, world.b)
    assert world.memory.load(world.b, X) == POISON


def test_without_an_acquire_nothing_helps_either() -> None:
    world = World()
    world.memory.store(world.a, X, NEW)
    world.memory.publish(world.a, "system")
    assert world.memory.load(world.b, X) == POISON


def test_a_release_of_device_scope_tells_the_device_only() -> None:
    world = World()
    world.memory.store(world.a, X, NEW)
    world.memory.publish(world.a, "device")
    for other in (world.near, world.b, world.lane):
        world.tell(world.a, other)
    assert world.memory.load(world.near, X) == NEW
    assert world.memory.load(world.b, X) == POISON
    assert world.memory.load(world.lane, X) == POISON, "a copy engine does not look into caches"


def test_a_later_release_of_system_scope_covers_what_only_the_device_saw() -> None:
    world = World()
    world.memory.store(world.a, X, NEW)
    world.memory.publish(world.a, "device")
    world.memory.publish(world.a, "system")
    world.tell(world.a, world.b)
    assert world.memory.load(world.b, X) == NEW


def test_a_release_covers_nobody_elses_stores() -> None:
    world = World()
    world.memory.store(world.a, X, NEW)
    world.memory.publish(world.a, "device")
    world.tell(world.a, world.near)
    world.memory.publish(world.near, "system")
    world.tell(world.near, world.b)
    assert world.memory.load(world.b, X) == POISON


@pytest.mark.parametrize(
    ("leader", "fences", "covered"),
    [
        (True, ("retire",), True),
        (True, (), False),
        (False, ("retire", "barrier"), True),
        (False, ("retire",), False),
        (False, ("barrier",), False),
        (False, ("barrier", "retire"), False),
    ],
)
def test_what_has_not_retired_and_met_is_not_covered(
    leader: bool, fences: Sequence[str], covered: bool
) -> None:
    world = World()
    world.memory.store(world.a, X, NEW, leader)
    for fence in fences:
        getattr(world.memory, fence)(world.a)
    world.memory.release(world.a, "system")
    world.tell(world.a, world.b)
    assert world.memory.load(world.b, X) == (NEW if covered else POISON)


def test_stores_are_buffered() -> None:
    world = World()
    world.memory.store(world.a, X, NEW)
    world.memory.store(world.b, Y, NEW)
    assert world.memory.load(world.a, Y) == POISON
    assert world.memory.load(world.b, X) == POISON


def test_an_agent_sees_its_own_stores() -> None:
    world = World()
    world.memory.store(world.a, X, NEW)
    world.memory.store(world.a, X, NEWER)
    assert world.memory.load(world.a, X) == NEWER


def test_stores_may_get_on_by_themselves() -> None:
    world = World(newest=True)
    world.memory.store(world.a, X, NEW)
    assert world.memory.load(world.near, X) == POISON
    world.memory.leak(Random(0))
    assert world.memory.load(world.near, X) == NEW
    assert world.memory.load(world.b, X) == POISON
    world.memory.leak(Random(0))
    assert world.memory.load(world.b, X) == NEW


@pytest.mark.parametrize("seed", range(8))
def test_each_cell_is_coherent(seed: int) -> None:
    world = World(newest=True)
    random = Random(seed)
    world.memory.store(world.a, X, NEW)
    world.memory.publish(world.a, "device")
    world.memory.store(world.a, X, NEWER)
    for _ in range(int(random.random() * 5)):
        world.memory.leak(random)
    world.memory.publish(world.a, "system")
    world.tell(world.a, world.b)
    assert world.memory.load(world.b, X) == NEWER
    assert [message.value for message in world.memory.history[X]] == [POISON, NEW, NEWER]


def test_cells_become_visible_in_any_order() -> None:
    orders = set()
    for seed in range(8):
        world = World(newest=True)
        random = Random(seed)
        for cell in (X, Y):
            world.memory.store(world.a, cell, NEW)
        for _ in range(2):
            world.memory.leak(random)
        orders.add((world.memory.load(world.b, X) == NEW, world.memory.load(world.b, Y) == NEW))
    assert {(True, False), (False, True)} <= orders


def test_a_late_store_lands_on_top_of_a_newer_one() -> None:
    world = World(newest=True)
    world.memory.store(world.a, X, NEW)
    world.memory.store(world.b, X, NEWER)
    world.memory.publish(world.b, "system")
    world.memory.leak(Random(0))
    world.memory.leak(Random(0))
    assert world.memory.load(world.b, X) == NEW


def test_strict_memory_refuses_a_load_with_a_choice() -> None:
    world = World(newest=True, strict=True)
    world.memory.store(world.a, X, NEW)
    world.memory.publish(world.a, "system")
    with pytest.raises(
        Fault, match=r"rank 1's b in call 0 may still find .* in cell 0: rank 0's a"
    ):
        world.memory.load(world.b, X)


def test_strict_memory_refuses_stores_in_no_known_order() -> None:
    world = World(strict=True)
    world.memory.store(world.a, X, NEW)
    world.memory.publish(world.a, "device")
    world.tell(world.a, world.b)
    with pytest.raises(Fault, match=r"released to its device only and nothing orders"):
        world.memory.store(world.b, X, NEWER)


def test_strict_memory_refuses_to_overwrite_what_is_in_use() -> None:
    world = World(strict=True)
    world.memory.load(world.a, X)
    with pytest.raises(Fault, match=r"overwrites cell 0, which rank 0's a .* has read"):
        world.memory.store(world.b, X, NEW)


@pytest.mark.parametrize(("leader", "barrier"), [(True, False), (False, True)])
def test_a_load_is_over_when_its_release_is_known(leader: bool, barrier: bool) -> None:
    world = World(strict=True)
    world.memory.load(world.a, X, leader)
    if barrier:
        world.memory.barrier(world.a)
    world.memory.release(world.a, "system")
    world.tell(world.a, world.b)
    world.memory.store(world.b, X, NEW)
    world.memory.publish(world.b, "system")
    world.tell(world.b, world.a)
    assert world.memory.load(world.a, X) == NEW


def test_the_leader_does_not_know_when_other_waves_have_loaded() -> None:
    world = World(strict=True)
    world.memory.load(world.a, X, leader=False)
    world.memory.release(world.a, "system")
    world.tell(world.a, world.b)
    with pytest.raises(Fault, match="overwrites"):
        world.memory.store(world.b, X, NEW)


def test_a_copy_is_known_when_the_queue_says_so() -> None:
    world = World()
    made = world.memory.copy(world.lane, X, Y)
    world.tell(world.lane, world.b)
    assert made.value == POISON
    world.memory.store(world.a, X, NEW)
    world.memory.publish(world.a, "system")
    world.tell(world.a, world.lane)
    again = world.memory.copy(world.lane, X, Y)
    world.memory.copied(world.lane, [(X, made), (X, again)])
    world.tell(world.lane, world.b)
    assert world.memory.load(world.b, Y) == NEW


def test_what_a_copy_reads_is_in_use_until_it_is_done() -> None:
    world = World(strict=True)
    made = world.memory.copy(world.lane, X, Y)
    world.tell(world.lane, world.a)
    with pytest.raises(Fault, match=r"lane .* has read"):
        world.memory.store(world.a, X, NEW)
    world.memory.copied(world.lane, [(X, made)])
    world.tell(world.lane, world.a)
    world.memory.store(world.a, X, NEW)
