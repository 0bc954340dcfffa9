"""`gemmlink.transport.atomics`: each implementation that can exist here keeps the same promises."""

from __future__ import annotations

import ctypes
import importlib.util
import mmap
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import threading
import time
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import pytest

from gemmlink.errors import Unavailable
from gemmlink.transport import atomics
from gemmlink.transport.atomics import Atomics, Bound

ROOT = Path(__file__).parents[2]
NAMES = ("extension", "libatomic", "x86-plain")
MS = 1_000_000
SECOND = 1_000_000_000

# The shared file of the two-process tests: two words in cache lines of their own, then the data.
FLAG = 0
REPLY = 128
DATA = 4096
DATA_BYTES = 64 * 1024


@dataclass(frozen=True)
class Case:
    """An implementation as a spawned process can find it again: by name, or by the built file."""

    name: str
    built: str | None = None

    def atomics(self) -> Atomics:
        return _load_extension(self.built) if self.built else atomics.select(self.name)


def _load_extension(path: str) -> Atomics:
    spec = importlib.util.spec_from_file_location("gemmlink.transport._atomics", path)
    assert spec is not None, f"{path} is no extension module's name"
    assert spec.loader is not None, f"{path} has no loader"
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    bound = Bound(module.reader, module.setter, module.waiter)
    return Atomics("extension", module.load, module.store, module.wait, bound)


def _build_extension(folder: Path) -> str:
    """Compile transport/_atomics.c, for an environment that was installed without a compiler."""
    compiler = next((path for name in ("cc", "gcc", "clang") if (path := shutil.which(name))), None)
    if compiler is None:
        pytest.skip("the extension is not built and there is no C compiler to build it")
    built = folder / "_atomics.abi3.so"
    include = sysconfig.get_path("include")
    flags = ["-std=gnu11", "-O2", "-shared", "-fPIC", f"-I{include}", "-o", str(built)]
    subprocess.run([compiler, *flags, str(ROOT / "transport" / "_atomics.c")], check=True)
    return str(built)


