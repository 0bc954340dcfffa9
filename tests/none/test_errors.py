"""Errors: the form of their text, their built-in bases, and their way through pickle."""

from __future__ import annotations

import pickle

import pytest

import gemmlink
from gemmlink import errors
from gemmlink.errors import GemmlinkError, PeerLost, PeerTimeout

ALL = [
    errors.InvalidArgument,
    errors.Unsupported,
    errors.Unavailable,
    errors.Poisoned,
    errors.Overlap,
    errors.PeerTimeout,
    errors.PeerLost,
]


@pytest.mark.parametrize(
    ("parts", "text"),
    [
        (("a rule",), "a rule"),
        (("a rule", "this"), "a rule; got this"),
        (("a rule", "", "Do that."), "a rule. Do that."),
        (("a rule", "this", "Do that."), "a rule; got this. Do that."),
    ],
)
@pytest.mark.parametrize("kind", ALL)
def test_a_text_is_the_rule_what_came_and_the_fix(
    kind: type[GemmlinkError], parts: tuple[str, ...], text: str
) -> None:
    error = kind(*parts)
    assert str(error) == text
    assert (error.rule, error.came, error.fix) == (*parts, "", "")[:3]


@pytest.mark.parametrize(
    ("kind", "base"),
    [
        (errors.InvalidArgument, ValueError),
        (errors.Unsupported, NotImplementedError),
        (errors.Unavailable, RuntimeError),
        (errors.Poisoned, RuntimeError),
        (errors.Overlap, RuntimeError),
        (errors.PeerTimeout, TimeoutError),
        (errors.PeerLost, PeerTimeout),
    ],
)
def test_an_error_is_also_what_python_calls_it(kind: type, base: type) -> None:
    assert issubclass(kind, base)
    assert issubclass(kind, GemmlinkError)
    assert getattr(gemmlink, kind.__name__) is kind


@pytest.mark.parametrize("kind", ALL)
def test_an_error_survives_pickling(kind: type[GemmlinkError]) -> None:
    """Launchers and test runners pass exceptions between processes."""
    error = kind("a rule", "this", "Do that.")
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is kind
    assert str(copy) == str(error)
    assert vars(copy) == vars(error)


@pytest.mark.parametrize("kind", [PeerTimeout, PeerLost])
def test_a_timeout_keeps_its_attributes_through_pickling(kind: type[PeerTimeout]) -> None:
    error = kind(
        "rule", operation="all_gather", epoch=7, rank=1, peer=2, word="free[2]", seen=5, wanted=6
    )
    copy = pickle.loads(pickle.dumps(error))
    assert vars(copy) == vars(error)
    assert (copy.operation, copy.epoch, copy.rank, copy.peer) == ("all_gather", 7, 1, 2)
    assert (copy.word, copy.seen, copy.wanted) == ("free[2]", 5, 6)


@pytest.mark.parametrize("name", [n for n in gemmlink.__all__ if n != "__version__"])
def test_every_public_name_is_there_and_documented(name: str) -> None:
    assert getattr(gemmlink, name).__doc__
    assert name in dir(gemmlink)


def test_an_unknown_attribute_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="'gemmlink' has no attribute 'gemm_all_mist'"):
        gemmlink.gemm_all_mist  # noqa: B018
