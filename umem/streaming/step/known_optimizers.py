"""Optimizers whose step may be divided by parameters, and the step's own function.

A step in parts gives the bits of the whole step if each parameter is updated from its own gradient,
its own state and its group's hyperparameters alone. Nothing can tell that from a class: the known
ones are those whose source was read, torch's here and those of other libraries in their adapters.
What their code makes of several parameters at once, such as the choice between two implementations
for a whole group, is looked up before each step.
"""

from __future__ import annotations

from operator import attrgetter
from typing import Any

import torch
from torch.optim.optimizer import Optimizer

from umem.adapters import ADAPTERS, adapter_of
from umem.adapters.interface import KnownStep, full_name
from umem.runtime.guard import PLAIN_CLASSES
from umem.runtime.model_parts import optimizer_parameters, plain_step
from umem.streaming.gradients.freed_gradient import is_freed
from umem.streaming.stage.sharded_tensors import are_sharded

__all__ = [
    "PER_PARAMETER_OPTIMIZERS",
    "is_elementwise",
    "refusal",
    "replaces_state",
    "whole_step_reason",
]

_TORCH_NAMES = (
    *("Adadelta", "Adafactor", "Adagrad", "Adam", "Adamax", "AdamW", "ASGD", "Muon"),
    *("NAdam", "RAdam", "RMSprop", "Rprop", "SGD", "SparseAdam"),
)

PER_PARAMETER_OPTIMIZERS: tuple[type[Optimizer], ...] = tuple(
    getattr(torch.optim, name) for name in _TORCH_NAMES if hasattr(torch.optim, name)
)
"""torch's optimizers that update each parameter by itself: all but LBFGS."""

_AT_ONCE = 256
"""Parameters of a group that are looked at together: the processor's caches hold so many."""

_IS_CONTIGUOUS = torch.Tensor.is_contiguous
_LAYOUT = attrgetter("layout")
_STRIDED = frozenset((torch.strided,))
_SPARSE = "gradients are sparse"

_HARMLESS = frozenset(
    f"__{name}__"
    for name in (
        *("annotations", "dict", "doc", "firstlineno", "init", "module", "orig_bases"),
        *("parameters", "qualname", "slotnames", "static_attributes", "weakref"),
    )
)
"""What a subclass may define, and still has the step of its base: arguments, and names."""


def _refuses_mixed_eps(optimizer: Any) -> str:
    for group in optimizer.param_groups:
        if group["eps"][0] is None and len({it.dtype for it in group["params"]}) > 1:
            return (
                f"{full_name(type(optimizer))} takes the eps of a group's first parameter for all "
                "of them, whose dtypes differ: set eps, or make a group for each dtype"
            )
    return ""


def _refuses_unknown(optimizer: Any) -> str:
    others = ", ".join(it.optimizers for it in ADAPTERS if it.optimizers)
    return (
        f"{full_name(type(optimizer))} may look at several parameters at once. Known to update "
        f"each by itself are torch's own optimizers but LBFGS, {others}, and subclasses of these "
        "that define __init__ only"
    )


_TORCHS: dict[type, KnownStep] = {
    kind: KnownStep(
        _refuses_mixed_eps if kind.__name__ == "Adafactor" else (lambda _: ""),
        is_elementwise=kind.__name__ not in ("Adafactor", "Muon", "SparseAdam"),
        replaces_state=kind.__name__ in ("SGD", "SparseAdam"),
        makes_contiguous=False,
    )
    for kind in PER_PARAMETER_OPTIMIZERS
}

_UNKNOWN = KnownStep(_refuses_unknown)


def _known_step(kind: type) -> KnownStep:
    """What is known of a class's step: that of a base, unless there is other code in between."""
    for base in kind.__mro__:
        known = _TORCHS.get(base)
        if known is None and (adapter := adapter_of(base)) is not None:
            known = adapter.step(base)
        if known is not None:
            # torch itself sets `step` of each class, with its hooks.
            return known if plain_step(kind) is plain_step(base) else _UNKNOWN
        if not _HARMLESS.issuperset(vars(base).keys() - {"step"}):
            break
    return _UNKNOWN


