"""The epilogues that the documentation shows keep the contract that it describes, as is proved."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

from gemmlink import plugins
from gemmlink.conformance import EpilogueContract, failures
from gemmlink.conformance.proof.protocols import named
from gemmlink.conformance.proof.survey import Scope, prove_all

DOCS = Path(__file__).parents[2] / "docs"
PLUGIN = DOCS / "examples" / "gemmlink-example"
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
#: Page, class, and how many protocols it serves.
EXAMPLES = [("guide.md", "Backwards", 5), ("epilogues.md", "LastFirst", 10)]


@pytest.mark.parametrize(("page", "name", "protocols"), EXAMPLES)
def test_an_example_keeps_the_contract(
    page: str, name: str, protocols: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of its schedules; on ranks an example would have to be a module that they can import."""
    blocks = BLOCK.findall((DOCS / page).read_text())
    text = next(text for text in blocks if f"class {name}:" in text)
    module = ModuleType("shown_in_the_docs")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(compile(text, page, "exec"), vars(module))
    contract = type(name, (EpilogueContract,), {"epilogue": f"{module.__name__}:{name}"})
    assert failures(contract, ranks=False) == {}
    assert _proved(f"{module.__name__}:{name}") == protocols


def test_the_example_plugin_keeps_the_contract(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of its schedules; CI installs and certifies all of it, see .ci/check_example.sh."""
    monkeypatch.syspath_prepend(str(PLUGIN / "src"))
    monkeypatch.setattr(plugins, "_registry", None)
    plugins.register(importlib.import_module("gemmlink_example"))
    assert plugins.find("transport", "directory").name == "directory"
    contract = type("Example", (EpilogueContract,), {"epilogue": "pairwise"})
    assert failures(contract, ranks=False) == {}
    assert _proved("pairwise") == 39


def _proved(epilogue: str) -> int:
    """How many protocols it makes, all of which are proved."""
    proofs = list(prove_all(Scope(2, 2).protocols(modes=named([epilogue]))))
    refuted = [line for each in proofs if not each.verdict.proved for line in each.lines()]
    assert not refuted, "\n".join(refuted)
    return len(proofs)
