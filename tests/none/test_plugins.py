"""Plugins: registering, finding, clashing, failing; real distributions where it matters."""

from __future__ import annotations

import itertools
import logging
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import gemmlink
from gemmlink import plugins
from gemmlink.backends.eager import Eager
from gemmlink.epilogues.push import Push
from gemmlink.errors import InvalidArgument, Unavailable
from gemmlink.plugins import Entry, hookimpl
from gemmlink.transport.shm import SharedMemory

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test reads entry points anew and leaves the table of the process alone."""
    monkeypatch.setattr(plugins, "_registry", None)


class Mine(Eager):
    """A backend of this test."""

    name = "mine"


class Hooked:
    """A plugin as an object with hooks."""

    @hookimpl
    def gemmlink_backends(self) -> list[Entry]:
        return [Entry("hooked", f"{__name__}:Mine", "backend")]

    @hookimpl
    def gemmlink_transports(self) -> list[Entry]:
        return [Entry("hooked", "gemmlink.transport.shm:SharedMemory", "transport")]


def _names(kind: str) -> set[str]:
    return {entry.name for entry in plugins.entries(kind)}


def _multiplied_by(name: str) -> str:
    """A whole call, for a backend that is chosen by name."""
    with gemmlink.GemmAllGather(2, 3, 2, group=gemmlink.SELF, backend=name) as op:
        assert op(torch.ones(2, 3), torch.ones(2, 3)).tolist() == [[3.0, 3.0]] * 2
        return type(op.launch.parts.backend).__name__


# Registering in this process.


def test_a_strategy_object_can_be_chosen_by_its_name_until_it_is_taken_back() -> None:
    mine = Mine()
    gemmlink.register(mine)
    assert plugins.find("backend", "mine") is mine
    assert _multiplied_by("mine") == "Mine"
    gemmlink.unregister("mine")
    assert "mine" not in _names("backend")
    with pytest.raises(InvalidArgument, match="backend must be auto, eager or"):
        plugins.find("backend", "mine")


def test_an_entry_is_imported_when_it_is_chosen() -> None:
    gemmlink.register(Entry("lazy", "no_such_module:Thing", "backend", "pip install lazy"))
    assert "lazy" in _names("backend")
    with pytest.raises(Unavailable) as caught:
        plugins.find("backend", "lazy")
    assert str(caught.value) == (
        "backend 'lazy' needs no_such_module:Thing; got ModuleNotFoundError: "
        "No module named 'no_such_module'. pip install lazy"
    )
    assert isinstance(caught.value.__cause__, ModuleNotFoundError)
    gemmlink.unregister("lazy")
    gemmlink.register(Entry("lazy", f"{__name__}:Mine", "backend"))
    assert _multiplied_by("lazy") == "Mine"


def test_an_object_with_hooks_brings_all_its_entries_and_takes_them_back() -> None:
    gemmlink.register(Hooked())
    assert "hooked" in _names("backend") & _names("transport")
    assert _multiplied_by("hooked") == "Mine"
    gemmlink.unregister("Hooked")
    assert "hooked" not in _names("backend") | _names("transport")


def test_a_module_with_hooks_is_a_plugin() -> None:
    module = ModuleType("hooked_module")
    vars(module)["gemmlink_backends"] = hookimpl(
        lambda: [Entry("m", f"{__name__}:Mine", "backend")]
    )
    gemmlink.register(module)
    assert _multiplied_by("m") == "Mine"
    gemmlink.unregister("hooked_module")
    assert "m" not in _names("backend")


def test_every_change_is_counted() -> None:
    """Caches are keyed with this number, so that a name never stands for an object of before."""
    seen = [plugins.generation()]
    gemmlink.register(Mine())
    seen.append(plugins.generation())
    gemmlink.unregister("mine")
    seen.append(plugins.generation())
    assert seen == sorted(set(seen))


def test_another_object_under_the_same_name_is_used_at_once() -> None:
    """Through the function form, which remembers operations."""

    class Wrong(Mine):
        def multiply(self, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
            out.fill_(-1)

    def call() -> float:
        made = gemmlink.gemm_all_gather(
            torch.ones(1, 3), torch.ones(1, 3), group=gemmlink.SELF, backend="mine"
        )
        return made.item()

    gemmlink.register(Mine())
    assert call() == 3
    gemmlink.unregister("mine")
    gemmlink.register(Wrong())
    assert call() == -1


@pytest.mark.parametrize("name", ["mine", "shm", "eager", ""])
def test_only_what_was_registered_can_be_taken_back(name: str) -> None:
    with pytest.raises(InvalidArgument, match="takes a name that was registered"):
        gemmlink.unregister(name)
    assert "shm" in _names("transport")


# What is refused.


@pytest.mark.parametrize(
    ("first", "second", "text"),
    [
        (None, Entry("shm", "m:a", "transport"), "'shm' from register, which built-in has already"),
        (Mine(), Mine(), "'mine' from register, which register has already"),
        (Mine(), Entry("mine", "m:a", "backend"), "'mine' from register, which register has"),
        (
            Entry("hooked", "m:a", "backend"),
            Hooked(),
            r"'hooked' from register\(Hooked\), which register has already",
        ),
    ],
    ids=["built-in", "objects", "object and entry", "entry and hook"],
)
def test_a_name_that_is_taken_is_refused_naming_both_origins(
    first: Any, second: Any, text: str
) -> None:
    if first is not None:
        gemmlink.register(first)
    before = plugins.entries()
    with pytest.raises(InvalidArgument, match=text):
        gemmlink.register(second)
    assert plugins.entries() == before, "a refused plugin left something behind"


def test_the_same_name_for_another_kind_is_no_clash() -> None:
    gemmlink.register(Entry("shm", f"{__name__}:Mine", "backend"))
    assert _multiplied_by("shm") == "Mine"


class NoMultiply:
    """A backend without the method that matters."""

    name = "lame"
    interface = 1

    def supports(self, problem: object) -> None:
        return None


class NextInterface(Eager):
    """A backend of another version of the contract."""

    name = "next"
    interface = 2


@pytest.mark.parametrize(
    "choice", [NoMultiply(), f"{__name__}:NoMultiply", "entry"], ids=["object", "target", "entry"]
)
def test_an_object_that_breaks_the_contract_is_told_what_it_lacks(choice: Any) -> None:
    gemmlink.register(Entry("entry", f"{__name__}:NoMultiply", "backend"))
    with pytest.raises(InvalidArgument, match=r"contracts\.Backend; got .*, which lacks multiply"):
        plugins.find("backend", choice)


@pytest.mark.parametrize(
    "choice",
    [NextInterface(), f"{__name__}:NextInterface", "entry"],
    ids=["object", "target", "entry"],
)
def test_another_version_of_the_contract_is_refused(choice: Any) -> None:
    gemmlink.register(Entry("entry", f"{__name__}:NextInterface", "backend"))
    with pytest.raises(InvalidArgument) as caught:
        plugins.find("backend", choice)
    assert "'next' must be written for interface 1; got interface 2" in str(caught.value)


def test_another_version_of_the_contract_is_refused_when_it_is_registered() -> None:
    with pytest.raises(InvalidArgument, match="must be written for interface 1; got interface 2"):
        gemmlink.register(NextInterface())
    assert "next" not in _names("backend")


@pytest.mark.parametrize(
    ("kind", "part"), [("transport", Mine()), ("epilogue", SharedMemory()), ("backend", Push())]
)
def test_a_part_of_another_kind_is_refused(kind: str, part: Any) -> None:
    with pytest.raises(InvalidArgument, match=f"a {kind} must fulfil"):
        plugins.find(kind, part)


def test_a_plugin_is_registered_once() -> None:
    gemmlink.register(Hooked())
    with pytest.raises(InvalidArgument, match="registered once, under a name of its own"):
        gemmlink.register(Hooked())
    assert _multiplied_by("hooked") == "Mine"


@pytest.mark.parametrize(
    "plugin", [object(), 3, "mine", None], ids=["object", "number", "text", "None"]
)
def test_what_is_no_plugin_is_refused(plugin: Any) -> None:
    with pytest.raises(InvalidArgument, match="a plugin must implement gemmlink_transports"):
        gemmlink.register(plugin)


@pytest.mark.parametrize(
    "entry",
    [Entry("x", "module:attr", "transprot"), Entry("x", "module.attr", "backend")],
    ids=["kind", "target"],
)
def test_a_malformed_entry_is_refused(entry: Entry) -> None:
    with pytest.raises(InvalidArgument, match="must return Entry objects of kind"):
        gemmlink.register(entry)


def test_a_hook_that_returns_something_else_is_refused() -> None:
    class Odd:
        @hookimpl
        def gemmlink_backends(self) -> list[Any]:
            return [("odd", "m:a")]

    with pytest.raises(InvalidArgument, match="gemmlink_backends must return Entry objects"):
        gemmlink.register(Odd())
    gemmlink.register(Hooked())


# Distributions with entry points.

_numbers = itertools.count()


class Site:
    """A folder of installed distributions, on sys.path for one test."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def install(self, dist: str, point: str, source: str) -> str:
        """A distribution with one module, named by entry point ``point``; the module's name."""
        module = f"gemmlink_test_plugin_{next(_numbers)}"
        (self.folder / f"{module}.py").write_text(source.replace("MODULE", module))
        info = self.folder / f"{dist.replace('-', '_')}-1.5.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {dist}\nVersion: 1.5\n")
        (info / "entry_points.txt").write_text(f"[gemmlink]\n{point} = {module}\n")
        return module


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    monkeypatch.syspath_prepend(str(tmp_path))
    return Site(tmp_path)


