"""Mistakes with the operations that exchange or add: all ranks hear of them, and go on."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import gemmlink
from tests.conftest import Ranks
from tests.operations import BF16, F32, FUNCTIONS, NAMES, OBJECTS, Asked, K, call, check
from tests.recovery import failing
from tests.refs import FEW_MODES

WORLD, N, M, EXTENT = 3, 7, 4, 6
FP8 = torch.float8_e4m3fn
#: No rank may take longer to hear of a mistake; the limit of a call is twenty seconds.
HEARD_S = 15.0
each_epilogue = pytest.mark.parametrize("mode", FEW_MODES)


def _asked(name: str, number: int, rows: tuple[int, ...] = (M,) * WORLD) -> Asked:
    return Asked(name, rows, N, number, EXTENT if name == "all_to_all" else None)


def _function(asked: Asked, rank: int, mode: str, **rest: Any) -> Any:
    """A call of the function form with these inputs; ``rest`` replaces arguments."""
    given = {"a": asked.a(rank), "b": asked.b(rank), "epilogue": mode}
    if asked.name == "all_to_all":
        given["extent"] = asked.extent
    return FUNCTIONS[asked.name](**{**given, **rest})


def _good(rank: int, name: str, mode: str, number: int) -> None:
    asked = _asked(name, number)
    check(_function(asked, rank, mode), asked, rank, f"{mode}, a good call afterwards")


def _refused(bad: Callable[[], Any], what: str) -> str:
    """The text of an ``InvalidArgument`` that comes in time."""
    began = time.monotonic()
    error = failing(bad)
    assert isinstance(error, gemmlink.InvalidArgument), f"{what}: {error!r}"
    assert time.monotonic() - began < HEARD_S, f"{what}: late"
    return str(error)


# Sums of unequal shapes.


def _unequal(rank: int, mode: str) -> list[str]:
    told = []
    for number, rows in enumerate([(4, 4, 3), (0, 4, 4), (5, 1, 2), (4, 0, 0)]):
        for name in ("reduce_scatter", "all_reduce"):
            asked = _asked(name, number, rows)
            with OBJECTS[name](N, K, 9, epilogue=mode) as op:
                bad: Callable[[], Any] = lambda: op(asked.a(rank), asked.b(rank))  # noqa: B023, E731
                told.append(f"{rows} {_refused(bad, f'{name} {rows}')}")
                call(op, _asked(name, number), rank, "after a refusal")
            text = _refused(lambda: _function(asked, rank, mode), f"{name} {rows}")  # noqa: B023
            told.append(f"{rows} {text}")
            _good(rank, name, mode, number)
    return told


@each_epilogue
def test_sums_of_unequal_m_are_refused_with_all_of_them(ranks: Ranks, mode: str) -> None:
    for rank, told in enumerate(ranks(WORLD).run(_unequal, mode, timeout_s=60)):
        for text in told:
            rows = [int(row) for row in text[1:].split(")")[0].split(", ")]
            assert "M must be equal on all ranks of" in text, f"rank {rank}: {text}"
            assert f"the ranks' M are {rows}" in text, f"rank {rank}: {text}"


# Ranks that ask for different things.

#: What rank 1 asks for and others do not, and the two values as every rank must name them.
DIFFERENT: Mapping[str, tuple[str, dict[str, Any], tuple[str, str]]] = {
    "extent": ("all_to_all", {"extent": 3}, (f"{EXTENT} on rank 0", "3 on rank 1")),
    "no extent": ("all_to_all", {"extent": 0}, (f"{EXTENT} on rank 0", "0 on rank 1")),
    "keep_product": ("all_to_all", {"keep_product": True}, ("False on rank 0", "True on rank 1")),
    "wire_dtype": ("all_reduce", {"wire_dtype": FP8}, ("None", "float8_e4m3fn")),
    "wire of a gather": ("all_gather", {"wire_dtype": FP8}, ("None", "float8_e4m3fn")),
    "deterministic": (
        "reduce_scatter",
        {"deterministic": False},
        ("True on rank 0", "False on rank 1"),
    ),
    "in order": ("all_reduce", {"deterministic": False}, ("True on rank 0", "False on rank 1")),
    "bits": ("all_reduce", {"bit_identical": True}, ("False on rank 0", "True on rank 1")),
    "epilogue": ("all_reduce", {"epilogue": "push+pull"}, ("'push", "'push+pull'")),
}


def _different(rank: int) -> dict[str, list[str]]:
    told: dict[str, list[str]] = {}
    for number, (what, (name, other, _)) in enumerate(DIFFERENT.items()):
        mine: dict[str, Any] = {"epilogue": "push"}
        if name == "all_to_all":
            mine["extent"] = EXTENT
        mine |= other if rank == 1 else {}
        made = OBJECTS[name](N, K, M, **mine)
        asked = _asked(name, number)
        told[what] = [
            _refused(made.prepare, f"{what}, object"),
            _refused(lambda: _function(asked, rank, "", **mine), f"{what}, function"),  # noqa: B023
        ]
        _good(rank, name, "push", number)
    return told


def test_ranks_that_ask_for_different_things_hear_both(ranks: Ranks) -> None:
    for rank, told in enumerate(ranks(WORLD).run(_different, timeout_s=60)):
        for what, texts in told.items():
            for text in texts:
                assert all(value in text for value in DIFFERENT[what][2]), f"rank {rank}: {text}"


def _other_operation(rank: int, mode: str) -> list[str]:
    """Rank 1 calls another function than the others, with the same tensors."""
    told = []
    for number, (mine, other) in enumerate(zip(NAMES, (*NAMES[1:], NAMES[0]), strict=True)):
        asked = _asked(other if rank == 1 else mine, number)
        told.append(_refused(lambda: _function(asked, rank, mode), asked.name))  # noqa: B023
        _good(rank, mine, mode, number)
    return told


@each_epilogue
def test_ranks_that_call_different_operations_hear_both(ranks: Ranks, mode: str) -> None:
    for told in ranks(WORLD).run(_other_operation, mode):
        for mine, other, text in zip(NAMES, (*NAMES[1:], NAMES[0]), told, strict=True):
            assert f"'{mine}'" in text, text
            assert f"'{other}'" in text, text


# Extents.


def _bad_extent(rank: int, mode: str) -> list[str]:
    """On all ranks, then on one alone: it was the only one to hear of it itself."""
    told = []
    for number, extent in enumerate((4, 5, 8, -3, True)):
        asked = _asked("all_to_all", number)
        for culprits in (range(WORLD), (number % WORLD,)):
            rest: dict[str, Any] = {"extent": extent} if rank in culprits else {}
            text = _refused(lambda: _function(asked, rank, mode, **rest), f"{extent}")  # noqa: B023
            told.append(text)
            _good(rank, "all_to_all", mode, number)
    made = failing(lambda: gemmlink.GemmAllToAll(N, K, M, extent=4))
    return [*told, str(made)]


@each_epilogue
def test_an_extent_that_cannot_be_dealt_out_is_heard_by_all(ranks: Ranks, mode: str) -> None:
    wanted = [
        *["extent=4. The nearest legal values are 3 and 6"] * 2,
        *["extent=5. The nearest legal values are 3 and 6"] * 2,
        *["extent must be a whole number from 0 to N=7; got 8"] * 2,
        *["extent must be a whole number from 0 to N=7; got -3"] * 2,
        *["extent must be a whole number from 0 to N=7; got True"] * 2,
        "extent=4. The nearest legal values are 3 and 6",
    ]
    for rank, told in enumerate(ranks(WORLD).run(_bad_extent, mode, timeout_s=60)):
        for text, part in zip(told, wanted, strict=True):
            assert part in text, f"rank {rank}: {text}"


# Outs.


def _bad_out(rank: int, name: str, mode: str) -> list[str]:
    """On rank 1 alone: another height, width, dtype, no tensor at all."""
    told = []
    with OBJECTS[name](N, K, M, epilogue=mode, **_extent(name)) as op:
        for number, make in enumerate(_outs(_asked(name, 0).want(rank).shape)):
            asked = _asked(name, number)
            rest = {"out": make} if rank == 1 else {}
            bad: Callable[[], Any] = lambda: op(asked.a(rank), asked.b(rank), **rest)  # noqa: B023, E731
            began = time.monotonic()
            error = failing(bad) if rank == 1 or not _late(name, number) else None
            if error is None:
                check(bad(), asked, rank, "a peer's out has a wrong height")
            else:
                assert isinstance(error, gemmlink.InvalidArgument), repr(error)
            assert time.monotonic() - began < HEARD_S
            told.append(str(error))
            call(op, _asked(name, 50 + number), rank, "after a wrong out")
    return told


def _extent(name: str) -> dict[str, Any]:
    return {"extent": EXTENT} if name == "all_to_all" else {}


def _late(name: str, number: int) -> bool:
    """Where blocks are stacked, the height is known only once all data is on its way."""
    return name == "all_to_all" and number == 0


def _outs(shape: tuple[int, ...]) -> list[Any]:
    rows, cols = shape
    return [
        torch.zeros(rows + 1, cols),
        torch.zeros(rows, cols + 1),
        torch.zeros(rows, cols, dtype=BF16),
        torch.zeros(rows * cols),
        [0.0],
    ]


@pytest.mark.parametrize("name", NAMES)
def test_an_out_that_does_not_fit_is_refused(ranks: Ranks, name: str) -> None:
    for mode in FEW_MODES:
        seen = ranks(WORLD).run(_bad_out, name, mode)
        rows, cols = _asked(name, 0).want(1).shape
        width = f"out must be a float32 tensor of shape (rows, {cols})"
        height = f"shape ({rows}, {cols})" if name == "all_to_all" else f"out must have {rows} rows"
        assert height in seen[1][0], seen[1][0]
        for told in seen:
            assert all(width in text for text in told[1:]), told
            assert seen[1][0] in told[0] or height in told[0] or told[0] == "None", told


# What an operation does not take.


#: Arguments of other operations.
NOT_TAKEN = {
    "all_gather": ("extent", "keep_product", "deterministic"),
    "all_to_all": ("wire_dtype", "deterministic"),
    "reduce_scatter": ("extent", "keep_product", "wire_dtype"),
    "all_reduce": ("extent", "keep_product"),
}


def _not_taken(rank: int) -> None:
    tensors = torch.ones(M, K), torch.ones(N, K)
    for name in ("reduce_scatter", "all_reduce"):
        with OBJECTS[name](N, K, M, epilogue="push") as op:
            for bad in (
                lambda: op(*tensors, rows=[M] * WORLD),
                lambda: FUNCTIONS[name](*tensors, rows=[M] * WORLD),  # noqa: B023
                lambda: FUNCTIONS[name](*tensors, extent=3),  # noqa: B023
            ):
                assert isinstance(failing(bad), TypeError), name
            call(op, _asked(name, 1), rank, "after a TypeError, which no peer need hear of")
    for name, make in OBJECTS.items():
        for word in ("epilog", *NOT_TAKEN[name]):
            error = failing(lambda: make(N, K, M, **{word: True}))  # noqa: B023
            assert isinstance(error, TypeError), f"{name} {word}: {error!r}"
            want = f"{make.__name__}.__init__() got an unexpected keyword argument '{word}'"
            assert str(error) == want


def test_what_an_operation_does_not_take_is_a_type_error(ranks: Ranks) -> None:
    ranks(WORLD).run(_not_taken)


#: Arguments that are refused on every rank before anything is set up: type and text.
CHOICES: list[tuple[str, dict[str, Any], str, str]] = [
    ("all_to_all", {"epilogue": "push+pull"}, "Unsupported", "all_to_all, which has 1"),
    ("reduce_scatter", {"epilogue": "push+pull"}, "Unsupported", "reduce_scatter, which has 1"),
    ("all_reduce", {"epilogue": "push+pull+push"}, "Unsupported", "all_reduce, which has 2"),
    ("all_reduce", {"epilogue": "push+collective"}, "Unsupported", "use windows, or none does"),
    ("all_reduce", {"epilogue": "collective+pull"}, "Unsupported", "use windows, or none does"),
    ("all_reduce", {"epilogue": "push+pul"}, "InvalidArgument", "Did you mean 'pull'"),
    ("all_reduce", {"result": "view", "epilogue": "collective"}, "Unsupported", "own window"),
    ("all_reduce", {"wire_dtype": FP8, "result": "view"}, "Unsupported", "with a wire_dtype"),
    ("all_reduce", {"wire_dtype": BF16}, "Unsupported", "wire_dtype must be float8_e4m3fn"),
    ("all_reduce", {"wire_dtype": "fp8"}, "InvalidArgument", "must be a torch.dtype or None"),
    ("all_reduce", {"deterministic": 1}, "InvalidArgument", "deterministic must be True or False"),
    ("all_to_all", {"keep_product": None}, "InvalidArgument", "keep_product must be True or"),
    ("all_to_all", {"bit_identical": "yes"}, "InvalidArgument", "bit_identical must be True or"),
    (
        "reduce_scatter",
        {"deterministic": False, "bit_identical": True},
        "InvalidArgument",
        "bit_identical results need sums in a fixed order",
    ),
]


def _bad_choices(rank: int) -> list[tuple[str, str]]:
    told = []
    for number, (name, given, *_) in enumerate(CHOICES):
        rest = {"epilogue": "push", "extent": EXTENT, **given}
        if name != "all_to_all":
            del rest["extent"]
        error = failing(lambda: OBJECTS[name](N, K, M, **rest).prepare())  # noqa: B023
        told.append((type(error).__name__, str(error)))
        function = {key: value for key, value in rest.items() if key != "result"}
        if len(function) == len(rest):
            asked = _asked(name, number)
            error = failing(lambda: _function(asked, rank, "", **function))  # noqa: B023
            assert (type(error).__name__, str(error)) == told[-1], f"function form: {error!r}"
        _good(rank, name, "push", number)
    return told


def test_what_cannot_be_served_is_said_on_every_rank(ranks: Ranks) -> None:
    for told in ranks(WORLD).run(_bad_choices, timeout_s=60):
        for (kind, text), (name, given, wanted, part) in zip(told, CHOICES, strict=True):
            assert (kind, part in text) == (wanted, True), f"{name} {given}: {kind} {text}"


def _one_bad(rank: int, mode: str) -> list[str]:
    """Rank 1 alone asks for what cannot be served; the others hear of it in the same call."""
    told = []
    wrong: list[dict[str, Any]] = [{"wire_dtype": "fp8"}, {"deterministic": 2}, {"b": None}]
    for number, rest in enumerate(wrong):
        asked = _asked("all_reduce", number)
        mine = rest if rank == 1 else {}
        told.append(_refused(lambda: _function(asked, rank, mode, **mine), "one"))  # noqa: B023
        _good(rank, "all_reduce", mode, number)
    return told


@each_epilogue
def test_one_rank_that_is_refused_is_heard_by_all(ranks: Ranks, mode: str) -> None:
    parts = ("wire_dtype must be", "deterministic must be True or False", "b must be a tensor of")
    for rank, told in enumerate(ranks(WORLD).run(_one_bad, mode)):
        for text, part in zip(told, parts, strict=True):
            assert part in text, f"rank {rank}: {text}"
            assert ("rank 1 refused" in text) == (rank != 1), f"rank {rank}: {text}"


def _remembered(rank: int) -> None:
    """What was prepared for other arguments is not taken, whichever came first."""
    for turn, keep in enumerate((False, True, False, True)):
        asked = _asked("all_to_all", turn)
        got = _function(asked, rank, "push", keep_product=keep)
        check(got, asked, rank, f"keep_product={keep}")
        assert (got.product is not None) == keep
    for turn, extent in enumerate((0, 3, 6, 3, 0)):
        asked = replace(_asked("all_to_all", turn), extent=extent)
        check(_function(asked, rank, "push"), asked, rank, f"extent={extent}")


def test_the_function_form_tells_arguments_apart(ranks: Ranks) -> None:
    ranks(WORLD).run(_remembered)


def _wrong_rows(rank: int, mode: str) -> list[str]:
    """An all-to-all takes every rank's M, and finds out when they are not."""
    told = []
    with gemmlink.GemmAllToAll(N, K, 9, extent=EXTENT, epilogue=mode) as op:
        for number, said in enumerate(([4, 4], [4, 4, 4, 4], [4, 5, 4], [4, 4, -1])):
            asked = _asked("all_to_all", number)
            bad: Callable[[], Any] = lambda: op(asked.a(rank), asked.b(rank), rows=said)  # noqa: B023, E731
            told.append(_refused(bad, f"rows {said}"))
            asked = replace(asked, rows=(4, 0, 9))
            call(op, asked, rank, "after a refusal", rows=[4, 0, 9])
    return told


@each_epilogue
def test_rows_that_are_not_so_are_refused(ranks: Ranks, mode: str) -> None:
    for told in ranks(WORLD).run(_wrong_rows, mode):
        assert all("rows" in text for text in told), told


def _no_gradients(rank: int) -> None:
    for name in NAMES:
        asked = _asked(name, 1)
        a = asked.a(rank).to(F32).requires_grad_()
        error = failing(lambda: _function(asked, rank, "push", a=a))  # noqa: B023
        assert isinstance(error, gemmlink.Unsupported), repr(error)
        assert "gradients do not pass" in str(error)
        _good(rank, name, "push", 2)
    assert dist.get_world_size() == WORLD


def test_gradients_are_refused(ranks: Ranks) -> None:
    ranks(WORLD).run(_no_gradients)
