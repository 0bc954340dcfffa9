"""Lowers a schedule: every chunk becomes tiles, every announcement what it takes on a device.

A kernel of ``blocks`` blocks deals the tiles of each chunk to them in turn. Every block waits, and
acquires, for itself. What is announced must be published by everybody who stored it:

- Where words are set right behind what they announce, each *tile* is followed by ``Retire,
  Barrier, Release, Elect(of=tiles)``, and who is elected sets the words.
- Where waits or joins lie between, each *block* publishes at the place of the words, and the last
  block sets them.
- Words that announce nothing of this kernel are set by its first block.

A kernel whose end is joined by something that is not of this device (a copy engine) publishes what
it has stored before it ends, for a join never does. A kernel without tiles has one block.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from gemmlink.errors import InvalidArgument
from gemmlink.spec import lowered
from gemmlink.spec.lowered import (
    Acquire,
    Add,
    Announce,
    Barrier,
    Convert,
    Counter,
    Elect,
    Fetch,
    Look,
    Lowered,
    Make,
    Post,
    Put,
    Release,
    Retire,
    Show,
    Strand,
    Tile,
)
from gemmlink.spec.operations import Operation
from gemmlink.spec.places import sums_into
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
    Scope,
    Set,
    Store,
    Sum,
    Wait,
    Word,
)

#: Actors that ``lower`` adds: who enters the call, and who looks at its result.
ENTRY = "entry"
READER = "reader"

#: What is done with one tile, in terms of tile 0.
Step = Make | Fetch | Add | Convert | Put


@dataclass(frozen=True)
class Grid:
    """How much of a device a kernel takes: ``blocks`` blocks, ``tiles`` tiles in each chunk."""

    blocks: int = 2
    tiles: int = 2


@dataclass
class _Unit:
    """A region from making to storing. ``sources``: whose M must be known to find it."""

    steps: list[Step]
    region: Region
    sources: set[int]


@dataclass(frozen=True)
class _Sets:
    """Words that are set one behind the other: one announcement."""

    sets: tuple[Set, ...]


#: What a kernel does, chunk by chunk: a unit of work, words to set, what every block does.
_Item = _Unit | _Sets | Wait | Join


def lower(
    operation: Operation, schedule: Schedule, grid: Grid | None = None, entry: bool = False
) -> Lowered:
    """What the strands of one rank do in a call of ``operation``.

    ``schedule`` has all phases (``schedule.chain``). ``entry``: ranks do not know each other's M
    and leave records of it, as calls on hosts do; otherwise M is an argument.
    """
    grid = grid or Grid()
    strands: list[Strand] = []
    if entry:
        strands.append(_entry(schedule.plan))
    for program in schedule.programs:
        strands += _lowered(operation, schedule, program, grid, entry)
    strands.append(_reader(operation, schedule, grid))
    return Lowered(operation, schedule, tuple(strands))


def _lowered(
    operation: Operation, schedule: Schedule, program: Program, grid: Grid, entry: bool
) -> list[Strand]:
    if program.lane is not None:
        in_order = schedule.plan.lane_order == "in_order"
        actions = tuple(_queue(program))
        return [Strand(program.actor, 0, "queue", actions, program.lane, in_order)]
    if any(isinstance(action, Collective) for action in program.actions):
        return [Strand(program.actor, 0, "host", tuple(_host(program)))]
    items = _items(operation, schedule.plan, program)
    kernel = _Kernel(schedule, program.actor, items, grid, entry)
    return kernel.strands()


def _queue(program: Program) -> Iterator[lowered.Action]:
    for action in program.actions:
        if isinstance(action, Wait):
            yield from _awaited(action)
        elif isinstance(action, Set):
            yield _announced(action)
        elif isinstance(action, Join):
            yield Join(action.actor)
        elif isinstance(action, Copy):
            yield action
        else:
            raise InvalidArgument("a lane copies, waits, joins and sets words", f"'{action}'")


def _host(program: Program) -> Iterator[lowered.Action]:
    for action in program.actions:
        if isinstance(action, Join):
            yield Join(action.actor)
        elif isinstance(action, Collective):
            yield action
        else:
            raise InvalidArgument("a library's actor joins and calls the library", f"'{action}'")


def _awaited(wait: Wait) -> tuple[lowered.Action, ...]:
    return (wait, Acquire("system"))


def _announced(action: Set, by: Counter | None = None) -> Announce:
    return Announce(action.word, action.at, action.scope, action.lag, by)


def _publish(scope: Scope) -> tuple[lowered.Action, ...]:
    return (Retire(), Barrier(), Release(scope))


def _entry(plan: Plan) -> Strand:
    """Enter: the record of the call before last may be overwritten, the new one, the word."""
    actions: list[lowered.Action] = []
    for peer in plan.peers:
        actions += _awaited(Wait(Word("enter", peer), lag=1))
    actions += [Post(), *_publish("system")]
    actions += [Announce(Word("enter", plan.rank), peer, "system") for peer in plan.peers]
    return Strand(ENTRY, 0, "host", tuple(actions))


def _reader(operation: Operation, schedule: Schedule, grid: Grid) -> Strand:
    plan, last = schedule.plan, len(operation.phases) - 1
    phase = operation.phases[last]
    at = LOCAL
    area: lowered.Place = "result"
    if plan.view:
        at, area = plan.rank, "sum" if phase.sums else "inbox"
    sources = (plan.rank,) if phase.sums else plan.everyone
    writes = plan.view and plan.send_complete
    shown: list[Show] = []
    for source in sources:
        regions = (Region(source, c, phase.part_for(plan.rank), last) for c in range(plan.chunks))
        shown += [Show(_first(region), at, area, writes) for region in regions]
    first = operation.phases[0]
    for part in range(len(first.routes)) if plan.keep else first.kept():
        kept = (Region(plan.rank, c, part) for c in range(plan.chunks))
        shown += [Show(_first(region), LOCAL, "product") for region in kept]
    actions: list[lowered.Action] = [Join(schedule.programs[-1].actor)]
    for index in range(grid.tiles):
        actions += [replace(show, tile=Tile(show.tile.region, index, grid.tiles)) for show in shown]
    return Strand(READER, 0, "host", tuple(actions))


# Finding the units of a kernel.


def _items(operation: Operation, plan: Plan, program: Program) -> list[_Item]:
    items: list[_Item] = []
    for action in program.actions:
        last = items[-1] if items else None
        unit = last if isinstance(last, _Unit) else None
        if isinstance(action, Wait | Join):
            items.append(action)
        elif isinstance(action, Set):
            if isinstance(last, _Sets):
                items[-1] = _Sets((*last.sets, action))
            else:
                items.append(_Sets((action,)))
        elif isinstance(action, Store):
            _attach(unit, action)
        elif isinstance(action, Encode) and unit is not None and unit.region == action.region:
            unit.steps.append(Convert(unit.steps[0].tile, "encode"))
        else:
            items += _unit(operation, plan, action)
    return items


def _attach(unit: _Unit | None, store: Store) -> None:
    if unit is None or unit.region != store.region:
        raise InvalidArgument(
            "a schedule must store each region right after making it", f"'{store}'"
        )
    area: lowered.Place = "product" if store.to == LOCAL else store.area
    unit.steps.append(Put(unit.steps[0].tile, store.to, area))


def _unit(operation: Operation, plan: Plan, action: Action) -> list[_Item]:
    """The beginning of a unit; none for what is shown where it lies."""
    if isinstance(action, Compute):
        region = Region(plan.rank, action.chunk, action.part, _phase_of(operation, action))
        return [_Unit([Make(_first(region))], region, set())]
    if isinstance(action, Load):
        fetch = Fetch(_first(action.region), action.window, action.area)
        return [_Unit([fetch], action.region, {action.region.source})]
    if isinstance(action, Encode):
        tile = _first(action.region)
        steps: list[Step] = [Fetch(tile, LOCAL, "scratch"), Convert(tile, "encode")]
        return [_Unit(steps, action.region, set())]
    if isinstance(action, Sum):
        return [_Unit(_sum(operation, plan, action), action.region, set(range(plan.world)))]
    if isinstance(action, Deliver):
        if plan.view:
            return []
        return [_Unit(_deliver(operation, action), action.region, {action.region.source})]
    raise InvalidArgument("a kernel does not call the library or copy as a lane", f"'{action}'")


def _first(region: Region) -> Tile:
    return Tile(region, 0, 1)


def _phase_of(operation: Operation, compute: Compute) -> int:
    found = [i for i, phase in enumerate(operation.phases) if phase.source == "product"]
    if not found:
        raise InvalidArgument("a phase must send the product to compute one", f"'{compute}'")
    return found[0]


def _deliver(operation: Operation, action: Deliver) -> list[Step]:
    tile = _first(action.region)
    steps: list[Step] = [Fetch(tile, action.window, action.area)]
    if operation.phases[action.region.phase].wire is not None:
        steps.append(Convert(tile, "decode"))
    return [*steps, Put(tile, LOCAL, "result")]


def _sum(operation: Operation, plan: Plan, action: Sum) -> list[Step]:
    tile = _first(action.region)
    add = Add(tile, action.places)
    into, follows = sums_into(operation, plan), action.region.phase + 1
    if into is None and len(operation.phases) == follows:
        return [add, Put(tile, LOCAL, "result")]
    if len(operation.phases) == follows:
        return [add, Put(tile, plan.rank, "sum")]
    # The next phase finds it by its own name: the whole band is its part 0.
    next_tile = _first(replace(action.region, phase=follows, part=0))
    if into is None:
        return [add, Put(next_tile, LOCAL, "scratch")]
    return [add, Put(next_tile, plan.rank, into[1])]


# Dealing them to blocks.


@dataclass
class _Block:
    """The actions of a block so far. ``open``: it has not published all that it did."""

    index: int
    actions: list[lowered.Action] = field(default_factory=list)
    open: bool = False
    known: set[int] = field(default_factory=set)


class _Kernel:
    def __init__(
        self, schedule: Schedule, actor: str, items: Sequence[_Item], grid: Grid, entry: bool
    ) -> None:
        self._rank = schedule.plan.rank
        self._actor = actor
        self._items = items
        self._tiles = grid.tiles
        self._entry = entry
        self._works = any(isinstance(item, _Unit) for item in items)
        self._blocks = [_Block(index) for index in range(grid.blocks if self._works else 1)]
        self._leaves_device = any(
            isinstance(action, Join) and action.actor == actor and action.scope == "system"
            for action in schedule.actions()
        )

    def strands(self) -> list[Strand]:
        """One for each block."""
        if self._entry:
            self._every(Join(ENTRY))
        worked = False
        for number, item in enumerate(self._items):
            if isinstance(item, _Unit):
                worked = True
                self._work(item, self._announced_by_tile(number))
            elif isinstance(item, _Sets):
                if not worked:
                    self._blocks[0].actions += [_announced(action) for action in item.sets]
                elif not self._is_by_tile(number):
                    self._set_by_block(number, item)
            else:
                self._every(*(_awaited(item) if isinstance(item, Wait) else (Join(item.actor),)))
        if self._leaves_device:
            for block in self._blocks:
                self._close(block, "system")
        return [Strand(self._actor, b.index, "block", tuple(b.actions)) for b in self._blocks]

    def _every(self, *actions: lowered.Action) -> None:
        for block in self._blocks:
            block.actions += actions

    def _work(self, unit: _Unit, announced: tuple[int, int] | None) -> None:
        for index in range(self._tiles):
            block = self._blocks[index % len(self._blocks)]
            self._look_up(block, unit)
            for step in unit.steps:
                tile = replace(step.tile, index=index, of=self._tiles)
                block.actions.append(replace(step, tile=tile))
            block.open = True
            if announced is not None:
                self._set(block, *announced)

    def _look_up(self, block: _Block, unit: _Unit) -> None:
        for source in sorted(unit.sources - block.known - {self._rank}) if self._entry else ():
            block.actions += [*_awaited(Wait(Word("enter", source))), Look(source)]
            block.known.add(source)

    def _set(self, block: _Block, number: int, of: int) -> None:
        """Publish what the block has done since; the last of ``of`` who come here sets words."""
        item, counter = self._items[number], Counter(self._actor, number)
        assert isinstance(item, _Sets), f"announcing '{item}'"
        self._close(block, _widest(item))
        block.actions.append(Elect(counter, of))
        block.actions += [_announced(action, counter) for action in item.sets]

    def _close(self, block: _Block, scope: Scope) -> None:
        if block.open:
            block.actions += _publish(scope)
            block.open = False

    def _set_by_block(self, number: int, item: _Sets) -> None:
        for block in self._blocks:
            if len(self._blocks) > 1:
                self._set(block, number, len(self._blocks))
            else:
                self._close(block, _widest(item))
                block.actions += [_announced(action) for action in item.sets]

    def _segment(self, number: int) -> list[int]:
        """Where the items between the words before and those at ``number`` are."""
        first = number
        while first and not isinstance(self._items[first - 1], _Sets):
            first -= 1
        return list(range(first, number))

    def _is_by_tile(self, number: int) -> bool:
        """Whether nothing but units precedes the words at ``number``, from the first one on."""
        kinds = [isinstance(self._items[index], _Unit) for index in self._segment(number)]
        return any(kinds) and all(kinds[kinds.index(True) :])

    def _announced_by_tile(self, number: int) -> tuple[int, int] | None:
        """The words that announce the unit at ``number`` tile by tile, and how many tiles."""
        after = (i for i, item in enumerate(self._items) if i > number and isinstance(item, _Sets))
        words = next(after, None)
        if words is None or not self._is_by_tile(words):
            return None
        units = [i for i in self._segment(words) if isinstance(self._items[i], _Unit)]
        return words, len(units) * self._tiles


def _widest(item: _Sets) -> Scope:
    return "system" if any(action.scope == "system" for action in item.sets) else "device"
