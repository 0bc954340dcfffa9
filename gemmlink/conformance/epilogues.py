"""The contract of an epilogue, clause by clause; see ``spec.contracts.Epilogue``.

Most clauses judge schedules, which are data: for every operation and plan of a small world (see
``asked``) they build the schedules of all ranks and look at what these do (``routes``) and at what
they order (``races``). The last ones run them on ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import ClassVar, cast, get_args

import torch

from gemmlink import plugins
from gemmlink.conformance import asked, races, routes, trials, worst
from gemmlink.conformance.asked import Asked, Wanted
from gemmlink.conformance.clauses import Desk, RankContract, clause, require
from gemmlink.conformance.exact import run_everywhere
from gemmlink.core.compose import Choice, compose
from gemmlink.core.flatten import flatten
from gemmlink.errors import Unsupported
from gemmlink.spec.contracts import INTERFACE, Epilogue
from gemmlink.spec.operations import Kind, Operation
from gemmlink.spec.problem import Problem
from gemmlink.spec.schedule import Deliver, Schedule, Set, Wait, Word
from gemmlink.spec.window import WindowLayout, inbox

_KINDS = get_args(Kind)


@dataclass(frozen=True)
class Examined:
    """What was asked for, and the order of all that its schedules do."""

    asked: Asked
    graph: races.Graph

    def schedules(self) -> Iterator[tuple[str, Schedule]]:
        """The schedule of each rank, and whose it is."""
        for schedule in self.graph.schedules:
            yield self.asked.where(schedule), schedule

    def judge(self, fault: str | None) -> None:
        """Fail if there is a fault."""
        require(fault is None, f"{self.asked.where(self.graph.schedules[0])}: {fault}")


class EpilogueContract(RankContract):
    """``Epilogue``: schedules that are complete, free of races and circles, and right on ranks.

    ``epilogue``: what is under test, as for ``transport``, which with ``backend`` carries it.
    ``operations``, ``results``, ``buffers``, ``completions``: what must be served, as far as the
    epilogue states the kinds of phase. A plan for which ``schedule`` raises ``Unsupported`` is left
    out, except the plainest one of each operation that the epilogue serves alone.
    """

    section = "epilogue"
    epilogue: str = "push"
    backend: str = "eager"
    operations: tuple[str, ...] = trials.OPERATIONS
    results: tuple[str, ...] = ("copy", "view")
    buffers: tuple[int, ...] = (1, 2)
    completions: tuple[str, ...] = ("receive", "receive_and_send")
    _questions: ClassVar[list[Asked]]
    _examined: ClassVar[list[Examined]]

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

    def test_it_states_the_kinds_of_phase_it_serves(self) -> None:
        """An epilogue states the kinds of phase it serves; others are refused, naming the kind."""
        phases = self._made().phases
        require(
            bool(phases) and len(set(phases)) == len(phases) and set(phases) <= set(_KINDS),
            f"phases is {phases!r}, not a tuple of {' or '.join(_KINDS)} or both",
        )
        for variant in asked.VARIANTS:
            for phase in variant.of(2).phases:
                if phase.name not in phases:
                    told = self._refusal(variant.of(2))
                    named = f"{phase.name} phase" in told and self._made().name in told
                    require(named, f"{variant} is refused with {told!r}")

    def test_schedules_are_for_the_plan_given(self) -> None:
        """``schedule`` returns the schedule of the phase and plan that it was given."""
        made = self._made()
        for each in self._asked():
            for phase, plan in each.own():
                found = made.schedule(phase, plan)
                require(found.plan == plan, f"asked for {plan}, got {found.plan}")
                require(found.phase == phase, f"asked for {phase}, got {found.phase}")

    def test_schedules_are_pure(self) -> None:
        """Equal arguments give equal schedules, whatever was asked in between."""
        made, fresh = self._made(), self._made()
        questions = [question for each in self._asked() for question in each.own()]
        first = [made.schedule(phase, plan) for phase, plan in questions]
        for (phase, plan), before in reversed(list(zip(questions, first, strict=True))):
            for again in (made.schedule(phase, plan), fresh.schedule(phase, plan)):
                require(again == before, f"two schedules for {plan}")

    def test_needs_say_what_is_used(self) -> None:
        """A schedule that uses a window or lanes says so in ``needs``, and the other way round."""
        made = self._made()
        questions = (question for each in self._asked() for question in each.own())
        used = [made.schedule(phase, plan) for phase, plan in questions]
        window = any(schedule.uses_window() for schedule in used)
        lanes = any(program.lane is not None for s in used for program in s.programs)
        require(made.needs.window == window, f"needs.window is {made.needs.window}, used: {window}")
        require(made.needs.lanes == lanes, f"needs.lanes is {made.needs.lanes}, used: {lanes}")

    def test_the_host_can_walk_it(self) -> None:
        """Actors are listed after those that they join; lanes wait for nothing of other ranks."""
        for _, schedule in self._schedules():
            flatten(schedule)

    def test_each_part_is_computed_once_and_stored(self) -> None:
        """Every chunk of every part of the own product is computed once, and stored at once."""
        self._each(routes.uncomputed)

    def test_what_travels_in_another_dtype_is_encoded(self) -> None:
        """Where the phase has a wire dtype all that is sent is encoded once, and nothing else."""
        self._each(routes.unencoded)

    def test_a_store_puts_what_was_made_or_loaded(self) -> None:
        """A store puts the region that its actor has just computed, encoded or loaded."""
        self._each(lambda operation, schedule: routes.exchanged(schedule))

    def test_parts_go_where_their_routes_lead(self) -> None:
        """An inbox takes only what has a route to its rank, an outbox only what its rank sends."""
        self._each(routes.astray)

    def test_what_stays_is_stored_once(self) -> None:
        """What stays, and with ``keep`` all, is stored in the private buffer exactly once."""
        if self._made().complete:
            self._each(routes.unkept)

    def test_every_region_is_delivered_once(self) -> None:
        """Every region of the result is delivered exactly once, on every rank, and no other."""
        for each in self._all() if self._made().complete else ():
            for where, schedule in each.schedules():
                window = schedule.uses_window()
                judge = routes.undelivered if window else routes.uncollected
                fault = judge(each.asked.operation, schedule)
                require(fault is None, f"{where}: {fault}")

    def test_sums_are_of_every_source_in_order(self) -> None:
        """Every chunk of the own band is summed exactly once, of all sources in their order."""
        for each in self._all() if self._made().complete else ():
            for where, schedule in each.schedules():
                if schedule.uses_window():
                    fault = routes.unsummed(each.asked.operation, schedule)
                    require(fault is None, f"{where}: {fault}")

    def test_what_is_delivered_is_there(self) -> None:
        """What is delivered, summed, loaded, encoded or copied has been put there before.

        In every order of events. A result that is a view lies in the own window.
        """
        for each in self._sorted():
            each.judge(races.missing_data(each.graph))
            for where, schedule in each.schedules() if each.graph.plan.view else ():
                away = [
                    action
                    for action in schedule.actions()
                    if isinstance(action, Deliver)
                    and (action.window, action.area) != (schedule.plan.rank, "inbox")
                ]
                require(not away, f"{where}: '{away[:1]}' for a view")

    def test_each_word_awaited_is_set_once_by_its_source(self) -> None:
        """A word that is awaited is set exactly once a call, at that rank, by the word's source."""
        for each in self._all():
            setters = _setters(each.graph)
            for where, schedule in each.schedules():
                for action in schedule.actions():
                    if isinstance(action, Wait):
                        by = setters.get((action.word, schedule.plan.rank), [])
                        require(
                            by == [action.word.source],
                            f"{where}: '{action}', a word set there by ranks {by}",
                        )

    def test_words_are_set_by_their_source(self) -> None:
        """A word has one writer: nobody sets a word of another rank, or the same one twice."""
        for each in self._all():
            for (word, at), by in _setters(each.graph).items():
                require(
                    by == [word.source],
                    f"{each.asked.where(each.graph.schedules[at])}: "
                    f"{word} is set here by ranks {by}",
                )

    def test_no_rank_waits_in_a_circle(self) -> None:
        """Every wait ends: its word is set, by somebody who does not wait for the waiter."""
        for each in self._all():
            if each.graph.unmet:
                each.judge(f"nobody sets what {each.graph.unmet[0]} waits for")
            if each.graph.circle is not None:
                each.judge(f"{each.graph.circle} waits, by way of others, for itself")

    def test_the_gate_stands_before_the_first_store(self) -> None:
        """No store before every peer's ``free`` has come, the own slot included; or two buffers."""
        for each in self._sorted():
            if each.graph.plan.buffers == 1:
                each.judge(races.ungated(each.graph))

    def test_nothing_is_overwritten_while_it_is_in_use(self) -> None:
        """Memory is used again only when everybody has finished with it, in every order of events.

        A result that is a view is in use until its rank enters the next call.
        """
        for each in self._sorted():
            each.judge(races.race(each.graph))

    def test_a_copied_result_sets_free_at_the_end(self) -> None:
        """With one buffer a rank tells every peer that it has finished reading.

        After its last reading if the result is copied out; for a view, in its next call.
        """
        for each in self._sorted():
            if each.graph.plan.buffers == 1 and self._made().needs.window:
                each.judge(races.unfreed(each.graph))

    def test_send_complete_means_that_nobody_reads_the_own_slot(self) -> None:
        """With ``send_complete`` a call ends when nobody reads the own window any more."""
        for each in self._sorted():
            if each.graph.plan.send_complete:
                each.judge(races.unsent(each.graph))

    def test_every_word_has_a_place(self) -> None:
        """Every word that is set or awaited is one that ``WindowLayout`` has, in its own place."""
        for each in self._all():
            phases = each.asked.operation.phases
            parts = max(len(phase.routes) for phase in phases)
            for where, schedule in each.schedules():
                plan = schedule.plan
                areas = inbox(plan.world, 64)
                layout = WindowLayout(
                    plan.world, plan.chunks, areas, plan.buffers, len(phases), parts
                )
                _place_all(layout, where, schedule)

    def test_it_is_right_on_the_worst_machine(self) -> None:
        """Told by tiles, fences and words it is right on the worst machine that contracts allow.

        The adversary runs it on two ranks: operations, forms, results and lanes, few seeds each.
        """
        for fault in worst.faults(self._made(), self.wanted()):
            require(False, fault)

    @clause
    def test_digests_are_the_same_in_every_process(self, desk: Desk) -> None:
        """A digest changes whenever an action changes, and never else: not between processes."""
        made = self._made()
        questions = [question for each in self._asked() for question in each.own()]
        mine = [made.schedule(phase, plan).digest() for phase, plan in questions]
        for rank, theirs in enumerate(desk.meet(mine)):
            wrong = [
                number for number, (a, b) in enumerate(zip(mine, theirs, strict=True)) if a != b
            ]
            require(not wrong, f"{len(wrong)} of {len(mine)} digests differ from rank {rank}'s")

    @clause
    def test_it_is_exact_alone(self, desk: Desk) -> None:
        """Results are exact in a world of one: operations, forms, results, buffers, any M."""
        run_everywhere(self, desk, 1)

    @clause
    def test_it_is_exact_on_two_ranks(self, desk: Desk) -> None:
        """Results are exact on two ranks: operations, forms, results, buffers, any M."""
        run_everywhere(self, desk, 2)

    @clause
    def test_it_is_exact_on_all_ranks(self, desk: Desk) -> None:
        """Results are exact on all ranks: operations, forms, results, buffers, any M."""
        run_everywhere(self, desk, desk.world)

    # What the clauses look at.

    def wanted(self) -> Wanted:
        """What must be served."""
        return Wanted(self.operations, self.results, self.buffers, self.completions)

    def _made(self) -> Epilogue:
        return cast(Epilogue, plugins.find("epilogue", self.epilogue))

    def _asked(self) -> list[Asked]:
        """Everything that is asked for; found once a class, as are the graphs."""
        cls = type(self)
        if "_questions" not in vars(cls):
            cls._questions = list(asked.everything(self._made(), self.wanted()))
        return cls._questions

    def _all(self) -> list[Examined]:
        """Everything that is asked for, with the order of what is done."""
        cls = type(self)
        if "_examined" not in vars(cls):
            cls._examined = [
                Examined(each, races.Graph(each.operation, each.schedules))
                for each in self._asked()
            ]
        return cls._examined

    def _sorted(self) -> Iterator[Examined]:
        """Those without circles, which have no order; a clause of their own is about circles."""
        return (each for each in self._all() if each.graph.circle is None)

    def _schedules(self) -> Iterator[tuple[str, Schedule]]:
        return (found for each in self._all() for found in each.schedules())

    def _each(self, judge: Callable[[Operation, Schedule], str | None]) -> None:
        """Judge every schedule by what its routes ask for."""
        for each in self._all():
            for where, schedule in each.schedules():
                fault = judge(each.asked.operation, schedule)
                require(fault is None, f"{where}: {fault}")

    def _refusal(self, operation: Operation) -> str:
        """What composing this epilogue for an operation is refused with."""
        problem = Problem(1, 1, 1, torch.float32, torch.float32, torch.device(self.device))
        choice = Choice(self.transport, self.epilogue, self.backend)
        try:
            compose(problem, 2, choice, operation)
        except Unsupported as error:
            return str(error)
        return "nothing"


