"""Who may wait where: that nobody who waits keeps those from running whom he waits for.

The other steps of the proof take it that every block runs. A device has ``slots`` for blocks, and a
block that waits keeps its slot. What is modelled:

- A block takes a slot when its kernel may begin, which is when the call has begun and what it joins
  *first* has ended, and gives it back when it ends. Queues, host threads and the caller need none.
- Kernels of a rank are launched in the order of its strands, and call by call; blocks of a kernel
  in order. A kernel that joins nothing comes when it is its turn; one that does may come as soon as
  it can, or be overtaken. Ranks that share a device come in any order.
- A join in the middle of a kernel is a wait like others: it keeps the slot.

Three rules follow (a fourth, that a queue waits for nothing that comes behind it in that queue, is
one of order and part of the graph):

(a) On a device that ranks share only strands that are one block each wait for words of other ranks:
    when the device turns from one rank to another, all blocks of a kernel that waits are in the
    way. Kernels as they are lowered wait in each of their blocks, so they pass with one block each
    and are refused with more.
(b) If fewer blocks may wait at once than there are slots, somebody always goes on. ``at_once`` is a
    bound on them: kernels of one rank that do not begin behind each other, in its worst call.
(c) Otherwise all orders in which blocks can take slots are gone through, as long as they are not
    too many. Someone who holds a slot and someone who has none may then wait for each other.

Not modelled: blocks that are larger than others, or that are taken off a device before they end;
what else runs there; how many streams the hardware keeps apart.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from time import perf_counter

from gemmlink.conformance.adversary.program import Program
from gemmlink.conformance.proof.graph import Graph, Part, Refutation, graph
from gemmlink.conformance.proof.stuck import deadlock, waits_in_a_circle
from gemmlink.conformance.proof.verdict import Verdict

#: Orders of blocks that are gone through before it is given up.
_LIMIT = 4000


@dataclass(frozen=True)
class Device:
    """What ranks run on: ``ranks`` neighbours share ``slots``.

    ``exclusive``: each has slots of its own, that many, though it may be one device.
    """

    slots: int
    ranks: int = 1
    exclusive: bool = False

    @property
    def shared(self) -> bool:
        """Whether ranks are in each other's way."""
        return self.ranks > 1 and not self.exclusive

    def of(self, rank: int) -> int:
        """The number of the device, or of the share of one, that ``rank`` runs on."""
        return rank // self.ranks if self.shared else rank


def residency(program: Program, device: Device) -> Verdict:
    """Whether ``device`` has room enough for the waits of ``program``."""
    began = perf_counter()
    made = graph(program)
    found = deadlock(made, made.order()) or crowded(made, device)
    reason, lines = (None, ()) if found is None else (found.reason, found.lines)
    took = perf_counter() - began
    return Verdict(program.case.name, len(made.before), 0, took, reason, lines)


def crowded(made: Graph, device: Device) -> Refutation | None:
    """Refute a graph, in which nobody waits in a circle as long as everybody runs."""
    return _alone(made, device) or _Room(made, device).refuted()


def _alone(made: Graph, device: Device) -> Refutation | None:
    """Rule (a)."""
    if not device.shared:
        return None
    for node, part, argument in made.ops("wait"):
        word, _ = made.program.words[argument[0]]
        if word.source != part.rank and part.block and _blocks(made, part) > 1:
            lines = (
                f"{part}: {made.text(node)}, in each of {_blocks(made, part)} blocks",
                f"of a device that {device.ranks} ranks share: only kernels of one block may wait "
                "there for other ranks",
            )
            return Refutation("resources", lines)
    return None


def _blocks(made: Graph, part: Part) -> int:
    codes = made.program.codes[part.rank][part.call - 1]
    return sum(code.strand.actor == part.code.strand.actor for code in codes)


