"""Every mistake that has a name is refuted, and so is all that the adversary catches."""

from __future__ import annotations

import re
from typing import Any

import pytest

from gemmlink.conformance.adversary.program import compile_case
from gemmlink.conformance.adversary.run import first_fault
from gemmlink.conformance.mutate import NAMED, Mutant, deletions, narrowings, swaps
from gemmlink.conformance.proof import Verdict, prove
from tests.adversary.cases import case
from tests.adversary.test_mutants import WHERE

SEEDS = range(30)

_COPY = {"view": False, "buffers": 1, "send_complete": False}
_VIEW = {"view": True, "buffers": 1, "send_complete": False}
_LANES = {"operation": "all_gather", "mode": "lanes", "lane_order": "in_order", "lanes": 1}

_PUBLISHED = r"stores call 1 rank 0 .*\n.* reads it .*\nthe store is known to be done by"
_GATE = r"in call 1 reads it .*\n.*producer#\d in call 2 stores .*\nthe load is known to be done by"
_OWN_COUNT = r"counter producer.2 in call 1 elects the last of {}, and 2 come:\n.*#0.*\n.*#1"

#: Why each is refuted, and what must be said of it, in the first place where it is a mistake.
TOLD = {
    "word before data": ("race", _PUBLISHED),
    "no gate": ("race", _GATE + r".*\n.*\nit has waited for nothing"),
    "gate only before stores that leave": ("race", _GATE),
    "own slot not gated in a pull": ("race", _GATE),
    "gate inside the lanes": ("race", r"lane\[1,0\] " + _GATE),
    "wait before saying": ("deadlock", r"0's .* wait free\[1\].* 1's .* must set\n.* free\[0\]"),
    "view given up when the call ends": ("race", r"reader in call 2 reads it .*\n.* in call 3"),
    "counter one short of the tiles": ("count", _OWN_COUNT.format(1)),
    "counter one beyond the tiles": ("count", _OWN_COUNT.format(3)),
    "one counter for all chunks": ("count", r"elects the last of 2, and 4 come:\n(.*\n){3}.*#1"),
    "nobody retires": ("race", _PUBLISHED + " the end of rank 0's producer#0 in call 1"),
    "no barriers": ("race", _PUBLISHED + " the end of rank 0's producer#0 in call 1"),
    "nobody releases": ("race", _PUBLISHED + " the end of rank 0's producer#0 in call 1"),
    "nobody acquires": ("race", r"'retire; barrier; release.*\n.*\nit has waited for: wait arrive"),
    "leader publishes for all": ("race", r"#1 in call 1 stores"),
    "leader acquires for all": ("race", r"consumer#1 in call 1 reads it"),
    "a join taken for a release": ("race", r"to its device only, by the end of rank 0's producer"),
    "one of several lanes drained": ("race", r"the end of rank 0's lane\[1,1\].* has drained"),
    "words of lanes that keep no order": ("race", r"the end of rank 0's lane\[1,0\].* has drained"),
    "complete only on the receiving side": ("race", r"reader in call 1 stores what the caller"),
}


def _verdict(wanted: dict[str, Any], mutant: Mutant) -> Verdict:
    whole = case(**wanted)
    changed = whole.changed(mutant.name, mutant.change)
    assert changed.lowered != whole.lowered, mutant.name
    return prove(compile_case(changed))


@pytest.mark.parametrize("mutant", NAMED, ids=lambda mutant: mutant.name)
def test_a_mistake_with_a_name_is_refuted(mutant: Mutant) -> None:
    found = [_verdict(wanted, mutant) for wanted in WHERE[mutant.name]]
    assert not any(each.proved for each in found), [str(each) for each in found]
    reason, told = TOLD[mutant.name]
    assert found[0].reason == reason, str(found[0])
    assert re.search(told, "\n".join(found[0].counterexample)), str(found[0])


def test_the_library_is_given_and_gives_what_is_joined() -> None:
    """Each deleted join of its strand is a race: with who stores before, or with who reads."""
    wanted: dict[str, Any] = {"operation": "all_gather", "mode": "collective"}
    joins = [m for m in deletions(case(**wanted).lowered[0]) if "'join" in m.name]
    found = [_verdict(wanted, mutant) for mutant in joins]
    assert [each.reason for each in found] == ["race"] * 2
    assert "host in call 1 reads it ('library collective all_gather')" in str(found[0])
    assert "host in call 1 stores call 1 rank 0" in str(found[1])


#: Which variants, and which of their mechanical mutants: every so many.
AGREED: list[tuple[dict[str, Any], int]] = [
    ({"operation": "all_gather", "mode": "pull", "fused": False, **_COPY}, 1),
    ({"operation": "all_gather", "mode": "push", "fused": False, **_VIEW}, 1),
    ({**_LANES, "fused": False, **_COPY}, 2),
    ({**_LANES, "fused": True, "lane_order": "after_drain", "lanes": 2, **_COPY}, 5),
    ({"operation": "all_gather", "mode": "push", "fused": True, **_COPY}, 5),
    ({"operation": "all_reduce", "mode": "push+pull", "fused": False, **_VIEW}, 5),
]


@pytest.mark.parametrize(("wanted", "every"), AGREED, ids=lambda each: str(each))
def test_what_the_adversary_catches_is_refuted_and_nothing_else(
    wanted: dict[str, Any], every: int
) -> None:
    """The first is soundness. The second need not be so, for a proof may be too careful."""
    whole = case(**wanted)
    first = whole.lowered[0]
    unsound, careful = [], []
    for mutant in [*deletions(first), *narrowings(first), *swaps(first)][::every]:
        changed = whole.changed(mutant.name, mutant.change)
        if changed.lowered == whole.lowered:
            continue
        found = prove(compile_case(changed))
        caught = first_fault(changed, SEEDS)
        if found.proved and caught is not None:
            unsound.append(str(caught))
        elif not found.proved and caught is None:
            careful.append(str(found))
    assert not unsound
    assert not careful
