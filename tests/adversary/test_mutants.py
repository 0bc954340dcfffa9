"""The adversary notices every mistake that has a name, and nearly every missing action."""

from __future__ import annotations

import re
from typing import Any

import pytest

from gemmlink.conformance.adversary.run import first_fault
from gemmlink.conformance.mutate import NAMED, deletions, narrowings, survey, swaps
from tests.adversary.cases import case

SEEDS = 30

_COPY = {"view": False, "buffers": 1, "send_complete": False}
_VIEW = {"view": True, "buffers": 1, "send_complete": False}
_PUSH: dict[str, Any] = {"operation": "all_gather", "mode": "push", "fused": True, **_COPY}
_PULL: dict[str, Any] = {"operation": "all_gather", "mode": "pull", "fused": True, **_COPY}
_LANES: dict[str, Any] = {
    **{"operation": "all_gather", "mode": "lanes", "fused": True, **_COPY},
    **{"lane_order": "in_order", "lanes": 1},
}
_DRAINED = {**_LANES, "lane_order": "after_drain", "lanes": 2}

#: Where each mistake is one. Elsewhere it may do no harm: a rank that pulls, for example, writes to
#: no memory of others, and what it shows nobody else writes to.
WHERE: dict[str, list[dict[str, Any]]] = {
    "word before data": [_PUSH, _PULL, _LANES, {**_PUSH, "operation": "reduce_scatter"}],
    "no gate": [_PUSH, _PULL, _LANES, {**_PUSH, **_VIEW}, {**_PUSH, "operation": "all_to_all"}],
    "gate only before stores that leave": [_PULL, {**_PULL, "fused": False}, _LANES],
    "own slot not gated in a pull": [_PULL, {**_PULL, "fused": False}, {**_PULL, **_VIEW}],
    "gate inside the lanes": [_LANES],
    "wait before saying": [{**_PUSH, **_VIEW}, {**_PULL, **_VIEW}, {**_LANES, **_VIEW}],
    "view given up when the call ends": [{**_PUSH, **_VIEW}, {**_LANES, **_VIEW}],
    "counter one short of the tiles": [_PUSH, _PULL, _LANES, {**_PUSH, "fused": False}],
    "counter one beyond the tiles": [_PUSH, _PULL, _LANES],
    "one counter for all chunks": [_PUSH, _PULL, _LANES, _DRAINED],
    "nobody retires": [_PUSH, _PULL, _LANES],
    "no barriers": [_PUSH, _PULL, _LANES],
    "nobody releases": [_PUSH, _PULL, _LANES, {**_LANES, "fused": False}],
    "nobody acquires": [_PUSH, _PULL, _LANES],
    "leader publishes for all": [_PUSH, _PULL, _LANES],
    "leader acquires for all": [_PUSH, _PULL, _LANES],
    "a join taken for a release": [
        {**_PUSH, **_VIEW, "fused": False},
        {**_COPY, "operation": "all_reduce", "mode": "push+pull", "fused": False},
        {**_LANES, "operation": "all_reduce"},
    ],
    "one of several lanes drained": [_DRAINED, {**_DRAINED, "operation": "all_to_all"}],
    "words of lanes that keep no order": [_LANES, {**_LANES, "fused": False}],
    "complete only on the receiving side": [
        {**_PULL, **_VIEW, "send_complete": True},
        {**_LANES, **_VIEW, "send_complete": True},
    ],
}


@pytest.mark.parametrize("mutant", NAMED, ids=lambda mutant: mutant.name)
def test_a_mistake_with_a_name_is_caught(mutant: Any) -> None:
    for wanted in WHERE[mutant.name]:
        found = survey(case(**wanted), [mutant], SEEDS)
        assert [name for name, _ in found.caught] == [mutant.name], f"{found} {found.idle}"


@pytest.mark.parametrize("mutant", NAMED, ids=lambda mutant: mutant.name)
def test_a_mistake_with_a_name_gives_wrong_results(mutant: Any) -> None:
    """Where a race as such is no fault, so that nothing but results and deadlocks count."""
    for wanted in WHERE[mutant.name]:
        changed = mutant.of(case(**wanted))
        found = first_fault(changed, range(100), strict=False)
        assert found is not None, changed.name
        assert found.fault is not None
        assert found.fault.kind in ("wrong", "deadlock"), str(found)


def test_every_name_has_its_place() -> None:
    assert list(WHERE) == [mutant.name for mutant in NAMED]


#: What nobody need notice, and why.
HARMLESS = {
    r"without 'join producer \(device\)' in (consumer|mover)": "words say as much",
    r"without 'retire' in consumer": "it loads, and stores what is private until the call ends",
    r"for the device, '.*set arrive\[0,chunk \d\] = n at rank 0 ": "set and awaited on one device",
    r"for the device, 'acquire \(system\)' in (consumer|mover)": "of the own block's word",
    r"for the device, 'release \(system\)' in consumer": "a load is over, whatever the scope",
}


#: The same for a push that is split: one block that has passed the gate is enough, for the mover
#: joins both, and no peer looks at what they store.
HARMLESS_SPLIT = {
    r"'(wait free\[1\] >= n-1|acquire \(system\))' in producer": "the other block waits",
    r"without 'join mover \(device\)' in consumer": "words say as much",
}


@pytest.mark.parametrize(
    ("wanted", "harmless"),
    [(_PUSH, HARMLESS), ({**_PUSH, "fused": False}, HARMLESS | HARMLESS_SPLIT), (_PULL, HARMLESS)],
    ids=["fused-push", "split-push", "fused-pull"],
)
def test_every_action_is_missed_or_known_to_be_harmless(
    wanted: dict[str, Any], harmless: dict[str, str]
) -> None:
    whole = case(**wanted)
    mutants = [*deletions(whole.lowered[0]), *narrowings(whole.lowered[0])]
    found = survey(whole, mutants, SEEDS)
    assert not found.idle
    left = [n for n in found.missed if not any(re.search(each, n) for each in harmless)]
    assert not left, f"nobody notices {left}"
    assert len(found.caught) > 2 * len(found.missed)


def test_what_is_missed_is_harmless_only_for_the_own_block() -> None:
    # Narrowing the acquire of a *peer's* word is caught: one harmless acquire for each own word.
    whole = case(**_PUSH)
    acquires = [m for m in narrowings(whole.lowered[0]) if "acquire" in m.name]
    found = survey(whole, acquires, SEEDS)
    own = sum("arrive[0" in str(a) for a in whole.lowered[0].strands[2].actions)
    assert own > 0
    assert len(found.missed) == 2 * own


def test_most_neighbours_may_not_change_places() -> None:
    whole = case(**_PUSH)
    found = survey(whole, swaps(whole.lowered[0]), SEEDS)
    assert len(found.caught) > 2 * len(found.missed), str(found)
