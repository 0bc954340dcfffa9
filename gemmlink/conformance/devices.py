"""Where the kit's tensors lie: on CPUs, or on the devices that the transport under test serves."""

from __future__ import annotations

import os

import torch

from gemmlink import plugins
from gemmlink.core.compose import AUTO_TRANSPORTS
from gemmlink.errors import Unavailable

HOST = "cpu"
KINDS = tuple(AUTO_TRANSPORTS)


def default_transport(device: str) -> str:
    """The built-in transport for tensors of this kind of device, as ``auto`` takes it first."""
    return AUTO_TRANSPORTS[device][0]


def served_by(transport: str | None) -> str:
    """The kind of device of the tensors that a transport serves: CPUs, if it serves those."""
    if transport is None:
        return HOST
    try:
        made: object = plugins.find("transport", transport)
        memory = made.probe().memory  # type: ignore[attr-defined]
    except Exception:  # a plugin may raise anything; whoever describes it next tells what
        return next((kind for kind, names in AUTO_TRANSPORTS.items() if transport in names), HOST)
    return HOST if HOST in memory or not memory else str(memory[0])


def lacking(device: str) -> str | None:
    """What this machine has not for tensors on ``device``, with the remedy; None if it has all."""
    try:
        require(device)
    except Unavailable as error:
        return str(error)
    return None


def require(device: str) -> None:
    """Raise ``Unavailable`` if there is no such device here."""
    if device != HOST and not torch.cuda.is_available():
        raise Unavailable(
            f"tensors on {device} need a device",
            "none that torch sees",
            "Run it where nvidia-smi lists one, with a torch for CUDA.",
        )


def take(device: str, rank: int) -> None:
    """Make a device the current one of this thread: one for each rank, as far as they go round."""
    if device != HOST:
        local = int(os.environ.get("LOCAL_RANK", rank))
        torch.cuda.set_device(local % torch.cuda.device_count())


def is_enqueued(device: str) -> bool:
    """Whether calls are enqueued, and so must be told every rank's M where that may differ."""
    return device != HOST


def settle(device: str) -> None:
    """Wait for what has been enqueued."""
    if device != HOST:
        torch.cuda.synchronize()
