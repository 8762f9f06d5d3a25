"""Orders every use of a tensor behind updates that still run on other streams.

A deferred optimizer step returns while its updates are under way. Until a block's next forward pass
has waited for them, anything else may look at the block's parameters, gradients or optimizer state:
an average of weights, a checkpoint, a logged norm, another thread. The guard changes the class of
these tensor *objects* for that time. torch then calls ``__torch_function__`` for each operator and
attribute that takes one of them, in every thread, and the guard has the caller's stream wait first.

An object of another tensor on the same memory would not be seen. So what has such an alias is not
deferred: :func:`has_alias`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from umem.torch_compat import DisableTorchFunctionSubclass, storage_key, storage_use_count

__all__ = [
    "GuardedParameter",
    "GuardedTensor",
    "can_guard",
    "guard_parameters",
    "guard_tensors",
    "has_alias",
    "release",
]


class _Uses:
    """What is to happen before a use of tensors that were guarded together.

    Thousands of tensors may be guarded in a step: one object for each would keep Python's garbage
    collector busy.
    """

    __slots__ = ("changes_grad", "gradients", "settle", "tensors")

    def __init__(
        self,
        tensors: Iterable[torch.Tensor],
        settle: Callable[[], None],
        changes_grad: Callable[[], None] | None = None,
    ) -> None:
        self.tensors = list(tensors)
        """Kept alive, so that each ``id`` stays theirs."""
        self.settle = settle
        self.changes_grad = changes_grad
        """For parameters that keep their gradients: called before the program sets another one."""
        self.gradients: dict[int, torch.Tensor | None] = {}
        """For other parameters, what the program sees as their gradients, by ``id``."""


_uses: dict[int, _Uses] = {}
"""Of guarded tensors by ``id``."""


def _harmless() -> frozenset[Any]:
    """Functions that neither read, write nor hand out a tensor's memory."""
    tensor: Any = torch.Tensor
    attributes = (
        *(tensor.device, tensor.dtype, tensor.is_cpu, tensor.is_cuda, tensor.is_leaf),
        *(tensor.is_sparse, tensor.itemsize, tensor.layout, tensor.nbytes, tensor.ndim),
        *(tensor.requires_grad, tensor.retains_grad, tensor.shape),
    )
    methods = (
        *(tensor.dim, tensor.element_size, tensor.get_device, tensor.is_complex),
        *(tensor.is_contiguous, tensor.is_floating_point, tensor.nelement, tensor.numel),
        *(tensor.register_hook, tensor.register_post_accumulate_grad_hook),
        *(tensor.requires_grad_, tensor.size, tensor.storage_offset, tensor.stride),
    )
    getters = (attribute.__get__ for attribute in attributes)
    return frozenset((*getters, tensor.requires_grad.__set__, *methods))


_HARMLESS = _harmless()
_GRADIENT: Any = torch.Tensor.grad


