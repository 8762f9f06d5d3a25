"""Managed trainings whose state or weights are loaded into other memory."""

from __future__ import annotations

import copy

import pytest
import torch
from managed_training import MIB, Training

from umem.classes import TensorClass
from umem.executor import Manager
from umem.executor._places import find_places
from umem.executor._program import Program

pytestmark = pytest.mark.usefixtures("one_thread")

BEFORE_PLANNED = 7


def program_of(manager: Manager) -> Program:
    program = manager._runner.program
    assert program is not None
    return program


def advised(manager: Manager) -> int:
    """Requests so far for advice on the optimizer's state."""
    counts = manager.engine.statistics().counts
    return sum(counts["advise", TensorClass.OPTIMIZER_STATE].requests.values())


def state_addresses(training: Training) -> set[int]:
    """Where the optimizer's large state is."""
    return {
        tensor.untyped_storage().data_ptr()
        for state in training.optimizer.state.values()
        for tensor in state.values()
        if torch.is_tensor(tensor) and tensor.nbytes >= 2 * MIB
    }


def test_state_that_is_loaded_into_new_memory_is_found_there() -> None:
    class Whole(torch.optim.AdamW):
        """Not done in parts, so that its state does not fit beside weights and gradients."""

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
    assert seen == [2 * len(first)]  # taken back while the memory was the optimizer's
    for it in (stock, training):
        it.steps(3)
    now = {address for address, _, _ in program_of(manager).mapped}
    assert now <= state_addresses(training)
    assert len(now) == len(first)
    assert advised(manager) == 3 * len(first)
    assert manager.status().strays == 0
    assert training.equals(stock)


def test_weights_that_are_loaded_into_new_memory_are_found_there() -> None:
    training = Training()
    manager = training.manage("lookahead", 34 * MIB)
    training.steps(BEFORE_PLANNED + 1)
    before = program_of(manager)
    kept = [parameter.data for parameter in training.model.parameters()]
    for parameter in training.model.parameters():
        parameter.data = parameter.data.clone()
    training.model.load_state_dict(training.model.state_dict())
    training.step()
    assert len(kept) == 5
    weight = program_of(manager).choice.trace.tensor_names.index("head.weight")
    assert program_of(manager) is not before
    places = find_places(before.choice.trace, training.model, training.optimizer)
    assert places.fixed[weight] == training.model.get_parameter("head.weight").data_ptr()
    assert manager.status().strays == 0
