"""Transport ``symm_mem``: CUDA ranks on one host, through ``torch.distributed._symmetric_memory``.

A window is one symmetric allocation of bytes that torch exchanges over the process group, whatever
its backend; words of this library lie in it as in any window, beside the data. torch's own signal
pads are not used: they are binary, 32 bits, and reset themselves.

Several ranks on one device are refused by torch unless ``TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES``
is 1. That is for tests, with MPS, and never faster than one rank.
"""

from __future__ import annotations

import importlib
import os
import socket
from collections.abc import Sequence
from typing import Any, cast

import torch

from gemmlink.errors import Unavailable, Unsupported
from gemmlink.rendezvous import agree
from gemmlink.spec.contracts import INTERFACE, Capabilities, Group
from gemmlink.transport.device_words import DeviceWords
from gemmlink.transport.liveness import Watch, process
from gemmlink.transport.stream_lanes import StreamLane

OVERLAP = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"
_MODULE = "torch.distributed._symmetric_memory"
_FIX = "Install a torch with CUDA: pip install 'torch>=2.9' (see pytorch.org for the right index)."


#: How often this process has exchanged memory by torch. torch numbers exchanges by process, not by
#: group, so that ranks that have made differently many would never find each other.
_exchanges = 0


class SymmetricMemory:
    """See the module's docstring."""

    name = "symm_mem"
    interface = INTERFACE

    def probe(self) -> Capabilities:
        """Needs a torch with CUDA. Does not ask for a device: that would begin to use one."""
        if torch.version.cuda is None:
            what = "for ROCm" if torch.version.hip is not None else "for CPUs only"
            raise Unavailable("transport 'symm_mem' needs CUDA", f"a torch {what}", _FIX)
        return Capabilities(
            memory=("cuda",),
            host_words=True,
            host_data=False,
            lanes=("in_order",),
            details={
                "torch": str(torch.__version__),
                "CUDA": str(torch.version.cuda),
                OVERLAP: os.environ.get(OVERLAP, "not set"),
            },
        )

    def open(self, group: Group, *, key: str, timeout_s: float) -> SymmSession:
        """Collective; checks first that ranks share a host and, unless allowed, no device."""
        places = agree(group, f"{key}/place", lambda: _place(group), timeout_s)
        for rank, place in enumerate(places):
            _refuse_apart(places[0], place, rank)
        _refuse_shared_devices(places)
        return SymmSession(group, key, timeout_s, places)


class SymmSession:
    """An open ``symm_mem`` transport over one group."""

    def __init__(
        self, group: Group, key: str, timeout_s: float, places: list[dict[str, Any]]
    ) -> None:
        self.rank = group.rank
        self.world = group.world
        self._group = group
        self._key = key
        self._timeout_s = timeout_s
        self._watches = [Watch(place) for place in places]
        self._windows: list[SymmWindow] = []
        self._made = 0
        self._barriers = 0

    def window(self, nbytes: int, common_from: int | None = None) -> SymmWindow:
        """Collective; see ``contracts.Session``."""
        if common_from is not None:
            raise Unsupported("windows of transport 'symm_mem' share no memory", "common_from")
        self._made += 1
        key = f"{self._key}/window{self._made}"
        window = SymmWindow(self._group, key, nbytes, self._timeout_s)
        self._windows = [known for known in self._windows if not known.freed]
        self._windows.append(window)
        return window

    def barrier(self, timeout_s: float) -> None:
        """Collective, through the group's own exchange: set-up and reset have time for that.

        What this rank has enqueued on its current stream has ended before it comes.
        """
        torch.cuda.current_stream().synchronize()
        self._barriers += 1
        agree(self._group, f"{self._key}/barrier{self._barriers}", dict, timeout_s)

    def alive(self, peer: int) -> bool | None:
        """Whether ``peer``'s process exists."""
        return self._watches[peer].alive() if self._watches else None

    def close(self) -> None:
        """Free all windows."""
        for window in self._windows:
            window.free()
        for watch in self._watches:
            watch.close()
        self._windows, self._watches = [], []