def _guarded(value: object) -> Iterator[torch.Tensor]:
    """The guarded tensors in an operator's arguments."""
    if isinstance(value, _Guarded):
        yield value  # type: ignore[misc]
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _guarded(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _guarded(item)


def _settle(tensor: torch.Tensor) -> None:
    uses = _uses.get(id(tensor))
    if uses is not None:
        uses.settle()
    elif type(tensor) is GuardedParameter:
        # The object of a parameter that was swapped for another one while it was guarded.
        _change_class(tensor, nn.Parameter)


def _change_class(tensor: Any, kind: type[torch.Tensor]) -> None:
    tensor.__class__ = kind


class _Guarded:
    __slots__ = ()

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        _types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func not in _HARMLESS:
            for tensor in list(_guarded((args, kwargs))):
                _settle(tensor)
            if next(_guarded((args, kwargs)), None) is None:
                return func(*args, **kwargs)  # classes of other libraries have their say
        with DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(_plain(self), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _plain(self).__reduce_ex__(protocol)


class GuardedTensor(_Guarded, torch.Tensor):
    """A gradient, or a tensor of optimizer state."""

    __slots__ = ()


class GuardedParameter(_Guarded, nn.Parameter):
    """A parameter whose update is under way.

    If the update reads its gradient, the gradient is taken off the parameter itself, so that a
    backward pass does not add to that memory; programs see it all the same.
    """

    __slots__ = ()

    @property
    def grad(self) -> torch.Tensor | None:
        """The gradient that the program sees."""
        uses = _uses.get(id(self))
        if uses is not None and uses.changes_grad is None:
            return uses.gradients.get(id(self))
        with DisableTorchFunctionSubclass():
            own: torch.Tensor | None = _GRADIENT.__get__(self)
        return own

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        uses = _uses.get(id(self))
        if uses is not None and uses.changes_grad is None:
            uses.gradients[id(self)] = value
            return
        if uses is not None and uses.changes_grad is not None:
            uses.changes_grad()
        with DisableTorchFunctionSubclass():
            _GRADIENT.__set__(self, value)

    @grad.deleter
    def grad(self) -> None:
        self.grad = None


def _plain(tensor: Any) -> torch.Tensor:
    """The tensor under torch's own class, after the updates that are under way."""
    _settle(tensor)
    plain: torch.Tensor = tensor
    if isinstance(tensor, _Guarded):
        with DisableTorchFunctionSubclass():
            plain = plain.detach()
    return plain


def can_guard(tensor: torch.Tensor) -> bool:
    """Whether a tensor is of torch's own classes, whose objects can be guarded."""
    return type(tensor) in (torch.Tensor, nn.Parameter, GuardedTensor, GuardedParameter)


def has_alias(tensor: torch.Tensor) -> bool:
    """Whether another tensor, or a view, has the same memory; always for sparse tensors."""
    if isinstance(tensor, _Guarded):
        with DisableTorchFunctionSubclass():
            return _has_alias(tensor)
    return _has_alias(tensor)


def _has_alias(tensor: torch.Tensor) -> bool:
    if tensor.layout is not torch.strided:
        return True
    # The tensor itself, and the object that is made here.
    return storage_use_count(storage_key(tensor.untyped_storage())) > 2


def guard_tensors(tensors: Iterable[torch.Tensor], settle: Callable[[], None]) -> None:
    """Guard gradients or optimizer state.

    Parameters
    ----------
    tensors
        Tensors for which :func:`can_guard` holds, not parameters.
    settle
        Called before each use, in the thread that uses one. It may :func:`release` them.
    """
    uses = _Uses(tensors, settle)
    for tensor in uses.tensors:
        _uses[id(tensor)] = uses
        _change_class(tensor, GuardedTensor)


def guard_parameters(
    parameters: Iterable[nn.Parameter],
    settle: Callable[[], None],
    changes_grad: Callable[[], None] | None = None,
) -> None:
    """Guard parameters.

    Parameters
    ----------
    parameters
        Parameters for which :func:`can_guard` holds.
    settle
        As for :func:`guard_tensors`.
    changes_grad
        Called before the program sets a gradient. None to take the gradients off the parameters:
        the program sees and sets them, but a backward pass begins new ones.
    """
    uses = _Uses(parameters, settle, changes_grad)
    for parameter in uses.tensors:
        _uses[id(parameter)] = uses
        if changes_grad is None:
            uses.gradients[id(parameter)] = parameter.grad
            parameter.grad = None
        _change_class(parameter, GuardedParameter)


def release(tensors: Iterable[torch.Tensor]) -> None:
    """Give tensors their class back, and parameters the gradient that the program sees."""
    for tensor in tensors:
        uses = _uses.pop(id(tensor), None)
        if uses is None:
            continue
        if type(tensor) is GuardedTensor:
            _change_class(tensor, torch.Tensor)
        elif type(tensor) is GuardedParameter:
            _change_class(tensor, nn.Parameter)
            if uses.changes_grad is None:
                _give_gradient(tensor, uses.gradients.pop(id(tensor), None))


def _give_gradient(parameter: torch.Tensor, seen: torch.Tensor | None) -> None:
    if seen is None:
        return
    added = parameter.grad
    if added is not None:  # by a backward pass meanwhile
        with torch.no_grad(), DisableTorchFunctionSubclass():
            seen.add_(added)
    parameter.grad = seen
