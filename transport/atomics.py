"""Load, store and wait on one 64-bit word of memory that other processes share.

A word is a signed 64-bit integer at an address that is nonzero and a multiple of 8 bytes; the
caller keeps the mapping under it alive. A misplaced address is a ValueError, a value outside
64 bits an OverflowError. An address that is not mapped ends the process.

- `load(address)` acquires: whatever the writer wrote before its `store` is visible to the reader
  after the `load` that returned the stored value.
- `store(address, value)` releases: whatever this rank wrote before it is visible to those who
  then load the value. It is one write, so no reader sees half of a value.
- `wait(address, at_least, budget_ns)` loads until the word is at least `at_least` (signed), for
  at most `budget_ns` nanoseconds, and returns the last value it loaded: the caller compares, since
  running out of budget is not an error here. Other threads run meanwhile, and so do signal
  handlers, hence Ctrl-C. Zero or less means one load.

With the extension, `bound` makes functions of these three for addresses that are given once: see
`Bound`. Elsewhere it is None.

No operation adds, swaps or compares, and none orders a store before a later load.

The waiting rule: spin for 100 us, giving the processor away between looks from 5 us on, and then
sleep a twentieth of the time waited so far, but at least 20 us and at most 1 ms. So a wait of
seconds takes under a tenth of a processor, and sees a store late by about 5 % of the time waited,
at most about 1 ms. The spin covers what a rank waits in a small call: a sleep of 20 us lasts about
75, since the system rounds it up.

Python has no atomic access of its own, so there are several ways to it, taken in this order:

    extension   `gemmlink.transport._atomics`, built at installation when a C compiler is present
    libatomic   GCC's run-time library through ctypes, for an installation without a compiler; it
                may be absent, since few programs need it
    x86-plain   aligned 8-byte access through ctypes, on x86-64 only: there a plain load acquires
                and a plain store releases, and the interpreter reorders neither

`IMPLEMENTATION` names the one in use, or is "none"; then each operation raises `Unavailable`.
"""

from __future__ import annotations

import ctypes
import os
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

_SPIN_ONLY_NS = 5_000
_SPIN_UNTIL_NS = 100_000
_SLEEP_SHORTEST_NS = 20_000
_SLEEP_LONGEST_NS = 1_000_000
_SLEEP_DIVISOR = 20

# The C compiler's memory orders, as libatomic takes them.
_ACQUIRE = 2
_RELEASE = 3

_REMEDY = (
    "Install a C compiler and then gemmlink again, "
    "or install libatomic (Debian: `apt-get install libatomic1`)"
)


@dataclass(frozen=True)
class Bound:
    """Makers of functions that do the operations at addresses given once.

    ``keep`` is an object that keeps the memory there mapped; it lives as long as the function.
    """

    reader: Callable[[tuple[int, ...], object], Callable[[], tuple[int, ...]]]
    setter: Callable[[tuple[tuple[int, ...], ...], object], Callable[..., None]]
    waiter: Callable[[int, int, object], Callable[[int], int]]


@dataclass(frozen=True)
class Atomics:
    """One implementation of the three operations; ``bound`` where it saves something."""

    name: str
    load: Callable[[int], int]
    store: Callable[[int, int], None]
    wait: Callable[[int, int, int], int]
    bound: Bound | None = None


def select(name: str) -> Atomics:
    """The implementation called `name`; `Unavailable` when this machine lacks it."""
    if name not in _IMPLEMENTATIONS:
        raise ValueError(f"an implementation is one of {', '.join(_IMPLEMENTATIONS)}: got {name!r}")
    try:
        return _IMPLEMENTATIONS[name]()
    except _ABSENT as reason:
        _unavailable(f"{name} atomics are absent: {reason}")


def available() -> dict[str, str | None]:
    """Each implementation's name, in order of preference, with None or the reason it is absent."""
    return {name: _absence(name) for name in _IMPLEMENTATIONS}


def _absence(name: str) -> str | None:
    try:
        _IMPLEMENTATIONS[name]()
    except _ABSENT as reason:
        return str(reason)
    return None


