"""``gemmlink explain``: what would be chosen for a problem, why, and the schedule of a rank."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TYPE_CHECKING

from gemmlink.cli import arguments as words
from gemmlink.cli import output
from gemmlink.errors import InvalidArgument

if TYPE_CHECKING:
    from gemmlink.spec.contracts import Board


class PaperGroup:
    """A rank of a world that does not run: enough for what is decided locally."""

    def __init__(self, rank: int, world: int) -> None:
        if not 0 <= rank < world:
            raise InvalidArgument("--rank must be in 0..world-1", f"rank {rank} of {world}")
        self.rank = rank
        self.world = world
        self.board: Board | None = None

    def all_gather(
        self,
        data: bytes,
        *,
        key: str,
        timeout_s: float,
        on_stall: Callable[[], None] | None = None,
    ) -> list[bytes]:
        """Nobody is there."""
        raise InvalidArgument("explain must decide without its peers", f"an exchange {key!r}")


def add(parsers: words.Parsers) -> None:
    """Describe the command."""
    parser = words.command(
        parsers, "explain", run, "Say what is chosen for a problem and why; runs nothing."
    )
    parser.add_argument("--op", choices=words.OPERATIONS, default="all_gather")
    words.add_extent(parser)
    parser.add_argument("--world", type=words.positive, default=2)
    parser.add_argument("--rank", type=words.at_least(0), default=0)
    parser.add_argument(
        "--shape", type=words.shape, required=True, metavar="M,N,K",
        help="rows per rank, columns, inner size",
    )  # fmt: skip
    words.add_dtypes(parser)
    words.add_choices(parser)
    words.add_device(parser, "cpu", "of the tensors (cpu)")
    parser.add_argument("--chunks", type=words.positive, help="chunks per rank")


def run(arguments: argparse.Namespace) -> output.Outcome:
    """Compose for one rank and tell."""
    import torch

    from gemmlink.core.compose import Choice
    from gemmlink.perf.field import Field
    from gemmlink.perf.modes import prepared
    from gemmlink.spec.problem import Problem

    words.check_extent(arguments.extent, (arguments.op,))
    m, n, k = arguments.shape
    problem = Problem(n, k, m, *words.torch_dtypes(arguments), torch.device(arguments.device))
    group = PaperGroup(arguments.rank, arguments.world)
    choice = Choice(arguments.transport, arguments.epilogue, arguments.backend, arguments.chunks)
    text = prepared(Field(group, problem, arguments.op, arguments.extent), choice).explain()
    row = {"rank": arguments.rank, "world": arguments.world, "ok": True, "text": text}
    return output.Outcome(output.RIGHT, 1, 0, (row,), text)
