"""The contract of an epilogue, clause by clause; see ``spec.contracts.Epilogue``.

Most clauses judge schedules, which are data: for every plan of a small world they build the
schedules of all ranks and look at what these order, see ``races``. The last ones run them on ranks.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from typing import Any, ClassVar, cast

from gemmlink import plugins
from gemmlink.conformance import races
from gemmlink.conformance.clauses import Desk, RankContract, clause, require
from gemmlink.conformance.exact import run_everywhere
from gemmlink.core.flatten import flatten
from gemmlink.errors import Unsupported
from gemmlink.spec.contracts import INTERFACE, Epilogue
from gemmlink.spec.operations import Phase, all_gather
from gemmlink.spec.schedule import (
    LOCAL,
    Collective,
    Compute,
    Copy,
    Deliver,
    Plan,
    Region,
    Schedule,
    Set,
    Store,
    Wait,
    Word,
)
from gemmlink.spec.window import WindowLayout, inbox

_WORLDS = (1, 2, 3)
_CHUNKS = 2
_N = 8


class EpilogueContract(RankContract):
    """``Epilogue``: schedules that are complete, free of races and circles, and right on ranks.

    ``epilogue``: what is under test, as for ``transport``, which with ``backend`` carries it.
    ``results``, ``buffers``, ``completions``: what must be served; a plan for which ``schedule``
    raises ``Unsupported`` is left out, except the plainest one.
    """

    section = "epilogue"
    epilogue: str = "push"
    backend: str = "eager"
    results: tuple[str, ...] = ("copy", "view")
    buffers: tuple[int, ...] = (1, 2)
    completions: tuple[str, ...] = ("receive", "receive_and_send")
    _graphs: ClassVar[list[races.Graph]]

    def test_it_says_what_it_is(self) -> None:
        """An epilogue has a name and an interface, and states its forms and needs."""
        made = self._made()
        require(bool(made.name), f"name is {made.name!r}")
        require(made.interface == INTERFACE, f"interface is {made.interface}")
        forms = made.forms()
        require(
            bool(forms) and len(set(forms)) == len(forms) and set(forms) <= {False, True},
            f"forms() is {forms!r}, not a tuple of False, True or both",
        )
        require(
            not made.needs.lanes or made.needs.window, "it needs lanes, which are part of a window"
        )

    def test_schedules_are_for_the_plan_given(self) -> None:
        """``schedule`` returns the schedule of the phase and plan that it was given."""
        made = self._made()
        for plans in self._plans():
            phase = _phase(len(plans))
            for plan in plans:
                found = made.schedule(phase, plan)
                require(found.plan == plan, f"asked for {plan}, got {found.plan}")
                require(found.phase == phase, f"asked for phase {phase.name}, got {found.phase}")

    def test_schedules_are_pure(self) -> None:
        """Equal arguments give equal schedules, whatever was asked in between."""
        made, fresh = self._made(), self._made()
        asked = [(_phase(len(plans)), plan) for plans in self._plans() for plan in plans]
        first = [made.schedule(phase, plan) for phase, plan in asked]
        for (phase, plan), before in reversed(list(zip(asked, first, strict=True))):
            for again in (made.schedule(phase, plan), fresh.schedule(phase, plan)):
                require(again == before, f"two schedules for {plan}")
                require(again.digest() == before.digest(), f"two digests for {plan}")

    def test_needs_say_what_is_used(self) -> None:
        """A schedule that uses a window or lanes says so in ``needs``, and the other way round."""
        needs = self._made().needs
        used = [schedule for graph in self._all() for schedule in graph.schedules]
        window = any(schedule.uses_window() for schedule in used)
        lanes = any(program.lane is not None for s in used for program in s.programs)
        require(needs.window == window, f"needs.window is {needs.window}, used: {window}")
        require(needs.lanes == lanes, f"needs.lanes is {needs.lanes}, used: {lanes}")

    def test_the_host_can_walk_it(self) -> None:
        """Actors are listed after those that they join; lanes wait for nothing of other ranks."""
        for _, schedule in self._schedules():
            flatten(schedule)

    def test_each_chunk_is_computed_once_and_stored(self) -> None:
        """Every chunk of the own product is computed once; its first store follows at once."""
        for where, schedule in self._schedules():
            chunks = Counter(a.chunk for a in schedule.actions() if isinstance(a, Compute))
            want = Counter(range(schedule.plan.chunks))
            require(chunks == want, f"{where}: computes chunks {sorted(chunks.elements())}")
            for program in schedule.programs:
                for one, then in itertools.zip_longest(program.actions, program.actions[1:]):
                    mine = Region(schedule.plan.rank, one.chunk) if isinstance(one, Compute) else 0
                    ok = not mine or (isinstance(then, Store) and then.region == mine)
                    require(ok, f"{where}: '{one}' is followed by '{then}', not by its store")

    def test_every_region_is_delivered_once(self) -> None:
        """Every region of every source is delivered exactly once, on every rank."""
        for where, schedule in self._schedules():
            plan = schedule.plan
            if not self._made().complete:
                continue
            if not self._made().needs.window:
                _gathered_by_library(where, schedule)
                continue
            found = Counter(a.region for a in schedule.actions() if isinstance(a, Deliver))
            for region in _regions(plan):
                times = found.pop(region, 0)
                require(times == 1, f"{where}: {region} is delivered {times} times")
            require(not found, f"{where}: delivers {next(iter(found), None)}, which nobody has")

    def test_what_is_delivered_is_there(self) -> None:
        """What is delivered, loaded or copied has been put there before, in every order of events.

        A result that is a view lies in the own window.
        """
        for graph in self._sorted():
            _judge(graph, races.missing_data(graph))
            for schedule in graph.schedules if graph.plan.view else ():
                away = [
                    action
                    for action in schedule.actions()
                    if isinstance(action, Deliver) and action.window != schedule.plan.rank
                ]
                require(not away, f"{_where(schedule)}: '{away[:1]}' for a view")

    def test_each_word_awaited_is_set_once_by_its_source(self) -> None:
        """A word that is awaited is set exactly once a call, at that rank, by the word's source."""
        for graph in self._all():
            setters = _setters(graph)
            for schedule in graph.schedules:
                for action in schedule.actions():
                    if isinstance(action, Wait):
                        by = setters.get((action.word, schedule.plan.rank), [])
                        require(
                            by == [action.word.source],
                            f"{_where(schedule)}: '{action}', a word set there by ranks {by}",
                        )

    def test_words_are_set_by_their_source(self) -> None:
        """A word has one writer: nobody sets a word of another rank, or the same one twice."""
        for graph in self._all():
            for (word, at), by in _setters(graph).items():
                require(
                    by == [word.source],
                    f"{_where(graph.schedules[at])}: {word} is set here by ranks {by}",
                )

    def test_no_rank_waits_in_a_circle(self) -> None:
        """Every wait ends: its word is set, by somebody who does not wait for the waiter."""
        for graph in self._all():
            if graph.unmet:
                _judge(graph, f"nobody sets what {graph.unmet[0]} waits for")
            if graph.circle is not None:
                _judge(graph, f"{graph.circle} waits, by way of others, for itself")

    def test_the_gate_stands_before_the_first_store(self) -> None:
        """No store before every peer's ``free`` has come, the own slot included; or two buffers."""
        for graph in self._sorted():
            if graph.plan.buffers == 1:
                _judge(graph, _ungated(graph))

    def test_nothing_is_overwritten_while_it_is_in_use(self) -> None:
        """Memory is used again only when everybody has finished with it, in every order of events.

        A result that is a view is in use until its rank enters the next call.
        """
        for graph in self._sorted():
            _judge(graph, races.race(graph))

    def test_a_copied_result_sets_free_at_the_end(self) -> None:
        """With one buffer a rank tells every peer that it has finished reading.

        After its last reading if the result is copied out; for a view, in its next call.
        """
        for graph in self._sorted():
            if graph.plan.buffers == 1 and self._made().needs.window:
                _judge(graph, _unfreed(graph))

    def test_send_complete_means_that_nobody_reads_the_own_slot(self) -> None:
        """With ``send_complete`` a call ends when nobody reads the own slot any more."""
        for graph in self._sorted():
            if graph.plan.send_complete:
                _judge(graph, races.unsent(graph))

    def test_every_word_has_a_place(self) -> None:
        """Every word that is set or awaited is one that ``WindowLayout`` has, in its own place."""
        for where, schedule in self._schedules():
            plan = schedule.plan
            layout = WindowLayout(plan.world, plan.chunks, inbox(plan.world, 64), plan.buffers)
            places: dict[tuple[int, int], Word] = {}
            for action in schedule.actions():
                if isinstance(action, Set | Wait):
                    at = action.at if isinstance(action, Set) else plan.rank
                    offset = _place(layout, where, action.word)
                    known = places.setdefault((at, offset), action.word)
                    require(
                        known == action.word, f"{where}: {known} and {action.word} share a place"
                    )

    @clause
    def test_digests_are_the_same_in_every_process(self, desk: Desk) -> None:
        """A digest changes whenever an action changes, and never else: not between processes."""
        made = self._made()
        mine = [
            made.schedule(_phase(len(plans)), plan).digest()
            for plans in self._plans()
            for plan in plans
        ]
        for rank, theirs in enumerate(desk.meet(mine)):
            wrong = [
                number for number, (a, b) in enumerate(zip(mine, theirs, strict=True)) if a != b
            ]
            require(not wrong, f"{len(wrong)} of {len(mine)} digests differ from rank {rank}'s")

    @clause
    def test_it_is_exact_alone(self, desk: Desk) -> None:
        """Results are exact in a world of one: forms, results, buffers, completions, any M."""
        run_everywhere(self, desk, 1)

    @clause
    def test_it_is_exact_on_two_ranks(self, desk: Desk) -> None:
        """Results are exact on two ranks: forms, results, buffers, completions, any M."""
        run_everywhere(self, desk, 2)

    @clause
    def test_it_is_exact_on_all_ranks(self, desk: Desk) -> None:
        """Results are exact on all ranks: forms, results, buffers, completions, any M."""
        run_everywhere(self, desk, desk.world)

    # What the clauses look at.

    def _made(self) -> Epilogue:
        return cast(Epilogue, plugins.find("epilogue", self.epilogue))

    def _plans(self) -> Iterator[list[Plan]]:
        """For every plan, that of each rank."""
        made = self._made()
        for options in self._options(made):
            for world in _WORLDS:
                plans = [Plan(rank=rank, world=world, **options) for rank in range(world)]
                try:
                    for plan in plans:
                        made.schedule(_phase(world), plan)
                except Unsupported:
                    plain = not options["view"] and options["buffers"] == 1
                    require(not plain or options["send_complete"], "the plainest plan is refused")
                    continue
                yield plans

    def _options(self, made: Epilogue) -> Iterator[dict[str, Any]]:
        needs = made.needs
        for fused, result, buffers, completion, lanes, order, common in itertools.product(
            made.forms(),
            self.results if needs.window else ("copy",),
            self.buffers,
            self.completions,
            (1, 2) if needs.lanes else (1,),
            ("in_order", "after_drain") if needs.lanes else ("in_order",),
            (False, True) if needs.common else (False,),
        ):
            view, send = result == "view", completion == "receive_and_send"
            if common and (send or not view):
                continue
            yield {
                "chunks": _CHUNKS, "fused": fused, "view": view, "buffers": buffers,
                "send_complete": send, "common": common, "lanes": lanes, "lane_order": order,
            }  # fmt: skip

    def _all(self) -> list[races.Graph]:
        """The order of events for every plan; made once a class."""
        cls = type(self)
        if "_graphs" not in vars(cls):
            made = self._made()
            cls._graphs = [
                races.Graph([made.schedule(_phase(len(plans)), plan) for plan in plans])
                for plans in self._plans()
            ]
        return cls._graphs

    def _sorted(self) -> Iterator[races.Graph]:
        """Those without circles, which have no order; a clause of their own is about circles."""
        return (graph for graph in self._all() if graph.circle is None)

    def _schedules(self) -> Iterator[tuple[str, Schedule]]:
        for graph in self._all():
            for schedule in graph.schedules:
                yield _where(schedule), schedule


