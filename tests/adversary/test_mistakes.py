"""What begins wrong, or goes on wrong, is noticed however right each call is."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from gemmlink.conformance.adversary.run import first_fault
from gemmlink.conformance.mistakes import OF_THE_CALLS, OF_THE_START, two_shapes
from gemmlink.conformance.mutate import Mutant, survey
from tests.adversary.cases import case

SEEDS = 30

_PUSH: dict[str, Any] = {
    **{"operation": "all_gather", "mode": "push", "fused": True},
    **{"view": False, "buffers": 1, "send_complete": False},
}
_PULL = {**_PUSH, "mode": "pull"}
_LANES = {**_PUSH, "mode": "lanes", "lane_order": "in_order", "lanes": 1}
_VIEW = {**_PUSH, "view": True}
_SUMS = {**_PUSH, "operation": "reduce_scatter"}

#: Where each mistake is one.
WHERE: dict[str, list[dict[str, Any]]] = {
    "arrivals of a former life": [_PUSH, _PULL, _LANES, _VIEW, _SUMS],
    "one arrival of a former life": [_PUSH, _PULL, _LANES, _VIEW, _SUMS],
    "gates of a former life": [_PUSH, _PULL, _LANES, _VIEW, _SUMS],
    "chunks of a former life": [_LANES],
    "counters of a former life": [_PUSH, _PULL, _LANES, _VIEW, _SUMS],
    "number used again after an exception": [_PUSH, _PULL, _LANES, _VIEW, _SUMS],
    "counters shared by two shapes": [_PUSH, _PULL, _LANES, _VIEW, _SUMS],
}

_ALL = (*OF_THE_START, *OF_THE_CALLS)


@pytest.mark.parametrize("mutant", _ALL, ids=lambda mutant: mutant.name)
def test_a_mistake_around_the_calls_is_caught(mutant: Mutant) -> None:
    for wanted in WHERE[mutant.name]:
        found = survey(case(**wanted), [mutant], SEEDS)
        assert [name for name, _ in found.caught] == [mutant.name], f"{found} {found.idle}"


@pytest.mark.parametrize("mutant", _ALL, ids=lambda mutant: mutant.name)
def test_a_mistake_around_the_calls_gives_wrong_results(mutant: Mutant) -> None:
    for wanted in WHERE[mutant.name]:
        found = first_fault(mutant.of(case(**wanted)), range(100), strict=False)
        assert found is not None, f"{wanted}: {mutant.name}"
        assert found.fault is not None
        assert found.fault.kind in ("wrong", "deadlock"), str(found)


def test_every_name_has_its_place() -> None:
    assert list(WHERE) == [mutant.name for mutant in _ALL]


@pytest.mark.parametrize("wanted", [_PUSH, _PULL, _LANES, _VIEW, _SUMS], ids=lambda w: w["mode"])
def test_two_shapes_that_count_for_themselves_are_right(wanted: dict[str, Any]) -> None:
    both = Mutant("two shapes", whole=two_shapes(shared=False)).of(case(**wanted))
    tiles = [len(both.doing(0, call).strands[-1].actions) for call in (1, 2, 3)]
    assert tiles[0] == tiles[2] < tiles[1], "the same shape in every call"
    found = first_fault(both, range(SEEDS))
    assert found is None, str(found)


def test_a_call_that_all_refuse_alike_is_no_call() -> None:
    whole = case(**_PUSH)
    numbers = (1, 0, *range(2, len(whole.rows)))
    refused = replace(whole, numbers=(numbers,) * whole.world)
    found = first_fault(refused, range(SEEDS))
    assert found is None, str(found)
