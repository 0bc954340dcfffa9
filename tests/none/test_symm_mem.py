"""`transport.symm_mem` where there is no device: what it refuses, and how it says so."""

from __future__ import annotations

import weakref
from typing import Any, cast
from unittest import mock

import pytest
import torch

import gemmlink
from gemmlink import plugins
from gemmlink.core import compose as compose_module
from gemmlink.core.compose import Choice, compose
from gemmlink.errors import Unavailable, Unsupported
from gemmlink.spec.contracts import Capabilities, Group
from gemmlink.spec.operations import all_gather
from gemmlink.spec.problem import Problem
from gemmlink.transport import symm_mem
from gemmlink.transport.ipc import Ipc


def _place(device: str, boot: str = "b", allowed: bool = False) -> dict[str, Any]:
    return {"device": device, "boot": boot, "host": "h", "ordinal": 0, "allowed": allowed}


def test_ranks_on_one_device_are_refused_with_the_variable() -> None:
    places = [_place("gpu-0"), _place("gpu-1"), _place("gpu-0")]
    with pytest.raises(Unsupported, match=r"ranks 0 and 2 on cuda:0.*ALLOW_OVERLAPPING_DEVICES=1"):
        symm_mem._refuse_shared_devices(places)


def test_ranks_on_one_device_may_be_allowed_by_all_of_them() -> None:
    symm_mem._refuse_shared_devices([_place("gpu-0", allowed=True), _place("gpu-0", allowed=True)])
    with pytest.raises(Unsupported):
        symm_mem._refuse_shared_devices([_place("gpu-0", allowed=True), _place("gpu-0")])


def test_ranks_on_two_hosts_are_refused() -> None:
    with pytest.raises(Unsupported, match="rank 0 on h and rank 3 on h"):
        symm_mem._refuse_apart(_place("gpu-0"), _place("gpu-0", boot="c"), 3)


def test_ranks_that_torch_would_not_bring_together_are_refused() -> None:
    symm_mem._refuse_other_turns([3, 3, 3])
    with pytest.raises(Unsupported, match=r"3 at rank 0 and 2 at rank 1.*=ipc"):
        symm_mem._refuse_other_turns([3, 2, 3])


@pytest.mark.usefixtures("cpu_torch")
def test_a_torch_without_cuda_is_told_what_to_install() -> None:
    with pytest.raises(
        Unavailable, match=r"a torch for CPUs only\. Install a torch with CUDA: pip"
    ):
        symm_mem.SymmetricMemory().probe()


@pytest.mark.usefixtures("cpu_torch")
@pytest.mark.parametrize("result", ["copy", "view"])
def test_cuda_tensors_ask_for_a_torch_with_devices(result: str) -> None:
    op = gemmlink.GemmAllGather(4, 4, 4, device="cuda", group=_Pair(), result=result)
    with pytest.raises(Unavailable, match="transport 'ipc' needs CUDA or ROCm"):
        op.explain()


@pytest.mark.usefixtures("cpu_torch")
def test_the_variable_is_heeded_and_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GEMMLINK_TRANSPORT", "symm_mem")
    op = gemmlink.GemmAllGather(4, 4, 4, group=_Pair())
    with pytest.raises(Unavailable, match=r"'symm_mem' needs CUDA; .* Install a torch with CUDA"):
        op.explain()


class _Pair:
    """A group of two that never exchanges anything."""

    rank, world, board = 0, 2, None

    def all_gather(self, data: bytes, **rest: Any) -> list[bytes]:
        raise AssertionError("nothing to exchange")


class _Somewhere:
    """`symm_mem` as it would be on a machine with a device."""

    name, interface = "symm_mem", 1

    def probe(self) -> Any:
        return Capabilities(("cuda",), host_words=True, host_data=False, lanes=("in_order",))

    def open(self, group: Any, *, key: str, timeout_s: float) -> Any:
        raise AssertionError("nothing to open")


def _composed(device: str = "cuda", **choice: Any) -> Any:
    problem = Problem(8, 8, 64, torch.float32, torch.float32, torch.device(device))
    return compose(problem, 2, Choice(transport=_Somewhere(), **choice), all_gather(2, 8))


