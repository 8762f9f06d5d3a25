"""Models whose weights umem keeps within the device budget, each with its manager."""

from __future__ import annotations

import logging
import weakref

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from umem.core.classes import TensorClass
from umem.core.errors import EnableError, UmemError
from umem.offloading import ActivationStore
from umem.runtime.giving_back import before_giving_back
from umem.runtime.model_parts import gpu_of
from umem.runtime.state import runtime
from umem.streaming.plan.step_timing import largest_slot_bytes
from umem.streaming.stage.lanes import cuda_lanes
from umem.streaming.stage.memory import CudaRoom, CudaStateMemory
from umem.streaming.stage.shared_budget import shared_budget
from umem.streaming.weights.model_weights import ModelWeights

__all__ = ["manage_weights", "managed_weights", "stream_weights", "weights_of"]

_LOG = logging.getLogger("umem")

_STEP_HOOK: list[object] = []
"""The handle of the hook on all optimizers, once there is a model."""

_models: weakref.WeakKeyDictionary[nn.Module, ModelWeights] = weakref.WeakKeyDictionary()


def managed_weights() -> list[ModelWeights]:
    """The managers of all models' weights."""
    return list(_models.values())


def weights_of(model: nn.Module) -> ModelWeights | None:
    """The manager of a model's weights, or of the model around it; None if there is none."""
    found = _models.get(model)
    if found is not None:
        return found
    return next((its for outer, its in _models.items() if model in set(outer.modules())), None)


def manage_weights(model: nn.Module) -> ModelWeights:
    """Keep the weights of a model on a GPU within the policy's budget, from its next call on.

    Raises
    ------
    EnableError
        If umem is not enabled, the policy streams no weights, or the model is not on one GPU.
    """
    known = weights_of(model)
    if known is not None and (known.is_driven or known.is_current):
        return known
    state = runtime()
    if not state.resolved.streams_weights:
        raise EnableError(
            f"policy {state.policy.name!r} streams no weights: enable umem with one that has "
            "`weights: {kind: device, mechanism: stream}`, such as inference"
        )
    device = gpu_of(model)
    index = device.index or 0
    budget_bytes = state.device_budgets[index]
    if budget_bytes is None:
        raise EnableError(f"policy {state.policy.name!r} has no device budget")
    inside = set(model.modules())
    for other, its in list(_models.items()):
        if other in inside or its is known:
            del _models[other]
            its.close()
    rules = state.resolved.rules
    min_bytes = rules[TensorClass.WEIGHTS.number].min_bytes
    lanes = cuda_lanes(device)
    memory = CudaStateMemory(device, state.allocator, min_bytes, largest_slot_bytes(budget_bytes))
    room = CudaRoom(state.allocator, index, budget_bytes, state.resolved.homes)
    made = ModelWeights(
        model,
        lanes,
        memory,
        room,
        ActivationStore(device),
        min_bytes=min_bytes,
        share=rules[TensorClass.WEIGHTS.number].fraction,
        shared=shared_budget(index),
    )
    _models[model] = made
    before_giving_back(_let_go)
    if not _STEP_HOOK:
        _STEP_HOOK.append(register_optimizer_step_pre_hook(_step_begins))
    return made


def stream_weights(model: nn.Module) -> ModelWeights | None:
    """Manage the weights of a model that is loaded, and place them for its first call.

    None, with a warning, where they cannot be streamed: they stay where they are.
    """
    state, name = runtime(), type(model).__name__
    for device in {it.device.index for it in model.parameters() if it.is_cuda}:
        state.allocator.set_device_budget(device, state.device_budgets[device] or 0)
    try:
        weights = manage_weights(model)
        weights.begin_call()
    except UmemError as error:
        _LOG.warning(
            "umem: weights of %s are not streamed. What the device budget has no room for is used "
            "in host memory, which is slow: %s",
            name,
            error,
        )
    except Exception as error:
        _LOG.warning(
            "umem: weights of %s are not streamed: %s: %s", name, type(error).__name__, error
        )
        _LOG.debug("umem: the error was raised here", exc_info=True)
    else:
        return weights
    return None


def _let_go(device: torch.device | None) -> None:
    for weights in managed_weights():
        weights.let_go(device)


def _step_begins(*_: object) -> None:
    """An optimizer is about to change weights: nothing that was fetched before counts."""
    for reference in _models.keyrefs():
        model = reference()
        its = None if model is None else _models.get(model)
        if its is not None:
            its.step_begins()
