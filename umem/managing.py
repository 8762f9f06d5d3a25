"""`umem.manage`, and totals over all managers of the process."""

from __future__ import annotations

import logging
import weakref
from collections import Counter
from collections.abc import Callable

from torch import nn
from torch.optim.optimizer import Optimizer

from umem.core.arguments import check_argument
from umem.core.classes import TensorClass
from umem.core.errors import PlanError
from umem.pages.plan import PLANNERS
from umem.pages.run.machine import Machine, cuda_machine
from umem.pages.run.manager import Manager
from umem.pages.run.status import ManagerState
from umem.policy import PolicyPlanner
from umem.runtime.hints import HintStatistics
from umem.runtime.host_room import share_bytes
from umem.runtime.model_parts import gpu_of, innermost
from umem.runtime.state import runtime
from umem.streaming.begin import stream_state
from umem.streaming.training import StreamedTraining
from umem.streaming.weights.managed_models import manage_weights
from umem.streaming.weights.model_weights import ModelWeights
from umem.trace import require_durations

__all__ = [
    "current_statistics",
    "ideal_step_s",
    "manage",
    "manage_on",
    "managers",
    "residency",
    "unpromised_bytes",
]

_managers: weakref.WeakKeyDictionary[Optimizer, weakref.ref[Manager]] = weakref.WeakKeyDictionary()
"""Managers by optimizer. The hooks on model and optimizer keep a manager alive."""
_LOG = logging.getLogger("umem")
_warned: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def manage(
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    step_in_backward: bool = False,
) -> Manager | StreamedTraining | ModelWeights:
    """Keep a training, or a model alone, within the policy's device budget.

    Under a policy with streamed optimizer state, the state streams through buffers on the device.
    Under a policy that plans pages, the next steps are recorded, then planned; from then on hints
    move memory ahead of need. :func:`umem.enable` does either after the optimizer's first step.
    Call `manage` to choose `step_in_backward`, or to read the status.

    Parameters
    ----------
    model
        The module that the training loop calls, on the GPU.
    optimizer
        The optimizer whose steps delimit training steps. None for a model that is not trained: its
        weights that the budget has no room for are streamed.
    step_in_backward
        Update each block's parameters in the backward pass as soon as their gradients are
        complete, and free the gradients: for trainings that use no gradient between the backward
        pass and ``step()``. Two steps are watched first; what cannot be exact is an error of
        ``step()``. Only state that is streamed can be updated so.

    Returns
    -------
    Manager, StreamedTraining or ModelWeights
        Its ``status()`` has state and counts. A second call for the same optimizer returns the
        same manager until it is closed. With another model it replaces the manager as long as no
        step was planned.

    Raises
    ------
    EnableError
        If umem is not enabled, or the model is not on a GPU.
    TypeError
        If `model` is no module, `optimizer` no optimizer, or another argument of another type.
    PlanError
        If the policy's planner is ``none``, and it streams no optimizer state; for
        `step_in_backward` under such a policy; and if the optimizer is already managed with other
        arguments or another model.

    Examples
    --------
    >>> manager = umem.manage(model, optimizer)  # doctest: +SKIP
    """
    check_argument("model", model, nn.Module, "give the module that the training loop calls")
    if optimizer is None:
        return manage_weights(model)
    optimizer = innermost(optimizer)
    check_argument("optimizer", optimizer, Optimizer, "give the torch.optim.Optimizer that steps")
    check_argument("step_in_backward", step_in_backward, bool, "give True or False")
    state = runtime()
    if state.resolved.streams_state and (step_in_backward or state.resolved.planner == "none"):
        return stream_state(model, optimizer, step_in_backward=step_in_backward)
    if step_in_backward:
        raise PlanError(
            "step_in_backward: only streamed optimizer state is updated in the backward pass, and "
            f"policy {state.policy.name!r} plans pages. Enable umem with a policy that has "
            "`optimizer_state: {mechanism: stream}`, such as sft, or call "
            "umem.manage(model, optimizer) without step_in_backward"
        )
    device = gpu_of(model)
    return manage_on(
        model,
        optimizer,
        lambda: cuda_machine(device.index or 0, model, optimizer, _unpromised_share),
        state.resolved.planner,
    )


