"""Schedules as data: what they say, when they are the same, in what order a thread runs them."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
import torch

from gemmlink.backends.eager import Eager
from gemmlink.core.interpret import HostProgram, flatten
from gemmlink.epilogues.collective import LibraryCollective
from gemmlink.epilogues.push import Push
from gemmlink.errors import InvalidArgument, Unsupported
from gemmlink.spec.contracts import Epilogue
from gemmlink.spec.operations import all_gather
from gemmlink.spec.problem import Problem
from gemmlink.spec.schedule import (
    LOCAL,
    Action,
    Collective,
    Compute,
    Deliver,
    Join,
    Load,
    Plan,
    Program,
    Region,
    Schedule,
    Set,
    Store,
    Wait,
    Word,
)
from gemmlink.spec.window import WindowLayout

PHASE = all_gather(3, 5).phases[0]
PUSH, COLLECTIVE = Push(), LibraryCollective()
MODES: dict[str, tuple[Epilogue, bool]] = {
    "fused-push": (PUSH, True),
    "split-push": (PUSH, False),
    "collective": (COLLECTIVE, False),
}

each_mode = pytest.mark.parametrize("mode", MODES)


def _made(mode: str, rank: int = 1, world: int = 3, chunks: int = 2) -> Schedule:
    epilogue, fused = MODES[mode]
    return epilogue.schedule(PHASE, Plan(rank, world, chunks, fused))


def _of(*actions: Action, actor: str = "producer") -> Schedule:
    return Schedule(PHASE, Plan(0, 2, 1, False), (Program(actor, actions),))


def test_render_reads_as_written_in_the_documentation() -> None:
    assert _made("fused-push", world=2, rank=0, chunks=1).render() == "\n".join(
        [
            "producer:",
            "  wait free[1] >= n-1",
            "  compute chunk 0",
            "  store rank 0 chunk 0 -> window 0 (system)",
            "  store rank 0 chunk 0 -> window 1 (system)",
            "  set arrive[0,chunk 0] = n at rank 0 (system)",
            "  set arrive[0,chunk 0] = n at rank 1 (system)",
            "consumer:",
            "  wait arrive[0,chunk 0] >= n",
            "  deliver rank 0 chunk 0 to the result",
            "  wait arrive[1,chunk 0] >= n",
            "  deliver rank 1 chunk 0 to the result",
            "  join producer (device)",
            "  set free[0] = n at rank 1 (system)",
        ]
    )


@each_mode
def test_equal_plans_give_equal_schedules(mode: str) -> None:
    assert _made(mode) == _made(mode)
    assert _made(mode).digest() == _made(mode).digest()
    assert len(_made(mode).digest()) == 16


@each_mode
def test_the_digest_changes_when_any_action_goes(mode: str) -> None:
    whole = _made(mode)
    seen = {whole.digest()}
    for place, program in enumerate(whole.programs):
        for index in range(len(program.actions)):
            left = program.actions[:index] + program.actions[index + 1 :]
            programs = list(whole.programs)
            programs[place] = replace(program, actions=left)
            digest = replace(whole, programs=tuple(programs)).digest()
            assert digest != whole.digest(), f"{program.actions[index]} does not count"
            seen.add(digest)
    assert len(seen) > 1


#: One action of every kind, and for each field another value.
OTHER: dict[str, Any] = {
    "chunk": 1,
    "region": Region(0, 1),
    "to": 2,
    "scope": "other",
    "word": Word("arrive", 1, 1),
    "at": 2,
    "lag": 1,
    "actor": "mover",
    "name": "all_reduce",
}
KINDS: list[Action] = [
    Compute(0),
    Store(Region(0, 0), to=LOCAL),
    Load(Region(0, 0)),
    Set(Word("arrive", 0, 0), at=1),
    Wait(Word("arrive", 0, 0)),
    Join("producer"),
    Collective("all_gather"),
    Deliver(Region(0, 0)),
]


@pytest.mark.parametrize(
    ("action", "field"), [(action, f.name) for action in KINDS for f in fields(action)]
)
def test_the_digest_changes_with_every_field_of_every_action(action: Action, field: str) -> None:
    changed = replace(action, **{field: OTHER[field]})
    assert changed != action, "the other value must be another"
    assert _of(action).digest() != _of(changed).digest()


def test_the_digest_changes_with_the_actor_and_the_order() -> None:
    one, two = Compute(0), Compute(1)
    digests = {
        _of(one, two).digest(),
        _of(two, one).digest(),
        _of(one, two, actor="mover").digest(),
    }
    assert len(digests) == 3


@each_mode
def test_a_window_is_needed_where_it_is_used(mode: str) -> None:
    epilogue, _ = MODES[mode]
    assert _made(mode).uses_window() == epilogue.needs.window


@pytest.mark.parametrize("world", [1, 2, 5])
@pytest.mark.parametrize("mode", ["fused-push", "split-push"])
def test_every_wait_has_one_writer_that_sets_it(mode: str, world: int) -> None:
    """Over all ranks: who waits for a word finds exactly one Set of it, by the rank in its name."""
    made = [_made(mode, rank, world) for rank in range(world)]
    sets = {
        (a.word, a.at): r for r, s in enumerate(made) for a in s.actions() if isinstance(a, Set)
    }
    count = sum(isinstance(a, Set) for s in made for a in s.actions())
    assert len(sets) == count, "a word is set twice in a call"
    for rank, schedule in enumerate(made):
        for action in schedule.actions():
            if isinstance(action, Wait):
                assert sets[action.word, rank] == action.word.source


@pytest.mark.parametrize("mode", ["fused-push", "split-push"])
def test_the_gate_comes_before_the_first_store(mode: str) -> None:
    """Own window included: peers may still read their results of the call before."""
    actions = flatten(_made(mode, rank=1, world=3))
    first_store = next(i for i, action in enumerate(actions) if isinstance(action, Store))
    gates = {a.word for a in actions[:first_store] if isinstance(a, Wait) and a.lag == 1}
    assert gates == {Word("free", 0), Word("free", 2)}


@each_mode
def test_a_schedule_ends_every_actor_before_it_is_joined(mode: str) -> None:
    assert flatten(_made(mode)) == tuple(_made(mode).actions())


def test_joining_an_actor_that_has_not_ended_is_refused() -> None:
    for programs in (
        (Program("consumer", (Join("producer"),)), Program("producer", ())),
        (Program("consumer", (Join("nobody"),)),),
        (Program("producer", (Join("producer"),)),),
    ):
        with pytest.raises(InvalidArgument, match="list an actor after those that it joins"):
            flatten(Schedule(PHASE, Plan(0, 2, 1, False), programs))


def _bound(*actions: Action) -> HostProgram:
    problem = Problem(4, 4, 4, torch.float32, torch.float32, torch.device("cpu"))
    layout = WindowLayout(2, 1, problem.slot_bytes)
    return HostProgram(_of(*actions), problem, Eager(), layout, None)


@pytest.mark.parametrize("after", [(), (Compute(0),), (Collective("all_gather"),)])
def test_a_chunk_that_is_computed_must_be_stored_at_once(after: tuple[Action, ...]) -> None:
    with pytest.raises(InvalidArgument, match=r"compute chunk 0 without a store"):
        _bound(Compute(0), *after)


@pytest.mark.parametrize(
    "action",
    [
        Store(Region(0, 0), to=0),
        Load(Region(0, 0)),
        Set(Word("arrive", 0), at=1),
        Wait(Word("arrive", 1)),
        Deliver(Region(1, 0)),
    ],
)
def test_a_schedule_that_uses_a_window_must_say_so(action: Action) -> None:
    with pytest.raises(InvalidArgument, match=r"must say needs\.window"):
        _bound(action)


def test_a_rank_stores_its_own_product_only() -> None:
    with pytest.raises(InvalidArgument, match="a rank stores its own product"):
        _bound(Compute(0), Store(Region(1, 0), to=LOCAL))


def test_an_unknown_collective_or_action_is_unsupported() -> None:
    with pytest.raises(Unsupported, match="all_gather; got all_reduce"):
        _bound(Collective("all_reduce"))
    with pytest.raises(Unsupported, match=r"actions of spec\.schedule"):
        _bound("compute")  # type: ignore[arg-type]


@pytest.mark.parametrize("rank", range(4))
def test_a_rank_sends_to_the_rank_behind_it_first(rank: int) -> None:
    plan = Plan(rank, 4, 1, True)
    assert plan.everyone[0] == rank
    assert sorted(plan.everyone) == [0, 1, 2, 3]
    assert plan.peers[0] == (rank + 1) % 4
