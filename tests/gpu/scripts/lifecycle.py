"""A process that ends, or forks, with umem's memory in every state: ``lifecycle.py MODE``."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import umem

# Where users put it: a spawned DataLoader worker runs this line again.
umem.enable("sft")

KEPT: list[object] = []
"""Alive until the interpreter tears its modules down."""

ITEMS, WIDTH = 32, 1024


class Numbers(Dataset[torch.Tensor]):
    """Rows of their own number, on the CPU."""

    def __len__(self) -> int:
        return ITEMS

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((WIDTH,), float(index))


def train(steps: int = 3) -> None:
    """A few steps whose model, state and gradients stay alive."""
    model = nn.Sequential(nn.Linear(64, 1024), nn.ReLU(), nn.Linear(1024, 1024)).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loss = torch.zeros(())
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(torch.randn(8, 64, device="cuda")).square().mean()
        loss.backward()
        optimizer.step()
    KEPT.extend([model, optimizer, loss])


def live_tensors() -> None:
    train()
    side = torch.cuda.Stream()
    pending = torch.ones(1 << 20, device="cuda")
    with torch.cuda.stream(side):
        torch.cuda._sleep(10_000_000)
        KEPT.append(pending + 1)
    pending.record_stream(side)  # freed below, while the side stream may still read it


def live_graph() -> None:
    train()
    inputs = torch.zeros(1 << 20, device="cuda")
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        output = inputs + 1
    graph.replay()
    assert output.sum().item() == 1 << 20
    KEPT.extend([inputs, output, graph])


def exception() -> None:
    train()
    raise ValueError("stop here")


def interrupt() -> None:
    # A parent in the background may have its children ignore the signal.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    train()
    print("ready", flush=True)
    while True:
        train(1)
        torch.cuda.synchronize()
        KEPT.clear()


def exit_in_a_class() -> None:
    train()
    with umem.tensor_class("other"):
        KEPT.append(torch.ones(1 << 20, device="cuda"))
        sys.exit(3)


def thread_with_tensors() -> None:
    holding = threading.Event()

    def hold() -> None:
        tensors = [torch.ones(1 << 20, device="cuda")]
        with umem.tensor_class("other"):
            tensors.append(torch.ones(1 << 20, device="cuda"))
            holding.set()
            threading.Event().wait()

    threading.Thread(target=hold, daemon=True).start()
    assert holding.wait(timeout=60)


def gpu_unused() -> None:
    assert not torch.cuda.is_initialized()


def fork(leave: Callable[[int], object]) -> None:
    """A child that drops tensors which it cannot free, and a parent that goes on."""
    train()
    side = torch.cuda.Stream()
    shared = torch.ones(1 << 20, device="cuda")
    small, recorded = torch.ones(100, device="cuda"), torch.ones(1 << 20, device="cuda")
    recorded.record_stream(side)
    torch.cuda.synchronize()
    child = os.fork()
    if child == 0:
        del shared, small, recorded
        KEPT.clear()
        leave(0)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0, f"the child's status is {status}"
    assert (shared + 1).sum().item() == 2 << 20
    assert small.sum().item() == 100
    train()


def loader(context: str) -> None:
    """DataLoader workers beside a parent that uses the GPU."""
    train()
    total = 0.0
    for batch in DataLoader(
        Numbers(), batch_size=4, num_workers=2, multiprocessing_context=context, pin_memory=True
    ):
        assert not batch.is_cuda
        total += batch.cuda(non_blocking=True).sum().item()
    assert total == WIDTH * sum(range(ITEMS)), total


MODES: dict[str, Callable[[], None]] = {
    "live_tensors": live_tensors,
    "live_graph": live_graph,
    "exception": exception,
    "interrupt": interrupt,
    "exit_in_a_class": exit_in_a_class,
    "thread_with_tensors": thread_with_tensors,
    "gpu_unused": gpu_unused,
    "fork_then_exit": lambda: fork(sys.exit),
    "fork_then_hard_exit": lambda: fork(os._exit),
    "loader_fork": lambda: loader("fork"),
    "loader_spawn": lambda: loader("spawn"),
}

if __name__ == "__main__":
    MODES[sys.argv[1]]()
    print("done")