GOOD = """
from gemmlink.backends.eager import Eager
from gemmlink.plugins import Entry, hookimpl

class Made(Eager):
    name = "NAME"

@hookimpl
def gemmlink_backends():
    return [Entry("NAME", "MODULE:Made", "backend", "pip install NAME")]
"""
BROKEN = "import a_library_that_is_not_installed\n"


def test_an_installed_distribution_offers_its_parts(site: Site) -> None:
    site.install("good-dist", "good", GOOD.replace("NAME", "good"))
    (entry,) = [entry for entry in plugins.entries("backend") if entry.name == "good"]
    assert entry.origin == "good-dist 1.5"
    assert entry.install_hint == "pip install good"
    assert _multiplied_by("good") == "Made"


def test_a_distribution_that_fails_to_import_leaves_the_others_usable(
    site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    for name, source in (("alpha", GOOD), ("broken", BROKEN), ("omega", GOOD)):
        site.install(f"{name}-dist", name, source.replace("NAME", name))
    with caplog.at_level(logging.WARNING, "gemmlink"):
        assert {"alpha", "omega", "eager"} <= _names("backend")
    assert _multiplied_by("alpha") == _multiplied_by("omega") == "Made"
    assert list(plugins.failures()) == ["broken"]
    (message,) = [record.getMessage() for record in caplog.records]
    assert message.startswith("plugin broken (broken-dist 1.5) was not loaded: No module named")


@pytest.mark.parametrize("kind", ["transport", "epilogue", "backend"])
def test_choosing_a_distribution_that_failed_raises_its_own_error(site: Site, kind: str) -> None:
    site.install("broken-dist", "broken", BROKEN)
    with pytest.raises(Unavailable) as caught:
        plugins.find(kind, "broken")
    assert "plugin 'broken' could not be loaded; got No module named 'a_library" in str(
        caught.value
    )
    assert isinstance(caught.value.__cause__, ModuleNotFoundError)


@pytest.mark.parametrize("reverse", [False, True])
def test_two_distributions_with_one_name_are_reported_and_order_does_not_matter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reverse: bool
) -> None:
    folders = [tmp_path / name for name in ("one", "two", "other")]
    for folder in folders:
        folder.mkdir()
    for folder, dist, name in zip(
        folders, ("one", "two", "other"), ("twin", "twin", "else"), strict=True
    ):
        Site(folder).install(f"{dist}-dist", dist, GOOD.replace("NAME", name))
    for folder in reversed(folders) if reverse else folders:
        monkeypatch.syspath_prepend(str(folder))
    (entry,) = [entry for entry in plugins.entries("backend") if entry.name == "twin"]
    assert entry.origin == "one-dist 1.5", "the winner depends on the order of folders"
    text = str(plugins.failures()["two"])
    assert "'twin' from two-dist 1.5, which one-dist 1.5 has already" in text
    assert _multiplied_by("else") == "Made"


