"""Settings: an argument beats the environment, which beats the file, which beats the default.

| variable | meaning | default |
| --- | --- | --- |
| ``GEMMLINK_TRANSPORT`` | name or ``module:attribute`` of the transport | ``auto`` |
| ``GEMMLINK_EPILOGUE`` | name or ``module:attribute`` of the epilogue | ``auto`` |
| ``GEMMLINK_BACKEND`` | name or ``module:attribute`` of the backend | ``auto`` |
| ``GEMMLINK_CHUNKS`` | chunks per source, 1 to 64; ``auto`` decides | ``auto`` |
| ``GEMMLINK_LANES`` | lanes per peer, 1 to 16, for epilogues that use lanes | ``1`` |
| ``GEMMLINK_TIMEOUT_S`` | limit of a call in seconds; set-up gets five times as much | ``60`` |
| ``GEMMLINK_CACHE_DIR`` | folder for tuning results, once something is tuned | none |
| ``GEMMLINK_PLUGINS`` | entry points to load, separated by commas, or ``none`` | all |
| ``GEMMLINK_LOG`` | ``debug``, ``info``, ``warning`` or ``error`` | ``warning`` |
| ``GEMMLINK_DEBUG`` | ``1``: check every call's arguments across ranks before data moves | ``0`` |

The file is ``$XDG_CONFIG_HOME/gemmlink.ini`` (``~/.config/gemmlink.ini``), section ``[gemmlink]``,
with the same names in lower case and without the prefix. An empty value means unset. A bad *value*
is an error; an unknown ``GEMMLINK_*`` *name* is one warning. ``GEMMLINK_X_<PLUGIN>_*`` belongs to
plugins.
"""

from __future__ import annotations

import configparser
import difflib
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import FrameType
from typing import Any

from gemmlink.errors import InvalidArgument

PREFIX = "GEMMLINK_"
_PLUGIN_PREFIX = "GEMMLINK_X_"
MAX_CHUNKS = 64
MAX_LANES = 16
LOG_LEVELS = ("debug", "info", "warning", "error")