class SymmWindow:
    """One symmetric allocation a rank, mapped by all."""

    def __init__(self, group: Group, key: str, nbytes: int, timeout_s: float) -> None:
        self.nbytes = nbytes
        self.freed = False
        self._rank = group.rank
        self._lanes: dict[tuple[int, int], StreamLane] = {}
        self._own: torch.Tensor | None = None
        self._handle: Any = None
        self._tensors: list[torch.Tensor] = []
        #: Addresses are those of this process.
        self.addresses: Sequence[int | None] = []
        turns = agree(group, f"{key}/allocate", self._allocate, timeout_s)
        if group.world > 1:
            _refuse_other_turns([turn["exchanges"] for turn in turns])
            agree(group, f"{key}/map", lambda: self._map(group), timeout_s)
        else:
            own = cast(torch.Tensor, self._own)
            self._tensors, self.addresses = [own], [own.data_ptr()]
        self.words = DeviceWords(self._tensors, group.rank)

    def _allocate(self) -> dict[str, Any]:
        memory = module()
        device = torch.device("cuda", torch.cuda.current_device())
        try:
            self._own = memory.empty(self.nbytes, dtype=torch.uint8, device=device)
            self._own.zero_()
            torch.cuda.current_stream().synchronize()
        except RuntimeError as error:
            raise Unavailable(
                f"a window needs {self.nbytes} bytes of device memory that can be shared",
                _first_line(error),
                "Lower max_m.",
            ) from error
        return {"exchanges": _exchanges}

    def _map(self, group: Group) -> dict[str, Any]:
        global _exchanges
        _exchanges += 1
        try:
            self._handle = module().rendezvous(self._own, _name(group))
        except RuntimeError as error:
            raise Unavailable(
                "torch must map every peer's symmetric memory",
                _first_line(error),
                "See docs/transports.md, symm_mem, for the common causes.",
            ) from error
        self.addresses = [int(address) for address in self._handle.buffer_ptrs]
        self._tensors = [self._view(peer) for peer in range(group.world)]
        return {}

    def _view(self, peer: int) -> torch.Tensor:
        view: torch.Tensor = self._handle.get_buffer(peer, (self.nbytes,), torch.uint8)
        # torch's view does not keep what it shows: a result that is a view of the window, read
        # after the operation was closed, would be a fault that costs the process its device. The
        # storage is shared by all views of this one, and lives as long as the last of them.
        view.untyped_storage()._gemmlink_keeps = (self._handle, self._own)  # type: ignore[attr-defined]
        return view

    def tensor(self, peer: int) -> torch.Tensor:
        """All bytes of ``peer``'s allocation, on this rank's device as torch sees it."""
        return self._tensors[peer]

    def lane(self, peer: int, index: int) -> StreamLane:
        """A stream that copies."""
        key = (peer, index)
        if key not in self._lanes:
            own, theirs = self._tensors[self._rank], self._tensors[peer]
            self._lanes[key] = StreamLane(own, theirs, peer, index)
        return self._lanes[key]

    def free(self) -> None:
        """Drop the mappings; memory goes with the last view, and with the last rank that maps it.

        torch waits for the own device then.
        """
        if self.freed:
            return
        self.freed = True
        # Both hold the memory, for as long as somebody holds the window.
        self.words.close()
        for lane in self._lanes.values():
            lane.close()
        self._lanes = {}
        self._tensors = []
        self._handle = self._own = None
        self.addresses = []


def module() -> Any:
    """torch's module, imported late: some builds of torch have it and cannot import it."""
    try:
        return importlib.import_module(_MODULE)
    except ImportError as error:
        raise Unavailable(f"transport 'symm_mem' needs {_MODULE}", str(error), _FIX) from error


def _name(group: Group) -> str:
    process_group = getattr(group, "process_group", None)
    name = getattr(process_group, "group_name", None)
    if not isinstance(name, str):
        raise Unavailable(
            "transport 'symm_mem' needs a torch.distributed group",
            type(group).__name__,
            "Call torch.distributed.init_process_group('nccl') (or 'gloo') first.",
        )
    return name


def _place(group: Group) -> dict[str, Any]:
    _name(group)
    if not torch.cuda.is_available():
        raise Unavailable("transport 'symm_mem' needs a CUDA device", "none that torch sees", _FIX)
    index = torch.cuda.current_device()
    with open("/proc/sys/kernel/random/boot_id") as file:
        boot = file.read().strip()
    return {
        "boot": boot,
        "host": f"{socket.gethostname()} (pid {os.getpid()})",
        "device": str(getattr(torch.cuda.get_device_properties(index), "uuid", index)),
        "ordinal": index,
        "allowed": os.environ.get(OVERLAP) == "1",
        **process(),
    }


def _refuse_apart(first: dict[str, Any], other: dict[str, Any], rank: int) -> None:
    if other["boot"] != first["boot"]:
        raise Unsupported(
            "transport 'symm_mem' needs all ranks on one host",
            f"rank 0 on {first['host']} and rank {rank} on {other['host']}",
            "Use a group of ranks on one host.",
        )


def _refuse_other_turns(exchanges: Sequence[int]) -> None:
    """On every rank alike, before anybody waits: torch's exchange has a limit of its own."""
    for rank, made in enumerate(exchanges):
        if made != exchanges[0]:
            raise Unsupported(
                "ranks of a symm_mem window must have made equally many of them before, in all "
                "their groups of more than one rank",
                f"{exchanges[0]} at rank 0 and {made} at rank {rank}",
                "Prepare operations of all groups in the same order on all ranks, or use "
                "GEMMLINK_TRANSPORT=ipc.",
            )


def _refuse_shared_devices(places: list[dict[str, Any]]) -> None:
    seen: dict[str, int] = {}
    for rank, place in enumerate(places):
        first = seen.setdefault(place["device"], rank)
        if first == rank or (place["allowed"] and places[first]["allowed"]):
            continue
        raise Unsupported(
            "every rank needs a device of its own",
            f"ranks {first} and {rank} on cuda:{place['ordinal']} ({place['device']})",
            "Call torch.cuda.set_device(local_rank) before; or, to test on one device, set "
            f"{OVERLAP}=1 for all ranks and start MPS.",
        )


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
