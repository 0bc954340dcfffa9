"""What a schedule must do because of the routes of its operation: nothing is lost or sent astray.

Each function judges the schedule of one rank, all phases of it, and returns a fault as a sentence,
or None.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator

from gemmlink.spec.operations import Operation
from gemmlink.spec.schedule import (
    LOCAL,
    Action,
    Collective,
    Compute,
    Copy,
    Deliver,
    Encode,
    Load,
    Plan,
    Region,
    Schedule,
    Store,
    Sum,
)

#: The library collective for a phase, by its name and whether it sums.
_COLLECTIVES = {
    ("gather", False): "all_gather",
    ("scatter", False): "all_to_all",
    ("scatter", True): "reduce_scatter",
}


def uncomputed(operation: Operation, schedule: Schedule) -> str | None:
    """A part of the product that is not computed exactly once, or not stored at once."""
    want = Counter(
        Compute(region.chunk, region.part)
        for region in _own(operation, schedule.plan)
        if operation.phases[region.phase].source == "product"
    )
    found = Counter(action for action in schedule.actions() if isinstance(action, Compute))
    for compute in {**want, **found}:
        if want[compute] != found[compute]:
            return f"'{compute}' {found[compute]} times, not {want[compute]}"
    for one, then in _neighbours(schedule):
        if isinstance(one, Compute | Encode) and not _stores(schedule.plan, one, then):
            return f"'{one}' is followed by '{then}', not by its store"
    return None


def _stores(plan: Plan, one: Compute | Encode, then: Action | None) -> bool:
    mine = one.region if isinstance(one, Encode) else Region(plan.rank, one.chunk, one.part)
    wanted = (Store, Encode) if isinstance(one, Compute) else (Store,)
    return isinstance(then, wanted) and then.region == mine


def unencoded(operation: Operation, schedule: Schedule) -> str | None:
    """Something that is not encoded exactly once where, and only where, a wire dtype is used."""
    window = schedule.uses_window()
    want = Counter(
        region
        for region in _own(operation, schedule.plan)
        if window and operation.phases[region.phase].wire is not None
    )
    found = Counter(action.region for action in schedule.actions() if isinstance(action, Encode))
    for region in {**want, **found}:
        if want[region] != found[region]:
            return f"{region} is encoded {found[region]} times, not {want[region]}"
    return None


def exchanged(schedule: Schedule) -> str | None:
    """A store of something else than what its actor has just made or loaded."""
    for program in schedule.programs:
        value: Region | None = None
        for action in program.actions:
            if isinstance(action, Compute):
                value = Region(schedule.plan.rank, action.chunk, action.part)
            elif isinstance(action, Encode | Load):
                value = action.region
            elif isinstance(action, Store) and action.region != value:
                return f"'{action}' behind what gave {value or 'nothing'}"
    return None


def astray(operation: Operation, schedule: Schedule) -> str | None:
    """A region that is put where no route leads, or in an area that is not there for it."""
    rank = schedule.plan.rank
    for action in schedule.actions():
        if isinstance(action, Copy):
            to, area = action.to, "inbox"
        elif isinstance(action, Store) and action.to != LOCAL:
            to, area = action.to, action.area
        else:
            continue
        region = action.region
        if area == "inbox":
            phase = operation.phases[region.phase]
            if region.part not in phase.sent() or to not in phase.routes[region.part].peers:
                return f"'{action}', where no route of {region} leads"
        elif area != "outbox" or not to == region.source == rank:
            return f"'{action}': an outbox takes what its own rank sends, and a sum its sums"
    return None


def unkept(operation: Operation, schedule: Schedule) -> str | None:
    """What stays, and with ``keep`` everything, is not stored in the private buffer once.

    A schedule without a window stores everything there, for the library to send.
    """
    plan = schedule.plan
    found = Counter(
        action.region
        for action in schedule.actions()
        if isinstance(action, Store) and action.to == LOCAL
    )
    for region in _own(operation, plan):
        phase = operation.phases[region.phase]
        library = not schedule.uses_window() and phase.source == "product"
        stays = region.part in phase.kept() or (plan.keep and region.phase == 0) or library
        times = found.pop(region, 0)
        if times > 1 or (stays and not times):
            return f"{region} is stored {times} times in the private buffer"
    strange = next(iter(found), None)
    return f"{strange} is stored in the private buffer" if strange is not None else None


def undelivered(operation: Operation, schedule: Schedule) -> str | None:
    """A region of the result that is not delivered exactly once, or one that is not part of it."""
    found = Counter(action.region for action in schedule.actions() if isinstance(action, Deliver))
    last = len(operation.phases) - 1
    want = [] if operation.phases[last].sums else _theirs(operation, schedule.plan, last)
    for region in want:
        times = found.pop(region, 0)
        if times != 1:
            return f"{region} is delivered {times} times"
    strange = next(iter(found), None)
    return f"delivers {strange}, which is no part of the result" if strange is not None else None


def unsummed(operation: Operation, schedule: Schedule) -> str | None:
    """A chunk of the own band that is not summed exactly once, or not of every source in order."""
    plan = schedule.plan
    sums = [action for action in schedule.actions() if isinstance(action, Sum)]
    for action in sums:
        if len(action.places) != plan.world:
            return f"'{action}' has {len(action.places)} terms in a world of {plan.world}"
    found = Counter(action.region for action in sums)
    for number, phase in enumerate(operation.phases):
        mine = _theirs(operation, plan, number) if phase.sums else ()
        for region in (region for region in mine if region.source == plan.rank):
            times = found.pop(region, 0)
            if times != 1:
                return f"{region} is summed {times} times"
    strange = next(iter(found), None)
    return f"sums {strange}, which is not in the own band" if strange is not None else None


def uncollected(operation: Operation, schedule: Schedule) -> str | None:
    """Without a window: not one library collective for each phase, that of its kind."""
    found = [action.name for action in schedule.actions() if isinstance(action, Collective)]
    want = [_COLLECTIVES[phase.name, phase.sums] for phase in operation.phases]
    return None if found == want else f"library collectives {found}, not {want}"


def _own(operation: Operation, plan: Plan) -> Iterator[Region]:
    """All parts of what this rank sends or keeps, in all phases."""
    for number, phase in enumerate(operation.phases):
        for part in range(len(phase.routes)):
            for chunk in range(plan.chunks):
                yield Region(plan.rank, chunk, part, number)


def _theirs(operation: Operation, plan: Plan, number: int) -> list[Region]:
    """What all ranks have for this one in a phase."""
    part = operation.phases[number].part_for(plan.rank)
    return [
        Region(source, chunk, part, number)
        for source in range(plan.world)
        for chunk in range(plan.chunks)
    ]


def _neighbours(schedule: Schedule) -> Iterable[tuple[Action, Action | None]]:
    """Every action with the one behind it in its program."""
    for program in schedule.programs:
        yield from itertools.zip_longest(program.actions, program.actions[1:])
