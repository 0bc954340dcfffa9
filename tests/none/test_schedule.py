"""Schedules as data: what they say, when they are the same, in what order a thread runs them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace
from itertools import product
from typing import Any, TypeGuard

import pytest
import torch

from gemmlink.backends.eager import Eager
from gemmlink.core.flatten import flatten
from gemmlink.core.interpret import HostProgram
from gemmlink.core.memory import Memory
from gemmlink.epilogues.collective import LibraryCollective
from gemmlink.epilogues.lanes import Lanes
from gemmlink.epilogues.pull import Pull
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
    Copy,
    Deliver,
    Encode,
    Join,
    Load,
    Plan,
    Program,
    Region,
    Schedule,
    Set,
    Store,
    Sum,
    Wait,
    Word,
)
from gemmlink.spec.window import WindowLayout, inbox

PHASE = all_gather(3, 5).phases[0]
MODES: dict[str, tuple[Epilogue, bool]] = {
    "fused-push": (Push(), True),
    "split-push": (Push(), False),
    "fused-pull": (Pull(), True),
    "split-pull": (Pull(), False),
    "fused-lanes": (Lanes(), True),
    "split-lanes": (Lanes(), False),
    "collective": (LibraryCollective(), False),
}
WINDOW_MODES = tuple(mode for mode in MODES if mode != "collective")

each_mode = pytest.mark.parametrize("mode", MODES)
each_window_mode = pytest.mark.parametrize("mode", WINDOW_MODES)


def _made(mode: str, rank: int = 1, world: int = 3, chunks: int = 2, **rest: Any) -> Schedule:
    epilogue, fused = MODES[mode]
    phase = all_gather(world, 5).phases[0]
    return epilogue.schedule(phase, Plan(rank, world, chunks, fused, **rest))


def _variants() -> Iterator[dict[str, Any]]:
    """Every way in which a mode that uses the window can be asked for."""
    for view, buffers, complete, lanes, order in product(
        (False, True), (1, 2), (False, True), (1, 2), ("in_order", "after_drain")
    ):
        yield {
            "view": view,
            "buffers": buffers,
            "send_complete": complete,
            "lanes": lanes,
            "lane_order": order,
        }


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
            "  deliver rank 0 chunk 0 from window 0 to the result",
            "  wait arrive[1,chunk 0] >= n",
            "  deliver rank 1 chunk 0 from window 0 to the result",
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
    "window": 2,
    "actor": "mover",
    "name": "all_reduce",
    "part": 1,
    "area": "outbox",
    "places": ((0, "inbox"), (1, "outbox")),
}
KINDS: list[Action] = [
    Compute(0),
    Store(Region(0, 0), to=1),
    Load(Region(0, 0), window=0),
    Copy(Region(0, 0), to=1),
    Set(Word("arrive", 0, 0), at=1),
    Wait(Word("arrive", 0, 0)),
    Join("producer"),
    Collective("all_gather"),
    Deliver(Region(0, 0), window=0),
    Sum(Region(0, 0), ((0, "inbox"), (1, "inbox"))),
    Encode(Region(0, 0)),
]


@pytest.mark.parametrize(
    ("action", "field"), [(action, f.name) for action in KINDS for f in fields(action)]
)
def test_the_digest_changes_with_every_field_of_every_action(action: Action, field: str) -> None:
    changed = replace(action, **{field: OTHER[field]})
    assert changed != action, "the other value must be another"
    assert _of(action).digest() != _of(changed).digest()


def _changed(what: Any, field: str) -> Any:
    return replace(what, **{field: 1})


@pytest.mark.parametrize("field", [f.name for f in fields(Region)])
def test_the_digest_changes_with_every_field_of_a_region(field: str) -> None:
    one, two = Region(0, 0), _changed(Region(0, 0), field)
    assert _of(Load(one, window=0)).digest() != _of(Load(two, window=0)).digest()


@pytest.mark.parametrize("kind", ["arrive", "chunk"])
@pytest.mark.parametrize("field", [f.name for f in fields(Word) if f.name != "kind"])
def test_the_digest_changes_with_every_field_of_a_word(field: str, kind: str) -> None:
    one, two = Word(kind, 0), _changed(Word(kind, 0), field)
    assert _of(Wait(one)).digest() != _of(Wait(two)).digest()
    assert _of(Wait(one)).digest() != _of(Wait(replace(one, kind="free"))).digest()


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
@each_window_mode
def test_every_wait_has_one_writer_that_sets_it(mode: str, world: int) -> None:
    """Over all ranks: who waits for a word finds exactly one Set of it, by the rank in its name.

    What is awaited is set in the same call, or (with a lag) in the call before.
    """
    for rest in _variants():
        made = [_made(mode, rank, world, 3, **rest) for rank in range(world)]
        sets = {
            (a.word, a.at): (r, a) for r, s in enumerate(made) for a in s.actions() if _is_set(a)
        }
        count = sum(_is_set(a) for s in made for a in s.actions())
        assert len(sets) == count, f"a word is set twice in a call of {rest}"
        for rank, schedule in enumerate(made):
            for action in schedule.actions():
                if isinstance(action, Wait):
                    writer, found = sets[action.word, rank]
                    assert writer == action.word.source, f"'{action}' of {rest}"
                    assert found.lag <= action.lag, f"'{action}' of {rest} is never satisfied"


def _is_set(action: Action) -> TypeGuard[Set]:
    return isinstance(action, Set)


def _flat(schedule: Schedule) -> list[Action]:
    return [placed.action for placed in flatten(schedule)]


@each_window_mode
def test_the_gate_comes_before_the_first_store(mode: str) -> None:
    """Own window included: peers may still read their results of the call before."""
    for rest in _variants():
        actions = _flat(_made(mode, rank=1, world=3, **rest))
        first_store = next(i for i, action in enumerate(actions) if isinstance(action, Store))
        gates = {a.word for a in actions[:first_store] if isinstance(a, Wait) and a.lag == 1}
        wanted = {Word("free", 0), Word("free", 2)} if rest["buffers"] == 1 else set()
        assert gates == wanted, rest


@each_window_mode
def test_a_rank_gives_its_last_view_back_before_it_waits_for_others(mode: str) -> None:
    """The other way round, two ranks would wait for each other."""
    flat = _flat(_made(mode, rank=1, world=3, view=True))
    free = [a for a in flat if isinstance(a, Set | Wait) and a.word.kind == "free"]
    assert free == [
        Set(Word("free", 1), at=2, lag=1),
        Set(Word("free", 1), at=0, lag=1),
        Wait(Word("free", 2), lag=1),
        Wait(Word("free", 0), lag=1),
    ]


@each_window_mode
def test_a_rank_whose_result_is_copied_out_reads_nothing_once_it_is_free(mode: str) -> None:
    flat = _flat(_made(mode, rank=1, world=3))
    last = [a for a in flat if isinstance(a, Load | Deliver | Set)][-2:]
    assert last == [Set(Word("free", 1), at=2), Set(Word("free", 1), at=0)]


@pytest.mark.parametrize("world", [1, 2, 3])
@each_window_mode
def test_every_region_is_delivered_once_and_after_it_has_arrived(mode: str, world: int) -> None:
    for rest in _variants():
        for rank in range(world):
            actions = _flat(_made(mode, rank, world, 3, **rest))
            delivered = []
            for place, action in enumerate(actions):
                if isinstance(action, Deliver):
                    region = action.region
                    arrival = Wait(Word("arrive", region.source, region.chunk))
                    assert arrival in actions[:place], f"'{action}' of {rest} comes too early"
                    delivered.append((region.source, region.chunk))
            wanted = [(source, chunk) for source in range(world) for chunk in range(3)]
            assert sorted(delivered) == wanted, rest


@each_window_mode
def test_a_view_is_delivered_from_the_own_window(mode: str) -> None:
    for rest in _variants():
        windows = {a.window for a in _flat(_made(mode, 1, 3, **rest)) if isinstance(a, Deliver)}
        away = mode.endswith("pull") and not rest["view"]
        assert windows == ({0, 1, 2} if away else {1}), rest


@pytest.mark.parametrize("view", [False, True])
@each_window_mode
def test_a_call_that_is_send_complete_waits_for_whoever_reads_the_own_slot(
    mode: str, view: bool
) -> None:
    """The peers that pull, or the lanes; nobody in push."""
    rest: dict[str, Any] = {"view": view, "lanes": 2, "chunks": 3}
    plain = list(_made(mode, send_complete=False, **rest).actions())
    added = [a for a in _made(mode, send_complete=True, **rest).actions() if a not in plain]
    wanted: dict[str, list[Action]] = {
        "push": [],
        "pull": [
            Set(Word("read", 1), at=2),
            Set(Word("read", 1), at=0),
            Wait(Word("read", 2)),
            Wait(Word("read", 0)),
        ],
        "lanes": [Join(f"lane[{peer},{lane}]") for peer in (2, 0) for lane in (0, 1)],
    }
    assert added == wanted[mode.partition("-")[2]]


def test_render_shows_lanes_as_actors() -> None:
    assert _made("fused-lanes", world=2, rank=0, chunks=1).render() == "\n".join(
        [
            "producer:",
            "  wait free[1] >= n-1",
            "  compute chunk 0",
            "  store rank 0 chunk 0 -> window 0 (system)",
            "  set chunk[0,chunk 0] = n at rank 0 (system)",
            "  set arrive[0,chunk 0] = n at rank 0 (system)",
            "lane[1,0]:",
            "  wait chunk[0,chunk 0] >= n",
            "  copy rank 0 chunk 0 -> window 1",
            "  set arrive[0,chunk 0] = n at rank 1 (system)",
            "consumer:",
            "  wait arrive[0,chunk 0] >= n",
            "  deliver rank 0 chunk 0 from window 0 to the result",
            "  wait arrive[1,chunk 0] >= n",
            "  deliver rank 1 chunk 0 from window 0 to the result",
            "  join producer (device)",
            "  set free[0] = n at rank 1 (system)",
        ]
    )


@each_mode
def test_a_schedule_ends_every_actor_before_it_is_joined(mode: str) -> None:
    """Without lanes the order is that of the schedule."""
    made, whole = _made(mode), [*_made(mode).actions()]
    if mode.endswith("lanes"):
        whole = [a for p in made.programs if p.lane is None for a in p.actions]
        lanes = {p.actor for p in made.programs if p.lane is not None}
        assert [p.action for p in flatten(made) if p.actor not in lanes] == whole
    else:
        assert _flat(made) == whole


def test_joining_an_actor_that_has_not_ended_is_refused() -> None:
    for programs in (
        (Program("consumer", (Join("producer"),)), Program("producer", ())),
        (Program("consumer", (Join("nobody"),)),),
        (Program("producer", (Join("producer"),)),),
    ):
        with pytest.raises(InvalidArgument, match="list an actor after those that it joins"):
            flatten(Schedule(PHASE, Plan(0, 2, 1, False), programs))


def _bound(*actions: Action) -> HostProgram:
    return _bind(_of(*actions))


def _bind(schedule: Schedule, window: Any = None) -> HostProgram:
    problem = Problem(4, 4, 4, torch.float32, torch.float32, torch.device("cpu"))
    layout = WindowLayout(2, 1, inbox(2, problem.slot_bytes))
    memory = Memory(all_gather(2, problem.n), schedule, problem, layout, window)
    return HostProgram(schedule, memory, Eager())


@pytest.mark.parametrize("after", [(), (Compute(0),), (Collective("all_gather"),)])
def test_a_chunk_that_is_computed_must_be_stored_at_once(after: tuple[Action, ...]) -> None:
    with pytest.raises(InvalidArgument, match="got 'compute chunk 0' without a store"):
        _bound(Compute(0), *after)


@pytest.mark.parametrize(
    "action",
    [
        Store(Region(0, 0), to=0),
        Load(Region(0, 0), window=0),
        Set(Word("arrive", 0), at=1),
        Wait(Word("arrive", 1)),
        Deliver(Region(1, 0), window=0),
    ],
)
def test_a_schedule_that_uses_a_window_must_say_so(action: Action) -> None:
    with pytest.raises(InvalidArgument, match=r"must say needs\.window"):
        _bound(action)


def test_a_rank_stores_its_own_product_only() -> None:
    with pytest.raises(InvalidArgument, match="a rank stores its own product"):
        _bound(Compute(0), Store(Region(1, 0), to=LOCAL))


def test_an_unknown_collective_or_action_is_unsupported() -> None:
    with pytest.raises(Unsupported, match="all_gather, all_to_all, reduce_scatter; got all_reduce"):
        _bound(Collective("all_reduce"))
    with pytest.raises(Unsupported, match=r"actions of spec\.schedule"):
        _bound("compute")  # type: ignore[arg-type]


def test_only_lanes_copy() -> None:
    with pytest.raises(Unsupported, match="'copy rank 0 chunk 0 -> window 1'"):
        _bound(Copy(Region(0, 0), to=1))


def test_a_lane_needs_a_window() -> None:
    lane = Program("lane[1,0]", (Copy(Region(0, 0), to=1),), lane=(1, 0))
    with pytest.raises(InvalidArgument, match=r"must say needs\.window"):
        _bind(Schedule(PHASE, Plan(0, 2, 1, False), (lane,)))


def test_a_view_of_another_window_is_refused() -> None:
    """What lies in a peer's window is not in the view; nobody would copy it."""
    program = Program("consumer", (Deliver(Region(1, 0), window=1),))
    schedule = Schedule(PHASE, Plan(0, 2, 1, False, view=True), (program,))
    with pytest.raises(InvalidArgument, match=r"a view shows the own window's inbox; got 'deliver"):
        _bind(schedule, window=object())


@pytest.mark.parametrize("rank", range(4))
def test_a_rank_sends_to_the_rank_behind_it_first(rank: int) -> None:
    plan = Plan(rank, 4, 1, True)
    assert plan.everyone[0] == rank
    assert sorted(plan.everyone) == [0, 1, 2, 3]
    assert plan.peers[0] == (rank + 1) % 4
