"""The library's collectives as a call makes them: private buffers in, the result out.

Ranks may have different M, which the library does not know of: blocks are padded to the longest,
or sent with their own sizes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from gemmlink.core import wire
from gemmlink.core.sums import ordered_sum
from gemmlink.spec.operations import Phase, band_rows

if TYPE_CHECKING:
    from gemmlink.core.call import Call


def all_gather(call: Call) -> None:
    """Gather what every rank has, its product or its summed band, into the result."""
    world, result = call.launch.group.world, call.result()
    phase = call.launch.phases[-1]
    rows = call.known_rows()
    if phase.source == "sum":
        bands = [band_rows(call.m, world, band) for band in range(world)]
        block, counts = call.band, [last - first for first, last in bands]
    else:
        block, counts = call.local(), list(rows)
    if phase.wire is not None:
        encoded = torch.zeros(len(block), wire.row_bytes(block.shape[1]), dtype=torch.uint8)
        wire.encode(block, encoded)
        block = encoded
    longest = max(counts)
    if min(counts) < longest:
        padded = torch.empty(longest, block.shape[1], dtype=block.dtype)
        padded[: len(block)].copy_(block)
        block = padded
    direct = min(counts) == longest and result.is_contiguous() and phase.wire is None
    shape = (world, longest, block.shape[1])
    gathered = result.view(shape) if direct else torch.empty(shape, dtype=block.dtype)
    call.through_library("all_gather", gathered, block)
    if not direct:
        _unpack(gathered, counts, result, phase)


def _unpack(gathered: torch.Tensor, counts: list[int], result: torch.Tensor, phase: Phase) -> None:
    start = 0
    for source, count in enumerate(counts):
        rows, target = gathered[source, :count], result[start : start + count]
        if phase.wire is None:
            target.copy_(rows)
        elif count:
            wire.decode(rows, target)
        start += count


def all_to_all(call: Call) -> None:
    """Send each rank its columns, stack what comes."""
    world, result = call.launch.group.world, call.result()
    phase, rows = call.launch.phases[0], call.known_rows()
    local = call.local()
    parts = [local[:, low:high] for low, high in (route.cols for route in phase.routes[:world])]
    block = torch.cat([part.reshape(-1) for part in parts])
    width = result.shape[1]
    direct = result.is_contiguous()
    gathered = result if direct else torch.empty(result.shape, dtype=result.dtype)
    sent, came = [call.m * width] * world, [count * width for count in rows]
    call.through_library("all_to_all", gathered.view(-1), block, sent, came)
    if not direct:
        result.copy_(gathered)


def reduce_scatter(call: Call) -> None:
    """Sum every rank's band, in source order unless that is not asked for."""
    launch = call.launch
    world, rank, local = launch.group.world, launch.group.rank, call.local()
    call.known_rows()
    bands = [band_rows(call.m, world, band) for band in range(world)]
    mine = bands[rank][1] - bands[rank][0]
    width = local.shape[1]
    target = call.result() if len(launch.phases) == 1 else call.make_band(mine)
    if not launch.deterministic:
        _reduce_in_any_order(call, local, bands, target)
        return
    gathered = torch.empty(world, mine, width, dtype=local.dtype)
    sent = [(last - first) * width for first, last in bands]
    came = [mine * width] * world
    call.through_library("all_to_all", gathered.view(-1), local.view(-1), sent, came)
    ordered_sum(list(gathered), target)


def _reduce_in_any_order(
    call: Call, local: torch.Tensor, bands: list[tuple[int, int]], target: torch.Tensor
) -> None:
    """As the library does it: in the dtype of the result, over bands of equal length."""
    longest = max(last - first for first, last in bands)
    padded = torch.zeros(len(bands), longest, local.shape[1], dtype=local.dtype)
    for block, (first, last) in zip(padded, bands, strict=True):
        block[: last - first].copy_(local[first:last])
    summed = torch.empty(longest, local.shape[1], dtype=local.dtype)
    call.through_library("reduce_scatter", summed, padded)
    target.copy_(summed[: len(target)])


#: By name.
COLLECTIVES: dict[str, Callable[[Call], None]] = {
    "all_gather": all_gather,
    "all_to_all": all_to_all,
    "reduce_scatter": reduce_scatter,
}
