"""Words on the command line that several commands share."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from gemmlink.errors import InvalidArgument

if TYPE_CHECKING:
    import torch

#: What ``add_subparsers`` returns; argparse has no public name for it.
Parsers: TypeAlias = Any

#: Said again here, because a command line is read before torch is imported.
OPERATIONS = ("all_gather", "all_to_all", "reduce_scatter", "all_reduce")
DEVICES = ("cpu", "cuda")

_DTYPES = {
    "bf16": "bfloat16",
    "fp16": "float16",
    "fp32": "float32",
    "bfloat16": "bfloat16",
    "float16": "float16",
    "float32": "float32",
}


def command(
    parsers: Parsers, name: str, run: Callable[[argparse.Namespace], Any], text: str
) -> argparse.ArgumentParser:
    """A parser for a command, with ``--json``."""
    parser: argparse.ArgumentParser = parsers.add_parser(name, help=text, description=text)
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    parser.set_defaults(run=run)
    return parser


def add_choices(
    parser: argparse.ArgumentParser, kinds: Sequence[str] = ("transport", "epilogue", "backend")
) -> None:
    """``--transport``, ``--epilogue`` and ``--backend``, one value each."""
    for kind in kinds:
        parser.add_argument(
            f"--{kind}", default="auto", metavar="NAME", help="a name, module:attribute, or auto"
        )


def add_device(parser: argparse.ArgumentParser, default: str | None, text: str) -> None:
    """``--device``, the kind of device of the tensors."""
    parser.add_argument("--device", choices=DEVICES, default=default, help=text)


def add_dtypes(parser: argparse.ArgumentParser) -> None:
    """``--dtype`` and ``--out-dtype``."""
    parser.add_argument("--dtype", type=dtype, default="float32", help="bf16, fp16 or fp32")
    parser.add_argument(
        "--out-dtype", type=dtype, default=None, help="fp32 or that of the inputs (default)"
    )


def add_extent(parser: argparse.ArgumentParser) -> None:
    """``--extent``."""
    parser.add_argument(
        "--extent", type=at_least(0), help="leading columns that travel in an all_to_all (all)"
    )


def check_extent(extent: int | None, operations: Sequence[str]) -> None:
    """Raise ``InvalidArgument`` for an extent that nothing uses."""
    if extent is not None and "all_to_all" not in operations:
        raise InvalidArgument(
            "--extent says how many columns travel in an all_to_all",
            f"--extent {extent} with --op {','.join(operations)}",
        )


def operations(text: str) -> tuple[str, ...]:
    """Names of operations separated by commas; ``all`` stands for each."""
    found = names(text)
    for name in found:
        if name not in (*OPERATIONS, "all"):
            known = ", ".join((*OPERATIONS, "all"))
            raise argparse.ArgumentTypeError(f"an operation is one of {known}: got {name!r}")
    return OPERATIONS if "all" in found else tuple(dict.fromkeys(found))


def shape(text: str) -> tuple[int, int, int]:
    """``M,N,K``, each at least 1."""
    parts = [positive(part) for part in text.split(",")]
    if len(parts) != 3:
        raise argparse.ArgumentTypeError(f"a shape is M,N,K (M rows a rank): got {text!r}")
    return parts[0], parts[1], parts[2]


def positive(text: str) -> int:
    """A whole number of at least 1."""
    return at_least(1)(text)


def at_least(low: int) -> Callable[[str], int]:
    """A reader of whole numbers of at least ``low``."""

    def read(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = low - 1
        if value < low:
            raise argparse.ArgumentTypeError(f"must be a whole number from {low}: got {text!r}")
        return value

    return read


def dtype(text: str) -> str:
    """A dtype's name in torch."""
    if text not in _DTYPES:
        raise argparse.ArgumentTypeError(f"a dtype is bf16, fp16 or fp32: got {text!r}")
    return _DTYPES[text]


def names(text: str) -> tuple[str, ...]:
    """Names separated by commas."""
    found = tuple(part.strip() for part in text.split(",") if part.strip())
    if not found:
        raise argparse.ArgumentTypeError("needs at least one name")
    return found


def numbers(text: str) -> tuple[int | None, ...]:
    """Whole numbers from 1, or ``auto``, separated by commas."""
    return tuple(None if part == "auto" else positive(part) for part in names(text))


def results(text: str) -> tuple[str, ...]:
    """``copy``, ``view`` or both."""
    found = names(text)
    if not set(found) <= {"copy", "view"}:
        raise argparse.ArgumentTypeError("takes copy, view or copy,view")
    return found


def torch_dtypes(arguments: argparse.Namespace) -> tuple[torch.dtype, torch.dtype]:
    """The dtypes of the inputs and of the output."""
    import torch

    given: torch.dtype = getattr(torch, arguments.dtype)
    wanted: torch.dtype = getattr(torch, arguments.out_dtype or arguments.dtype)
    return given, wanted
