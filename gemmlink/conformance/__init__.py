"""Proving that a transport, an epilogue and a backend keep their contracts, alone and together.

| module | job |
| --- | --- |
| ``problems`` | seeded inputs that every rank can rebuild, and their references in float64 |
| ``devices`` | where tensors lie: on CPUs, or on devices |
| ``trials``, ``served`` | a problem through one operation; which operations a mode serves |
| ``quick`` | the self-test: small whole-number problems in every mode, compared exactly |
| ``contract``, ``gaps`` | what all contracts share: names of clauses, and those known to fail |
| ``clauses`` | runs the clauses of a contract on one set of ranks and keeps each one's outcome |
| ``sessions``, ``windows``, ``words``, ``lanes`` | the contracts of a transport, clause by clause |
| ``asked`` | what an epilogue is asked for when it is judged |
| ``routes`` | what a schedule must do because of the routes of its operation |
| ``touches`` | what memory the actions of a schedule read and write |
| ``races`` | what a set of schedules orders, over several calls, and what it leaves to chance |
| ``adversary`` | runs lowered schedules as badly as the contracts allow |
| ``mutate`` | lowered schedules with one mistake, to see whether anybody notices |
| ``mistakes`` | the same around schedules: how calls begin, follow each other, and recover |
| ``mutations``, ``mutation_table`` | who notices which mistake, as a page |
| ``proof`` | proves lowered schedules, all that are built in and those of plugins |
| ``explore`` | runs lowered schedules in all ways that differ, instead of some |
| ``cross_check`` | whether proofs and explorations agree |
| ``epilogues``, ``backends`` | the contracts of an epilogue and of a backend |
| ``catalog`` | the ids of all clauses and cells |
| ``parts``, ``certify``, ``matrix`` | what is under test; runs all of it; the support matrix |

Imports go ``spec``, ``operators`` <- ``problems``, ``devices`` <- ``trials`` <- ``served`` <-
``quick`` <- ``cli``; ``spec``, ``core`` <- ``touches`` <- ``races``; and ``served``, ``spawn``,
``gaps`` <-
``contract`` <- ``clauses``, ``asked``, ``routes``, ``races`` <- the contracts <- ``catalog`` <-
``parts`` <- ``certify`` <- ``matrix`` <- ``cli``. By themselves are ``spec`` <- ``adversary`` <-
``mutate``, of which ``explore`` makes use, and so does ``proof``, which also asks ``served``.

A contract is a class for pytest; subclass it, say what is under test, and every clause is a test::

    from gemmlink.conformance import WindowContract

    class TestMineWindow(WindowContract):
        transport = "mine.transport:Mine"

Nothing here needs pytest: ``failures(TestMineWindow)`` runs the clauses without it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gemmlink.conformance.backends import BackendContract as BackendContract
    from gemmlink.conformance.clauses import RankContract as RankContract
    from gemmlink.conformance.clauses import failures as failures
    from gemmlink.conformance.clauses import run_together as run_together
    from gemmlink.conformance.contract import Contract as Contract
    from gemmlink.conformance.epilogues import EpilogueContract as EpilogueContract
    from gemmlink.conformance.lanes import LaneContract as LaneContract
    from gemmlink.conformance.sessions import TransportContract as TransportContract
    from gemmlink.conformance.windows import WindowContract as WindowContract
    from gemmlink.conformance.words import WordsContract as WordsContract

_PUBLIC = {
    "TransportContract": "sessions",
    "WindowContract": "windows",
    "WordsContract": "words",
    "LaneContract": "lanes",
    "EpilogueContract": "epilogues",
    "BackendContract": "backends",
    "Contract": "contract",
    "RankContract": "clauses",
    "failures": "clauses",
    "run_together": "clauses",
}

__all__ = [*_PUBLIC]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'gemmlink.conformance' has no attribute {name!r}")
    return getattr(importlib.import_module(f"gemmlink.conformance.{_PUBLIC[name]}"), name)
