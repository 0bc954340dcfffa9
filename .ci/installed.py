"""An installed gemmlink has every package of the tree, and the expected atomics.

Usage: python installed.py CHECKOUT IMPLEMENTATION
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


def main(checkout: Path, implementation: str) -> None:
    project = tomllib.loads((checkout / "pyproject.toml").read_text())
    for name in project["tool"]["setuptools"]["packages"]:
        file = importlib.import_module(name).__file__
        if file is None or checkout in Path(file).resolve().parents:
            sys.exit(f"{name} comes from {file}, not from the installation")
    atomics = importlib.import_module("gemmlink.transport.atomics")
    if implementation != atomics.IMPLEMENTATION:
        sys.exit(f"expected {implementation}, got {atomics.IMPLEMENTATION}: {atomics.available()}")
    top = Path(importlib.import_module("gemmlink").__path__[0])
    if not (top / "py.typed").exists():
        sys.exit(f"{top} has no py.typed: type checkers would ignore its annotations")
    print(f"{top}: every package, py.typed, {atomics.IMPLEMENTATION} atomics")


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve(), sys.argv[2])
