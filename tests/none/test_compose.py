"""Composition: which parts are taken, what is refused and why, and the sentences that say so."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

import gemmlink
from gemmlink.backends.eager import Eager
from gemmlink.core.compose import ALIASES, Choice, Composition, compose, may_fall_back, name_of
from gemmlink.epilogues.push import Push
from gemmlink.errors import InvalidArgument, Unavailable, Unsupported
from gemmlink.spec.contracts import Capabilities, Needs
from gemmlink.spec.operations import Operation, all_gather, all_reduce
from gemmlink.spec.problem import Problem
from gemmlink.transport.shm import SharedMemory


def _problem(capacity: int = 512, device: str = "cpu") -> Problem:
    return Problem(16, 16, capacity, torch.float32, torch.float32, torch.device(device))


def _composed(
    world: int = 2, capacity: int = 512, operation: Operation | None = None, **choice: Any
) -> Composition:
    problem = _problem(capacity)
    return compose(problem, world, Choice(**choice), operation or all_gather(world, problem.n))


@pytest.mark.parametrize(
    ("epilogue", "mode", "transport"),
    [
        ("push", "split-push", "shm"),
        ("fused-push", "fused-push", "shm"),
        ("split-push", "split-push", "shm"),
        ("collective", "collective", "none"),
        ("split-collective", "collective", "none"),
        ("split-rccl", "collective", "none"),
        ("split-lsa-push", "split-push", "shm"),
        ("split-lsa-pull", "split-pull", "shm"),
        ("fused-lsa", "fused-push", "shm"),
        ("pull", "split-pull", "shm"),
        ("split-pull", "split-pull", "shm"),
        ("lanes", "split-lanes", "shm"),
        ("split-lanes", "split-lanes", "shm"),
        ("split-sdma", "split-lanes", "shm"),
        ("fused-sdma", "fused-lanes", "shm"),
        pytest.param(Push(), "split-push", "shm", id="object"),
        ("gemmlink.epilogues.push:Push", "split-push", "shm"),
    ],
    ids=str,
)
def test_every_spelling_of_a_mode(epilogue: Any, mode: str, transport: str) -> None:
    parts = _composed(epilogue=epilogue)
    assert (parts.mode, parts.transport_name) == (mode, transport)


@pytest.mark.parametrize("alias", ALIASES)
def test_an_alias_is_compared_between_ranks_by_its_own_name(alias: str) -> None:
    assert name_of(alias) == ALIASES[alias]
    assert Choice(epilogue=alias).names()["epilogue"] == ALIASES[alias]


def test_an_object_is_compared_between_ranks_by_its_name() -> None:
    assert Choice(backend=Eager(), epilogue=Push()).names() == {
        "transport": "auto",
        "epilogue": "push",
        "backend": "eager",
        "chunks": None,
        "lanes": 1,
        "buffers": 1,
        "result": "copy",
        "completion": "receive",
        "keep_product": False,
        "deterministic": True,
        "bit_identical": False,
    }
    assert Choice(view=True, send_complete=True).names()["result"] == "view"
    assert Choice(send_complete=True).names()["completion"] == "receive_and_send"


@pytest.mark.parametrize(
    ("choice", "parts"),
    [
        (
            {"epilogue": "puhs"},
            (
                "auto, collective, lanes, pull, push or 'module:attribute'",
                "Did you mean 'push'",
            ),
        ),
        ({"epilogue": "split-puhs"}, ("epilogue must be", "got 'puhs'", "Did you mean 'push'")),
        ({"epilogue": "Push"}, ("epilogue must be", "got 'Push'", "Did you mean 'push'")),
        ({"epilogue": " push"}, ("epilogue must be", "got ' push'", "Did you mean 'push'")),
        ({"epilogue": ""}, ("epilogue must be", "got ''")),
        (
            {"transport": "sham"},
            ("auto, ipc, shm, symm_mem or 'module:attribute'", "Did you mean 'shm'"),
        ),
        ({"backend": "eagle"}, ("auto, eager", "Did you mean 'eager'")),
        ({"epilogue": "collective", "transport": "sham"}, ("Did you mean 'shm'",)),
    ],
    ids=str,
)
def test_an_unknown_name_lists_the_known_ones_and_the_nearest(
    choice: dict[str, Any], parts: Sequence[str]
) -> None:
    with pytest.raises(InvalidArgument) as caught:
        _composed(**choice)
    assert all(part in str(caught.value) for part in parts), str(caught.value)


def test_a_form_that_an_epilogue_lacks_is_unsupported() -> None:
    with pytest.raises(Unsupported, match="'collective' has only a split form; got fused-collect"):
        _composed(epilogue="fused-collective")


@pytest.mark.parametrize("kind", ["transport", "epilogue", "backend"])
@pytest.mark.parametrize("value", [None, 3, object()], ids=["None", "3", "object"])
def test_what_is_no_such_part_is_refused_with_what_it_lacks(kind: str, value: Any) -> None:
    with pytest.raises(InvalidArgument, match=f"a {kind} must fulfil .* which lacks "):
        _composed(**{kind: value})


@pytest.mark.parametrize(
    ("kind", "value"), [("transport", SharedMemory), ("epilogue", Push), ("backend", Eager)]
)
def test_a_class_in_place_of_an_object_is_refused(kind: str, value: Any) -> None:
    with pytest.raises(InvalidArgument, match=rf"Pass {value.__name__}\(\) in place of the class"):
        _composed(**{kind: value})


@pytest.mark.parametrize("capacity", [0, 1, 100_000])
def test_auto_on_cpus_pulls_when_all_is_computed(capacity: int) -> None:
    parts = _composed(capacity=capacity)
    assert (parts.mode, parts.chunks) == ("split-pull", 1)
    assert any(reason.startswith("split: ") for reason in parts.reasons)
    assert any(reason.startswith("epilogue pull: ") for reason in parts.reasons)


@pytest.mark.parametrize(
    ("capacity", "epilogue", "chunks"),
    [
        (0, "fused-push", 2),
        (256, "fused-push", 2),
        (640, "fused-push", 5),
        (100_000, "fused-push", 8),
        (100_000, "split-push", 1),
        (100_000, "collective", 1),
    ],
)
def test_how_many_chunks_are_taken(capacity: int, epilogue: str, chunks: int) -> None:
    assert _composed(capacity=capacity, epilogue=epilogue).chunks == chunks


@pytest.mark.parametrize("chunks", [1, 7, 64])
@pytest.mark.parametrize("epilogue", ["fused-push", "split-pull", "fused-lanes", "collective"])
def test_chunks_that_are_asked_for_are_taken(epilogue: str, chunks: int) -> None:
    parts = _composed(epilogue=epilogue, chunks=chunks)
    assert parts.chunks == chunks
    assert f"chunks {chunks}: asked for" in parts.reasons


@pytest.mark.parametrize("chunks", [0, -1, 65])
def test_chunks_out_of_range_are_refused(chunks: int) -> None:
    with pytest.raises(InvalidArgument, match=f"whole number from 1 to 64; got {chunks}"):
        _composed(chunks=chunks)


@pytest.mark.parametrize("chunks", [2.5, "3", True])
def test_chunks_that_are_no_number_are_refused(chunks: Any) -> None:
    with pytest.raises(InvalidArgument, match="whole number from 1 to 64; got"):
        _composed(chunks=chunks)


def test_a_world_of_one_sends_nothing() -> None:
    parts = _composed(world=1)
    assert parts.mode == "collective"
    assert "epilogue collective: world 1 has nothing to send" in parts.reasons


def test_every_decision_has_its_reason() -> None:
    choices: tuple[dict[str, Any], ...] = (
        {},
        {"epilogue": "push"},
        {"epilogue": "collective"},
        {"backend": "eager"},
    )
    for choice in choices:
        text = "\n".join(_composed(**choice).reasons)
        for word in ("backend ", "epilogue ", "transport ", "chunks "):
            assert word in text, f"no reason for the {word}of {choice}"


def test_a_backend_that_cannot_says_why_and_what_there_is() -> None:
    with pytest.raises(Unsupported, match=r"and CUDA devices, not on mps\. Known back"):
        compose(_problem(device="mps"), 2, Choice(), all_gather(2, 16))


class _Limited(SharedMemory):
    """Shared memory that says it can do less."""

    name = "limited"

    def __init__(self, **capabilities: Any) -> None:
        given: dict[str, Any] = {"memory": ("cpu",), "host_words": True, "host_data": True}
        self._capabilities = Capabilities(**(given | capabilities))

    def probe(self) -> Capabilities:
        return self._capabilities


class _WithLanes(Push):
    """Push that says it needs lanes."""

    name = "with-lanes"
    needs = Needs(window=True, lanes=True)


@pytest.mark.parametrize(
    ("capabilities", "text"),
    [
        ({"memory": ("cuda", "xpu")}, "'limited' serves cuda, xpu tensors; got tensors on cpu"),
        ({"host_words": False}, "'limited' with host_words=False, host_data=True"),
        ({"host_data": False}, "'limited' with host_words=True, host_data=False"),
    ],
)
def test_a_transport_that_does_not_fit_is_unsupported(
    capabilities: dict[str, Any], text: str
) -> None:
    with pytest.raises(Unsupported, match=text):
        _composed(transport=_Limited(**capabilities))


def test_an_epilogue_gets_the_lanes_that_it_needs() -> None:
    with pytest.raises(Unsupported, match=r"'with-lanes' needs lanes; got .*'limited' without any"):
        _composed(epilogue=_WithLanes(), transport=_Limited())
    assert _composed(epilogue=_WithLanes()).lane_order == "in_order"


def test_the_best_order_that_lanes_promise_is_taken_and_said() -> None:
    for lanes in (("in_order",), ("after_drain",), ("in_order", "after_drain")):
        parts = _composed(epilogue="lanes", transport=_Limited(lanes=lanes))
        assert parts.lane_order == lanes[0]
        assert f"lanes of limited announce {lanes[0].replace('_', ' ')}" in parts.reasons
    assert not any("announce" in reason for reason in _composed(epilogue="push").reasons)


@pytest.mark.parametrize("buffers", [0, 3, -1, "2"])
def test_buffers_are_one_or_two(buffers: Any) -> None:
    with pytest.raises(InvalidArgument, match=f"buffers must be 1 or 2; got {buffers!r}"):
        _composed(buffers=buffers)


@pytest.mark.parametrize("lanes", [0, -1, 17])
def test_lanes_out_of_range_are_refused(lanes: int) -> None:
    with pytest.raises(InvalidArgument, match=f"lanes must be from 1 to 16; got {lanes}"):
        _composed(lanes=lanes, epilogue="lanes")


def test_a_view_needs_a_window_to_look_at() -> None:
    with pytest.raises(Unsupported, match="a view shows the own window; got epilogue 'collective'"):
        _composed(epilogue="collective", view=True)


def test_a_pair_of_epilogues_needs_an_operation_of_two_phases() -> None:
    with pytest.raises(Unsupported, match=r"'lanes\+pull' for all_gather, which has 1\. Name one"):
        _composed(epilogue="lanes+pull")
    with pytest.raises(Unsupported, match=r"'lanes\+pull\+push' for all_reduce, which has 2"):
        _composed(epilogue="lanes+pull+push", operation=all_reduce(2, 16))


@pytest.mark.parametrize(
    ("choice", "error", "may"),
    [
        (Choice(), Unavailable("x"), True),
        (Choice(), Unsupported("x"), True),
        (Choice(), InvalidArgument("x"), False),
        (Choice(), RuntimeError("x"), False),
        (Choice(transport="shm"), Unavailable("x"), False),
        (Choice(epilogue="push"), Unavailable("x"), False),
        (Choice(view=True), Unavailable("x"), False),
    ],
    ids=repr,
)
def test_only_what_was_left_open_may_fall_back(choice: Choice, error: Exception, may: bool) -> None:
    assert may_fall_back(choice, error, torch.device("cpu")) is may
    assert not may_fall_back(choice, error, torch.device("cuda"))


@pytest.fixture
def op() -> Iterator[gemmlink.GemmAllGather]:
    """An operation that is not prepared."""
    made = gemmlink.GemmAllGather(3, 4, 5, group=gemmlink.SELF, epilogue="fused-push", chunks=2)
    yield made
    made.close()


def test_explain_says_what_and_why_before_and_after_prepare(op: gemmlink.GemmAllGather) -> None:
    before = op.explain()
    assert "mode: fused-push over shm, multiplied by eager" in before
    assert "window: not made yet" in before
    assert "  because chunks 2: asked for" in before
    after = op.prepare().explain()
    assert f"window: {op.launch.layout.nbytes} bytes on each rank" in after
    assert op.launch.schedule.render() in after
    assert op.launch.schedule.render() in before


def test_supports_gives_the_reason_and_does_not_raise() -> None:
    made = gemmlink.GemmAllGather
    assert made(3, 4, 5, group=gemmlink.SELF).supports() is None
    refusal = made(3, 4, 5, group=gemmlink.SELF, epilogue="fused-collective").supports()
    assert refusal is not None
    assert "has only a split form" in refusal
