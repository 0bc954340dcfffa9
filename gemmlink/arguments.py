"""What a call's arguments must be; looked at before anything is sent. All of it is local."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gemmlink.errors import InvalidArgument, Unsupported
from gemmlink.spec.operations import Operation
from gemmlink.spec.places import result_shape
from gemmlink.spec.problem import Problem, dtype_name


def one_of(name: str, value: str, good: tuple[str, ...]) -> str:
    """``value`` if it is one of ``good``, else ``InvalidArgument``."""
    if value not in good:
        raise InvalidArgument(f"{name} must be {' or '.join(map(repr, good))}", repr(value))
    return value


def flag(name: str, value: object) -> bool:
    """``value`` if it is True or False, else ``InvalidArgument``."""
    if not isinstance(value, bool):
        raise InvalidArgument(f"{name} must be True or False", repr(value))
    return value


def check_arguments(
    problem: Problem,
    operation: Operation,
    world: int,
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor | None,
    rows: Sequence[int] | None,
    rank: int,
    view: bool,
) -> InvalidArgument | Unsupported | None:
    """The first thing that is wrong with the arguments of one call, or None. Local."""
    try:
        _check_input("a", a, None, problem)
        _check_input("b", b, problem.n, problem)
        if view and out is not None:
            raise InvalidArgument("out is for result='copy'", "out with result='view'")
        if rows is not None:
            _check_rows(rows, world, rank, a.shape[0])
        if out is not None:
            known = rows if rows is not None else [a.shape[0]] * world
            height, width = result_shape(operation, rank, world, known)
            _check_out(out, problem, width)
            # A rank whose peers have other M learns that only from them.
            if out.shape[0] != height and (rows is not None or not operation.ragged):
                raise InvalidArgument(f"out must have {height} rows", f"{out.shape[0]}")
    except (InvalidArgument, Unsupported) as error:
        return error
    return None


def _check_input(name: str, tensor: torch.Tensor, rows: int | None, problem: Problem) -> None:
    # Each question to torch costs: most calls pass on the first device comparison.
    shape = tensor.shape if isinstance(tensor, torch.Tensor) else ()
    device = problem.device
    fits = (
        len(shape) == 2
        and shape[1] == problem.k
        and (rows is None or shape[0] == rows)
        and tensor.dtype == problem.dtype
        and (tensor.device == device or tensor.device.type == device.type)
        and tensor.layout == torch.strided
    )
    if not fits:
        raise _unfit(name, tensor, rows, problem)
    if tensor.requires_grad and torch.is_grad_enabled():
        raise Unsupported(
            "gradients do not pass through this operation",
            f"{name} with requires_grad",
            "Call it under torch.no_grad(), or detach the tensor.",
        )


def _unfit(name: str, tensor: torch.Tensor, rows: int | None, problem: Problem) -> InvalidArgument:
    shape = f"({'M' if rows is None else rows}, {problem.k})"
    want = f"{name} must be a {dtype_name(problem.dtype)} tensor of shape {shape}"
    if not isinstance(tensor, torch.Tensor):
        return InvalidArgument(want, type(tensor).__name__)
    if tensor.dim() != 2 or tensor.shape[1] != problem.k or rows not in (None, tensor.shape[0]):
        return InvalidArgument(want, f"shape {tuple(tensor.shape)}")
    if tensor.dtype != problem.dtype:
        return InvalidArgument(want, dtype_name(tensor.dtype), f"Convert {name} first.")
    return InvalidArgument(
        f"{name} must be a dense tensor on {problem.device}", f"{tensor.layout} on {tensor.device}"
    )


def _check_out(out: torch.Tensor, problem: Problem, width: int) -> None:
    shape = out.shape if isinstance(out, torch.Tensor) else ()
    if len(shape) != 2 or shape[1] != width or out.dtype != problem.out_dtype:
        raise _unfit_out(out, problem, width)
    if out.device != problem.device and out.device.type != problem.device.type:
        raise InvalidArgument(f"out must be on {problem.device}", str(out.device))
    if out.requires_grad and torch.is_grad_enabled():
        raise Unsupported("gradients do not pass through this operation", "out with requires_grad")


def _unfit_out(out: torch.Tensor, problem: Problem, width: int) -> InvalidArgument:
    want = f"out must be a {dtype_name(problem.out_dtype)} tensor of shape (rows, {width})"
    if not isinstance(out, torch.Tensor):
        return InvalidArgument(want, type(out).__name__)
    return InvalidArgument(want, f"{dtype_name(out.dtype)} of shape {tuple(out.shape)}")


def _check_rows(rows: Sequence[int], world: int, rank: int, mine: int) -> None:
    if not isinstance(rows, Sequence) or not all(type(count) is int for count in rows):
        raise InvalidArgument("rows must be a list of whole numbers", repr(rows))
    if len(rows) != world or any(count < 0 for count in rows):
        raise InvalidArgument(f"rows must hold M of each of the {world} ranks", f"{list(rows)}")
    if rows[rank] != mine:
        raise InvalidArgument(
            "rows must hold this rank's M at its place",
            f"rows[{rank}]={rows[rank]} with an a of {mine} rows",
        )
