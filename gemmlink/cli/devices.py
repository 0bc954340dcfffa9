"""The set-up of ``symm_mem``, walked step by step for ``doctor``: what is there, what fails first.

Every step returns what it found or raises, with the remedy; those behind one that fails are not
looked at, since they need it. The last one starts ranks.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from itertools import permutations
from pathlib import Path
from typing import NamedTuple

import torch

from gemmlink import groups, spawn
from gemmlink.core.device import compiled, driver
from gemmlink.errors import Unavailable
from gemmlink.transport import symm_mem

_LIMIT_S = 60.0
_OLDEST = (7, 0)
#: Ranks that a trial has at most.
_MOST = 8
_PLACE, _WORD = 4096, 64


class Found(NamedTuple):
    """The outcome of a step."""

    name: str
    text: str
    ok: bool


def walk() -> Iterator[Found]:
    """The steps up to the first that fails, and the names of those behind it."""
    left = list(STEPS)
    while left:
        name, look = left.pop(0)
        try:
            yield Found(name, look(), True)
        except Exception as error:  # whatever it is, a doctor tells it
            yield Found(name, _last_line(error), False)
            if left:
                behind = ", ".join(name for name, _ in left)
                yield Found("steps behind it", f"not looked at: {behind}", False)
            return


def _last_line(error: Exception) -> str:
    """The text of an error; of one on ranks, how the first of them ended."""
    text = (
        next(iter(error.failures.values())) if isinstance(error, spawn.RankFailed) else f"{error}"
    )
    return (text.strip().splitlines() or [type(error).__name__])[-1]


def _torch() -> str:
    found = symm_mem.SymmetricMemory().probe().details
    return f"torch {found['torch']}, CUDA {found['CUDA']}"


def _module() -> str:
    return str(symm_mem.module().__name__)


def _driver() -> str:
    return f"CUDA {driver.version()}"


def _device() -> str:
    if not torch.cuda.is_available():
        raise Unavailable(
            "CUDA tensors need a device",
            "none that torch sees",
            "See what nvidia-smi lists, and CUDA_VISIBLE_DEVICES.",
        )
    return ", ".join(torch.cuda.get_device_name(each) for each in _devices())


def _capability() -> str:
    found = {each: torch.cuda.get_device_capability(each) for each in _devices()}
    for each, capability in found.items():
        if capability < _OLDEST:
            raise Unavailable(
                f"a device needs compute capability {_dotted(_OLDEST)} or more",
                f"{_dotted(capability)} of cuda:{each}",
                "Hide it with CUDA_VISIBLE_DEVICES.",
            )
    return ", ".join(sorted({_dotted(each) for each in found.values()}))


def _kernels() -> str:
    for each in _devices():
        for name in ("gl_words", "gl_moves"):
            compiled.function(name, each)
    return f"compiled and loaded on {_count()}"


def _peers() -> str:
    for one, two in permutations(_devices(), 2):
        if not torch.cuda.can_device_access_peer(one, two):
            raise Unavailable(
                "devices must reach each other's memory",
                f"cuda:{one}, which cannot reach cuda:{two}",
                "See nvidia-smi topo -p2p r; use a group of devices that can.",
            )
    return f"between all of {_count()}"


def _ranks() -> str:
    """How ranks may be spread; what is slow there is told and is no failure."""
    queues = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "8, by default")
    text = f"{_count()}, CUDA_DEVICE_MAX_CONNECTIONS: {queues}"
    if os.environ.get(symm_mem.OVERLAP) != "1":
        return f"one on each of {text}"
    folder = os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps")
    daemon = "MPS runs" if Path(folder, "control").exists() else "no MPS, so that they take turns"
    return f"several on one of {text}, {daemon} ({folder})"


def _trial() -> str:
    world = min(_MOST, torch.cuda.device_count())
    if world == 1 and os.environ.get(symm_mem.OVERLAP) == "1":
        world = 2
    spawn.run_ranks(world, move_bytes, timeout_s=_LIMIT_S)
    return f"bytes and words moved between {world} ranks" if world > 1 else "of one rank"


def move_bytes() -> None:
    """On every rank: a window, bytes and a word from the rank before. Raises what fails."""
    group = groups.resolve()
    torch.cuda.set_device(group.rank % torch.cuda.device_count())
    session = symm_mem.SymmetricMemory().open(group, key="doctor", timeout_s=_LIMIT_S)
    window = session.window(2 * _PLACE)
    peer, before = (group.rank + 1) % group.world, (group.rank - 1) % group.world
    window.tensor(peer)[_PLACE:].fill_(1 + group.rank)
    window.words.set(peer, _WORD, 1 + group.rank)
    word = window.words.wait(_WORD, 1 + before, _LIMIT_S)
    byte = int(window.tensor(group.rank)[-1])
    if (word, byte) != (1 + before, 1 + before):
        raise Unavailable(
            "what a peer stores must come", f"word {word} and byte {byte} of rank {before}"
        )
    session.barrier(_LIMIT_S)
    session.close()


def _devices() -> range:
    return range(torch.cuda.device_count())


def _count() -> str:
    number = torch.cuda.device_count()
    return f"{number} device" if number == 1 else f"{number} devices"


def _dotted(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))


STEPS: tuple[tuple[str, Callable[[], str]], ...] = (
    ("torch", _torch),
    ("symmetric memory", _module),
    ("driver", _driver),
    ("device", _device),
    ("compute capability", _capability),
    ("kernels", _kernels),
    ("peer access", _peers),
    ("ranks", _ranks),
    ("window", _trial),
)
