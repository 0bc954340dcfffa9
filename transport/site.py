"""Where a rank works: its device, through the vendor's runtime and as torch sees it."""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from typing import Any

import torch

from gemmlink.errors import Unavailable
from gemmlink.spec.contracts import Lane, Words
from gemmlink.transport.device_words import DeviceWords
from gemmlink.transport.stream_lanes import StreamLane
from gemmlink.transport.vendor import Vendor, names

_STORAGE = "_construct_storage_from_data_pointer"


class Site:
    """The current device of the thread that makes it."""

    #: Device types that windows are for.
    memory: tuple[str, ...] = ("cuda",)

    def __init__(self) -> None:
        self.vendor = Vendor(names())
        if not torch.cuda.is_available():
            raise Unavailable(
                f"transport 'ipc' needs a {self.vendor.name} device",
                "none that torch sees",
                "Look at nvidia-smi or rocm-smi, and at CUDA_VISIBLE_DEVICES or "
                "HIP_VISIBLE_DEVICES.",
            )
        try:
            self.index = torch.cuda.current_device()
        except RuntimeError as error:
            raise Unavailable(
                f"transport 'ipc' needs a {self.vendor.name} device that can be used",
                (str(error).splitlines() or [type(error).__name__])[0],
                "See whether another process has it for itself (nvidia-smi -q -d COMPUTE).",
            ) from error
        self.device = torch.device("cuda", self.index)

    @classmethod
    def probe(cls) -> dict[str, str]:
        """Facts for ``doctor``; uses no device. Raises ``Unavailable`` if the library is absent."""
        vendor = Vendor(names())
        return {"torch": str(torch.__version__), vendor.name: vendor.version()}

    def finish_stream(self) -> None:
        """Wait for what the current stream holds."""
        torch.cuda.current_stream(self.device).synchronize()

    def selected(self) -> AbstractContextManager[None]:
        """Within, the vendor's calls of this thread concern this device."""
        return self.vendor.on(self.index)

    def finish(self) -> None:
        """Wait for all that the device holds of this process; one that has failed holds nothing."""
        with contextlib.suppress(Unavailable), self.selected():
            self.vendor.synchronize()

    def words(self, tensors: list[torch.Tensor], rank: int) -> Words:
        """Words in these windows, by host methods."""
        return DeviceWords(tensors, rank)

    def lane(
        self, own: torch.Tensor, theirs: torch.Tensor, words: Words, peer: int, index: int
    ) -> Lane:
        """A lane between two windows."""
        return StreamLane(own, theirs, peer, index)


def view(address: int, nbytes: int, device: torch.device, keeper: object) -> torch.Tensor:
    """Bytes at ``address``, as ``device`` reaches them; whoever holds a view holds ``keeper``.

    ``device`` need not be the one that the memory lies on: kernels on views of a peer's memory must
    run here. That is why torch is not left to guess it from the address.
    """
    make: Any = getattr(torch._C, _STORAGE, None)
    if make is None:
        raise Unavailable(
            f"transport 'ipc' needs torch._C.{_STORAGE}",
            f"torch {torch.__version__}, which has none",
            "Install a torch from 2.7 to 2.13.",
        )
    storage = make(address, device, nbytes)
    tensor = torch.empty(0, dtype=torch.uint8, device=device).set_(storage, 0, (nbytes,), (1,))
    # One storage is shared by all views of this one, and lives as long as the last of them.
    tensor.untyped_storage()._gemmlink_keeps = keeper  # type: ignore[attr-defined]
    return tensor