def test_the_order_of_auto_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that cannot be had is passed over, with its own words."""
    plugins.register(plugins.Entry("somewhere", f"{__name__}:_Somewhere", "transport"))
    try:
        monkeypatch.setitem(vars(compose_module)["AUTO_TRANSPORTS"], "cuda", ("lost", "somewhere"))
        plugins.register(plugins.Entry("lost", f"{__name__}:_Lost", "transport"))
        problem = Problem(8, 8, 64, torch.float32, torch.float32, torch.device("cuda"))
        parts = compose(problem, 2, Choice(), all_gather(2, 8))
    finally:
        for name in ("somewhere", "lost"):
            plugins.unregister(name)
    told = "\n".join(parts.reasons)
    assert "transport lost: passed over; it needs a map; got none. Draw one." in told
    assert "CUDA devices of one host; for these auto takes lost, then somewhere" in told


def test_ipc_is_taken_where_torch_has_no_symmetric_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    lacking = Unavailable("transport 'symm_mem' needs CUDA", "a torch for ROCm")
    monkeypatch.setattr(symm_mem.SymmetricMemory, "probe", mock.Mock(side_effect=lacking))
    monkeypatch.setattr(Ipc, "probe", _Somewhere.probe)
    problem = Problem(8, 8, 64, torch.float32, torch.float32, torch.device("cuda"))
    parts = compose(problem, 2, Choice(), all_gather(2, 8))
    told = "\n".join(parts.reasons)
    assert parts.transport_name == "ipc"
    assert "transport symm_mem: passed over; transport 'symm_mem' needs CUDA" in told
    assert "for these auto takes symm_mem, then ipc" in told


class _Lost(_Somewhere):
    """One that cannot be had."""

    name = "lost"

    def probe(self) -> Any:
        raise Unavailable("it needs a map", "none", "Draw one.")


@pytest.mark.parametrize(("view", "mode"), [(False, "split-pull"), (True, "split-push")])
def test_what_is_chosen_on_a_device(view: bool, mode: str) -> None:
    assert _composed(view=view).mode == mode


def test_library_collectives_and_wire_dtypes_are_for_cpus() -> None:
    with pytest.raises(Unsupported, match="library collectives serve CPU tensors only"):
        _composed(epilogue="collective")
    problem = Problem(8, 8, 64, torch.float32, torch.float32, torch.device("cuda"))
    encoded = all_gather(2, 8, torch.float8_e4m3fn)
    with pytest.raises(Unsupported, match="another dtype on CPUs only"):
        compose(problem, 2, Choice(transport=_Somewhere()), encoded)


def test_tensors_and_transport_must_be_of_one_kind() -> None:
    with pytest.raises(Unsupported, match=r"'symm_mem' serves cuda tensors; got tensors on cpu"):
        _composed(device="cpu")


class _Memory:
    """torch's symmetric memory with two ranks, both in the memory of this process."""

    def empty(self, nbytes: int, **_: Any) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8)

    def rendezvous(self, own: torch.Tensor, name: str) -> Any:
        return _Handle(own)


class _Twins(_Pair):
    """A group of two, both of which say the same."""

    def all_gather(self, data: bytes, **rest: Any) -> list[bytes]:
        return [data, data]


class _Handle:
    def __init__(self, own: torch.Tensor) -> None:
        self.own, self.buffer_ptrs = own, [own.data_ptr(), own.data_ptr()]

    def get_buffer(self, *_: Any) -> torch.Tensor:
        return self.own.clone()


@pytest.fixture
def _torch_without_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(symm_mem, "module", _Memory)
    monkeypatch.setattr(symm_mem, "_name", lambda group: "one")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: mock.Mock())
    monkeypatch.setattr(torch.cuda, "Stream", mock.Mock())


@pytest.mark.usefixtures("_torch_without_a_device")
def test_a_window_that_was_freed_holds_nothing_though_it_is_held() -> None:
    """Words are views of all windows: one that keeps them keeps the memory of every rank."""
    session = symm_mem.SymmSession(cast(Group, _Twins()), "here", 5.0, [])
    window = session.window(4096)
    handle = weakref.ref(window._handle)
    window.free()
    window.free()
    assert handle() is None, "something of a freed window holds its memory"
    session.window(4096)
    assert [known.freed for known in session._windows] == [False]
    session.close()


@pytest.mark.usefixtures("_torch_without_a_device")
def test_a_rank_by_itself_exchanges_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or torch would count an exchange that the ranks of its other groups have not made."""
    monkeypatch.setattr(symm_mem, "_exchanges", 0)
    monkeypatch.setattr(_Memory, "rendezvous", mock.Mock(side_effect=AssertionError("alone")))
    alone = symm_mem.SymmSession(gemmlink.SELF, "here", 5.0, []).window(4096)
    assert alone.addresses == [alone.tensor(0).data_ptr()]
    assert symm_mem._exchanges == 0


@pytest.mark.usefixtures("_torch_without_a_device")
def test_exchanges_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(symm_mem, "_exchanges", 0)
    session = symm_mem.SymmSession(cast(Group, _Twins()), "here", 5.0, [])
    session.window(4096)
    session.window(4096)
    assert symm_mem._exchanges == 2