def _integer(low: int, high: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        value = int(text)
        if not low <= value <= high:
            raise ValueError
        return value

    return parse


def _chunks(text: str) -> int | None:
    return None if text == "auto" else _integer(1, MAX_CHUNKS)(text)


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 < value < 1e9:
        raise ValueError
    return value


def _level(text: str) -> str:
    if text not in LOG_LEVELS:
        raise ValueError
    return text


def _flag(text: str) -> bool:
    return {"0": False, "1": True}[text]


def _names(text: str) -> tuple[str, ...]:
    if text == "none":
        return ()
    return tuple(part.strip() for part in text.split(",") if part.strip())


@dataclass(frozen=True)
class _Field:
    parse: Callable[[str], Any]
    default: Any
    good: str


_FIELDS: Mapping[str, _Field] = {
    "transport": _Field(str, "auto", "a name or module:attribute"),
    "epilogue": _Field(str, "auto", "a name or module:attribute"),
    "backend": _Field(str, "auto", "a name or module:attribute"),
    "chunks": _Field(_chunks, None, f"auto or a whole number from 1 to {MAX_CHUNKS}"),
    "lanes": _Field(_integer(1, MAX_LANES), 1, f"a whole number from 1 to {MAX_LANES}"),
    "timeout_s": _Field(_seconds, 60.0, "a number of seconds above 0"),
    "cache_dir": _Field(str, None, "a folder"),
    "plugins": _Field(_names, None, "names separated by commas, or none"),
    "log": _Field(_level, "warning", ", ".join(LOG_LEVELS)),
    "debug": _Field(_flag, False, "0 or 1"),
}


_WATCHED = (*(PREFIX + name.upper() for name in _FIELDS), "XDG_CONFIG_HOME", "HOME")


@dataclass(frozen=True)
class Settings:
    """The settings in force; see the table of this module."""

    transport: str = "auto"
    epilogue: str = "auto"
    backend: str = "auto"
    chunks: int | None = None
    lanes: int = 1
    timeout_s: float = 60.0
    cache_dir: str | None = None
    plugins: tuple[str, ...] | None = None
    log: str = "warning"
    debug: bool = False

    @property
    def prepare_timeout_s(self) -> float:
        """Limit of set-up, in seconds: 300 by default."""
        return 5 * self.timeout_s


def config_file(environ: Mapping[str, str] = os.environ) -> Path:
    """Where the settings file is looked for."""
    home = environ.get("XDG_CONFIG_HOME") or os.path.join(environ.get("HOME") or "/", ".config")
    return Path(home) / "gemmlink.ini"


def current() -> Settings:
    """The settings of this process. Cheap: parsed again only when a variable has changed.

    Raises ``InvalidArgument`` for a bad value, naming good ones. The file is read once.
    """
    return _remembered(tuple(os.environ.get(name) for name in _WATCHED))


@lru_cache(maxsize=64)
def _remembered(_: tuple[str | None, ...]) -> Settings:
    found = read(os.environ)
    _set_log_level(found.log)
    return found


def read(environ: Mapping[str, str]) -> Settings:
    """Settings from ``environ`` and the file that it points to."""
    warn_unknown(environ)
    values: dict[str, Any] = {}
    for source, texts in (("file", _from_file(environ)), ("environment", _from_environ(environ))):
        for name, text in texts.items():
            values[name] = _parse(name, text, source, environ)
    return Settings(**values)


def unknown_names(environ: Mapping[str, str] = os.environ) -> dict[str, str | None]:
    """``GEMMLINK_*`` variables that mean nothing, each with the nearest name that does."""
    known = [PREFIX + name.upper() for name in _FIELDS]
    found: dict[str, str | None] = {}
    for name in sorted(environ):
        if name.startswith(PREFIX) and not name.startswith(_PLUGIN_PREFIX) and name not in known:
            # Without the prefix, which would make every name look like every other.
            ends = [other.removeprefix(PREFIX) for other in known]
            near = difflib.get_close_matches(name.removeprefix(PREFIX), ends, n=1, cutoff=0.5)
            found[name] = PREFIX + near[0] if near else None
    return found


_warned: set[str] = set()


def _set_log_level(level: str) -> None:
    logger = logging.getLogger("gemmlink")
    logger.setLevel(level.upper())
    # Python shows warnings even where no handler is configured, but nothing below them.
    if level in ("debug", "info") and not logger.hasHandlers():
        logger.addHandler(logging.StreamHandler())


def warn_unknown(environ: Mapping[str, str] = os.environ) -> frozenset[str]:
    """Warn of each of ``unknown_names`` once, at the line of the user that led here.

    Returns the names that this process has warned of so far.
    """
    for name, near in unknown_names(environ).items():
        if name not in _warned:
            _warned.add(name)
            hint = f"; did you mean {near}?" if near else ""
            _warn_the_user(f"{name} is not a setting of gemmlink{hint}")
    return frozenset(_warned)


def do_not_warn_of(names: Iterable[str]) -> None:
    """For a process whose parent has warned of ``names`` already."""
    _warned.update(names)


def _warn_the_user(text: str) -> None:
    # Not by a fixed stacklevel: the ways from a user's line to here differ in length.
    frame = sys._getframe()
    while _is_ours(frame) and frame.f_back is not None:
        frame = frame.f_back
    warnings.warn_explicit(
        text,
        UserWarning,
        frame.f_code.co_filename,
        frame.f_lineno,
        registry=frame.f_globals.setdefault("__warningregistry__", {}),
    )


def _is_ours(frame: FrameType) -> bool:
    # The package, for under ``python -m gemmlink`` the name is __main__.
    package = frame.f_globals.get("__package__") or ""
    return package.partition(".")[0] == "gemmlink"


def _from_environ(environ: Mapping[str, str]) -> dict[str, str]:
    found = {name: environ.get(PREFIX + name.upper(), "").strip() for name in _FIELDS}
    return {name: text for name, text in found.items() if text}


def _from_file(environ: Mapping[str, str]) -> dict[str, str]:
    path = config_file(environ)
    parser = configparser.ConfigParser(interpolation=None)
    try:
        parser.read(path)
        section = parser["gemmlink"] if parser.has_section("gemmlink") else {}
    except configparser.Error as error:
        raise InvalidArgument(f"{path} must be an INI file", str(error)) from error
    for name in section:
        if name not in _FIELDS:
            raise InvalidArgument(
                f"{path} may set {', '.join(_FIELDS)}", name, "Remove or correct that line."
            )
    return {name: text.strip() for name, text in section.items() if text.strip()}


def _parse(name: str, text: str, source: str, environ: Mapping[str, str]) -> Any:
    where = (
        PREFIX + name.upper() if source == "environment" else f"{name} in {config_file(environ)}"
    )
    try:
        return _FIELDS[name].parse(text)
    except (ValueError, KeyError):
        raise InvalidArgument(f"{where} must be {_FIELDS[name].good}", repr(text)) from None
