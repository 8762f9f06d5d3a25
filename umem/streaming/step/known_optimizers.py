"""Optimizers whose step may be divided by parameters, and the step's own function.

A step in parts gives the bits of the whole step if each parameter is updated from its own gradient,
its own state and its group's hyperparameters alone. Nothing can tell that from a class: the known
ones are those whose source was read. What their code makes of several parameters at once, such as
the choice between two implementations for a whole group, is looked up before each step.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any

import torch
from torch.optim.optimizer import Optimizer

from umem.runtime.guard import PLAIN_CLASSES
from umem.runtime.model_parts import local_part
from umem.streaming.gradients.freed_gradient import is_freed

__all__ = [
    "PER_PARAMETER_OPTIMIZERS",
    "is_elementwise",
    "plain_step",
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

_ELEMENTWISE = frozenset(_TORCH_NAMES) - {"Adafactor", "Muon", "SparseAdam"}
"""Those of them that update each element by itself, and a count for the whole parameter."""

_REPLACING = frozenset(("SGD", "SparseAdam"))
"""Those of them that put values into the state of a parameter that has state already."""

_AT_ONCE = 256
"""Parameters of a group that are looked at together: the processor's caches hold so many."""

_IS_CONTIGUOUS = torch.Tensor.is_contiguous
_LAYOUT = attrgetter("layout")
_STRIDED = frozenset((torch.strided,))
_SPARSE = "gradients are sparse"

_BITSANDBYTES = frozenset(
    f"bitsandbytes.optim.{name.lower()}.{name}{bits}"
    for name in ("Adam", "AdamW")
    for bits in ("", "32bit")
)
"""Those of bitsandbytes, as of 0.50."""

_DEEPSPEED = "deepspeed.ops.adam.fused_adam.FusedAdam"
"""DeepSpeed's Adam and AdamW, as of 0.19. Its kernel updates each element by itself."""

_TORCHAO = "torchao.optim"

_HARMLESS = frozenset(
    f"__{name}__"
    for name in (
        *("annotations", "dict", "doc", "firstlineno", "init", "module", "orig_bases"),
        *("parameters", "qualname", "slotnames", "static_attributes", "weakref"),
    )
)
"""What a subclass may define, and still has the step of its base: arguments, and names."""


def plain_step(optimizer: Optimizer) -> Callable[[Optimizer], Any]:
    """The step without torch's hooks around it, which run once for the whole step."""
    return _plain_step(type(optimizer))


def _plain_step(kind: Any) -> Callable[[Optimizer], Any]:
    step: Any = kind.step
    while getattr(step, "hooked", False):
        step = step.__wrapped__
    plain: Callable[[Optimizer], Any] = step
    return plain


def refusal(optimizer: Optimizer) -> str:
    """Why no step of an optimizer can run in parts; empty if steps can."""
    kind = type(optimizer)
    known, name = _known_class(kind), _name(kind)
    if known is None and name.startswith(_TORCHAO):
        return f"{name} compiles its update, and its low-bit state is not plain tensors"
    if known is None:
        return (
            f"{name} may look at several parameters at once. Known to update each by itself are "
            "torch's own optimizers but LBFGS, bitsandbytes' 32-bit Adam and AdamW, DeepSpeed's "
            "FusedAdam, and subclasses of these that define __init__ only"
        )
    if _name(known) in _BITSANDBYTES:
        return _bitsandbytes_refusal(optimizer, name)
    if _name(known) == _DEEPSPEED:
        if any(len(group["params"]) > 1 for group in optimizer.param_groups):
            return (
                f"{name} counts the steps of a group's last parameter only: use ZeRO, which puts "
                'one partition into a group, or torch\'s AdamW (`"torch_adam": true`)'
            )
        return ""
    if known.__name__ == "Adafactor":
        for group in optimizer.param_groups:
            if group["eps"][0] is None and len({it.dtype for it in group["params"]}) > 1:
                return (
                    f"{name} takes the eps of a group's first parameter for all of them, whose "
                    "dtypes differ: set eps, or make a group for each dtype"
                )
    return ""