def refusal(optimizer: Optimizer) -> str:
    """Why no step of an optimizer can run in parts; empty if steps can."""
    return _known_step(type(optimizer)).refusal(optimizer)


def is_elementwise(optimizer: Optimizer) -> bool:
    """Whether a parameter may be updated piece by piece."""
    return _known_step(type(optimizer)).is_elementwise


def replaces_state(optimizer: Optimizer) -> bool:
    """Whether a step may replace a value in a parameter's state, and not only change tensors."""
    return _known_step(type(optimizer)).replaces_state


def whole_step_reason(optimizer: Optimizer) -> str:
    """Why the step that comes next has to run as a whole; empty if it may run in parts."""
    known = _known_step(type(optimizer))
    reason = known.refusal(optimizer)
    if reason:
        return reason
    if not known.is_elementwise and are_sharded(optimizer_parameters(optimizer)):
        name = full_name(type(optimizer))
        return f"{name} looks at whole parameters, and ranks have parts of them"
    for group in optimizer.param_groups:
        if group.get("differentiable"):
            return "a group is differentiable"
        if len(set(map(id, group["params"]))) < len(group["params"]):
            return "a group has a parameter twice"
        # torch chooses foreach functions by all parameters of a group, and these their kernels.
        is_foreach = group.get("foreach", False) is not False and not group.get("fused")
        if is_foreach or known.makes_contiguous:
            reason = _mixed_reason(group, optimizer, known)
        elif known.is_elementwise and not group.get("fused"):  # which takes none
            reason = _sparse_reason(group)
        if reason:
            return reason
    return ""


def _sparse_reason(group: dict[str, Any]) -> str:
    """Why elements of a group's parameters cannot be told apart: a gradient lacks some of them."""
    gradients = [gradient for it in group["params"] if (gradient := it.grad) is not None]
    return "" if _STRIDED.issuperset(map(_LAYOUT, gradients)) else _SPARSE


def _mixed_reason(group: dict[str, Any], optimizer: Optimizer, known: KnownStep) -> str:
    """Why a group's parameters may be updated by other functions than some of them alone."""
    kinds: set[type] = set()
    has_momentum: set[bool] = set()
    parameters = group["params"]
    # Loops of C, because there may be thousands.
    for begin in range(0, len(parameters), _AT_ONCE):
        some = parameters[begin : begin + _AT_ONCE]
        gradients = [gradient for it in some if (gradient := it.grad) is not None]
        updated = some
        if len(gradients) < len(some):
            updated = [it for it in some if it.grad is not None]
        kinds.update(map(type, updated))
        try:
            are_contiguous = all(map(_IS_CONTIGUOUS, gradients)) and all(
                map(_IS_CONTIGUOUS, updated)
            )
        except RuntimeError:  # of compressed rows, which have no such order
            return _SPARSE
        if not are_contiguous:
            reason = _order_reason(updated, gradients, known)
            if reason:
                return reason
        if isinstance(optimizer, torch.optim.SGD) and group["momentum"]:
            states = [optimizer.state.get(it, {}) for it in updated]
            has_momentum.update(state.get("momentum_buffer") is not None for state in states)
    if len(set(map(PLAIN_CLASSES.__contains__, kinds))) > 1:
        return "a group has parameters of torch's own classes and of others"
    return "some parameters have no momentum yet" if len(has_momentum) > 1 else ""


def _order_reason(updated: list[Any], gradients: list[Any], known: KnownStep) -> str:
    """The same by the order of elements in memory, of parameters and their gradients."""
    for it, gradient in zip(updated, gradients, strict=True):
        if gradient.layout is not torch.strided:
            return _SPARSE
        if (gradient.is_contiguous() and it.is_contiguous()) or is_freed(gradient):
            continue
        if known.makes_contiguous or gradient.stride() != it.stride():
            return "a parameter or its gradient is not contiguous"
    return ""
