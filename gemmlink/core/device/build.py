"""Makes the device's part of a prepared operation: the machine, the desk, the program."""

from __future__ import annotations

from collections.abc import Callable

import torch

from gemmlink.core.device.desk import Desk
from gemmlink.core.device.machine import Gpu, Machine
from gemmlink.core.device.program import DeviceProgram, addresses_of
from gemmlink.core.memory import Memory
from gemmlink.errors import InvalidArgument
from gemmlink.spec.contracts import Backend
from gemmlink.spec.schedule import Schedule

#: By the type of a device: what serves it.
MACHINES: dict[str, Callable[[torch.device], Machine]] = {"cuda": Gpu}


def serves(device: torch.device) -> bool:
    """Whether calls on this device are enqueued, rather than walked by the host."""
    return device.type in MACHINES


def device_program(
    schedule: Schedule, memory: Memory, backend: Backend, merge: bool, timeout_s: float
) -> DeviceProgram:
    """The program of one rank, on the device of its problem. ``timeout_s`` limits each call."""
    device = memory.problem.device
    check_current(device)
    machine = MACHINES[device.type](device)
    addresses = addresses_of(memory)
    desk = Desk(machine, memory.layout, addresses, schedule.plan.rank, timeout_s)
    return DeviceProgram(schedule, memory, backend, merge, machine, desk)


def check_current(device: torch.device) -> None:
    """Raise ``InvalidArgument`` unless ``device`` is the current one, where the window is made."""
    if device.type != "cuda":
        return
    current = torch.cuda.current_device()
    if device.index != current:
        raise InvalidArgument(
            "an operation is prepared and called on the current device",
            f"{device} where cuda:{current} is current",
            f"Call torch.cuda.set_device({device.index}) first.",
        )
