"""The repository's top level is the architecture; the import package is one namespace."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[1]
LAYERS = ("backends", "epilogues", "transport")
SETUPTOOLS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]


@pytest.mark.parametrize("layer", LAYERS)
def test_link_leads_to_the_layer(layer: str) -> None:
    assert (ROOT / "gemmlink" / layer).readlink() == Path("..", layer)


def test_map_names_every_layer() -> None:
    assert SETUPTOOLS["package-dir"] == {f"gemmlink.{layer}": layer for layer in LAYERS}


def test_packages_list_is_the_tree() -> None:
    inits = [p for top in ("gemmlink", *LAYERS) for p in (ROOT / top).rglob("__init__.py")]
    found = {".".join(p.parent.relative_to(ROOT).parts) for p in inits}
    found = {name if name.split(".")[0] == "gemmlink" else f"gemmlink.{name}" for name in found}
    assert sorted(found) == SETUPTOOLS["packages"]


@pytest.mark.parametrize("layer", LAYERS)
def test_a_layer_has_one_name(layer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT))
    with pytest.raises(ImportError, match=f"import gemmlink.{layer}"):
        __import__(layer)