@pytest.fixture(scope="module", params=NAMES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    name: str = request.param
    reason = atomics.available()[name]
    if reason is None:
        return Case(name)
    if name == "extension":
        return Case(name, _build_extension(tmp_path_factory.mktemp("extension")))
    pytest.skip(reason)


@pytest.fixture
def ops(case: Case) -> Atomics:
    return case.atomics()


@pytest.fixture(scope="module")
def binding(tmp_path_factory: pytest.TempPathFactory) -> Atomics:
    """The one kind that binds words to their places."""
    if atomics.available()["extension"] is None:
        return Case("extension").atomics()
    return Case("extension", _build_extension(tmp_path_factory.mktemp("binding"))).atomics()


@pytest.fixture
def bound(binding: Atomics) -> Bound:
    assert binding.bound is not None, "the extension binds nothing"
    return binding.bound


@pytest.fixture
def word() -> Iterator[int]:
    """The address of a word that holds 0."""
    memory = ctypes.create_string_buffer(64)
    yield -(-ctypes.addressof(memory) // 8) * 8
    del memory


class Shared:
    """A mapping of a file, and addresses in it."""

    def __init__(self, path: str) -> None:
        with open(path, "r+b") as file:
            self.map = mmap.mmap(file.fileno(), 0)
        self._first = ctypes.c_char.from_buffer(self.map)
        self.base = ctypes.addressof(self._first)

    def close(self) -> None:
        del self._first
        self.map.close()


@pytest.fixture
def shared(tmp_path: Path) -> Iterator[tuple[str, Shared]]:
    path = tmp_path / "shared"
    path.write_bytes(bytes(DATA + DATA_BYTES))
    mapping = Shared(str(path))
    yield str(path), mapping
    mapping.close()


# Which implementation


def test_implementations_are_named_in_order_of_preference() -> None:
    found = atomics.available()
    assert tuple(found) == NAMES
    first = next((name for name, reason in found.items() if reason is None), "none")
    assert first == atomics.IMPLEMENTATION


def test_a_fallback_works_here() -> None:
    found = atomics.available()
    works = [name for name in NAMES[1:] if found[name] is None]
    assert works, f"no implementation without a compiler works here: {found}"


def test_module_functions_are_the_chosen_ones(word: int) -> None:
    atomics.store(word, 7)
    assert atomics.load(word) == 7
    assert atomics.wait(word, 7, 0) == 7


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(ValueError, match="one of extension, libatomic, x86-plain: got 'futex'"):
        atomics.select("futex")


def _missing() -> Atomics:
    raise OSError("libatomic.so.1: cannot open shared object file")


def test_an_absent_one_says_why_and_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(atomics._IMPLEMENTATIONS, "libatomic", _missing)
    assert atomics.available()["libatomic"] == "libatomic.so.1: cannot open shared object file"
    with pytest.raises(Unavailable, match=r"cannot open shared object file.*apt-get install"):
        atomics.select("libatomic")


def test_with_none_the_first_use_fails_and_not_the_import(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        monkeypatch.setitem(atomics._IMPLEMENTATIONS, name, _missing)
    none = atomics._choose()
    assert none.name == "none"
    with pytest.raises(Unavailable, match="no atomic access"):
        none.load(8)
    with pytest.raises(Unavailable, match="no atomic access"):
        none.store(8, 1)
    with pytest.raises(Unavailable, match="no atomic access"):
        none.wait(8, 1, 0)


def test_python_and_c_state_the_same_waiting_rule() -> None:
    header = (ROOT / "transport" / "_atomics_core.h").read_text()
    names = ("SPIN_ONLY", "SPIN_UNTIL", "SLEEP_SHORTEST", "SLEEP_LONGEST", "SLEEP_DIVISOR")
    for name in names:
        unit = "" if name == "SLEEP_DIVISOR" else "_NS"
        value = getattr(atomics, f"_{name}{unit}")
        assert f"#define GEMMLINK_{name} {value}\n" in header, f"{name} is {value} in Python only"


# One word


@pytest.mark.parametrize(
    "value",
    [0, 1, -1, 2**31 - 1, 2**31, -(2**31) - 1, 2**32, 2**32 + 5, 2**62, 2**63 - 1, -(2**63)],
)
def test_a_stored_value_is_loaded(ops: Atomics, word: int, value: int) -> None:
    ops.store(word, value)
    assert ops.load(word) == value
    assert ctypes.c_int64.from_address(word).value == value


def test_a_store_touches_its_own_eight_bytes(ops: Atomics, word: int) -> None:
    neighbours = (ctypes.c_int64 * 3).from_address(word)
    neighbours[:] = [-1, -1, -1]
    ops.store(word + 8, 5)
    assert list(neighbours) == [-1, 5, -1]


@pytest.mark.parametrize("value", [2**63, -(2**63) - 1])
def test_a_value_beyond_64_bits_is_refused(ops: Atomics, word: int, value: int) -> None:
    with pytest.raises(OverflowError):
        ops.store(word, value)
    with pytest.raises(OverflowError):
        ops.wait(word, value, 0)
    assert ops.load(word) == 0


@pytest.mark.parametrize("offset", [1, 4, 7])
def test_a_misaligned_address_is_refused(ops: Atomics, word: int, offset: int) -> None:
    _refuses(ops, word + offset)


@pytest.mark.parametrize("address", [0, -8])
def test_an_address_of_no_memory_is_refused(ops: Atomics, address: int) -> None:
    _refuses(ops, address)


def _refuses(ops: Atomics, address: int) -> None:
    match = f"nonzero and a multiple of 8 bytes: got {address}$"
    with pytest.raises(ValueError, match=match):
        ops.load(address)
    with pytest.raises(ValueError, match=match):
        ops.store(address, 1)
    with pytest.raises(ValueError, match=match):
        ops.wait(address, 1, 0)


# Waiting


@pytest.mark.parametrize(("value", "at_least"), [(5, 5), (6, 5), (2**40, 3), (-3, -4), (0, -1)])
def test_a_satisfied_wait_returns_at_once(
    ops: Atomics, word: int, value: int, at_least: int
) -> None:
    ops.store(word, value)
    took = []
    for _ in range(5):
        started = time.monotonic_ns()
        assert ops.wait(word, at_least, SECOND) == value
        took.append(time.monotonic_ns() - started)
    # The best of some, since a busy machine may stop us at any place.
    assert min(took) < 10 * MS, f"{took=} ns"


@pytest.mark.parametrize(("value", "at_least"), [(4, 5), (-5, -4), (-1, 0), (3, 2**40)])
@pytest.mark.parametrize("budget", [0, -1, -(2**62)])
def test_without_a_budget_the_word_is_read_once(
    ops: Atomics, word: int, value: int, at_least: int, budget: int
) -> None:
    ops.store(word, value)
    assert ops.wait(word, at_least, budget) == value


@pytest.mark.parametrize("budget", [10_000, MS, 50 * MS, 250 * MS])
def test_a_wait_ends_with_its_budget(ops: Atomics, word: int, budget: int) -> None:
    started = time.monotonic_ns()
    assert ops.wait(word, 1, budget) == 0
    took = time.monotonic_ns() - started
    # Not earlier; and later only by what a busy machine takes to run us again.
    assert budget <= took < budget + SECOND, f"{took=} ns for {budget=} ns"


def test_the_longest_budget_does_not_wrap(ops: Atomics, shared: tuple[str, Shared]) -> None:
    """A process stores, so that the wait ends even where threads and signals would be kept out."""
    path, mapping = shared
    script = f"import time; time.sleep(0.25); open({path!r}, 'r+b', 0).write(bytes([1, *bytes(7)]))"
    store = subprocess.Popen([sys.executable, "-I", "-S", "-W", "ignore", "-c", script])
    seen = ops.wait(mapping.base + FLAG, 1, 2**63 - 1)
    assert store.wait(30) == 0
    assert seen == 1


def test_other_threads_run_during_a_wait(ops: Atomics, word: int) -> None:
    """A wait that keeps the GIL keeps the thread that would end it from running."""
    store = threading.Timer(0.05, ops.store, (word, 3))
    store.start()
    seen = ops.wait(word, 3, 5 * SECOND)
    store.join()
    assert seen == 3


def test_a_signal_handler_runs_during_a_wait(ops: Atomics, word: int) -> None:
    """Or Ctrl-C would do nothing for as long as the budget."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        started = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            ops.wait(word, 1, 5 * SECOND)
        assert time.monotonic() - started < 4, "the handler ran when the wait was over"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_a_handled_signal_does_not_end_a_wait(ops: Atomics, word: int) -> None:
    handled = threading.Event()
    before = signal.signal(signal.SIGALRM, lambda number, frame: handled.set())
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.02, 0.02)
        started = time.monotonic_ns()
        assert ops.wait(word, 1, 200 * MS) == 0
        assert time.monotonic_ns() - started >= 200 * MS
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert handled.is_set()


def test_a_long_wait_takes_under_a_tenth_of_a_processor(ops: Atomics, word: int) -> None:
    used = time.process_time()
    assert ops.wait(word, 1, 2 * SECOND) == 0
    used = time.process_time() - used
    assert used < 0.2, f"{used:.3f} s of processor time for a wait of 2 s"


# Two processes


def _publish(case: Case, path: str, rounds: int) -> None:
    ops = case.atomics()
    mapping = Shared(path)
    for i in range(1, rounds + 1):
        mapping.map[DATA : DATA + DATA_BYTES] = _pattern(i)
        ops.store(mapping.base + FLAG, i)
        if ops.wait(mapping.base + REPLY, i, 10 * SECOND) != i:
            os._exit(3)
    mapping.close()


def _pattern(i: int) -> bytes:
    return i.to_bytes(8, "little") * (DATA_BYTES // 8)


def test_what_was_written_before_a_store_is_seen_after_the_wait(
    case: Case, shared: tuple[str, Shared]
) -> None:
    """Catches a store that is not seen by another process, or is seen before the data."""
    rounds = 2000
    ops = case.atomics()
    path, mapping = shared
    writer = multiprocessing.get_context("spawn").Process(
        target=_publish, args=(case, path, rounds), daemon=True
    )
    writer.start()
    try:
        for i in range(1, rounds + 1):
            seen = ops.wait(mapping.base + FLAG, i, (60 if i == 1 else 10) * SECOND)
            assert seen == i, f"round {i}: the flag holds {seen}, {writer.exitcode=}"
            data = mapping.map[DATA : DATA + DATA_BYTES]
            assert data == _pattern(i), f"round {i}: the flag came before the data"
            ops.store(mapping.base + REPLY, i)
        writer.join(10)
        assert writer.exitcode == 0
    finally:
        writer.kill()
        writer.join()


# Bound to addresses


def test_the_extension_binds(ops: Atomics) -> None:
    assert (ops.bound is not None) == (ops.name == "extension")


def test_a_reader_reads_its_words_in_order(binding: Atomics, bound: Bound, word: int) -> None:
    binding.store(word, -5)
    binding.store(word + 16, (1 << 63) - 1)
    read = bound.reader((word + 16, word, word + 8), None)
    assert read() == ((1 << 63) - 1, -5, 0)
    binding.store(word, 7)
    assert read() == ((1 << 63) - 1, 7, 0), "the value of the first call came again"
    assert bound.reader((), None)() == ()


def test_a_setter_writes_each_value_to_its_group(binding: Atomics, bound: Bound, word: int) -> None:
    write = bound.setter(((word, word + 24), (), (word + 8,)), None)
    write(1, 2, -(1 << 63))
    assert [binding.load(word + at) for at in (0, 8, 16, 24)] == [1, -(1 << 63), 0, 1]


@pytest.mark.parametrize("count", [0, 1, 3])
def test_a_setter_wants_a_value_for_each_group(bound: Bound, word: int, count: int) -> None:
    write = bound.setter(((word,), (word + 8,)), None)
    with pytest.raises(TypeError, match=f"takes 2 arguments: got {count}"):
        write(*range(count))


def test_a_setter_refuses_what_a_word_cannot_hold(
    binding: Atomics, bound: Bound, word: int
) -> None:
    with pytest.raises(OverflowError):
        bound.setter(((word,), (word + 8,)), None)(1, 1 << 63)
    assert binding.load(word + 8) == 0


@pytest.mark.parametrize("offset", [1, 4, 7])
def test_bad_addresses_are_refused_when_binding(bound: Bound, word: int, offset: int) -> None:
    for make in (
        lambda: bound.reader((word, word + offset), None),
        lambda: bound.setter(((word,), (word, word + offset)), None),
        lambda: bound.waiter(word + offset, SECOND, None),
    ):
        with pytest.raises(ValueError, match="multiple of 8"):
            make()


def test_a_waiter_returns_what_it_saw(binding: Atomics, bound: Bound, word: int) -> None:
    wait = bound.waiter(word, 20 * MS, None)
    binding.store(word, 3)
    assert (wait(3), wait(-1)) == (3, 3)
    began = time.monotonic_ns()
    assert wait(4) == 3
    assert 20 * MS <= time.monotonic_ns() - began < SECOND, "the budget did not count"


def test_a_waiter_lets_other_threads_run(binding: Atomics, bound: Bound, word: int) -> None:
    timer = threading.Timer(0.05, binding.store, (word, 9))
    timer.start()
    assert bound.waiter(word, 20 * SECOND, None)(9) == 9
    timer.join()


def test_bound_functions_keep_the_memory_alive(bound: Bound, word: int) -> None:
    class Memory:
        pass

    memory = Memory()
    gone = weakref.ref(memory)
    functions = [
        bound.reader((word,), memory),
        bound.setter(((word,),), memory),
        bound.waiter(word, 0, memory),
    ]
    del memory
    while functions:
        assert gone() is not None, f"unmapped under {functions}"
        functions.pop()
    assert gone() is None, "kept for ever"
