"""Compiles the planner, by plans of a step of few tensors.

On a machine where numba has kept nothing yet it takes half a minute: once, before training
processes are forked, and not in each of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from umem.core.classes import TensorClass
from umem.hardware import load_hardware
from umem.planning.plan_search import search_plan
from umem.policy import PolicyPlanner, load_policy, resolve
from umem.trace import Access, Trace, ranges

if TYPE_CHECKING:
    from umem.policy import ResolvedPolicy

__all__ = ["compile_planner"]

_LAYERS = 4
_PHASES = 2 * _LAYERS + 1
_TENSOR_BYTES = 64 << 20
_BUDGETS_BYTES = (12 * _TENSOR_BYTES, 18 * _TENSOR_BYTES)
"""Of 20 tensors: one budget leaves room for the optimizer's step, the other does not."""

_PLANNERS: tuple[PolicyPlanner, ...] = ("planned", "lookahead", "fault")


def compile_planner() -> None:
    """Plan and simulate with every planner; CUDA is not started."""
    hardware = load_hardware("h200-pcie")
    trace = _few_layers()
    for budget_bytes in _BUDGETS_BYTES:
        for planner in _PLANNERS:
            search_plan(trace, hardware, _policy(budget_bytes), planner)


def _policy(budget_bytes: int) -> ResolvedPolicy:
    policy = load_policy(
        {"name": "compile", "extends": "sft", "device_budget": f"{budget_bytes} B"}
    )
    return resolve(policy, 4 * budget_bytes, {})


def _few_layers() -> Trace:
    """A step of layers with a weight, its gradient, one moment, and what is saved for later."""
    kinds = (
        (TensorClass.WEIGHTS, True),
        (TensorClass.OPTIMIZER_STATE, True),
        (TensorClass.OPTIMIZER_STATE, True),
        (TensorClass.GRADIENTS, False),
        (TensorClass.ACTIVATIONS, False),
    )
    count = len(kinds)
    uses: list[dict[int, Access]] = [{} for _ in range(_PHASES)]
    first, last = (
        np.zeros(count * _LAYERS, np.int32),
        np.full(count * _LAYERS, _PHASES - 1, np.int32),
    )
    both = Access.READ | Access.WRITE
    for layer in range(_LAYERS):
        weight, *moments, gradient, activation = range(count * layer, count * (layer + 1))
        forward, backward = layer, 2 * _LAYERS - 1 - layer
        uses[forward] |= {weight: Access.READ, activation: Access.WRITE}
        uses[backward] |= {weight: Access.READ, activation: Access.READ, gradient: Access.WRITE}
        uses[-1] |= {weight: both, gradient: Access.READ, **dict.fromkeys(moments, both)}
        first[[activation, gradient]] = forward, backward
        last[activation] = backward
    return Trace(
        name="few layers",
        source="umem_bench.train.compile_planner",
        tensor_names=tuple(f"tensor {number}" for number in range(count * _LAYERS)),
        tensor_bytes=np.full(count * _LAYERS, _TENSOR_BYTES, np.int64),
        tensor_class=np.array([kind.number for kind, _ in kinds] * _LAYERS, np.uint8),
        persistent=np.array([lives_on for _, lives_on in kinds] * _LAYERS, np.bool_),
        first_phase=first,
        last_phase=last,
        phase_names=tuple(f"phase {number}" for number in range(_PHASES)),
        phase_kind=np.zeros(_PHASES, np.uint8),
        phase_precision=np.zeros(_PHASES, np.uint8),
        flops=np.zeros(_PHASES),
        memory_bytes=np.zeros(_PHASES, np.int64),
        duration_s=np.full(_PHASES, 2e-3),
        access_start=ranges(np.array([len(phase) for phase in uses], np.int64)),
        access_tensor=np.array([tensor for phase in uses for tensor in phase], np.int32),
        access_mode=np.array([int(mode) for phase in uses for mode in phase.values()], np.uint8),
    )
