"""Symbolic elements of matrices, and what every rank must get: the oracle.

An element is a tuple that says what it is: ``("C", call, rank, row, col)`` of a product, ``("sum",
terms)`` in the order in which they were added, ``("wire", value)`` of what has travelled in another
dtype and was rounded for it. Two elements are equal only if they came about in the same way.

The oracle is written down from what the operations mean, and shares no arithmetic with the places
that schedules use.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gemmlink.spec.operations import Operation

#: An element. Tuples compare by what they say.
Value = tuple[Any, ...]

#: What memory holds before anybody has stored there.
POISON: Value = ("poison",)

#: What a caller writes over a result that is his.
SCRIBBLE: Value = ("scribble",)


def product(call: int, rank: int, row: int, col: int) -> Value:
    """An element of the product of ``rank`` in ``call``."""
    return ("C", call, rank, row, col)


def add(terms: Sequence[Value]) -> Value:
    """The sum of ``terms``, in this order."""
    return ("sum", *terms)


def encode(value: Value) -> Value:
    """``value`` as it travels in the dtype of the wire."""
    return ("encoded", value)


def decode(value: Value) -> Value:
    """What ``encode`` made, rounded; decoding anything else gives nonsense."""
    return ("wire", value[1]) if value[0] == "encoded" else ("not encoded", value)


def expected(
    operation: Operation, rows: Sequence[int], call: int, rank: int, row: int, col: int
) -> Value:
    """What ``rank`` must find at ``row``, ``col`` of its result when rank r's M is ``rows[r]``."""
    world = len(rows)
    last = operation.phases[-1]
    if operation.name in ("all_gather", "all_to_all"):
        source = 0
        while row >= rows[source]:
            row -= rows[source]
            source += 1
        shift = rank * _shard(operation) if operation.name == "all_to_all" else 0
        value = product(call, source, row, shift + col)
    else:
        if operation.name == "reduce_scatter":
            shorter, longer = divmod(rows[rank], world)
            row += shorter * rank + min(rank, longer)
        value = add([product(call, source, row, col) for source in range(world)])
    return ("wire", value) if last.wire is not None else value


def _shard(operation: Operation) -> int:
    low, high = operation.phases[0].routes[0].cols
    return high - low


def shape(operation: Operation, rows: Sequence[int], rank: int) -> tuple[int, int]:
    """Rows and columns of what ``rank`` gets."""
    low, high = operation.phases[-1].routes[0].cols
    world = len(rows)
    heights = {
        "all_gather": sum(rows),
        "all_to_all": sum(rows),
        "reduce_scatter": rows[rank] // world + (rank < rows[rank] % world),
        "all_reduce": rows[rank],
    }
    return heights[operation.name], high - low


def say(value: Value) -> str:
    """An element in words."""
    if value[0] == "C":
        return f"call {value[1]} rank {value[2]} row {value[3]} col {value[4]}"
    if value[0] == "sum":
        return "(" + " + ".join(say(term) for term in value[1:]) + ")"
    if value[0] == "poison":
        return "what was there before anybody stored"
    if value[0] == "scribble":
        return "what the caller wrote over his view"
    if value[0] == "record":
        return f"the record of call {value[1]} with M {value[2]}"
    return f"{value[0]} {say(value[1])}"
