"""What the kit checks, by name: the stable ids of its clauses and cells.

A clause's id is its section and its sentence, ``transport/words/a_wait_is_bounded``. A *cell* is
one operation in one mode that serves it, with one pair of dtypes in one world, composed of the
parts under test: ``cell/all_gather/fused-push/bfloat16-float32/world2``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from gemmlink.conformance import trials
from gemmlink.conformance.backends import BackendContract
from gemmlink.conformance.contract import Contract, methods
from gemmlink.conformance.epilogues import EpilogueContract
from gemmlink.conformance.lanes import LaneContract
from gemmlink.conformance.quick import dtype_pairs
from gemmlink.conformance.sessions import TransportContract
from gemmlink.conformance.windows import WindowContract
from gemmlink.conformance.words import WordsContract
from gemmlink.spec.problem import dtype_name

OPERATIONS = trials.OPERATIONS
WORLDS = (1, 2, 3)

#: The contracts of each kind of part, in the order in which they are reported.
CONTRACTS: dict[str, tuple[type[Contract], ...]] = {
    "transport": (TransportContract, WindowContract, WordsContract, LaneContract),
    "epilogue": (EpilogueContract,),
    "backend": (BackendContract,),
}


def clause_ids(contract: type[Contract]) -> dict[str, str]:
    """The ids of a contract's clauses, and the method of each."""
    return {contract.clause_id(name): name for name in methods(contract)}


def sentence(contract: type[Contract], method: str) -> str:
    """A clause in words."""
    text: Any = getattr(contract, method).__doc__
    return " ".join(text.split())


def all_clause_ids() -> set[str]:
    """Every clause of every contract."""
    return {
        name
        for contracts in CONTRACTS.values()
        for contract in contracts
        for name in clause_ids(contract)
    }


def pairs() -> list[str]:
    """The pairs of dtypes of a cell, as ids have them: ``bfloat16-float32``."""
    return [f"{dtype_name(dtype)}-{dtype_name(out_dtype)}" for dtype, out_dtype in dtype_pairs()]


def cell_id(operation: str, mode: str, pair: str, world: int) -> str:
    """The id of a cell."""
    return f"cell/{operation}/{mode}/{pair}/world{world}"


def cell_ids(modes: Mapping[str, Sequence[str]]) -> Iterator[str]:
    """The cells of these modes, each with the operations that it serves."""
    for mode, operations in modes.items():
        for operation in operations:
            for pair in pairs():
                for world in WORLDS:
                    yield cell_id(operation, mode, pair, world)


def is_known(name: str, modes: Mapping[str, Sequence[str]] | None = None) -> bool:
    """Whether the kit has a clause or cell of this id; ``modes`` that may be, None for any."""
    if name in all_clause_ids():
        return True
    parts = name.split("/")
    if parts[0] != "cell" or len(parts) != 5:
        return False
    served = OPERATIONS if modes is None else modes.get(parts[2], ())
    return name in cell_ids({parts[2]: served})