class _Room:
    """Rules (b) and (c)."""

    def __init__(self, made: Graph, device: Device) -> None:
        self._graph = made
        self._device = device
        self._blocks = [part for part in made.parts if part.block]
        #: Where each block needs a slot: behind what it joins first.
        self._gates = {part.index: _gate(part) for part in self._blocks}

    def refuted(self) -> Refutation | None:
        """The way to a state in which nobody goes on, if there is one."""
        crowds = {d: self.at_once(d) for d in self._devices}
        if all(crowd < self._device.slots for crowd in crowds.values()):
            return None
        met, left = set[frozenset[int]](), [_State(self._graph, self._gates)]
        while left:
            if len(met) > _LIMIT:
                return self._too_many(crowds)
            state = left.pop()
            coming = list(self._coming(state))
            if not coming and not state.complete:
                return self._stuck(state)
            for part in coming:
                if state.admitted | {part.index} not in met:
                    met.add(state.admitted | {part.index})
                    left.append(state.with_slot(part))
        return None

    @cached_property
    def _devices(self) -> list[int]:
        return sorted({self._device.of(part.rank) for part in self._blocks})

    def at_once(self, device: int) -> int:
        """How many blocks may wait at the same time on ``device``, at most."""
        ranks = {p.rank for p in self._blocks if self._device.of(p.rank) == device}
        calls = range(1, len(self._graph.program.case.rows) + 1)
        return sum(max(self._waiting(rank, call) for call in calls) for rank in ranks)

    def _waiting(self, rank: int, call: int) -> int:
        """The same for a rank in a call: the largest set of kernels none of which joins another."""
        sizes: dict[str, int] = {}
        for part in self._blocks:
            if (part.rank, part.call) == (rank, call) and self._waits(part):
                actor = part.code.strand.actor
                sizes[actor] = sizes.get(actor, 0) + 1
        behind = _behind(
            part for part in self._graph.parts if (part.rank, part.call) == (rank, call)
        )
        largest = 0
        for count in range(1, len(sizes) + 1):
            for some in combinations(sizes, count):
                if not any(b in behind[a] for a in some for b in some):
                    largest = max(largest, sum(sizes[actor] for actor in some))
        return largest

    def _waits(self, part: Part) -> bool:
        rest = part.code.ops[self._gates[part.index] - part.first - 1 :]
        return any(name in ("wait", "join") for name, _ in rest)

    def _coming(self, state: _State) -> Iterable[Part]:
        """Blocks that may take a slot next."""
        full = {d for d in self._devices if len(self._resident(state, d)) >= self._device.slots}
        held: set[tuple[int, str]] = set()
        for part in self._blocks:
            name = (part.rank, part.code.strand.actor)
            if part.index in state.admitted:
                continue
            room = self._device.of(part.rank) not in full
            if room and not {(part.rank, ""), name} & held and state.may_begin(part):
                yield part
            held.add(name)
            if self._gates[part.index] == part.first + 1:
                held.add((part.rank, ""))  # nobody overtakes a kernel that joins nothing

    def _resident(self, state: _State, device: int) -> list[Part]:
        return [
            part
            for part in self._blocks
            if part.index in state.admitted
            and not state.done[part.last]
            and self._device.of(part.rank) == device
        ]

    def _stuck(self, state: _State) -> Refutation:
        """Tell who waits for whom: who has no slot waits for those who have."""
        taken: dict[int, tuple[str, Sequence[Part]]] = {}
        for part in self._blocks:
            if part.index not in state.admitted:
                device = self._device.of(part.rank)
                resident = self._resident(state, device)
                names = ", ".join(map(str, resident))
                text = f" finds no slot: device {device} has {self._device.slots}, taken by {names}"
                taken[self._gates[part.index]] = (text, resident)
        return Refutation("resources", waits_in_a_circle(self._graph, state.done, taken))

    def _too_many(self, crowds: dict[int, int]) -> Refutation:
        device, crowd = max(crowds.items(), key=lambda each: each[1])
        lines = (
            f"{crowd} blocks may wait at the same time on device {device}, which has "
            f"{self._device.slots} slots;",
            f"nothing goes wrong in the first {_LIMIT} orders in which blocks may take them, and "
            "there are more",
        )
        return Refutation("resources", lines)


def _gate(part: Part) -> int:
    """The first node of a block that needs a slot, which it may have as soon as it gets there."""
    node = part.first + 1
    for name, _ in part.code.ops:
        if name != "join":
            break
        node += 1
    return node


def _behind(parts: Iterable[Part]) -> dict[str, set[str]]:
    """Of each actor those that have ended when it begins."""
    behind: dict[str, set[str]] = {}
    for part in parts:
        joined = part.code.ops[: _gate(part) - part.first - 1]
        behind.setdefault(part.code.strand.actor, set()).update(actor for _, actor in joined)
    for middle in behind:
        for actor in behind:
            if middle in behind[actor]:
                behind[actor] |= behind[middle]
    return behind


class _State:
    """How far all can get when only ``admitted`` blocks have had a slot."""

    def __init__(self, made: Graph, gates: dict[int, int]) -> None:
        self._after: list[list[int]] = [[] for _ in made.before]
        for node, before in enumerate(made.before):
            for other in before:
                self._after[other].append(node)
        self._gates = gates
        self._missing = [len(before) for before in made.before]
        for gate in gates.values():
            self._missing[gate] += 1
        self.admitted: frozenset[int] = frozenset()
        self.done = [False] * len(made.before)
        self._go([node for node, count in enumerate(self._missing) if not count])

    @property
    def complete(self) -> bool:
        """Whether all has happened."""
        return all(self.done)

    def may_begin(self, part: Part) -> bool:
        """Whether a block needs nothing but a slot."""
        return self.done[self._gates[part.index] - 1]

    def with_slot(self, part: Part) -> _State:
        """What comes of it when ``part`` gets a slot."""
        state = _State.__new__(_State)
        state._after, state._gates = self._after, self._gates
        state._missing, state.done = list(self._missing), list(self.done)
        state.admitted = self.admitted | {part.index}
        gate = self._gates[part.index]
        state._missing[gate] -= 1
        state._go([] if state._missing[gate] else [gate])
        return state

    def _go(self, nodes: list[int]) -> None:
        for node in nodes:
            self.done[node] = True
            for other in self._after[node]:
                self._missing[other] -= 1
                if not self._missing[other]:
                    nodes.append(other)
