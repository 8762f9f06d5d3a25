"""Orders every use of a tensor behind updates that still run on other streams.

A deferred optimizer step returns while its updates are under way. Until a block's next forward pass
has waited for them, anything else may look at the block's parameters, gradients or optimizer state:
an average of weights, a checkpoint, a logged norm, another thread. The guard changes the class of
these tensor *objects* for that time. torch then calls ``__torch_function__`` for each operator and
attribute that takes one of them, in every thread, and the guard has the caller's stream wait first.
The class equals torch's own: by ``type(tensor) in [torch.Tensor]`` torch chooses between kernels
for lists of tensors and for single ones, such as of a norm, which round differently.

An object of another tensor on the same memory would not be seen. So what has such an alias is not
deferred (:func:`has_alias`), unless all tensors on the memory are known and guarded
(:func:`are_all_on_memory`).
"""

from __future__ import annotations

import copy
import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from torch import nn

from umem.core.interrupts import call_all
from umem.runtime.held_memory import any_held, are_kept
from umem.runtime.model_parts import dtensor_class
from umem.torch_compat import (
    DTENSOR_PART,
    DisableTorchFunctionSubclass,
    InferenceMode,
    storage_address,
    storage_key,
    storage_use_count,
)

__all__ = [
    "DTensorGuard",
    "DTensorParameterGuard",
    "Guard",
    "GuardedParameter",
    "GuardedTensor",
    "ParameterGuard",
    "StandingGuard",
    "TensorGuard",
    "UseGuard",
    "WatchedParameterGuard",
    "are_all_on_memory",
    "are_plain",
    "can_guard",
    "can_guard_dtensor",
    "guards_of",
    "has_alias",
    "is_guardable",
    "settle_all",
]


_PLAIN = frozenset(map(id, (torch.Tensor, nn.Parameter)))
"""Classes, by ``id``, of tensors that nothing guards, and that can be guarded."""

_ONE, _TWO = frozenset((1,)), frozenset((2,))
"""References to a storage that one tensor has for itself: without an object in Python, and with."""
_storage = torch.Tensor.untyped_storage


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
_HARMLESS_NAMES = frozenset(
    ("__class__", "__torch_function__", "device", "dtype", "ndim", "requires_grad", "shape")
)
"""The attributes among them that are looked at most, and those that Python and torch ask for."""
_PARAMETER_NAMES = _HARMLESS_NAMES.union(
    ("__dict__", "_is_param", "grad", "is_leaf", "numel", "size", DTENSOR_PART)
)
"""The same of a DTensor as a parameter. Its gradient is an attribute of the object meanwhile, and
its part has a guard of its own: FSDP2 asks for it before it gathers."""
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


def _settle(tensor: Any, func: object = None) -> Guard | None:
    """Settle a tensor's guards, one behind the other. Returns one that runs `func` itself."""
    guard: Guard | None = None
    while (found := getattr(type(tensor), "guard", None)) is not guard:
        guard = found
        if guard is None:  # another thread may have settled it
            return None
        if func in guard.functions:
            return guard
        guard.use(tensor)
    return None


def settle_all(arguments: object) -> None:
    """Settle what is guarded in the arguments of a function that torch does not dispatch."""
    for tensor in list(_guarded(arguments)):
        _settle(tensor)


def guards_of(tensors: Iterable[torch.Tensor]) -> list[tuple[TensorGuard, list[torch.Tensor]]]:
    """The guards of what is guarded among gradients, state, or parts of parameters."""
    found: dict[int, tuple[TensorGuard, list[torch.Tensor]]] = {}
    for tensor in tensors:
        guard = getattr(type(tensor), "guard", None)
        if guard is not None:
            found.setdefault(id(guard), (guard, []))[1].append(tensor)
    return list(found.values())


class _EqualsPlain(type(nn.Parameter)):  # type: ignore[misc]
    """Classes that equal the one that torch would have in their place."""

    def __eq__(cls, other: object) -> bool:
        return _plain_class(cls) is _plain_class(other)

    def __hash__(cls) -> int:
        return hash(_plain_class(cls))


