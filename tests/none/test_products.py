"""Which products of a schedule are computed as one: neighbours, all of them, and nothing else."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest

from gemmlink.core.flatten import flatten
from gemmlink.core.products import Columns, Product, group
from gemmlink.epilogues.collective import LibraryCollective
from gemmlink.epilogues.lanes import Lanes
from gemmlink.epilogues.pull import Pull
from gemmlink.epilogues.push import Push
from gemmlink.spec import operations
from gemmlink.spec.operations import Operation, Phase
from gemmlink.spec.places import Places
from gemmlink.spec.schedule import LOCAL, Compute, Plan, Region, Schedule, Store

N, WORLD = 12, 3
CAPACITY = 11

OPERATIONS = {
    "all_gather": operations.all_gather(WORLD, N),
    "all_to_all": operations.all_to_all(WORLD, N, 9),
    "all_to_all without a tail": operations.all_to_all(WORLD, N),
    "reduce_scatter": operations.reduce_scatter(WORLD, N),
}

each_operation = pytest.mark.parametrize("name", OPERATIONS)
each_epilogue = pytest.mark.parametrize("epilogue", [Push(), Pull(), Lanes(), LibraryCollective()])


def _schedules(epilogue: Any, operation: Operation, **options: Any) -> Iterator[Schedule]:
    for rank, chunks, fused in itertools.product(range(WORLD), (1, 2), epilogue.forms()):
        plan = Plan(rank, WORLD, chunks, fused, **options)
        yield epilogue.schedule(operation.phases[0], plan)


def _grouped(schedule: Schedule, merge: bool = True) -> list[list[list[Region]]]:
    """The products of a schedule: for each, its columns, and for each of these its regions."""
    phase, plan = schedule.phase, schedule.plan
    placed = flatten(schedule)
    computed = [item.action for item in placed if isinstance(item.action, Compute)]
    regions = iter(Region(plan.rank, action.chunk, action.part) for action in computed)
    found = []
    for item in group(placed, plan.chunks, [phase] if merge else None):
        if isinstance(item, Product | Columns):
            products = item.products if isinstance(item, Columns) else (item,)
            found.append([_until(regions, product) for product in products])
    assert not list(regions), "something is computed in no product"
    return found


def _until(regions: Iterator[Region], product: Product) -> list[Region]:
    taken = [next(regions)]
    assert taken[0] == product.store.region, "a product begins with another region"
    while taken[-1] != product.end:
        taken.append(next(regions))
    return taken


@each_operation
@each_epilogue
def test_only_neighbours_are_one_product(name: str, epilogue: Any) -> None:
    """Rows follow each other in the product and in memory; columns stand side by side."""
    phase = OPERATIONS[name].phases[0]
    for schedule in _schedules(epilogue, OPERATIONS[name]):
        chunks = schedule.plan.chunks
        places = Places(phase, WORLD, chunks, CAPACITY)
        for columns in _grouped(schedule):
            for regions, rows in itertools.product(columns, (0, 1, 2, 7, CAPACITY)):
                _follow_each_other(places, phase, regions, rows, schedule)
            cols = [phase.routes[regions[0].part].cols for regions in columns]
            assert all(left[1] == right[0] for left, right in itertools.pairwise(cols))
            if len(columns) > 1:
                bounds = {(regions[0].chunk, regions[-1].chunk) for regions in columns}
                assert len(bounds) == 1, "columns of different rows"


def _follow_each_other(
    places: Places, phase: Phase, regions: list[Region], rows: int, schedule: Schedule
) -> None:
    firsts = [source * CAPACITY for source in range(WORLD)]
    stores: dict[Region, Store] = {}
    for action in schedule.actions():
        if isinstance(action, Store):
            stores.setdefault(action.region, action)
    for one, two in itertools.pairwise(regions):
        assert phase.routes[one.part].cols == phase.routes[two.part].cols
        (first, last), (begin, _) = places.product_rows(one, rows), places.product_rows(two, rows)
        assert last == begin, f"{one} and {two} of {rows} rows"
        assert (stores[one].to, stores[one].area) == (stores[two].to, stores[two].area)
        if stores[one].to != LOCAL:
            area = stores[one].area
            start = places.first_row(one, area, rows, firsts)
            assert places.first_row(two, area, rows, firsts) == start + last - first


@pytest.mark.parametrize("epilogue", [Push(), Pull(), Lanes()])
def test_a_split_form_makes_one_product(epilogue: Any) -> None:
    """Of all that it sends, and of what stays, where that is computed behind it."""
    for operation in OPERATIONS.values():
        for rank in range(WORLD):
            plan = Plan(rank, WORLD, chunks=1, fused=False)
            schedule = epilogue.schedule(operation.phases[0], plan)
            assert len(_grouped(schedule)) == 1, operation.name


@each_operation
@each_epilogue
def test_nothing_is_one_product_where_bits_must_be_those_of_other_modes(
    name: str, epilogue: Any
) -> None:
    for schedule in _schedules(epilogue, OPERATIONS[name]):
        assert all(len(c) == len(c[0]) == 1 for c in _grouped(schedule, merge=False))


@each_operation
@pytest.mark.parametrize("epilogue", [Push(), Pull(), Lanes()])
def test_a_fused_form_sends_what_it_has(name: str, epilogue: Any) -> None:
    """A product that is announced alone is computed alone."""
    operation = OPERATIONS[name]
    for chunks in (1, 2):
        schedule = epilogue.schedule(operation.phases[0], Plan(0, WORLD, chunks, fused=True))
        sent = chunks * len(operation.phases[0].sent())
        assert sent <= len(_grouped(schedule)) <= sent + bool(operation.phases[0].kept())


def test_what_is_kept_as_well_is_computed_by_itself() -> None:
    """The store behind it copies its rows, and no others."""
    plan = Plan(0, WORLD, chunks=1, fused=False, keep=True)
    phase = OPERATIONS["all_to_all"].phases[0]
    assert len(_grouped(Pull().schedule(phase, plan))) == WORLD + 1
