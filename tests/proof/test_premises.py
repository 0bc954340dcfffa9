"""What a proof takes for granted is looked at: what begins or counts otherwise is refuted."""

from __future__ import annotations

from typing import Any

import pytest

from gemmlink.conformance.adversary.program import compile_case
from gemmlink.conformance.mistakes import OF_THE_CALLS, OF_THE_START, two_shapes
from gemmlink.conformance.mutate import Mutant
from gemmlink.conformance.proof import prove
from tests.adversary.cases import case
from tests.adversary.test_mistakes import WHERE

_PUSH: dict[str, Any] = {"operation": "all_gather", "mode": "push", "fused": True, "buffers": 1}

#: What is said of each, where it is one.
TOLD = {
    "arrivals of a former life": "arrive[0,chunk 0] at rank 0 is 4 before the first call",
    "one arrival of a former life": "arrive[1,chunk 1] at rank 0 is 4 before the first call",
    "gates of a former life": "free[0] at rank 1 is 4 before the first call",
    "chunks of a former life": "chunk[0,chunk 0] at rank 0 is 4 before the first call",
    "counters of a former life": "rank 0's counter producer.2 is 1 before the first call",
    "number used again after an exception": "arrive[1,chunk 0] at rank 0 to only 1, 2, 3",
    "counters shared by two shapes": "elects the last of 2 in call 1",
}


@pytest.mark.parametrize("mutant", [*OF_THE_START, *OF_THE_CALLS], ids=lambda mutant: mutant.name)
def test_a_mistake_around_the_calls_is_refuted(mutant: Mutant) -> None:
    first = prove(compile_case(mutant.of(case(**WHERE[mutant.name][0]))))
    assert not first.proved
    assert TOLD[mutant.name] in str(first)
    for wanted in WHERE[mutant.name][1:]:
        assert not prove(compile_case(mutant.of(case(**wanted)))).proved, wanted


def test_two_shapes_that_count_for_themselves_are_proved() -> None:
    both = Mutant("two shapes", whole=two_shapes(shared=False)).of(case(**_PUSH))
    assert prove(compile_case(both)).proved
