"""Settings: what wins over what, and what is said about wrong values and names."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import gemmlink
from gemmlink import settings
from gemmlink.errors import InvalidArgument
from gemmlink.prepared import choose
from gemmlink.settings import Settings
from gemmlink.spawn import run_ranks

ONE = torch.ones(1, 1)
GOOD = [
    ("TRANSPORT", "shm", "transport", "shm"),
    ("EPILOGUE", "fused-push", "epilogue", "fused-push"),
    ("BACKEND", "package.module:Thing", "backend", "package.module:Thing"),
    ("CHUNKS", "auto", "chunks", None),
    ("CHUNKS", "1", "chunks", 1),
    ("CHUNKS", " 64 ", "chunks", 64),
    ("LANES", "16", "lanes", 16),
    ("TIMEOUT_S", "0.5", "timeout_s", 0.5),
    ("CACHE_DIR", "/somewhere", "cache_dir", "/somewhere"),
    ("PLUGINS", "one, two,", "plugins", ("one", "two")),
    ("PLUGINS", "none", "plugins", ()),
    ("LOG", "debug", "log", "debug"),
    ("DEBUG", "1", "debug", True),
    ("DEBUG", "0", "debug", False),
]
BAD = [
    ("CHUNKS", "0", "auto or a whole number from 1 to 64"),
    ("CHUNKS", "65", "auto or a whole number from 1 to 64"),
    ("CHUNKS", "2.5", "auto or a whole number from 1 to 64"),
    ("LANES", "17", "a whole number from 1 to 16"),
    ("LANES", "many", "a whole number from 1 to 16"),
    ("TIMEOUT_S", "0", "a number of seconds above 0"),
    ("TIMEOUT_S", "-1", "a number of seconds above 0"),
    ("TIMEOUT_S", "nan", "a number of seconds above 0"),
    ("TIMEOUT_S", "inf", "a number of seconds above 0"),
    ("TIMEOUT_S", "soon", "a number of seconds above 0"),
    ("LOG", "loud", "debug, info, warning, error"),
    ("DEBUG", "yes", "0 or 1"),
]


@pytest.fixture
def home(tmp_path: Path) -> dict[str, str]:
    """An environment whose settings file is that of this test."""
    return {"XDG_CONFIG_HOME": str(tmp_path)}


def _write(home: dict[str, str], text: str) -> None:
    settings.config_file(home).write_text(text)


@pytest.mark.parametrize(("name", "text", "field", "value"), GOOD)
def test_each_variable_is_read(
    home: dict[str, str], name: str, text: str, field: str, value: object
) -> None:
    assert getattr(settings.read({**home, f"GEMMLINK_{name}": text}), field) == value


@pytest.mark.parametrize(("name", "text", "field", "value"), GOOD)
def test_the_file_holds_the_same_names(
    home: dict[str, str], name: str, text: str, field: str, value: object
) -> None:
    _write(home, f"[gemmlink]\n{name.lower()} = {text}\n")
    assert getattr(settings.read(home), field) == value


def test_every_field_has_a_variable_in_the_tables() -> None:
    assert settings.__doc__ is not None
    for field in Settings.__dataclass_fields__:
        assert f"``GEMMLINK_{field.upper()}``" in settings.__doc__, f"{field} is not documented"
        assert field.upper() in {name for name, *_ in GOOD}, f"{field} is not tested"


def test_without_anything_the_defaults_hold(home: dict[str, str]) -> None:
    assert settings.read(home) == Settings()
    assert Settings().prepare_timeout_s == 300


def test_the_environment_beats_the_file(home: dict[str, str]) -> None:
    _write(home, "[gemmlink]\nchunks = 3\nlanes = 4\n")
    found = settings.read({**home, "GEMMLINK_CHUNKS": "5"})
    assert (found.chunks, found.lanes) == (5, 4)


def test_an_argument_beats_the_environment() -> None:
    from_environment = Settings(transport="t", epilogue="e", backend="b", chunks=5)
    choice = choose(from_environment, "shm", "push", "eager", 3)
    assert (choice.transport, choice.epilogue, choice.backend, choice.chunks) == (
        "shm",
        "push",
        "eager",
        3,
    )
    choice = choose(from_environment, "auto", "auto", "auto", None)
    assert (choice.transport, choice.epilogue, choice.backend, choice.chunks) == ("t", "e", "b", 5)


def test_an_operation_follows_argument_environment_and_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The same through the public interface."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    (tmp_path / "gemmlink.ini").write_text("[gemmlink]\nchunks = 2\nepilogue = split-push\n")

    def composed(chunks: int | None = None) -> str:
        return gemmlink.GemmAllGather(2, 2, 2, group=gemmlink.SELF, chunks=chunks).explain()

    assert "split-push" in composed()
    assert "chunks 2: asked for" in composed()
    monkeypatch.setenv("GEMMLINK_CHUNKS", "3")
    assert "chunks 3: asked for" in composed()
    assert "chunks 4: asked for" in composed(chunks=4)


@pytest.mark.parametrize(("name", "text", "good"), BAD)
def test_a_bad_value_lists_the_good_ones(
    home: dict[str, str], name: str, text: str, good: str
) -> None:
    with pytest.raises(InvalidArgument) as caught:
        settings.read({**home, f"GEMMLINK_{name}": text})
    assert str(caught.value) == f"GEMMLINK_{name} must be {good}; got '{text}'"


def test_a_bad_value_in_the_file_names_the_file(home: dict[str, str]) -> None:
    _write(home, "[gemmlink]\nlanes = 0\n")
    with pytest.raises(InvalidArgument, match=r"lanes in .*gemmlink\.ini must be a whole number"):
        settings.read(home)


def test_an_unknown_name_in_the_file_lists_the_known(home: dict[str, str]) -> None:
    _write(home, "[gemmlink]\nchunk = 2\n")
    with pytest.raises(InvalidArgument, match=r"may set transport, epilogue, .*; got chunk\. "):
        settings.read(home)


def test_a_file_that_is_no_ini_file_is_refused(home: dict[str, str]) -> None:
    _write(home, "chunks = 2\n")
    with pytest.raises(InvalidArgument, match=r"gemmlink\.ini must be an INI file"):
        settings.read(home)


def test_empty_means_unset(home: dict[str, str]) -> None:
    _write(home, "[gemmlink]\nchunks =\nlanes = 3\n")
    empty = {f"GEMMLINK_{name.upper()}": " " for name in Settings.__dataclass_fields__}
    assert settings.read({**home, **empty}) == Settings(lanes=3)


def test_an_unknown_name_is_one_warning_with_the_nearest(
    home: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(settings, "_warned", set())
    environ = {**home, "GEMMLINK_TRANPORT": "shm"}
    with pytest.warns(
        UserWarning, match="GEMMLINK_TRANPORT is not a setting .* GEMMLINK_TRANSPORT"
    ):
        assert settings.read(environ) == Settings()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        settings.read(environ)


FORMS: dict[str, Callable[[], Any]] = {
    "function": lambda: gemmlink.gemm_all_gather(ONE, ONE, group=gemmlink.SELF),
    "object": lambda: gemmlink.GemmAllGather(1, 1, 1, group=gemmlink.SELF),
    "cache": lambda: settings.current(),
}


@pytest.mark.parametrize("form", FORMS)
def test_the_warning_points_at_the_users_line(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """However long the way from there to the settings is."""
    monkeypatch.setattr(settings, "_warned", set())
    monkeypatch.setenv("GEMMLINK_TRANPORT", "shm")
    settings._remembered.cache_clear()
    with pytest.warns(UserWarning, match="GEMMLINK_TRANPORT is not a setting") as caught:
        FORMS[form]()
    (warning,) = caught
    line = FORMS[form].__code__.co_firstlineno
    assert (warning.filename, warning.lineno) == (__file__, line)


def _rank() -> str:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        settings.current()
    return ", ".join(str(warning.message) for warning in caught)


def test_ranks_do_not_repeat_the_warning_of_the_process_that_started_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(settings, "_warned", set())
    monkeypatch.setenv("GEMMLINK_TRANPORT", "shm")
    with pytest.warns(UserWarning, match="GEMMLINK_TRANPORT is not a setting") as caught:
        said = run_ranks(1, _rank)
    assert said == [""]
    (warning,) = caught
    assert warning.filename == __file__


def test_a_name_like_no_other_is_a_warning_without_a_guess(
    home: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(settings, "_warned", set())
    with pytest.warns(UserWarning, match="GEMMLINK_QQQQQQQQQ is not a setting of gemmlink$"):
        settings.read({**home, "GEMMLINK_QQQQQQQQQ": "1"})
    assert settings.unknown_names({"GEMMLINK_QQQQQQQQQ": "1"}) == {"GEMMLINK_QQQQQQQQQ": None}


def test_names_of_plugins_are_left_alone(home: dict[str, str]) -> None:
    """A warning would be an error here."""
    settings.read({**home, "GEMMLINK_X_RING_DEPTH": "3"})
    assert settings.unknown_names({"GEMMLINK_X_RING_DEPTH": "3"}) == {}


def test_a_changed_variable_counts_at_the_next_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GEMMLINK_LANES", "2")
    assert settings.current().lanes == 2
    monkeypatch.setenv("GEMMLINK_LANES", "3")
    assert settings.current().lanes == 3


@pytest.mark.parametrize("timeout_s", [0.0, -1.0, float("nan")])
def test_a_limit_must_be_above_zero(timeout_s: float) -> None:
    with pytest.raises(InvalidArgument, match="timeout_s must be above 0"):
        gemmlink.GemmAllGather(1, 1, 1, group=gemmlink.SELF, timeout_s=timeout_s)


@pytest.mark.parametrize("sizes", [(-1, 1, 1), (1, -1, 1), (1, 1, -1)])
def test_sizes_are_not_negative(sizes: tuple[int, int, int]) -> None:
    with pytest.raises(InvalidArgument, match=r"must be at least 0; got (n|k|max_m)=-1"):
        gemmlink.GemmAllGather(*sizes, group=gemmlink.SELF)


@pytest.mark.parametrize(
    ("dtype", "out_dtype", "text"),
    [
        (torch.float64, None, "inputs must be one of float32, bfloat16, float16; got float64"),
        (torch.int8, None, "inputs must be one of"),
        (torch.float32, torch.float16, "float16 for float32 inputs"),
        (torch.bfloat16, torch.float16, "float16 for bfloat16 inputs"),
    ],
)
def test_dtypes_are_checked_when_an_operation_is_made(
    dtype: torch.dtype, out_dtype: torch.dtype | None, text: str
) -> None:
    with pytest.raises(InvalidArgument, match=text):
        gemmlink.GemmAllGather(1, 1, 1, dtype, out_dtype, group=gemmlink.SELF)
