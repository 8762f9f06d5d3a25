"""Ways to a tensor's memory past torch's operators: each waits for what works on it.

Python reads addresses by ``data_ptr``, and so do Triton and ``__cuda_array_interface__``. Files,
pickles, copies of optimizers and shared memory begin with ``untyped_storage``. Memory that a tensor
gives up for another one by ``data`` must not be an update's any more. Kernels that TorchScript has
fused take the addresses of a function's arguments. ``torch.utils.swap_tensors`` swaps memory, and
refuses a tensor with a guard. In operators of classes that programs and libraries put around
tensors torch leaves guards out. All these are replaced while tensors are guarded or on lent memory,
and no longer. What hands memory to other libraries is replaced for good: programs import some of it
by name. So are the methods of ``torch.distributed``'s backends, which take memory themselves; those
of process groups are operators.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch

from umem import patches, torch_compat
from umem.torch_compat import tree_leaves

__all__ = [
    "DataListener",
    "Owner",
    "on_export",
    "original_data",
    "original_storage",
    "owner_of",
    "wait_at_attributes",
    "watch_data",
    "watch_exports",
    "watch_lent",
]

original_data: Any = torch.Tensor.data
"""The attribute as torch has it, for what umem itself does to tensors."""
original_storage: Callable[[torch.Tensor], torch.UntypedStorage] = torch.Tensor.untyped_storage
"""The same of the method."""
_wait: Callable[[Any], None] | None = None
_let_go: Callable[[Any], None] | None = None
_give_own: Callable[[torch.Tensor], None] | None = None
_note_alias: Callable[[torch.Tensor], None] | None = None
_is_watched = False
_is_complete = True
"""Whether all are replaced, or put back."""
_listeners: list[Callable[[torch.Tensor], None]] = []
_of_data: weakref.WeakSet[DataListener] = weakref.WeakSet()


class DataListener(Protocol):
    """Told of tensors whose changes may not be counted from now on."""

    def data_is_taken(self, tensor: torch.Tensor) -> None:
        """The program is about to read or to set a tensor's ``data``."""


class Owner:
    """Who has the memory that a tensor had when it was asked for, wherever umem moves that.

    Parameters
    ----------
    tensor
        The tensor.
    """

    __slots__ = ("__weakref__", "tensor")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        """The tensor; another one once the program gives it other memory by ``data``."""


_owners: weakref.WeakValueDictionary[int, Owner] = weakref.WeakValueDictionary()
"""By ``id`` of tensors, which these keep alive."""


def owner_of(tensor: torch.Tensor) -> Owner:
    """The owner of a tensor's present memory, while :func:`watch_lent` calls functions."""
    owner = _owners.get(id(tensor))
    if owner is None:
        owner = _owners[id(tensor)] = Owner(tensor)
    return owner


def wait_at_attributes(
    wait: Callable[[Any], None] | None, let_go: Callable[[Any], None] | None = None
) -> None:
    """Call functions with tensors past torch's operators; None for no functions any more.

    `wait` is called with each tensor whose memory is taken, `let_go` with each whose contents are
    swapped: it has no guard any more.
    """
    global _wait, _let_go
    _wait, _let_go = wait, let_go
    _watch()


def watch_lent(
    give_own: Callable[[torch.Tensor], None] | None,
    note_alias: Callable[[torch.Tensor], None] | None,
) -> None:
    """Call functions for tensors that may be on lent memory; None for no functions any more.

    `give_own` is called with each tensor whose storage is taken, `note_alias` with what ``.data``
    returns, which counts its changes by itself.
    """
    global _give_own, _note_alias
    _give_own, _note_alias = give_own, note_alias
    _watch()


def watch_data(listener: DataListener, is_on: bool) -> None:
    """Have a listener told of each ``data``, or no more. Only a weak reference is kept."""
    (_of_data.add if is_on else _of_data.discard)(listener)
    _watch()


def _watch() -> None:
    global _is_watched, _is_complete
    is_watched = _wait is not None or _give_own is not None or bool(_of_data)
    if is_watched == _is_watched and _is_complete:
        return
    _is_complete = False  # what an interrupt cuts short, another call completes
    patches.undo("subclass_operators", *_REPLACED)
    if is_watched:
        watch_exports()
        _watch_backends()
        for key, make in _REPLACED.items():
            patches.wrap(key, make)
        _wrap_operators(torch.Tensor)
    _is_watched, _is_complete = is_watched, True


