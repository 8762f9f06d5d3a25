"""Begins to stream a training's optimizer state on a GPU, as the process's policy says."""

from __future__ import annotations

import logging

import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from umem.capture.live.timing import CudaClock
from umem.core.classes import TensorClass
from umem.core.errors import UnsupportedError
from umem.hardware import detect_hardware
from umem.offloading import ActivationStore
from umem.policy import ResolvedPolicy
from umem.runtime.model_parts import gpu_of
from umem.runtime.state import runtime
from umem.streaming import activations
from umem.streaming.plan.step_timing import largest_slot_bytes
from umem.streaming.stage.lanes import cuda_lanes
from umem.streaming.stage.memory import CudaRoom, CudaStateMemory
from umem.streaming.stage.shared_budget import shared_budget
from umem.streaming.step.known_optimizers import refusal
from umem.streaming.training import StreamedTraining, streamed_trainings
from umem.streaming.tune.tuner import StreamTuner
from umem.streaming.weights.managed_models import stream_weights, weights_of
from umem.torch_compat import Need, require

__all__ = ["stream_state"]

_LOG = logging.getLogger("umem")


def stream_state(
    model: nn.Module, optimizer: Optimizer, *, step_in_backward: bool = False
) -> StreamedTraining:
    """Stream the optimizer state of a training on a GPU, under the policy of this process.

    State that cannot be streamed stays in host memory, and is used there in place, with a warning.

    Parameters
    ----------
    model, optimizer
        The model and its optimizer.
    step_in_backward
        Update parameters in the backward pass; also for a training that is streamed already.

    Raises
    ------
    EnableError
        If umem is not enabled, or the model is not on one GPU.
    PlanError
        For `step_in_backward` if state cannot be streamed, and where ``torch.distributed`` is
        initialised.
    """
    for training in streamed_trainings():
        if training.optimizer is optimizer:
            if step_in_backward:
                training.move_into_backward()
            return training
    state = runtime()
    policy, device = state.resolved, gpu_of(model)
    index = device.index or 0
    budget_bytes = state.device_budgets[index] or detect_hardware(index).device_bytes
    rule = policy.rules[TensorClass.OPTIMIZER_STATE.number]
    streams_state = policy.streams_state
    reason = refusal(optimizer) if streams_state and not step_in_backward else ""
    if reason:
        streams_state = False
        _LOG.warning("umem: optimizer state is used in host memory, which is slow: %s", reason)
    weights = weights_of(model)
    if weights is None and policy.streams_weights:
        # Ahead of the model's first call: the plan for the state is to decide on them, too.
        weights = stream_weights(model)
    # The optimizers of a model have one plan, and take turns with the slots.
    others = [it for it in streamed_trainings() if it.model is model and it.tuner is not None]
    tuner = others[0].tuner if others else None
    if tuner is None:
        tuner = StreamTuner(
            model,
            detect_hardware(index),
            CudaClock(device),
            CudaRoom(state.allocator, index, budget_bytes, policy.homes),
            ActivationStore(device) if policy.copies_activations else None,
            weights=weights,
            state_share=rule.fraction,
            shared=shared_budget(index),
            may_recompute=policy.recomputes,
            losses=_sliced_losses(policy, model, device, budget_bytes),
        )
    training = StreamedTraining(
        model,
        optimizer,
        cuda_lanes(device),
        CudaStateMemory(device, state.allocator, rule.min_bytes, largest_slot_bytes(budget_bytes)),
        tuner,
        streams_state=streams_state,
        copies_gradients=streams_state and policy.copies_gradients,
        step_in_backward=step_in_backward,
        weights=weights,
        ring=others[0].step.units.ring if others else None,
    )
    training.step.hosts.may_update = policy.updates_on_host
    return training


def _sliced_losses(
    policy: ResolvedPolicy, model: nn.Module, device: torch.device, budget_bytes: int
) -> activations.SlicedLosses | None:
    if not (policy.slices_losses and policy.copies_activations):
        return None
    try:
        require(Need.SLICE_LOSSES)
    except UnsupportedError as error:
        _LOG.warning("umem: losses are left to torch: %s", error)
        return None
    tables = (it.num_embeddings for it in model.modules() if isinstance(it, nn.Embedding))
    # Its module needs names of torch that umem does without otherwise.
    return activations.SlicedLosses(
        device.type, budget_bytes=budget_bytes, vocabulary=max(tables, default=0)
    )