def manage_on(
    model: nn.Module,
    optimizer: Optimizer,
    make_machine: Callable[[], Machine],
    planner: PolicyPlanner,
) -> Manager:
    """Manage a training on any machine; `make_machine` is called for a new manager only."""
    optimizer = innermost(optimizer)
    if planner == "none":
        raise PlanError(
            "planner 'none' runs no training: set the policy's planner, or UMEM_PLANNER, to one of "
            f"{', '.join(PLANNERS)}"
        )
    reference = _managers.get(optimizer)
    known = None if reference is None else reference()
    if known is not None and not known.is_closed:
        if known.model is model:
            return known
        if known.model is not None and known.status().plans:
            raise PlanError(
                f"this optimizer is managed with another model, a {type(known.model).__name__}, "
                "already: call umem.manage so before the first step, or close() the manager that "
                "the earlier call has returned (umem.manage with the earlier model returns it too)"
            )
        known.close()
    manager = Manager(model, optimizer, make_machine(), planner)
    _managers[optimizer] = weakref.ref(manager)
    _plan_once(model)
    return manager


def _plan_once(model: nn.Module) -> None:
    """Leave the plan of a model's pages to the optimizer with most to update, and say so once.

    Two plans would move the same pages, each within the whole budget: together they exceed it.
    """
    found = [it for it in managers() if it.model is model]
    waiting = [it for it in found if it.status().state is not ManagerState.OFF]
    if len(waiting) < 2:
        return
    best = max(reversed(waiting), key=lambda it: it.updated_bytes)  # of equal ones the newest
    for other in waiting:
        if other is not best:
            other.stand_back("another optimizer of the model has the plan")
    if model in _warned:
        return
    _warned.add(model)
    _LOG.warning(
        "umem: %d optimizers train one %s: its pages are planned for the steps of the one with "
        "most to update, and the state of others stays where it is. Use one optimizer with "
        "parameter groups, or a policy that streams optimizer state, such as sft",
        len(found),
        type(model).__name__,
    )


def unpromised_bytes(share_bytes: int) -> int:
    """What one more training may take of this process's share of the host.

    Less what the plans of others may still take, and divided with those that have no plan yet.
    """
    others = managers()
    planless = (ManagerState.OFF, ManagerState.RESIDENT)
    waiting = sum(it.trace is None and it.status().state not in planless for it in others)
    promised_bytes = sum(it.promised_host_bytes() for it in others)
    return max(share_bytes - promised_bytes, 0) // (waiting + 1)


def _unpromised_share() -> int | None:
    own_bytes = share_bytes()
    return None if own_bytes is None else unpromised_bytes(own_bytes)


def managers() -> list[Manager]:
    """All managers of the process that are not closed."""
    found = [reference() for reference in _managers.values()]
    return [manager for manager in found if manager is not None and not manager.is_closed]


def current_statistics() -> HintStatistics | None:
    """Statistics of the hint engine so far; None if no training is managed."""
    found = managers()
    return found[0].engine.statistics() if found else None


def ideal_step_s() -> float | None:
    """Recorded time of a step with everything resident, seconds.

    None if no training is managed, or several are.
    """
    traces = [manager.trace for manager in managers()]
    if len(traces) != 1 or traces[0] is None:
        return None
    return float(require_durations(traces[0]).sum())


def residency(device: int = 0) -> dict[TensorClass, int]:
    """Bytes of live tensors that plans keep on a device now, by class.

    These are the allocator's live bytes less those that were evicted or are mapped on the host. A
    hint in flight counts as done.

    Raises
    ------
    EnableError
        If umem is not enabled.
    """
    stats = runtime().allocator.class_stats(device)
    away: Counter[TensorClass] = Counter()
    for manager in managers():
        if (manager.device.index or 0) == device:
            away.update(manager.away_bytes())
    return {
        tensor_class: max(
            stats[tensor_class.number]["allocated_bytes"]["current"] - away[tensor_class], 0
        )
        for tensor_class in TensorClass
    }
