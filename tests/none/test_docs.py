"""Every Python block of the README and the pages runs as it stands, alone, without a warning."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fresh import Interpreters

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PAGES = [
    "README.md",
    "docs/conformance.md",
    "docs/guide.md",
    "docs/epilogues.md",
    "docs/errors.md",
    "docs/quantize.md",
    "docs/transports.md",
]


def blocks() -> list[tuple[str, str]]:
    """A name for each block (page and place) and its text."""
    found = []
    for page in PAGES:
        for number, text in enumerate(BLOCK.findall((ROOT / page).read_text()), start=1):
            found.append((f"{page}-{number}", text))
    return found


@pytest.fixture(scope="module")
def interpreters() -> Iterator[Interpreters]:
    """One server for all blocks."""
    with Interpreters() as made:
        yield made


@pytest.mark.parametrize(("name", "text"), blocks(), ids=[name for name, _ in blocks()])
def test_block_runs(name: str, text: str, tmp_path: Path, interpreters: Interpreters) -> None:
    """A reader who pastes the block into a file and runs it sees no error and no warning."""
    script = tmp_path / "block.py"
    script.write_text(text)
    done = interpreters.run(script, tmp_path, {**os.environ, "PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, f"{name} failed:\n{done.stderr}"
    assert done.stderr == "", f"{name} wrote to stderr"


def test_all_pages_have_blocks() -> None:
    """The pattern above finds something on every page, so nothing passes for want of blocks."""
    pages = {name.rpartition("-")[0] for name, _ in blocks()}
    assert pages == set(PAGES)


def links() -> list[tuple[str, str]]:
    """Every relative link of the Markdown pages: page and target."""
    found = []
    for page in [ROOT / "README.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").rglob("*.md")]:
        for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
            if "://" not in target:
                found.append((str(page.relative_to(ROOT)), target))
    return found


@pytest.mark.parametrize(("page", "target"), links())
def test_link_leads_somewhere(page: str, target: str) -> None:
    """A relative link names a file or folder of the repository."""
    assert (ROOT / page).parent.joinpath(target).exists(), f"{page} links to {target}"
