"""Cuts a flat schedule into what a stream executes: few launches, each doing much.

A launch costs microseconds, a word does not. So neighbouring actions become one launch: *moves*
(stores and deliveries), then *words* set, then words awaited, then moves again. Actions change
places only where that cannot be told from a slower device:

- a ``Set`` comes later than stores that followed it: it announces more than it must;
- a ``Wait`` comes earlier than moves that preceded it. What peers wait for is announced by a
  ``Set``, and none is passed.

A ``Set`` is never brought before a wait or a move that it followed.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

from gemmlink.core.flatten import Placed
from gemmlink.core.products import Columns, Product
from gemmlink.spec.schedule import LOCAL, Deliver, Join, Load, Set, Store, Wait


@dataclass(frozen=True)
class Fan:
    """One region, loaded from a window or just produced, that goes to several windows."""

    load: Load | None
    stores: tuple[Store, ...]


@dataclass(frozen=True)
class Moves:
    """Regions that are moved by one launch."""

    moves: tuple[Fan | Deliver, ...]


@dataclass(frozen=True)
class Exchange:
    """Words set, then words awaited, by one launch; the first and the last of a call do more."""

    sets: tuple[Set, ...] = ()
    waits: tuple[Wait, ...] = ()
    enters: bool = False
    leaves: bool = False


@dataclass(frozen=True)
class Posted:
    """What lanes are given to do at this point."""

    actions: tuple[Placed, ...]


@dataclass(frozen=True)
class Joined:
    """Everything given to lanes has been done."""


Block = Product | Columns | Placed | Moves | Exchange | Posted | Joined


def blocks(items: Sequence[Placed | Product | Columns], lanes: Collection[str]) -> list[Block]:
    """The schedule, as ``products.group`` gives it, in blocks. ``lanes`` are the lanes' actors.

    The first exchange enters the call, the last one leaves it; lanes have ended before.
    """
    grouping = _Grouping(lanes)
    for item in items:
        grouping.add(item)
    grouping.flush()
    return _bracketed(grouping.done)


@dataclass
class _Grouping:
    lanes: Collection[str]
    done: list[Block] = field(default_factory=list)
    before: list[Fan | Deliver] = field(default_factory=list)
    sets: list[Set] = field(default_factory=list)
    waits: list[Wait] = field(default_factory=list)
    after: list[Fan | Deliver] = field(default_factory=list)
    load: Load | None = None
    continues: bool = False

    def add(self, item: Placed | Product | Columns) -> None:
        if isinstance(item, Product | Columns):
            self._alone(item)
        elif item.actor in self.lanes:
            self._post(item)
        else:
            self._act(item)

    def flush(self) -> None:
        if self.before:
            self.done.append(Moves(tuple(self.before)))
        if self.sets or self.waits:
            self.done.append(Exchange(tuple(self.sets), tuple(self.waits)))
        if self.after:
            self.done.append(Moves(tuple(self.after)))
        self.before, self.sets, self.waits, self.after = [], [], [], []
        self.continues = False

    def _alone(self, block: Block) -> None:
        self.flush()
        self.load = None
        self.done.append(block)

    def _post(self, item: Placed) -> None:
        self.flush()
        last = self.done[-1] if self.done else None
        if isinstance(last, Posted):
            self.done[-1] = Posted((*last.actions, item))
        else:
            self.done.append(Posted((item,)))

    def _act(self, item: Placed) -> None:
        action = item.action
        if isinstance(action, Load):
            self.load, self.continues = action, False
        elif isinstance(action, Store) and action.to != LOCAL:
            self._store(action)
        elif isinstance(action, Deliver):
            self._moves().append(action)
            self.continues = False
        elif isinstance(action, Set):
            self._set(action)
        elif isinstance(action, Wait):
            self.waits.append(action)
        elif isinstance(action, Join):
            if action.actor in self.lanes:
                self._alone(Joined())  # any other actor runs in the same stream
        else:
            self._alone(item)

    def _moves(self) -> list[Fan | Deliver]:
        return self.after if self.waits else self.before

    def _store(self, store: Store) -> None:
        moves = self._moves()
        last = moves[-1] if moves else None
        if self.continues and isinstance(last, Fan) and last.stores[0].region == store.region:
            moves[-1] = replace(last, stores=(*last.stores, store))
        else:
            moves.append(Fan(self.load, (store,)))
        self.continues = True

    def _set(self, action: Set) -> None:
        if action.word.kind == "chunk":
            return  # read by lanes alone, and those are posted behind what it announces
        if self.waits or self.after:
            self.flush()
        self.sets.append(action)


def _bracketed(done: Sequence[Block]) -> list[Block]:
    made = list(done)
    if not made or not isinstance(made[0], Exchange):
        made.insert(0, Exchange())
    if not isinstance(made[-1], Exchange):
        made.append(Exchange())
    made = [block for block in made if not isinstance(block, Joined)] if _idle(made) else made
    if any(isinstance(block, Posted) for block in made) and not _joins_last(made):
        made.insert(len(made) - 1, Joined())
    first = made[0]
    assert isinstance(first, Exchange), f"a call that begins with {first}"
    made[0] = replace(first, enters=True)
    last = made[-1]
    assert isinstance(last, Exchange), f"a call that ends with {last}"
    made[-1] = replace(last, leaves=True)
    return made


def _idle(made: Sequence[Block]) -> bool:
    return not any(isinstance(block, Posted) for block in made)


def _joins_last(made: Sequence[Block]) -> bool:
    """Whether lanes are joined behind the last thing that they were given."""
    posted = max(at for at, block in enumerate(made) if isinstance(block, Posted))
    return any(isinstance(block, Joined) for block in made[posted:])