def _phase(world: int) -> Phase:
    return all_gather(world, _N).phases[0]


def _where(schedule: Schedule) -> str:
    plan = schedule.plan
    words = [
        "fused" if plan.fused else "split", "view" if plan.view else "copy",
        f"{plan.buffers} buffers", "send complete" if plan.send_complete else "",
        "common" if plan.common else "",
        "" if plan.lane_order == "in_order" else plan.lane_order,
        "" if plan.lanes == 1 else f"{plan.lanes} lanes",
    ]  # fmt: skip
    return f"rank {plan.rank} of {plan.world} ({', '.join(word for word in words if word)})"


def _judge(graph: races.Graph, fault: str | None) -> None:
    require(fault is None, f"{_where(graph.schedules[0])}: {fault}")


def _regions(plan: Plan) -> list[Region]:
    return [Region(source, c) for source in range(plan.world) for c in range(plan.chunks)]


def _gathered_by_library(where: str, schedule: Schedule) -> None:
    calls = [action for action in schedule.actions() if isinstance(action, Collective)]
    require(len(calls) == 1, f"{where}: {len(calls)} library collectives")
    stored = Counter(
        action.region
        for action in schedule.actions()
        if isinstance(action, Store) and action.to == LOCAL
    )
    want = Counter(r for r in _regions(schedule.plan) if r.source == schedule.plan.rank)
    require(stored == want, f"{where}: the private buffer gets {sorted(map(str, stored))}")


