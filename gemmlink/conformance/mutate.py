"""Mutants: lowered schedules with one mistake, to see whether whoever judges schedules notices.

A mutant is a change to the object that the adversary runs and proofs are made about. Mechanical
ones delete each action in turn, swap neighbours, or narrow a scope; named ones are mistakes that
have been made, or that read as if they were right. Those of ``NAMED`` are in what a rank does;
``mistakes`` has those in how a case begins, how its calls follow each other, and how ranks recover.

Not every change is a mistake: two words of different ranks may be set in either order, a block that
loads nothing need not acquire. ``Survey.missed`` lists what nobody noticed, to be looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from gemmlink.conformance.adversary.case import Case
from gemmlink.conformance.adversary.run import Outcome, first_fault
from gemmlink.spec.lower import READER
from gemmlink.spec.lowered import (
    Acquire,
    Action,
    Announce,
    Barrier,
    Counter,
    Elect,
    Fetch,
    Lowered,
    Make,
    Put,
    Release,
    Retire,
    Strand,
)
from gemmlink.spec.schedule import LOCAL, Join, Wait

#: What becomes of the actions of a strand.
Edit = Callable[[Strand], Sequence[Action]]


def _as_it_is(lowered: Lowered) -> Lowered:
    return lowered


def _untouched(case: Case) -> Case:
    return case


@dataclass(frozen=True)
class Mutant:
    """A change with a name: ``change`` of what every rank does, ``whole`` of the case around it.

    ``kind`` is what mechanical ones have in common; ``place`` the strand and the action that they
    are about.
    """

    name: str
    change: Callable[[Lowered], Lowered] = _as_it_is
    whole: Callable[[Case], Case] = _untouched
    kind: str = "named"
    place: tuple[int, int] | None = None

    def of(self, case: Case) -> Case:
        """The case with the mistake."""
        return self.whole(case.changed(self.name, self.change))


def edited(lowered: Lowered, edit: Edit) -> Lowered:
    """``lowered`` with the actions of every strand replaced."""
    strands = (replace(strand, actions=tuple(edit(strand))) for strand in lowered.strands)
    return replace(lowered, strands=tuple(strands))


# Mechanical ones. They name an action by its strand's and its own index, as of rank 0: the strands
# of other ranks are built alike. The reader is left alone: he is who notices.


def _strands(lowered: Lowered) -> Iterator[tuple[int, Strand]]:
    for place, strand in enumerate(lowered.strands):
        if strand.actor != READER:
            yield place, strand


def deletions(lowered: Lowered) -> Iterator[Mutant]:
    """Every single action deleted in turn."""
    for place, strand in _strands(lowered):
        for index, action in enumerate(strand.actions):
            name = f"without '{action}' in {strand.name}"
            yield _at(name, _kind("without", action), place, index, lambda found: found[1:])


def swaps(lowered: Lowered) -> Iterator[Mutant]:
    """Every two neighbours exchanged in turn."""
    for place, strand in _strands(lowered):
        for index, (one, two) in enumerate(zip(strand.actions, strand.actions[1:], strict=False)):
            name = f"'{two}' before '{one}' in {strand.name}"
            yield _at(name, "exchanged", place, index, lambda f: (f[1], f[0], *f[2:]))


def narrowings(lowered: Lowered) -> Iterator[Mutant]:
    """Every scope narrowed in turn."""
    for place, strand in _strands(lowered):
        for index, action in enumerate(strand.actions):
            if isinstance(action, Release | Acquire | Announce) and action.scope == "system":
                name = f"only for the device, '{action}' in {strand.name}"
                yield _at(name, _kind("device scope of", action), place, index, _narrow)


def _kind(what: str, action: Action) -> str:
    """What is done to actions of a type."""
    return f"{what} {type(action).__name__.lower()}"


def _narrow(found: Sequence[Action]) -> Sequence[Action]:
    first = found[0]
    assert isinstance(first, Release | Acquire | Announce), f"no scope in '{first}'"
    return (replace(first, scope="device"), *found[1:])


def _at(
    name: str,
    kind: str,
    place: int,
    index: int,
    do: Callable[[Sequence[Action]], Sequence[Action]],
) -> Mutant:
    def change(lowered: Lowered) -> Lowered:
        strands = list(lowered.strands)
        actions = strands[place].actions
        changed = (*actions[:index], *do(actions[index:]))
        strands[place] = replace(strands[place], actions=changed)
        return replace(lowered, strands=tuple(strands))

    return Mutant(name, change, kind=kind, place=(place, index))


# Named ones. Those that find nothing to change in a schedule leave it as it is.


def _kept(keep: Callable[[Action], bool]) -> Callable[[Lowered], Lowered]:
    return lambda lowered: edited(lowered, lambda strand: [a for a in strand.actions if keep(a)])


def _is_gate(action: Action) -> bool:
    return isinstance(action, Wait) and action.word.kind == "free"


def _is_entry(action: Action) -> bool:
    return isinstance(action, Announce) and action.word.kind == "free" and action.lag == 1


def word_before_data(lowered: Lowered) -> Lowered:
    """Each tile is announced before it is published."""

    def edit(strand: Strand) -> Sequence[Action]:
        done: list[Action] = []
        fences: list[Action] = []
        for action in strand.actions:
            if isinstance(action, Retire | Barrier | Release):
                fences.append(action)
            elif isinstance(action, Elect | Announce):
                done.append(action)
            else:
                done += [*fences, action]
                fences = []
        return [*done, *fences]

    return edited(lowered, edit)


def gate_after_the_own_slot(lowered: Lowered) -> Lowered:
    """The gate stands before what goes to peers, and no more before the own memory."""

    def edit(strand: Strand) -> Sequence[Action]:
        if not any(_is_gate(action) for action in strand.actions):
            return strand.actions
        gate: list[Action] = []
        rest: list[Action] = []
        for action in strand.actions:
            into_gate = _is_gate(action) or (
                gate and not _has_work(rest) and isinstance(action, Acquire)
            )
            (gate if into_gate else rest).append(action)
        at = next((i for i, a in enumerate(rest) if _leaves(a, lowered.rank)), len(rest))
        return [*rest[:at], *gate, *rest[at:]]

    return edited(lowered, edit)


def _has_work(actions: Sequence[Action]) -> bool:
    """Whether a tile is among them."""
    return any(isinstance(action, Make | Fetch | Put) for action in actions)


def _leaves(action: Action, rank: int) -> bool:
    if isinstance(action, Put):
        return action.at not in (rank, LOCAL)
    return isinstance(action, Retire)


def gate_in_the_mover(lowered: Lowered) -> Lowered:
    """Whoever loads from peers waits for ``free``; the producer, whose slot they load, does not."""
    found = dict.fromkeys(w for s in lowered.strands for w in s.actions if _is_gate(w))
    movers = {s.actor for s in lowered.strands if any(_pulls(a, lowered.rank) for a in s.actions)}

    def edit(strand: Strand) -> Sequence[Action]:
        rest: list[Action] = []
        for action in strand.actions:
            if isinstance(action, Acquire) and rest and _is_gate(rest[-1]):
                rest.pop()
            else:
                rest.append(action)
        gate = [action for wait in found for action in (wait, Acquire("system"))]
        return [*gate, *rest] if strand.actor in movers else rest

    return edited(lowered, edit) if movers else lowered


def _pulls(action: Action, rank: int) -> bool:
    return isinstance(action, Fetch) and action.at not in (rank, LOCAL)


def gate_in_the_lanes(lowered: Lowered) -> Lowered:
    """Lanes wait for ``free``, and the producer, who writes what they read, does not."""
    gate = [(w, Acquire("system")) for s in lowered.strands for w in s.actions if _is_gate(w)]
    pairs = list(dict.fromkeys(gate))

    def edit(strand: Strand) -> Sequence[Action]:
        if strand.lane is not None:
            mine = [action for pair in pairs for action in pair]
            return [*mine, *strand.actions]
        return [action for action in strand.actions if not _is_gate(action)]

    return edited(lowered, edit) if any(s.lane for s in lowered.strands) else lowered


def wait_before_saying(lowered: Lowered) -> Lowered:
    """A rank says that it has done with its view only when all others have said so."""

    def edit(strand: Strand) -> Sequence[Action]:
        said = [action for action in strand.actions if _is_entry(action)]
        rest = [action for action in strand.actions if not _is_entry(action)]
        last = max((i for i, action in enumerate(rest) if _is_gate(action)), default=-2) + 2
        return [*rest[:last], *said, *rest[last:]]

    return edited(lowered, edit)


def view_given_up_at_once(lowered: Lowered) -> Lowered:
    """The view counts as read when the call ends, not when the next one begins."""
    said = [a for s in lowered.strands for a in s.actions if _is_entry(a)]
    early = [replace(a, lag=0) for a in said if isinstance(a, Announce)]

    def edit(strand: Strand) -> Sequence[Action]:
        rest = [action for action in strand.actions if not _is_entry(action)]
        is_last = strand is lowered.strands[-2]  # before the reader
        return [*rest, *early] if is_last else rest

    return edited(lowered, edit)


def _counted(change: Callable[[int], int]) -> Callable[[Lowered], Lowered]:
    def one(action: Action) -> Action:
        return replace(action, of=change(action.of)) if isinstance(action, Elect) else action

    return lambda lowered: edited(lowered, lambda strand: [one(a) for a in strand.actions])


def one_counter_for_all_chunks(lowered: Lowered) -> Lowered:
    """A kernel counts the tiles of all chunks with its first counter."""
    first: dict[str, Counter] = {}
    for action in lowered.actions():
        if isinstance(action, Elect):
            known = first.setdefault(action.counter.actor, action.counter)
            first[known.actor] = min(known, action.counter, key=lambda counter: counter.index)

    def one(action: Action) -> Action:
        if isinstance(action, Elect):
            return replace(action, counter=first[action.counter.actor])
        if isinstance(action, Announce) and action.by is not None:
            return replace(action, by=first[action.by.actor])
        return action

    return edited(lowered, lambda strand: [one(action) for action in strand.actions])


def leader_publishes_for_all(lowered: Lowered) -> Lowered:
    """Only the first block of each kernel releases; the others count on it."""
    return edited(
        lowered,
        lambda strand: [
            a for a in strand.actions if strand.index == 0 or not isinstance(a, Release)
        ],
    )


def leader_acquires_for_all(lowered: Lowered) -> Lowered:
    """Only the first block of each kernel acquires."""
    return edited(
        lowered,
        lambda strand: [
            a for a in strand.actions if strand.index == 0 or not isinstance(a, Acquire)
        ],
    )


def join_for_a_release(lowered: Lowered) -> Lowered:
    """A kernel that ends does not publish what it has stored: it is joined, after all."""

    def edit(strand: Strand) -> Sequence[Action]:
        ends = strand.actions[-3:]
        fences = [type(action) for action in ends] == [Retire, Barrier, Release]
        return strand.actions[:-3] if fences else strand.actions

    return edited(lowered, edit)


def one_lane_drained(lowered: Lowered) -> Lowered:
    """Of several lanes to a peer only the first is joined before the word is set."""
    others = {s.actor for s in lowered.strands if s.lane is not None and s.lane[1] > 0}

    def edit(strand: Strand) -> Sequence[Action]:
        sets = any(isinstance(action, Announce) for action in strand.actions)
        return [
            a for a in strand.actions if not (sets and isinstance(a, Join) and a.actor in others)
        ]

    return edited(lowered, edit)


def lanes_in_any_order(lowered: Lowered) -> Lowered:
    """Words that lanes set behind copies, on lanes that promise no order."""
    strands = (
        replace(strand, in_order=strand.lane is None and strand.in_order)
        for strand in lowered.strands
    )
    return replace(lowered, strands=tuple(strands))


def not_send_complete(lowered: Lowered) -> Lowered:
    """A call ends though peers or lanes may still read the own memory."""
    lanes = {strand.actor for strand in lowered.strands if strand.lane is not None}
    consumers = {strand.name for strand in lowered.strands if strand.actor.startswith("consumer")}

    def edit(strand: Strand) -> Sequence[Action]:
        if strand.name not in consumers:
            return strand.actions
        return [
            a
            for a in strand.actions
            if not (isinstance(a, Join) and a.actor in lanes)
            and not (isinstance(a, Wait) and a.word.kind == "read")
        ]

    return edited(lowered, edit)


NAMED: tuple[Mutant, ...] = (
    Mutant("word before data", word_before_data),
    Mutant("no gate", _kept(lambda action: not _is_gate(action))),
    Mutant("gate only before stores that leave", gate_after_the_own_slot),
    Mutant("own slot not gated in a pull", gate_in_the_mover),
    Mutant("gate inside the lanes", gate_in_the_lanes),
    Mutant("wait before saying", wait_before_saying),
    Mutant("view given up when the call ends", view_given_up_at_once),
    Mutant("counter one short of the tiles", _counted(lambda of: max(1, of - 1))),
    Mutant("counter one beyond the tiles", _counted(lambda of: of + 1)),
    Mutant("one counter for all chunks", one_counter_for_all_chunks),
    Mutant("nobody retires", _kept(lambda action: not isinstance(action, Retire))),
    Mutant("no barriers", _kept(lambda action: not isinstance(action, Barrier))),
    Mutant("nobody releases", _kept(lambda action: not isinstance(action, Release))),
    Mutant("nobody acquires", _kept(lambda action: not isinstance(action, Acquire))),
    Mutant("leader publishes for all", leader_publishes_for_all),
    Mutant("leader acquires for all", leader_acquires_for_all),
    Mutant("a join taken for a release", join_for_a_release),
    Mutant("one of several lanes drained", one_lane_drained),
    Mutant("words of lanes that keep no order", lanes_in_any_order),
    Mutant("complete only on the receiving side", not_send_complete),
)


# What is noticed.


@dataclass(frozen=True)
class Survey:
    """Which mutants of a case were caught, with what came of the run, and which were missed."""

    case: str
    caught: tuple[tuple[str, Outcome], ...]
    missed: tuple[str, ...]
    #: Mutants that changed nothing in this case.
    idle: tuple[str, ...]

    def __str__(self) -> str:
        lines = [f"{self.case}: {len(self.caught)} caught, {len(self.missed)} missed"]
        lines += [f"  missed: {name}" for name in self.missed]
        return "\n".join(lines)


def survey(case: Case, mutants: Iterable[Mutant], seeds: int = 50) -> Survey:
    """Run the adversary on each mutant of ``case``, at most ``seeds`` times."""
    caught, missed, idle = [], [], []
    for mutant in mutants:
        changed = mutant.of(case)
        if replace(changed, name=case.name) == case:
            idle.append(mutant.name)
            continue
        outcome = first_fault(changed, range(seeds))
        if outcome is None:
            missed.append(mutant.name)
        else:
            caught.append((mutant.name, outcome))
    return Survey(case.name, tuple(caught), tuple(missed), tuple(idle))
