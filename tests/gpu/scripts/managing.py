"""A small training in a process of its own, stock or managed: ``managing.py MODE STEPS [TOKENS]``.

The last line is JSON: what the mode found out.
"""

from __future__ import annotations

import gc
import json
import os
import random
import sys
import zlib
from collections.abc import Callable
from typing import Any

import torch
from begin import begin
from torch import nn

import umem
from umem.core.classes import TensorClass
from umem.core.schedule import HintOp
from umem.managing import managers, residency
from umem.pages import Manager, ManagerState
from umem.runtime.hints import HintEngine

HIDDEN, WIDE, LAYERS = 512, 2048, 6
SMALLEST_BYTES = 2 << 20
"""What moves: smaller tensors have no pages of their own, or are plain device memory."""

MOST_BEFORE_PLANNED = 20
"""Steps in which a plan has to be there."""

MOST_SEARCH_S = 120.0
"""A search takes so long at most, with compiling the planner."""


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.up = nn.Linear(HIDDEN, WIDE)
        self.down = nn.Linear(WIDE, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.head = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def manager_facts(manager: Manager) -> dict[str, Any]:
    """What a manager says, and what it has moved."""
    status = manager.status()
    statistics = manager.engine.statistics()
    return {
        "state": str(status.state),
        "reason": status.reason,
        "planner": status.planner,
        "budget_bytes": status.budget_bytes,
        "steps": status.steps,
        "diverged_steps": status.diverged_steps,
        "wait_timeouts": status.wait_timeouts,
        "failures": [failure.text for failure in statistics.failures],
        "moved_bytes": sum(of.moved_bytes for of in statistics.counts.values()),
        "moved_activation_bytes": sum(
            of.moved_bytes
            for (_, tensor_class), of in statistics.counts.items()
            if tensor_class is TensorClass.ACTIVATIONS
        ),
        "copied_bytes": manager.store.statistics.bytes_out,
        "late_fetches": manager.store.statistics.late_fetches,
    }


class Training:
    """The same model, batches and steps in every process."""

    tokens = 4096

    def __init__(self) -> None:
        torch.manual_seed(1)
        self.model = Net().cuda()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.losses: list[torch.Tensor] = []

    def forward(self) -> torch.Tensor:
        torch.manual_seed(100 + len(self.losses))
        batch = torch.randn(self.tokens, HIDDEN, device="cuda")
        return self.model(batch).square().mean()

    def step(self) -> None:
        loss = self.forward()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(loss.detach())

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.step()

    def steps_until_planned(self) -> None:
        """Train until a plan runs, or it is clear that none will: the host must not run ahead."""
        for _ in range(MOST_BEFORE_PLANNED):
            self.step()
            self.losses[-1].item()
            for manager in managers():
                manager.wait_for_search(MOST_SEARCH_S)
            states = [manager.status().state for manager in managers()]
            if states and states[0] not in (
                ManagerState.WARMING_UP,
                ManagerState.RECORDING,
                ManagerState.PLANNING,
            ):
                self.steps(2)  # hooks that came in the middle of a step follow the next one
                return

    def facts(self) -> dict[str, Any]:
        """Losses, a checksum of weights and state, and what the manager says."""
        torch.cuda.synchronize()
        checksum = 0
        for parameter in self.model.parameters():
            state = self.optimizer.state[parameter]
            for tensor in (parameter, state["exp_avg"], state["exp_avg_sq"]):
                checksum = zlib.crc32(tensor.detach().cpu().numpy().data, checksum)
        found: dict[str, Any] = {
            "losses": [loss.item() for loss in self.losses],
            "checksum": checksum,
            "peak_bytes": torch.cuda.max_memory_allocated(),
        }
        for manager in managers():
            found |= manager_facts(manager)
            assert umem.manage(self.model, self.optimizer) is manager
        return found


def plain(steps: int) -> dict[str, Any]:
    training = Training()
    training.steps(steps)
    return training.facts()


def patient(steps: int) -> dict[str, Any]:
    """The same for a managed run in which a plan is looked for: it is made or refused in time."""
    training = Training()
    training.steps_until_planned()
    training.steps(steps - len(training.losses))
    return training.facts()


def sampled(steps: int) -> dict[str, Any]:
    """What is on the device at each end of each layer, once the plan runs."""
    training = Training()
    training.steps_until_planned()
    seen: list[int] = []

    def look(*_: object) -> None:
        seen.append(sum(residency().values()))

    def look_twice(_module: object, _args: object, output: torch.Tensor) -> None:
        look()
        output.register_hook(look)

    handles = [layer.register_forward_hook(look_twice) for layer in training.model.layers]
    handles.append(training.optimizer.register_step_post_hook(look))
    training.steps(steps - len(training.losses))
    for handle in handles:
        handle.remove()
    return {**training.facts(), "peak_resident_bytes": max(seen), "samples": len(seen)}


def disturbed(steps: int) -> dict[str, Any]:
    """Hints of no plan, at random, on tensors of every class."""
    training = Training()
    training.steps_until_planned()
    (manager,) = managers()
    chance = random.Random(7)

    def tensors() -> list[torch.Tensor]:
        found: list[torch.Tensor] = list(training.model.parameters())
        found += [parameter.grad for parameter in found if parameter.grad is not None]
        for parameter in training.model.parameters():
            state = training.optimizer.state[parameter]
            found += [state["exp_avg"], state["exp_avg_sq"]]
        return [tensor for tensor in found if tensor.nbytes >= SMALLEST_BYTES]

    def disturb(tensor: torch.Tensor | None = None) -> None:
        engine: HintEngine = manager.engine
        if tensor is None or tensor.grad_fn is None:
            tensor = chance.choice(tensors())
        address, size_bytes = tensor.untyped_storage().data_ptr(), tensor.nbytes
        kind = chance.choice(["prefetch", "evict", "map", "unmap", "activations"])
        if kind in ("prefetch", "evict"):
            op = HintOp.PREFETCH if kind == "prefetch" else HintOp.EVICT
            batch = engine.batch([op], [address], [size_bytes], [TensorClass.OTHER])
            engine.submit_batch(batch, torch.cuda.current_stream().cuda_stream)
        elif kind == "activations":
            for group in list(manager.store._groups):
                getattr(manager.store, chance.choice(["send", "release", "fetch"]))(group)
        else:
            is_mapped = kind == "map"
            engine.advise(
                address,
                size_bytes,
                placement="host" if is_mapped else "device",
                accessed_by_device=is_mapped,
            )

    def after_forward(_module: object, _args: object, output: torch.Tensor) -> None:
        disturb(output)
        disturb()
        output.register_hook(disturb)

    for layer in training.model.layers:
        layer.register_forward_hook(after_forward)
    training.steps(steps - len(training.losses))
    return training.facts()


def broken(steps: int) -> dict[str, Any]:
    """An exception in the middle of a forward pass, one in a backward pass, and on."""
    training = Training()
    training.steps_until_planned()

    class StopError(Exception):
        pass

    def stop(*_: object) -> None:
        raise StopError

    layers = training.model.layers
    for attach in (
        lambda: layers[2].register_forward_pre_hook(stop),
        lambda: layers[1].get_parameter("up.weight").register_hook(stop),
    ):
        handle = attach()
        try:
            training.forward().backward()
        except StopError:
            pass
        else:
            raise AssertionError("nothing was raised")
        handle.remove()
        training.optimizer.zero_grad()
        training.steps(2)
    training.steps(steps - len(training.losses))
    return training.facts()


def profiled(steps: int) -> dict[str, Any]:
    """CUPTI has another user while steps are recorded and planned."""
    training = Training()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]):
        training.steps_until_planned()
    training.steps(steps - len(training.losses))
    return training.facts()