def _plain_class(kind: Any) -> object:
    if not isinstance(kind, _EqualsPlain):
        return kind
    return next(it for it in kind.__mro__ if not issubclass(it, _Guarded))


class _Guarded:
    __slots__ = ()

    guard: ClassVar[Any]
    """The guard of these tensors, each of which has a class of its own."""

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
            guards = [_settle(tensor, func) for tensor in list(_guarded((args, kwargs)))]
            able = next(filter(None, guards), None)
            if able is not None:
                result = able.run(func, args, kwargs)
                if result is not NotImplemented:
                    return result
                settle_all((args, kwargs))
            if next(_guarded((args, kwargs)), None) is None:
                return func(*args, **kwargs)  # classes of other libraries have their say
        with DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(_plain(self), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _plain(self).__reduce_ex__(protocol)


class GuardedTensor(_Guarded, torch.Tensor, metaclass=_EqualsPlain):
    """A gradient, or a tensor of optimizer state."""

    __slots__ = ()


class GuardedParameter(_Guarded, nn.Parameter, metaclass=_EqualsPlain):
    """A parameter whose update is under way.

    Its update reads its gradient. That is taken off the parameter itself, so that a backward pass
    does not add to that memory. Programs see, set and delete it all the same: it is an attribute
    of the object meanwhile, which takes no call of Python. (Only ``del`` of a gradient that was
    deleted already raises AttributeError.)
    """

    __slots__ = ()

    grad: Any = None


class _WatchedParameter(GuardedParameter):  # type: ignore[metaclass]
    """A parameter that keeps its gradient."""

    __slots__ = ()

    @property
    def grad(self) -> torch.Tensor | None:
        """The gradient."""
        with DisableTorchFunctionSubclass():
            own: torch.Tensor | None = _GRADIENT.__get__(self)
        return own

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        if self.guard.is_on:
            self.guard.changes_grad()
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


def can_guard_dtensor(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a DTensor of torch's own class."""
    return _plain_class(type(tensor)) is dtensor_class()


def are_plain(tensors: Iterable[torch.Tensor]) -> bool:
    """Whether tensors are of torch's own classes, and nothing guards them."""
    return _PLAIN.issuperset(map(id, map(type, tensors)))


def can_guard(tensor: torch.Tensor) -> bool:
    """Whether a tensor is of torch's own classes, whose objects can be guarded."""
    return is_guardable(type(tensor))


def is_guardable(kind: type) -> bool:
    """Whether tensors of a class can be guarded."""
    return id(kind) in _PLAIN or issubclass(kind, _Guarded)


def has_alias(tensors: Collection[torch.Tensor]) -> bool:
    """Whether something else has the memory of some tensors; always for sparse ones.

    That is other tensors, such as views, or a program that holds the memory in another way.
    """
    try:
        if any_held(tensors):
            return True
        if _ONE.issuperset(map(storage_use_count, map(storage_address, tensors))):
            return False
        # Python's object of a storage counts too, also one that nothing refers to any more.
        with DisableTorchFunctionSubclass():
            storages = list(map(_storage, tensors))
        counts = map(storage_use_count, map(storage_key, storages))
        return not _TWO.issuperset(counts) or are_kept(storages)
    except (NotImplementedError, RuntimeError):  # there is no storage
        return True


def are_all_on_memory(tensors: Collection[torch.Tensor]) -> bool:
    """Whether nothing but these tensors has their memory, the same for all; each is given once."""
    if any_held(tensors):
        return False
    first = next(iter(tensors))
    address = storage_address(first)
    if storage_use_count(address) == len(tensors):
        return True
    # Python's object of a storage counts too, also one that nothing refers to any more.
    with DisableTorchFunctionSubclass():
        storages = [first.untyped_storage()]
    is_object = storage_use_count(storage_key(storages[0])) == len(tensors) + 1
    return is_object and not are_kept(storages)


def _nothing() -> None:
    pass


class Guard(ABC):
    """Sees each use of some tensors.

    The tensors get a class that only this guard has: that takes less time than to keep a record of
    each, and makes no work for Python's garbage collector.
    """

    functions: ClassVar[frozenset[Any]] = frozenset()
    """What :meth:`run` runs. Anything else is a use."""
    _guarded: ClassVar[type[torch.Tensor]] = GuardedTensor
    _plain: ClassVar[type[torch.Tensor]] = torch.Tensor

    def __init__(self) -> None:
        name = self._guarded.__name__
        self.kind: Any = type(name, (self._guarded,), {"__slots__": (), "guard": self})
        """The class of the tensors."""

    @abstractmethod
    def use(self, tensor: torch.Tensor) -> None:
        """Called before each use, in the thread that uses a tensor."""

    def run(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one of `functions` on these tensors, and others that this guard does not know.

        NotImplemented where it is a use after all.
        """
        raise NotImplementedError


class TensorGuard(Guard):
    """Guards gradients or optimizer state that are updated together.

    Parameters
    ----------
    settle
        Called before each use, in the thread that uses a tensor. It may :meth:`release` them.
    """

    def __init__(self, settle: Callable[[], None]) -> None:
        super().__init__()
        self.settle = settle
        self.is_on = False
        """Whether any tensors are guarded."""
        self._tensors: list[Any] = []

    def use(self, tensor: torch.Tensor) -> None:
        """Settle all."""
        self.settle()
        if isinstance(tensor, _Guarded) and not self.is_on:
            # The object of a tensor that was swapped for another one while it was guarded.
            self.give_back([tensor])

    def hold(self, tensors: Iterable[torch.Tensor]) -> None:
        """Guard tensors for which :func:`can_guard` holds, and keep them alive."""
        kind, some = self.kind, list[Any](tensors)
        self._tensors += some
        self.is_on = True
        for tensor in some:
            tensor.__class__ = kind

    def release(self) -> None:
        """Guard nothing any more. What an interrupt cuts short, another call completes."""
        self.is_on = False
        if self._tensors:
            self.give_back(self._tensors)
            self._tensors = []

    def give_back(self, tensors: Iterable[Any]) -> None:
        """Guard tensors no more."""
        kind, plain = self.kind, self._plain
        for tensor in tensors:
            if type(tensor) is kind:
                tensor.__class__ = plain


class StandingGuard(TensorGuard):
    """Guards tensors whatever uses them, until they are given back or others take their place."""

    def hold(self, tensors: Iterable[torch.Tensor]) -> None:
        """Guard these tensors, and no others any more."""
        some = list(tensors)
        self.release()
        super().hold(some)


@functools.cache
def _guarded_dtensor() -> Any:
    class GuardedDTensor(_Guarded, dtensor_class(), metaclass=_EqualsPlain):  # type: ignore[misc]
        """A gradient, or a tensor of state. Its methods and torch's own code read attributes."""

        __slots__ = ()
        harmless: ClassVar[frozenset[str]] = _HARMLESS_NAMES

        def __getattribute__(self, name: str) -> Any:
            if name in type(self).harmless:
                return super().__getattribute__(name)
            _settle(self)
            return getattr(self, name)

    return GuardedDTensor


@functools.cache
def _guarded_dtensor_parameter() -> Any:
    class GuardedDTensorParameter(_guarded_dtensor()):  # type: ignore[misc]
        """A parameter, whose gradient is taken off it as that of a :class:`GuardedParameter`."""

        __slots__ = ()
        harmless = _PARAMETER_NAMES

        grad: Any = None

    return GuardedDTensorParameter


class DTensorGuard(TensorGuard):
    """Guards DTensors of optimizer state, or gradients, until the first use.

    Parameters
    ----------
    settle
        As of :class:`TensorGuard`.
    """

    _make_class: ClassVar[Callable[[], Any]] = staticmethod(_guarded_dtensor)

    def __init__(self, settle: Callable[[], None]) -> None:
        self._guarded, self._plain = self._make_class(), dtensor_class()  # type: ignore[misc]
        super().__init__(settle)

    def use(self, tensor: torch.Tensor) -> None:
        """Settle all, and give them back."""
        self.settle()
        self.release()
        self.give_back([tensor])


class WatchedParameterGuard(TensorGuard):
    """Guards parameters that keep their gradients.

    Parameters
    ----------
    settle
        As of :class:`TensorGuard`.
    changes_grad
        Called before the program sets a gradient.
    """

    _guarded = _WatchedParameter
    _plain = nn.Parameter

    def __init__(
        self, settle: Callable[[], None], changes_grad: Callable[[], None] = _nothing
    ) -> None:
        super().__init__(settle)
        self.changes_grad = changes_grad


class UseGuard(WatchedParameterGuard):
    """Sees uses of parameters, which it goes on to guard.

    Parameters
    ----------
    seen
        Called before each use, in the thread that uses a parameter.
    taken
        Called when another guard takes a parameter.
    unseen
        Functions whose use of a parameter does not count.
    """

    def __init__(
        self,
        seen: Callable[[torch.Tensor], None],
        taken: Callable[[torch.Tensor], None],
        unseen: frozenset[Any],
    ) -> None:
        super().__init__(_nothing)
        self._seen = seen
        self._taken = taken
        self.functions = unseen  # type: ignore[misc]

    def use(self, tensor: torch.Tensor) -> None:
        """Tell of a use."""
        self._seen(tensor)

    def give_way(self, tensor: torch.Tensor) -> None:
        """Leave a parameter to another guard, which sees its uses from now on."""
        self._taken(tensor)
        self.give_back([tensor])

    def run(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run what does not count."""
        with DisableTorchFunctionSubclass():
            return function(*args, **kwargs)


class ParameterGuard(TensorGuard):
    """Guards parameters, and takes their gradients off them.

    The program sees and sets the gradients, but a backward pass begins new ones.
    """

    _guarded = GuardedParameter
    _plain = nn.Parameter

    def take_gradients(
        self, parameters: Iterable[nn.Parameter], gradients: Iterable[torch.Tensor]
    ) -> None:
        """Guard parameters that nothing guards, each of which has a gradient."""
        kind, some = self.kind, list[Any](parameters)
        self._tensors += some
        self.is_on = True
        for parameter, gradient in zip(some, gradients, strict=True):
            parameter.grad = None
            parameter.__class__ = kind
            parameter.grad = gradient

    def give_back(self, tensors: Iterable[Any]) -> None:
        """Guard parameters no more, and give them the gradients that the program sees."""
        kind, plain = self.kind, self._plain
        for parameter in tensors:
            if type(parameter) is kind:
                seen = parameter.__dict__.get("grad")
                if seen is not None:
                    _add_later_gradient(parameter, seen)
                    # At once: no interrupt comes between two assignments without a call.
                    parameter.__class__, parameter.grad = plain, seen
                else:
                    parameter.__class__ = plain
                parameter.__dict__.pop("grad", None)


class DTensorParameterGuard(DTensorGuard, ParameterGuard):
    """Guards DTensors as parameters, and takes their gradients off them."""

    _make_class = staticmethod(_guarded_dtensor_parameter)


def _add_later_gradient(parameter: torch.Tensor, seen: torch.Tensor) -> None:
    """Add what a backward pass has made while the gradient was taken off."""
    with DisableTorchFunctionSubclass():
        added = _GRADIENT.__get__(parameter)
    if added is not None:
        _settle(seen)
        with InferenceMode(torch.is_inference_mode_enabled()), DisableTorchFunctionSubclass():
            torch.set_grad_enabled(False)
            # Together: what an interrupt cuts short, another call does again.
            call_all(partial(seen.add_, added), partial(_GRADIENT.__set__, parameter, None))
