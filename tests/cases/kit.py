"""Inputs that show what went where, memory that shows who reads or writes beside it, and a call.

``tagged`` with B = identity gives C == A: a row, column or rank in the wrong place shows. ``whole``
(see ``tests.refs``) makes every sum exact. Both are known to every rank without communication.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

import gemmlink
from tests.refs import FEW_MODES, MODES, assert_equal, product

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
DTYPES = (F32, BF16, F16)
NAN = float("nan")
#: Limit of a call where one is to fail, in seconds, and how much later all ranks must know.
LIMIT_S = 5.0
HEARD_S = LIMIT_S + 5.0
LIMIT = {"GEMMLINK_TIMEOUT_S": f"{LIMIT_S}"}

each_mode = pytest.mark.parametrize("mode", MODES)
each_epilogue = pytest.mark.parametrize("mode", FEW_MODES)

__all__ = ["BF16", "DTYPES", "F16", "F32", "FEW_MODES", "HEARD_S", "LIMIT_S", "MODES", "NAN"]


def tagged(tag: int, rows: int, cols: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    """``(rows, cols)`` where element, row, column and ``tag`` tell; at most 250, exact in bf16."""
    i = torch.arange(rows).view(-1, 1)
    j = torch.arange(cols).view(1, -1)
    return ((37 * tag + 5 * i + j) % 251).to(dtype)


def eye(size: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    """A B that leaves A as it is."""
    return torch.eye(size).to(dtype)


def in_garbage(value: torch.Tensor, fill: float = NAN, skip: int = 3) -> torch.Tensor:
    """``value`` cut out of the middle of a larger matrix full of ``fill``."""
    rows, cols = value.shape
    big = torch.full((rows + 2 * skip, cols + 2 * skip), fill, dtype=value.dtype)
    inner = big[skip : skip + rows, skip : skip + cols]
    return inner.copy_(value)


def guarded(rows: int, cols: int, dtype: torch.dtype) -> tuple[torch.Tensor, Callable[[], None]]:
    """An out with NaN in it and 99 all around it, and a check that the 99s are still there."""
    big = torch.full((rows + 2, cols + 2), 99.0, dtype=dtype)
    out = big[1:-1, 1:-1]
    out.fill_(NAN)

    def check() -> None:
        beside = int((big == 99).sum()) - int((out == 99).sum())
        assert beside == big.numel() - out.numel(), "a call wrote beside its out"

    return out, check


def stacked(blocks: Sequence[torch.Tensor], b: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What every rank must get when rank r has ``blocks[r]``. No communication."""
    return product(torch.cat(list(blocks)), b, dtype)


def gather(a: torch.Tensor, b: torch.Tensor, mode: str, **given: Any) -> torch.Tensor:
    """A call of the function form that must leave its inputs alone, bit for bit."""
    before = a.clone(), b.clone()
    got = gemmlink.gemm_all_gather(a, b, epilogue=mode, **given)
    for name, tensor, copy in (("a", a, before[0]), ("b", b, before[1])):
        assert torch.equal(bits(tensor), bits(copy)), f"{mode} changed {name}"
    return got


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of every element, so that NaN equals itself and -0.0 differs from 0.0."""
    return tensor.contiguous().view(torch.uint8)


def failing(bad: Callable[[], Any]) -> tuple[Exception, float]:
    """The error of what must fail, and the seconds that it took."""
    started = time.monotonic()
    try:
        value = bad()
    except AssertionError:
        raise
    except Exception as error:
        return error, time.monotonic() - started
    raise AssertionError(f"returned {value!r} where an error was due")


def good_call(rank: int, world: int, number: int, mode: str, group: Any = None) -> None:
    """A call with inputs of its own, exactly right: what is left is usable."""
    b = eye(8, F32)
    blocks = [tagged(number + peer, 4, 8, F32) for peer in range(world)]
    got = gather(blocks[rank], b, mode, group=group)
    assert_equal(got, torch.cat(blocks), f"{mode}, good call {number}")