def _setters(graph: races.Graph) -> dict[tuple[Word, int], list[int]]:
    found: dict[tuple[Word, int], list[int]] = {}
    for schedule in graph.schedules:
        for action in schedule.actions():
            if isinstance(action, Set):
                found.setdefault((action.word, action.at), []).append(schedule.plan.rank)
    return found


def _place_all(layout: WindowLayout, where: str, schedule: Schedule) -> None:
    """Every word of a schedule has a place of its own."""
    places: dict[tuple[int, int], Word] = {}
    for action in schedule.actions():
        if isinstance(action, Set | Wait):
            at = action.at if isinstance(action, Set) else schedule.plan.rank
            known = places.setdefault((at, _place(layout, where, action.word)), action.word)
            require(known == action.word, f"{where}: {known} and {action.word} share a place")


def _place(layout: WindowLayout, where: str, word: Word) -> int:
    try:
        offset = layout.word(word)
    except KeyError as error:
        raise AssertionError(f"{where}: {error.args[0]}") from None
    fits = (
        0 <= word.source < layout.world
        and 0 <= word.chunk < layout.chunks
        and 0 <= word.part < layout.parts
        and 0 <= word.phase < layout.phases
    )
    require(fits and offset < layout.data, f"{where}: {word} has no place in a window")
    return offset