def _setters(graph: races.Graph) -> dict[tuple[Word, int], list[int]]:
    found: dict[tuple[Word, int], list[int]] = {}
    for schedule in graph.schedules:
        for action in schedule.actions():
            if isinstance(action, Set):
                found.setdefault((action.word, action.at), []).append(schedule.plan.rank)
    return found


def _ungated(graph: races.Graph) -> str | None:
    gates: dict[int, dict[int, races.Node]] = {}
    for node in graph.nodes:
        action = node.action
        if node.call == 1 and isinstance(action, Wait) and action.word.kind == "free":
            gates.setdefault(node.rank, {})[action.word.source] = node
    for node in graph.nodes:
        stores = isinstance(node.action, Store) and node.action.to != LOCAL
        if node.call == 1 and (stores or isinstance(node.action, Copy)):
            for peer in graph.schedules[node.rank].plan.peers:
                gate = gates.get(node.rank, {}).get(peer)
                if gate is None or not node.follows(gate):
                    return f"{node} does not wait for free[{peer}]"
    return None


def _unfreed(graph: races.Graph) -> str | None:
    lag = 1 if graph.plan.view else 0
    for schedule in graph.schedules:
        rank = schedule.plan.rank
        said = [
            node
            for node in graph.nodes
            if node.call == 1 and node.rank == rank and _frees(node, rank, lag)
        ]
        told = sorted(cast(Set, node.action).at for node in said)
        if told != sorted(schedule.plan.peers):
            return f"rank {rank} sets free (= n{f'-{lag}' if lag else ''}) at ranks {told}"
        for access in graph.accesses if not graph.plan.view else ():
            node = access.node
            if (node.rank, node.call) == (rank, 1) and isinstance(node.action, Deliver):
                early = [n for n in said if not n.follows(node)]
                if early:
                    return f"{early[0]} does not come after {node}"
    return None


def _frees(node: races.Node, rank: int, lag: int) -> bool:
    action = node.action
    return isinstance(action, Set) and action.word == Word("free", rank) and action.lag == lag


def _place(layout: WindowLayout, where: str, word: Word) -> int:
    try:
        offset = layout.word(word)
    except KeyError as error:
        raise AssertionError(f"{where}: {error.args[0]}") from None
    fits = 0 <= word.source < layout.world and 0 <= word.chunk < layout.chunks
    require(fits and offset < layout.data, f"{where}: {word} has no place in a window")
    return offset