def freed(steps: int) -> dict[str, Any]:
    """A model goes while hints on its memory are queued; the next one gets that memory."""
    first = Training()
    first.steps_until_planned()
    (manager,) = managers()
    first.forward().backward()
    first.optimizer.step()
    open_requests = manager.engine.statistics().open_requests
    del first, manager
    gc.collect()
    alive = len(managers())
    torch.cuda.empty_cache()
    second = Training()
    second.steps_until_planned()
    second.steps(steps - len(second.losses))
    return {**second.facts(), "open_requests": open_requests, "alive": alive}


def forked(steps: int) -> dict[str, Any]:
    """A child in the middle of a step that trains nothing."""
    training = Training()
    training.steps_until_planned()
    loss = training.forward()
    child = os.fork()
    if child == 0:
        sys.exit(0)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0, f"the child's status is {status}"
    loss.backward()
    training.optimizer.step()
    training.optimizer.zero_grad()
    training.losses.append(loss.detach())
    training.steps(steps - len(training.losses))
    return training.facts()


def ended(_steps: int) -> dict[str, Any]:
    """The process ends with hints in flight."""
    training = Training()
    training.steps_until_planned()
    (manager,) = managers()
    assert manager.status().state == "running", manager.status()
    training.forward().backward()
    KEPT.append(training)
    # The driver refuses hints on plain device memory, and the engine says so on stderr.
    tensors = [p for p in training.model.parameters() if p.nbytes >= SMALLEST_BYTES]
    for tensor in tensors * 20:
        for op in (HintOp.EVICT, HintOp.PREFETCH):
            manager.engine.submit(op, tensor.data_ptr(), tensor.nbytes)
    return {"open_requests": manager.engine.statistics().open_requests}


KEPT: list[object] = []
"""Alive until the interpreter tears its modules down."""

MODES: dict[str, Callable[[int], dict[str, Any]]] = {
    "plain": plain,
    "patient": patient,
    "sampled": sampled,
    "disturbed": disturbed,
    "broken": broken,
    "profiled": profiled,
    "freed": freed,
    "forked": forked,
    "ended": ended,
}

if __name__ == "__main__":
    begin()
    mode, step_count = sys.argv[1], int(sys.argv[2])
    if len(sys.argv) > 3:
        Training.tokens = int(sys.argv[3])
    print(json.dumps(MODES[mode](step_count)))