# What an import or a library that is not there raises.
_ABSENT = (ImportError, OSError, AttributeError)


def _extension() -> Atomics:
    from gemmlink.transport import _atomics

    bound = Bound(_atomics.reader, _atomics.setter, _atomics.waiter)
    return Atomics("extension", _atomics.load, _atomics.store, _atomics.wait, bound)


def _libatomic() -> Atomics:
    library = ctypes.CDLL("libatomic.so.1")
    load_8 = library.__atomic_load_8
    load_8.argtypes, load_8.restype = (ctypes.c_void_p, ctypes.c_int), ctypes.c_int64
    store_8 = library.__atomic_store_8
    store_8.argtypes, store_8.restype = (ctypes.c_void_p, ctypes.c_int64, ctypes.c_int), None

    def load(address: int) -> int:
        value: int = load_8(_word(address), _ACQUIRE)
        return value

    def store(address: int, value: int) -> None:
        store_8(_word(address), _int64(value), _RELEASE)

    return Atomics("libatomic", load, store, _waiting(load))


def _x86_plain() -> Atomics:
    if platform.machine() not in ("x86_64", "AMD64") or ctypes.sizeof(ctypes.c_void_p) != 8:
        raise ImportError(f"plain access is atomic and ordered on x86-64, not {platform.machine()}")

    def load(address: int) -> int:
        return ctypes.c_int64.from_address(_word(address)).value

    def store(address: int, value: int) -> None:
        ctypes.c_int64.from_address(_word(address)).value = _int64(value)

    return Atomics("x86-plain", load, store, _waiting(load))


def _absent() -> Atomics:
    """Stands in where nothing works, so that importing never fails and using says why."""

    def load(address: int) -> int:
        _none_works()

    def store(address: int, value: int) -> None:
        _none_works()

    def wait(address: int, at_least: int, budget_ns: int) -> int:
        _none_works()

    return Atomics("none", load, store, wait)


def _none_works() -> NoReturn:
    reasons = "; ".join(f"{name}: {reason}" for name, reason in available().items())
    _unavailable(f"no atomic access to shared memory here ({reasons})")


def _unavailable(what: str) -> NoReturn:
    from gemmlink.errors import Unavailable

    raise Unavailable(what, fix=_REMEDY)


def _word(address: int) -> int:
    if address <= 0 or address % 8:
        raise ValueError(
            f"a word's address must be nonzero and a multiple of 8 bytes: got {address}"
        )
    return address


def _int64(value: int) -> int:
    # ctypes would cut the value silently.
    if not -(1 << 63) <= value < 1 << 63:
        raise OverflowError(f"a word holds a signed 64-bit integer: got {value}")
    return value


def _waiting(load: Callable[[int], int]) -> Callable[[int, int, int], int]:
    """The waiting rule around a `load`."""

    def wait(address: int, at_least: int, budget_ns: int) -> int:
        _int64(at_least)
        started = time.monotonic_ns()
        until = started + budget_ns
        while True:
            # The clock before the word: a store made in time is never missed.
            now = time.monotonic_ns()
            value = load(address)
            if value >= at_least or now >= until:
                return value
            _back_off(now - started, until - now)

    return wait


def _back_off(elapsed_ns: int, left_ns: int) -> None:
    if elapsed_ns >= _SPIN_UNTIL_NS:
        sleep = min(max(elapsed_ns // _SLEEP_DIVISOR, _SLEEP_SHORTEST_NS), _SLEEP_LONGEST_NS)
        time.sleep(min(sleep, left_ns) / 1e9)
    elif elapsed_ns >= _SPIN_ONLY_NS:
        os.sched_yield()


_IMPLEMENTATIONS: dict[str, Callable[[], Atomics]] = {
    "extension": _extension,
    "libatomic": _libatomic,
    "x86-plain": _x86_plain,
}


def _choose() -> Atomics:
    for make in _IMPLEMENTATIONS.values():
        try:
            return make()
        except _ABSENT:
            continue
    return _absent()


_chosen = _choose()
IMPLEMENTATION = _chosen.name
load = _chosen.load
store = _chosen.store
wait = _chosen.wait
bound = _chosen.bound