@pytest.mark.parametrize(
    ("allowed", "found"),
    [
        ("alpha", {"alpha"}),
        ("alpha,omega", {"alpha", "omega"}),
        ("none", set()),
        ("", {"alpha", "omega"}),
    ],
)
def test_the_list_of_allowed_plugins(
    site: Site, monkeypatch: pytest.MonkeyPatch, allowed: str, found: set[str]
) -> None:
    """One that is not on the list is not even imported."""
    modules = {
        name: site.install(f"{name}-dist", name, GOOD.replace("NAME", name))
        for name in ("alpha", "omega")
    }
    monkeypatch.setenv("GEMMLINK_PLUGINS", allowed)
    assert _names("backend") - {"eager"} == found
    assert {name for name, module in modules.items() if module in sys.modules} == found


def test_listing_imports_no_part(site: Site) -> None:
    """Only the small module with the hooks is imported, and torch with gemmlink's own contracts."""
    source = GOOD.split("class Made")[0].replace("from gemmlink.backends.eager import Eager", "")
    hook = "@hookimpl" + GOOD.split("@hookimpl")[1]
    site.install("lazy-dist", "lazy", (source + hook).replace("NAME", "lazy"))
    script = (
        "import sys; sys.path.insert(0, sys.argv[1]); from gemmlink import plugins; "
        "names = [entry.name for entry in plugins.entries()]; "
        "assert 'lazy' in names and 'shm' in names and 'push' in names, names; "
        "print(*sorted(name for name in sys.modules if name.startswith('gemmlink.')))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(site.folder)], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    parts = ("gemmlink.backends", "gemmlink.epilogues", "gemmlink.transport")
    assert not [name for name in done.stdout.split() if name.startswith(parts)]
