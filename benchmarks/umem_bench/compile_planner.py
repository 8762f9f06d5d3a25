"""Compiles the planner by planning a step of few tensors: `python -m umem_bench.compile_planner`.

Where numba has kept nothing yet, the first plan of a process takes up to a minute. This program
does it once, before tests start many processes, and prints the seconds that it took. Benchmarks do
it before a process whose policy plans pages; streamed state is planned without compiled code.
"""

from __future__ import annotations

import functools
import time

import numpy as np

from umem import TensorClass, Trace, load_hardware, load_policy
from umem.pages.plan.plan_search import search_plan
from umem.policy import resolve
from umem.trace import Access, PhaseKind, Precision, ranges

__all__ = ["compile_planner", "small_step"]

_LAYERS = 4
_TENSOR_BYTES = 64 << 20


@functools.cache
def compile_planner() -> None:
    """Plan and simulate with every planner, once in a process; CUDA is not started."""
    trace, hardware = small_step(), load_hardware("h200")
    # Of 20 tensors: one budget leaves room for the optimizer's step, the other does not.
    for budget_bytes in (12 * _TENSOR_BYTES, 18 * _TENSOR_BYTES):
        rules = {"name": "small", "extends": "managed", "device_budget": f"{budget_bytes} B"}
        policy = resolve(load_policy(rules), hardware, {})
        for planner in ("planned", "lookahead", "fault"):
            search_plan(trace, hardware, policy, planner)


def small_step() -> Trace:
    """A step of layers with a weight, two moments, a gradient, and what is saved for later."""
    kinds = (
        TensorClass.WEIGHTS,
        TensorClass.OPTIMIZER_STATE,
        TensorClass.OPTIMIZER_STATE,
        TensorClass.GRADIENTS,
        TensorClass.ACTIVATIONS,
    )
    count, phases = len(kinds) * _LAYERS, 2 * _LAYERS + 1
    uses: list[dict[int, Access]] = [{} for _ in range(phases)]
    first, last = np.zeros(count, np.int32), np.full(count, phases - 1, np.int32)
    both = Access.READ | Access.WRITE
    for layer in range(_LAYERS):
        weight, *moments, gradient, activation = range(5 * layer, 5 * layer + 5)
        forward, backward = layer, 2 * _LAYERS - 1 - layer
        uses[forward] |= {weight: Access.READ, activation: Access.WRITE}
        uses[backward] |= {weight: Access.READ, activation: Access.READ, gradient: Access.WRITE}
        uses[-1] |= {weight: both, gradient: Access.READ, **dict.fromkeys(moments, both)}
        first[[activation, gradient]] = forward, backward
        last[activation] = backward
    return Trace(
        name="small step",
        source="umem_bench.compile_planner",
        tensor_names=tuple(f"tensor {number}" for number in range(count)),
        tensor_bytes=np.full(count, _TENSOR_BYTES, np.int64),
        tensor_class=np.array([kind.number for kind in kinds] * _LAYERS, np.uint8),
        persistent=np.array([True, True, True, False, False] * _LAYERS, np.bool_),
        first_phase=first,
        last_phase=last,
        phase_names=tuple(f"phase {number}" for number in range(phases)),
        phase_kind=np.full(phases, next(iter(PhaseKind)), np.uint8),
        phase_precision=np.full(phases, next(iter(Precision)), np.uint8),
        flops=np.zeros(phases),
        memory_bytes=np.zeros(phases, np.int64),
        duration_s=np.full(phases, 2e-3),
        access_start=ranges(np.array([len(phase) for phase in uses], np.int64)),
        access_tensor=np.array([tensor for phase in uses for tensor in phase], np.int32),
        access_mode=np.array([int(mode) for phase in uses for mode in phase.values()], np.uint8),
    )


if __name__ == "__main__":
    began_s = time.perf_counter()
    compile_planner()
    print(time.perf_counter() - began_s)
