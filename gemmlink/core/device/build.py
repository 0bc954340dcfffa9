"""Makes the device's part of a prepared operation: the machine, the desk, the program."""

from __future__ import annotations

from collections.abc import Callable

import torch

from gemmlink.core.device.arguments import MovesArguments
from gemmlink.core.device.desk import Desk
from gemmlink.core.device.machine import Gpu, Machine
from gemmlink.core.device.program import DeviceProgram, addresses_of
from gemmlink.core.memory import Memory
from gemmlink.spec.contracts import Backend
from gemmlink.spec.schedule import Schedule

#: By the type of a device: what serves it.
MACHINES: dict[str, Callable[[torch.device], Machine]] = {"cuda": Gpu}


def device_program(
    schedule: Schedule,
    memory: Memory,
    backend: Backend,
    merge: bool,
    timeout_s: float,
    forks: bool = True,
) -> DeviceProgram:
    """The program of one rank, on the device of its problem. ``timeout_s`` limits each call.

    ``forks``: whether lanes have streams of their own.
    """
    device = memory.problem.device
    machine = MACHINES[device.type](device)
    addresses = addresses_of(memory)
    desk = Desk(machine, memory.layout, addresses, schedule.plan.rank, timeout_s)
    _load_kernels(machine, desk)
    return DeviceProgram(schedule, memory, backend, merge, machine, desk, forks)


def _load_kernels(machine: Machine, desk: Desk) -> None:
    """Launch each kernel with nothing to do.

    A kernel is loaded by its first launch, and loading waits for whatever runs: beside a kernel
    that waits for a peer, the host would hang until that comes.
    """
    stream = machine.stream()
    machine.words(desk.arguments([], []), stream)
    nothing = MovesArguments()
    nothing.desk, nothing.count = desk.address, 1
    machine.moves(nothing, stream)
