"""The epilogues that the documentation shows keep the contract that it describes."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

from gemmlink import plugins
from gemmlink.conformance import EpilogueContract, failures

DOCS = Path(__file__).parents[2] / "docs"
PLUGIN = DOCS / "examples" / "gemmlink-example"
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
EXAMPLES = [("guide.md", "Backwards"), ("epilogues.md", "LastFirst")]


@pytest.mark.parametrize(("page", "name"), EXAMPLES)
def test_an_example_keeps_the_contract(
    page: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of its schedules; on ranks an example would have to be a module that they can import."""
    blocks = BLOCK.findall((DOCS / page).read_text())
    text = next(text for text in blocks if f"class {name}:" in text)
    module = ModuleType("shown_in_the_docs")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(compile(text, page, "exec"), vars(module))
    contract = type(name, (EpilogueContract,), {"epilogue": f"{module.__name__}:{name}"})
    assert failures(contract, ranks=False) == {}


def test_the_example_plugin_keeps_the_contract(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of its schedules; CI installs and certifies all of it, see .ci/check_example.sh."""
    monkeypatch.syspath_prepend(str(PLUGIN / "src"))
    monkeypatch.setattr(plugins, "_registry", None)
    plugins.register(importlib.import_module("gemmlink_example"))
    assert plugins.find("transport", "directory").name == "directory"
    contract = type("Example", (EpilogueContract,), {"epilogue": "pairwise"})
    assert failures(contract, ranks=False) == {}