def is_elementwise(optimizer: Optimizer) -> bool:
    """Whether a parameter may be updated piece by piece."""
    known = _known_class(type(optimizer))
    if known is None or _name(known) == _DEEPSPEED:
        return known is not None
    return known in PER_PARAMETER_OPTIMIZERS and known.__name__ in _ELEMENTWISE


def replaces_state(optimizer: Optimizer) -> bool:
    """Whether a step may replace a value in a parameter's state, and not only change tensors."""
    known = _known_class(type(optimizer))
    return known not in PER_PARAMETER_OPTIMIZERS or known.__name__ in _REPLACING


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _known_class(kind: type) -> type | None:
    """The known class whose step a class has; None if there is other code in between."""
    for base in kind.__mro__:
        if base in PER_PARAMETER_OPTIMIZERS or _name(base) in {*_BITSANDBYTES, _DEEPSPEED}:
            # torch itself sets `step` of each class, with its hooks.
            return base if _plain_step(kind) is _plain_step(base) else None
        if not _HARMLESS.issuperset(vars(base).keys() - {"step"}):
            return None
    return None


def _bitsandbytes_refusal(optimizer: Any, name: str) -> str:
    if optimizer.is_paged:
        return f"{name} pages its state by itself: take the optimizer without Paged"
    if optimizer.mng.index2config:
        return f"{name} has settings by a parameter's place in its group (GlobalOptimManager)"
    if any("qmap1" in values for values in optimizer.state.values()):
        return f"{name} has 8-bit state, whose quantization maps belong to several parameters"
    return ""


def whole_step_reason(optimizer: Optimizer) -> str:
    """Why the step that comes next has to run as a whole; empty if it may run in parts."""
    reason = refusal(optimizer)
    is_torch = _known_class(type(optimizer)) in PER_PARAMETER_OPTIMIZERS
    if not is_elementwise(optimizer) and any(
        local_part(it) is not it for group in optimizer.param_groups for it in group["params"]
    ):
        reason = reason or (
            f"{_name(type(optimizer))} looks at whole parameters, and ranks have parts of them"
        )
    for group in optimizer.param_groups:
        if group.get("differentiable"):
            reason = reason or "a group is differentiable"
        # torch chooses foreach functions by all parameters of a group, and these their kernels.
        is_foreach = group.get("foreach", False) is not False and not group.get("fused")
        if is_foreach or not is_torch:
            reason = reason or _mixed_reason(group, optimizer, is_torch=is_torch)
        elif is_elementwise(optimizer) and not group.get("fused"):  # which takes none
            reason = reason or _sparse_reason(group)
    return reason


def _sparse_reason(group: dict[str, Any]) -> str:
    """Why elements of a group's parameters cannot be told apart: a gradient lacks some of them."""
    gradients = [gradient for it in group["params"] if (gradient := it.grad) is not None]
    return "" if _STRIDED.issuperset(map(_LAYOUT, gradients)) else _SPARSE


def _mixed_reason(group: dict[str, Any], optimizer: Optimizer, *, is_torch: bool) -> str:
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
            reason = _order_reason(updated, gradients, is_torch=is_torch)
            if reason:
                return reason
        if isinstance(optimizer, torch.optim.SGD) and group["momentum"]:
            states = [optimizer.state.get(it, {}) for it in updated]
            has_momentum.update(state.get("momentum_buffer") is not None for state in states)
    if len(set(map(PLAIN_CLASSES.__contains__, kinds))) > 1:
        return "a group has parameters of torch's own classes and of others"
    return "some parameters have no momentum yet" if len(has_momentum) > 1 else ""


def _order_reason(updated: list[Any], gradients: list[Any], *, is_torch: bool) -> str:
    """The same by the order of elements in memory, of parameters and their gradients."""
    for it, gradient in zip(updated, gradients, strict=True):
        if gradient.layout is not torch.strided:
            return _SPARSE
        if (gradient.is_contiguous() and it.is_contiguous()) or is_freed(gradient):
            continue
        if not is_torch or gradient.stride() != it.stride():  # bitsandbytes replaces both
            return "a parameter or its gradient is not contiguous"
    return ""
