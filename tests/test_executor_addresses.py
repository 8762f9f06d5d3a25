"""Addresses of a managed training's tensors: after loading state, and of wrapped weights."""

from __future__ import annotations

import copy
from typing import Any, cast

import pytest
import torch
from managed_training import BEFORE_PLANNED, MIB, WIDTH, Net, Training, program_of
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from umem.core.classes import TensorClass
from umem.pages import Manager


def advised(manager: Manager) -> int:
    """Advice requests for the optimizer's state so far."""
    return manager.engine.statistics().counts["advise", TensorClass.OPTIMIZER_STATE].asked


def state_addresses(training: Training) -> set[int]:
    """Addresses of the optimizer's large state."""
    return {
        tensor.untyped_storage().data_ptr()
        for state in training.optimizer.state.values()
        for tensor in state.values()
        if torch.is_tensor(tensor) and tensor.nbytes >= 2 * MIB
    }


@pytest.mark.slow
def test_loaded_optimizer_state_is_found_at_its_new_address() -> None:
    class Whole(torch.optim.AdamW):
        """A subclass does not run in parts, and its state does not fit beside the gradients."""

    stock, training = Training(make_optimizer=Whole), Training(make_optimizer=Whole)
    manager = training.manage("planned")
    stock.steps(BEFORE_PLANNED + 1)
    training.steps(BEFORE_PLANNED + 1)
    first = {address for address, _, _ in program_of(manager).mapped}
    assert advised(manager) == len(first) > 0

    seen: list[int] = []
    training.optimizer.register_load_state_dict_post_hook(lambda _: seen.append(advised(manager)))
    for it in (stock, training):
        it.optimizer.load_state_dict(copy.deepcopy(it.optimizer.state_dict()))
    assert seen == [2 * len(first)]  # brought back while it still belonged to the optimizer
    for it in (stock, training):
        it.steps(3)
    now = {address for address, _, _ in program_of(manager).mapped}
    assert now <= state_addresses(training)
    assert len(now) == len(first)
    assert advised(manager) == 3 * len(first)
    assert manager.status().diverged_steps == 0
    assert training.equals(stock)


class Quantised(nn.Module):
    """A frozen weight that wraps two tensors, as quantised weights do, and a trained adapter."""

    def __init__(self) -> None:
        super().__init__()
        parts = torch.randn(WIDTH), torch.randn(WIDTH)
        self.frozen = nn.Parameter(cast(Any, TwoTensor)(*parts), requires_grad=False)
        self.adapter = nn.Parameter(torch.randn(WIDTH) / 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        frozen: Any = self.frozen
        return x + torch.tanh(x * (frozen.a + frozen.b) * self.adapter)


class QuantisedNet(Net):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Quantised() for _ in range(4))


@pytest.mark.slow
def test_each_part_of_a_wrapped_weight_moves() -> None:
    stock, training = Training(QuantisedNet), Training(QuantisedNet)
    manager = training.manage("fault", 60 * MIB)
    stock.steps(12)
    training.steps(12)
    assert training.losses == stock.losses
    assert manager.status().diverged_steps == 0
    trace = manager.trace
    assert trace is not None
    frozen = {f"layers.{layer}.frozen[{part}]" for layer in range(4) for part in range(2)}
    assert {name for name in trace.tensor_names if "frozen" in name} == frozen
    counts = manager.engine.statistics().counts
    assert counts["evict", TensorClass.FROZEN_WEIGHTS].moved_bytes > 0
