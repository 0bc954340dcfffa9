"""The base of all contracts: the names of clauses, and those that are known to fail."""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import Any

from gemmlink.conformance import gaps


class Contract:
    """Base of all contracts.

    ``section``: how the ids of its clauses begin. ``gaps``: clauses that are known to fail, for
    subclasses: a file as ``gemmlink.conformance.gaps`` describes it, named by its path as seen from
    the subclass's own file, or as ``"module:file"``. Under pytest they are strict xfails.
    """

    section: str = ""
    gaps: str = ""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        for name, gap in declared(cls).items():
            _expect_failure(cls, name, gap)

    @classmethod
    def clause_id(cls, method: str) -> str:
        """The id of the clause that this method tells."""
        return f"{cls.section}/{method.removeprefix('test_')}"


def declared(contract: type[Contract]) -> dict[str, gaps.Gap]:
    """The gaps of a contract class by method. Raises ``InvalidArgument`` for an unknown id."""
    if not contract.gaps:
        return {}
    from gemmlink.conformance import catalog  # which imports every contract, and so this module

    home = getattr(sys.modules.get(contract.__module__), "__file__", None) or "."
    found = gaps.read(gaps.locate(contract.gaps, Path(home).parent))
    gaps.refuse_unknown(found.values(), catalog.is_known, catalog.all_clause_ids())
    ids = {contract.clause_id(name): name for name in methods(contract)}
    return {ids[name]: gap for name, gap in found.items() if name in ids}


def _expect_failure(contract: type[Contract], name: str, gap: gaps.Gap) -> None:
    """Mark a clause for this class alone; the method is shared with all other subclasses."""
    try:
        import pytest
    except ImportError:  # ``failures`` reads the gaps itself
        return
    original = getattr(contract, name)

    def expected(self: Any) -> None:
        __tracebackhide__ = True
        original(self)

    functools.update_wrapper(expected, original)
    vars(expected).pop("__wrapped__")
    expected.gap = gap  # type: ignore[attr-defined]
    reason = f"{gap.reason} ({gap.where})"
    setattr(contract, name, pytest.mark.xfail(strict=True, reason=reason)(expected))


def methods(contract: type) -> list[str]:
    """The names of a contract's tests in the order of the source, base classes first."""
    names = [n for base in reversed(contract.__mro__) for n in vars(base) if n.startswith("test_")]
    return list(dict.fromkeys(names))