def _behind(before: Callable[[Any], None], function: Any) -> Any:
    @functools.wraps(function)
    def call(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        before(tensor)
        return function(tensor, *args, **kwargs)

    return call


def _behind_arguments(before: Callable[[Any], None], function: Any) -> Any:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        for value in tree_leaves((args, kwargs)):
            before(value)
        return function(*args, **kwargs)

    return call


def _wrap_operators(kind: Any) -> None:
    """Have operators of a class, and of those below it, wait for the tensors in its objects.

    Not those of torch's own classes: what is in a DTensor has a guard by itself.
    """
    own = vars(kind).get("__torch_dispatch__")
    if isinstance(own, classmethod) and kind.__module__.partition(".")[0] != "torch":
        ours: Any = classmethod(_behind_parts(own.__func__))
        patches.replace("subclass_operators", ours, owner=kind)
    for below in kind.__subclasses__():
        _wrap_operators(below)


def _behind_parts(dispatch: Any) -> Any:
    @functools.wraps(dispatch)
    def call(cls: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for value in tree_leaves((args, kwargs or {})):
            if isinstance(value, torch.Tensor):
                for part in vars(value).values():
                    _use(part)
        return dispatch(cls, func, types, args, kwargs)

    return call


def _use(value: Any) -> None:
    if _wait is not None:
        _wait(value)


def _take(tensor: Any) -> None:
    _use(tensor)
    if _give_own is not None:
        _give_own(tensor)


def _swap(tensor: Any) -> None:
    _take(tensor)
    if _let_go is not None:
        _let_go(tensor)


def _tell_of_data(tensor: Any) -> None:
    for listener in list(_of_data):
        listener.data_is_taken(tensor)


def _get_data(tensor: Any) -> Any:
    _tell_of_data(tensor)
    _use(tensor)
    alias = original_data.__get__(tensor)
    if _note_alias is not None:
        _note_alias(alias)
    return alias


def _put_data(tensor: Any, value: Any) -> None:
    _tell_of_data(tensor)
    owner = _owners.pop(id(tensor), None)
    if owner is None:
        _use(tensor)
    else:
        _take(tensor)
        owner.tensor = original_data.__get__(tensor)
    if isinstance(value, torch.Tensor):
        _take(value)  # which shares its memory from now on
    original_data.__set__(tensor, value)


def _kept(make: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Make the same of an attribute again, while the attribute stays the same."""
    known: tuple[Any, Any] = (None, None)

    def kept(original: Any) -> Any:
        nonlocal known
        of, made = known
        if made is None or of is not original:
            made = make(original)
            known = original, made
        return made

    return kept


_data = property(_get_data, _put_data, doc=original_data.__doc__)
_new_subclass: Any = classmethod(_wrap_operators)
_REPLACED: dict[str, Callable[[Any], Any]] = {
    "data_ptr": _kept(functools.partial(_behind, _use)),
    "const_data_ptr": _kept(functools.partial(_behind, _use)),  # a newer torch's
    "untyped_storage": _kept(lambda _: _behind(_take, original_storage)),
    "data": lambda _: _data,
    "swap_contents": _kept(functools.partial(_behind_arguments, _swap)),
    "scripted_function": _kept(functools.partial(_behind_arguments, _use)),
    "new_subclasses": lambda _: _new_subclass,
}
"""What takes the place of attributes for a time, by the keys of :data:`umem.patches.PATCHES`. It is
made once: it comes and goes with each step."""


def on_export(listener: Callable[[torch.Tensor], None]) -> None:
    """Call a function with each tensor whose memory another library gets, for good."""
    _listeners.append(listener)
    watch_exports()


@functools.cache
def watch_exports() -> None:
    """See memory that leaves by DLPack or ``__cuda_array_interface__``, until the process ends."""
    for key in ("tensor_dlpack", "utils_to_dlpack", "to_dlpack"):
        patches.wrap(key, functools.partial(_behind, _export))
    patches.wrap("cuda_array_interface", _exported)


def _exported(interface: Any) -> property:
    def get(tensor: Any) -> Any:
        _export(tensor)
        return interface.__get__(tensor)

    return property(get, doc=interface.__doc__)


@functools.cache
def _watch_backends() -> None:
    """See what collectives take that a program asks a backend for, until the process ends."""
    if not torch.distributed.is_available():
        return
    backend = torch_compat.ProcessGroupBackend
    for name in list(vars(backend)):
        method: Any = getattr(backend, name)
        # The signature of a method in C++ is in its description.
        if callable(method) and "Tensor" in (method.__doc__ or ""):
            ours = _behind_arguments(_use, method)
            patches.replace("backend_methods", ours, owner=backend, attribute=name)


def _export(tensor: Any) -> None:
    _use(tensor)
    if isinstance(tensor, torch.Tensor):
        for listener in _listeners:
            listener(tensor)
