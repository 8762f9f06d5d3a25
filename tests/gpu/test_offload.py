"""Activation offload on a GPU, under torch's allocator and under umem's."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from gpu_jobs import Start

from umem.offloading import ActivationStore, CudaMover

MIB = 1 << 20


@pytest.fixture(scope="module")
def facts(start: Start) -> dict[str, Any]:
    """Results of the runs, one after the other."""
    found = {}
    for policy in ("stock", "sft"):
        found[policy] = start("offloading.py", policy, UMEM_MANAGED_LIMIT="6GiB").facts()
    return found


@pytest.mark.parametrize("policy", ["stock", "sft"])
@pytest.mark.parametrize("name", ["linear", "layernorm+linear", "layernorm+mlp"])
def test_memory_after_the_forward_pass(facts: dict[str, Any], policy: str, name: str) -> None:
    found = facts[policy][name]
    print(policy, name, {key: found[key] / MIB for key in ("off", "on", "one", "weights")})
    assert found["on"] < found["off"]
    assert found["on"] - found["one"] < found["weights"]


@pytest.mark.parametrize("policy", ["stock", "sft"])
@pytest.mark.parametrize("name", ["linear", "layernorm+linear", "layernorm+mlp"])
def test_values_equal_those_without_offload(facts: dict[str, Any], policy: str, name: str) -> None:
    found = facts[policy][name]
    assert all(found["equal"])
    tensors_out, tensors_in, late = found["tensors"]
    assert tensors_out == tensors_in >= 4
    assert late == 0


@pytest.mark.parametrize("policy", ["stock", "sft"])
def test_copies_neither_race_nor_block_the_thread(facts: dict[str, Any], policy: str) -> None:
    found = facts[policy]["races"]
    print(policy, found)
    assert found["wrong"] == 0
    assert found["late"] == 4 * 4
    assert not found["waited"]


@pytest.mark.parametrize("policy", ["stock", "sft"])
def test_graph_capture(facts: dict[str, Any], policy: str) -> None:
    assert facts[policy]["capture"] == {"opened": False, "equal": True}


def test_host_memory_is_pinned_and_given_back() -> None:
    mover = CudaMover(torch.device("cuda", 0))
    memory = mover.allocate_host(6 * MIB)
    assert memory.nbytes == 6 * MIB
    assert memory.is_pinned()
    address = memory.data_ptr()
    mover.free_host(memory)
    again = torch.cuda.cudart().cudaHostRegister(address, 6 * MIB, 0)
    assert int(again) == 0, "the memory is not pinned any more"
    mover.free_host(memory)


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_fork_does_not_move_pinned_memory() -> None:
    memory = CudaMover(torch.device("cuda", 0)).allocate_host(2 * MIB).fill_(1)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(writing)
        os.read(reading, 1)  # until the parent is done
        os._exit(0)
    os.close(reading)
    memory.fill_(2)  # a shared page would move now
    assert memory.to("cuda", non_blocking=True).eq(2).all()
    os.close(writing)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_refused_pin_leaves_no_error_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    mover = CudaMover(torch.device("cuda", 0))
    monkeypatch.setattr(
        "umem.offloading.movers.CUDA_HOST_REGISTER_PORTABLE", 1 << 20
    )  # no such flag
    with pytest.raises(MemoryError, match="which CUDA cannot pin"):
        mover.allocate_host(2 * MIB)
    assert torch.full((4,), 3.0, device="cuda").sum().item() == 12


def test_backward_on_another_stream() -> None:
    store = ActivationStore("cuda")
    x = torch.randn(1024, 1024, device="cuda", requires_grad=True)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        store.open_group("a")
        y = (x * 2).exp()
        store.close_group()
        assert store.send("a") == store.release("a") == 4 * MIB
    store.fetch("a")
    torch.cuda.current_stream().wait_stream(side)
    y.sum().backward()
    torch.cuda.current_stream().wait_stream(side)
    assert x.grad is not None
    assert torch.equal(x.grad, (x.detach() * 2).exp() * 2)


def test_other_devices_stay() -> None:
    store = ActivationStore("cuda")
    x = torch.randn(1024, 1024, requires_grad=True)
    store.open_group("a")
    y = x.exp()
    store.close_group()
    assert store.send("a") == 0
    y.sum().backward()
