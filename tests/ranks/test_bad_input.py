"""Mistakes: every rank hears of them, in time, and a good call afterwards is right."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import gemmlink
from gemmlink.backends.eager import Eager
from gemmlink.core.call import Call
from tests.conftest import Ranks
from tests.refs import FEW_MODES, MODES, WINDOW_MODES, a_of, assert_equal, b_of, gathered, whole

N, K, M = 10, 8, 4
#: Limit of a call in these tests, in seconds. No rank may take longer to hear of a mistake.
LIMIT_S = 20.0
NAN = float("nan")

each_mode = pytest.mark.parametrize("mode", MODES)
each_epilogue = pytest.mark.parametrize("mode", FEW_MODES)


def _good_call(rank: int, call: int, mode: str, group: Any = None) -> None:
    """A call with new inputs, exactly right."""
    b = b_of(call, N, K)
    world = dist.get_world_size()
    got = gemmlink.gemm_all_gather(a_of(rank, call, M, K), b, epilogue=mode, group=group)
    assert_equal(got, gathered(call, [M] * world, b), f"{mode}, the good call {call}")


def _failing(bad: Callable[[], Any]) -> Exception:
    try:
        value = bad()
    except Exception as error:
        return error
    raise AssertionError(f"returned {value!r} where an error was due")


# Ranks that pass different things.

#: What rank 1 passes that others do not, and the two values as every rank must name them.
MISMATCHES: Mapping[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "n": ({"n": N + 1}, ("n must", f"{N} on rank", f"{N + 1} on rank 1")),
    "k": ({"k": K + 1}, ("k must", f"{K} on rank", f"{K + 1} on rank 1")),
    "dtype": ({"dtype": torch.bfloat16}, ("'float32'", "'bfloat16'")),
    "out_dtype": (
        {"dtype": torch.float16, "out_dtype": torch.float16},
        ("'float32'", "'float16'"),
    ),
    "epilogue": ({"epilogue": "split-push"}, ("'fused-push'", "'split-push'")),
    "mode": ({"epilogue": "collective"}, ("'fused-push'", "'collective'")),
    "transport": ({"transport": "shm"}, ("'auto'", "'shm'")),
    "backend": ({"backend": "eager"}, ("'auto'", "'eager'")),
    "rows": ({"rows": [M, M, M]}, ("None", f"[{M}, {M}, {M}]")),
    "rows of others": ({"rows": [M, M, M + 1]}, ("None", f"[{M}, {M}, {M + 1}]")),
}


def _mismatched_call(odd: bool, changes: dict[str, Any]) -> torch.Tensor:
    given: dict[str, Any] = {"n": N, "k": K, "dtype": torch.float32, "epilogue": "fused-push"}
    if "out_dtype" in changes:
        given |= {"dtype": torch.float16, "out_dtype": torch.float32}
    given |= changes if odd else {}
    n, k, dtype = given.pop("n"), given.pop("k"), given.pop("dtype")
    return gemmlink.gemm_all_gather(whole(1, M, k, dtype), whole(2, n, k, dtype), **given)


def _mismatch(rank: int, name: str, cached: bool, odd_rank: int) -> tuple[str, str]:
    changes, _ = MISMATCHES[name]
    if cached:
        _mismatched_call(False, changes)
        _good_call(rank, 1, "fused-push")
    error = _failing(lambda: _mismatched_call(rank == odd_rank, changes))
    _good_call(rank, 2, "fused-push")
    _good_call(rank, 3, "split-push")
    return type(error).__name__, str(error)


@pytest.mark.parametrize("cached", [False, True], ids=["first call", "later call"])
@pytest.mark.parametrize("name", MISMATCHES)
def test_ranks_that_pass_different_things_all_hear_both(
    ranks: Ranks, name: str, cached: bool
) -> None:
    """In a later call the other ranks have the operation at hand and wait in it."""
    outcomes = ranks(3).outcomes(_mismatch, name, cached, 1, env={"GEMMLINK_TIMEOUT_S": "20"})
    for outcome in outcomes:
        assert outcome.failure is None, f"rank {outcome.rank}: {outcome.error.trace}"
        kind, text = outcome.value
        assert kind == "InvalidArgument", text
        for part in MISMATCHES[name][1]:
            assert part in text, f"rank {outcome.rank} does not name {part!r}: {text}"
        assert outcome.seconds < LIMIT_S


def _same_operation_other_sizes(rank: int) -> str:
    """4 x 6 and 6 x 4: as many bytes from both ranks."""
    m, n = [(4, 6), (6, 4)][rank]
    error = _failing(lambda: gemmlink.gemm_all_gather(whole(1, m, K), whole(2, n, K)))
    return f"{type(error).__name__} {error}"


def test_equal_numbers_of_elements_do_not_hide_different_shapes(ranks: Ranks) -> None:
    for text in ranks(2).run(_same_operation_other_sizes):
        assert "InvalidArgument n must be equal on all ranks" in text
        assert "6 on rank 0 and 4 on rank 1" in text


def _object_mismatch(rank: int, changes: dict[str, Any]) -> str:
    given: dict[str, Any] = {"n": N, "k": K, "max_m": M, "epilogue": "fused-push", "chunks": 2}
    op = gemmlink.GemmAllGather(**(given | changes if rank == 1 else given))
    error = _failing(op.prepare)
    op.close()
    _good_call(rank, 2, "fused-push")
    return f"{type(error).__name__} {error}"


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"n": 11}, ("n must", "10 on rank 0 and 11 on rank 1")),
        ({"chunks": 3}, ("chunks must", "2 on rank 0 and 3 on rank 1")),
        ({"epilogue": "collective"}, ("'fused-push'", "'collective'")),
        ({"dtype": torch.bfloat16}, ("'float32'", "'bfloat16'")),
    ],
    ids=["n", "chunks", "epilogue", "dtype"],
)
def test_operations_made_differently_are_refused_when_prepared(
    ranks: Ranks, changes: dict[str, Any], parts: tuple[str, str]
) -> None:
    for text in ranks(3).run(_object_mismatch, changes):
        assert text.startswith("InvalidArgument"), text
        assert all(part in text for part in parts), text


# One rank whose own arguments are wrong.

Bad = tuple[dict[str, Any], str, str]


def _bad_arguments(name: str) -> Bad:
    """Changes to a good call of the object form, the type of the error and a part of its text."""
    wrong: dict[str, Callable[[], Bad]] = {
        "k of a": lambda: ({"a": whole(1, M, K + 1)}, "InvalidArgument", f"({M}, {K + 1})"),
        "k of b": lambda: ({"b": whole(1, N, K + 1)}, "InvalidArgument", f"({N}, {K + 1})"),
        "n of b": lambda: ({"b": whole(1, N + 1, K)}, "InvalidArgument", f"({N + 1}, {K})"),
        "dtype of a": lambda: (
            {"a": whole(1, M, K, torch.float16)},
            "InvalidArgument",
            "a must be a float32 tensor",
        ),
        "list": lambda: ({"a": [[1.0] * K]}, "InvalidArgument", "got list"),
        "none": lambda: ({"b": None}, "InvalidArgument", "got NoneType"),
        "one dimension": lambda: ({"a": torch.ones(K)}, "InvalidArgument", f"({K},)"),
        "three dimensions": lambda: ({"a": torch.ones(1, M, K)}, "InvalidArgument", "(1, 4, 8)"),
        "sparse": lambda: ({"a": torch.eye(K).to_sparse()}, "InvalidArgument", "sparse"),
        "columns of out": lambda: (
            {"out": torch.empty(3 * M, N + 1)},
            "InvalidArgument",
            f"({3 * M}, {N + 1})",
        ),
        "dtype of out": lambda: (
            {"out": torch.empty(3 * M, N).half()},
            "InvalidArgument",
            "float16",
        ),
        "out is a list": lambda: ({"out": [0.0]}, "InvalidArgument", "got list"),
        "short rows": lambda: ({"rows": [M, M]}, "InvalidArgument", "each of the 3 ranks"),
        "negative rows": lambda: ({"rows": [-1, M, M]}, "InvalidArgument", "[-1, 4, 4]"),
        "rows without me": lambda: ({"rows": [M, M + 1, M]}, "InvalidArgument", "rows[1]=5"),
        "gradient": lambda: (
            {"a": whole(1, M, K).requires_grad_()},
            "Unsupported",
            "gradients do not pass",
        ),
    }
    return wrong[name]()


BAD_ARGUMENTS = (
    "k of a",
    "k of b",
    "n of b",
    "dtype of a",
    "list",
    "none",
    "one dimension",
    "three dimensions",
    "sparse",
    "columns of out",
    "dtype of out",
    "out is a list",
    "short rows",
    "negative rows",
    "rows without me",
    "gradient",
)


def _one_refuses(rank: int, mode: str) -> dict[str, tuple[str, str]]:
    """One operation, all mistakes on rank 1 one after the other, a good call after each."""
    seen = {}
    with gemmlink.GemmAllGather(N, K, M, epilogue=mode) as op:
        for call, name in enumerate(BAD_ARGUMENTS):
            given: dict[str, Any] = {"a": a_of(rank, call, M, K), "b": b_of(call, N, K)}
            bad = {**given, **(_bad_arguments(name)[0] if rank == 1 else {})}
            error = _failing(lambda bad=bad: op(**bad))  # type: ignore[misc]
            seen[name] = (type(error).__name__, str(error))
            got = op(**given)
            assert_equal(got, gathered(call, [M] * 3, given["b"]), f"{mode} after {name}")
    return seen


@each_mode
def test_one_refusing_rank_is_heard_by_all_and_the_operation_stays_usable(
    ranks: Ranks, mode: str
) -> None:
    rows = ranks(3).run(_one_refuses, mode, timeout_s=60)
    for name in BAD_ARGUMENTS:
        _, kind, part = _bad_arguments(name)
        for rank, seen in enumerate(rows):
            assert part in seen[name][1], f"{name} on rank {rank}: {seen[name]}"
        assert rows[1][name][0] == kind
        for rank in (0, 2):
            assert rows[rank][name][0] == "InvalidArgument"
            assert "rank 1 refused" in rows[rank][name][1], f"{name}: {rows[rank][name]}"


def _function_refuses(rank: int, mode: str, name: str, cached: bool) -> tuple[str, str]:
    if cached:
        _good_call(rank, 1, mode)
    given: dict[str, Any] = {"a": a_of(rank, 2, M, K), "b": b_of(2, N, K), "epilogue": mode}
    bad = {**given, **(_bad_arguments(name)[0] if rank == 1 else {})}
    error = _failing(lambda: gemmlink.gemm_all_gather(**bad))
    _good_call(rank, 3, mode)
    return type(error).__name__, str(error)


@pytest.mark.parametrize("cached", [False, True], ids=["first call", "later call"])
@pytest.mark.parametrize(
    "name", ["k of a", "list", "columns of out", "rows without me", "gradient"]
)
@pytest.mark.parametrize("mode", ["fused-lanes", "collective"])
def test_a_refused_call_of_the_function_form_is_heard_by_all(
    ranks: Ranks, mode: str, name: str, cached: bool
) -> None:
    _, kind, part = _bad_arguments(name)
    for rank, (seen, text) in enumerate(ranks(3).run(_function_refuses, mode, name, cached)):
        assert seen == (kind if rank == 1 else "InvalidArgument"), text
        assert part in text, f"rank {rank}: {text}"


def _refuses_and_goes_on(rank: int, mode: str) -> str:
    """Rank 1 refuses one call and waits in the next before its peers have come to the first."""
    given: dict[str, Any] = {"a": a_of(rank, 2, M, K), "b": b_of(2, N, K), "epilogue": mode}
    if rank == 1:
        given["a"] = None
    else:
        time.sleep(1.0)
    error = _failing(lambda: gemmlink.gemm_all_gather(**given))
    _good_call(rank, 3, mode)
    return str(error)


@each_epilogue
def test_a_refusal_waits_for_peers_that_come_later(ranks: Ranks, mode: str) -> None:
    """What rank 1 posts in its next call must not hide that it refused the one before."""
    for text in ranks(3).run(_refuses_and_goes_on, mode):
        assert "a must be a tensor of two dimensions; got NoneType" in text


def _slow_to_deliver(rank: int, mode: str) -> None:
    """Rank 2 is still reading the entry records of call 1 when call 2 has been refused."""
    real = Call.result

    def slow(call: Call) -> torch.Tensor:
        if rank == 2 and call.epoch == 1 and not call.starts:
            time.sleep(0.3)
        return real(call)

    with (
        gemmlink.GemmAllGather(N, K, M, epilogue=mode) as op,
        mock.patch.object(Call, "result", slow),
    ):
        for call in (1, 2, 3):
            given: dict[str, Any] = {"a": a_of(rank, call, M, K), "b": b_of(call, N, K)}
            if call == 2:
                bad = given | ({"a": None} if rank == 1 else {})
                error = _failing(lambda bad=bad: op(**bad))  # type: ignore[misc]
                assert "got NoneType" in str(error), str(error)
            else:
                assert_equal(op(**given), gathered(call, [M] * 3, given["b"]), f"call {call}")


@pytest.mark.parametrize("mode", WINDOW_MODES)
def test_a_refused_call_lets_nobody_run_two_calls_ahead(ranks: Ranks, mode: str) -> None:
    """Each rank has two entry records; a third would overwrite one that is being read."""
    ranks(3).run(_slow_to_deliver, mode)


def _out_of_wrong_length(rank: int, mode: str, function: bool) -> list[str]:
    seen = []
    for call in (0, 2, 4):
        b = b_of(call, N, K)
        out = torch.full((3 * M + (rank == 1), N), NAN)
        with gemmlink.GemmAllGather(N, K, M, epilogue=mode) as op:
            form = (
                (lambda a, b, out: gemmlink.gemm_all_gather(a, b, out=out, epilogue=mode))
                if function
                else op
            )
            try:
                form(a_of(rank, call, M, K), b, out=out)
                assert_equal(out, gathered(call, [M] * 3, b), f"{mode} call {call}")
                seen.append("right")
            except gemmlink.InvalidArgument as error:
                seen.append(str(error))
            good = torch.full((3 * M, N), NAN)
            form(a_of(rank, call + 1, M, K), b, out=good)
            assert_equal(good, gathered(call + 1, [M] * 3, b), f"{mode} after call {call}")
    return seen


@pytest.mark.parametrize("function", [False, True], ids=["object", "function"])
@each_epilogue
def test_an_out_of_wrong_length_is_refused_where_it_was_passed(
    ranks: Ranks, mode: str, function: bool
) -> None:
    """Its length is known only once all M are; others may have their right result by then."""
    rows = ranks(3).run(_out_of_wrong_length, mode, function)
    for text in rows[1]:
        assert f"out must have shape ({3 * M}, {N})" in text
    for text in rows[0] + rows[2]:
        assert text == "right" or "rank 1 refused" in text, text


def _too_many_rows(rank: int, mode: str) -> str:
    with gemmlink.GemmAllGather(N, K, M, epilogue=mode) as op:
        b = b_of(0, N, K)
        m = M + (rank == 1)
        error = _failing(lambda: op(whole(0, m, K), b))
        got = op(a_of(rank, 0, M, K), b)
        assert_equal(got, gathered(0, [M] * 3, b), f"{mode} after too many rows")
    return f"{type(error).__name__} {error}"


@each_mode
def test_m_above_max_m_is_refused_on_every_rank(ranks: Ranks, mode: str) -> None:
    for text in ranks(3).run(_too_many_rows, mode):
        assert text.startswith(f"InvalidArgument M must be at most max_m={M}"), text
        assert f"M={M + 1}" in text


class Counting(Eager):
    """Counts the products that it was asked for."""

    name = "counting"
    products = 0

    def multiply(self, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
        self.products += 1
        super().multiply(a, b, out)


def _products_of_a_refused_call(rank: int, mode: str) -> int:
    backend = Counting()
    with gemmlink.GemmAllGather(N, K, M, epilogue=mode, backend=backend) as op:
        a = a_of(rank, 0, M, K) if rank != 1 else whole(0, M, K + 1)
        error = _failing(lambda: op(a, b_of(0, N, K)))
        assert isinstance(error, gemmlink.InvalidArgument), repr(error)
    return backend.products


@each_mode
def test_debug_finds_a_mistake_before_anything_is_multiplied(ranks: Ranks, mode: str) -> None:
    seen = ranks(3).run(_products_of_a_refused_call, mode, env={"GEMMLINK_DEBUG": "1"})
    assert seen == [0, 0, 0]


# Choices that do not exist.


def _choose(rank: int, choices: dict[str, str], only: int | None) -> None:
    mine = choices if only in (None, rank) else {}
    try:
        gemmlink.gemm_all_gather(a_of(rank, 0, M, K), b_of(0, N, K), **mine)  # type: ignore[arg-type]
    finally:
        _good_call(rank, 1, "auto")


@pytest.mark.parametrize(
    ("choices", "parts"),
    [
        (
            {"epilogue": "pussh"},
            ("epilogue must be auto, collective, lanes, pull, push", "'push'?"),
        ),
        (
            {"epilogue": "fused-pussh"},
            ("epilogue must be auto, collective, lanes, pull, push", "'push'?"),
        ),
        ({"transport": "shmm"}, ("transport must be auto, ipc, shm", "'shm'?")),
        ({"transport": "shmm", "epilogue": "collective"}, ("transport must be auto, ipc, shm",)),
        ({"backend": "eagre"}, ("backend must be auto, eager", "'eager'?")),
        ({"epilogue": "fused-collective"}, ("'collective' has only a split form",)),
    ],
    ids=lambda value: " ".join(value.values()) if isinstance(value, dict) else "",
)
def test_an_unknown_choice_lists_the_known_ones_on_every_rank(
    ranks: Ranks, choices: dict[str, str], parts: tuple[str, ...]
) -> None:
    for outcome in ranks(2).outcomes(_choose, choices, None):
        assert outcome.error.type in ("InvalidArgument", "Unsupported"), outcome.error.trace
        assert all(part in outcome.error.text for part in parts), outcome.error.text


@pytest.mark.parametrize("kind", ["transport", "epilogue", "backend"])
def test_an_unknown_choice_on_one_rank_is_heard_by_all(ranks: Ranks, kind: str) -> None:
    for outcome in ranks(2).outcomes(_choose, {kind: "typo"}, 1):
        assert outcome.error.type == "InvalidArgument", outcome.error.trace
        assert "'auto' on rank 0" in outcome.error.text
        assert "'typo' on rank 1" in outcome.error.text


@pytest.mark.parametrize("kind", ["transport", "epilogue", "backend"])
def test_a_part_that_cannot_be_imported_says_why(ranks: Ranks, kind: str) -> None:
    for outcome in ranks(2).outcomes(_choose, {kind: "no_such_module:Thing"}, None):
        assert outcome.error.type == "Unavailable", outcome.error.trace
        assert "no_such_module" in outcome.error.text
        assert "ModuleNotFoundError" in outcome.error.cause


@pytest.mark.parametrize("value", ["0", "65", "many"])
def test_a_bad_variable_is_refused_with_the_good_values(ranks: Ranks, value: str) -> None:
    for outcome in ranks(2).outcomes(_choose, {}, None, env={"GEMMLINK_CHUNKS": value}):
        assert outcome.error.type == "InvalidArgument"
        assert f"GEMMLINK_CHUNKS must be auto or a whole number from 1 to 64; got '{value}'" in (
            outcome.error.text
        )


# The life of an operation.


def _life(rank: int, mode: str) -> None:
    a, b = a_of(rank, 0, M, K), b_of(0, N, K)
    op = gemmlink.GemmAllGather(N, K, M, epilogue=mode)
    early = _failing(lambda: op(a, b))
    assert "must be prepared before it is called" in str(early), str(early)
    assert op.prepare() is op
    assert op.prepare() is op, "a second prepare is no second set-up"
    kept = op(a, b)
    op.close()
    op.close()
    for use in (lambda: op(a, b), op.prepare, op.check):
        started = time.monotonic()
        error = _failing(use)
        assert isinstance(error, gemmlink.InvalidArgument), repr(error)
        assert "must be open; got a use after close()" in str(error)
        assert time.monotonic() - started < 1, "an error that needs no peer waited for one"
    with gemmlink.GemmAllGather(N, K, M, epilogue=mode) as again:
        assert_equal(again(a, b), gathered(0, [M, M], b), "opened again")
        again.close()
    assert_equal(kept, gathered(0, [M, M], b), "a result outlives its operation")


@each_mode
def test_before_prepare_and_after_close_a_call_is_refused_at_once(ranks: Ranks, mode: str) -> None:
    ranks(2).run(_life, mode)
