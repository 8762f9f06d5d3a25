"""Hooks on the calls of modules, also of compiled ones and of those whose ``forward`` is run."""

from __future__ import annotations

import functools
import inspect
import sys
import weakref
from collections.abc import Callable
from types import FrameType, FunctionType
from typing import Any

import torch
from torch import nn
from torch.compiler import is_compiling

from umem import patches
from umem.runtime.torch_hooks.hidden import HookPlace, Undo, are_called, hide
from umem.torch_compat import compiled_call, set_compiled_call

__all__ = ["HookErrors", "Undo", "enter_running_forward", "hook_calls", "hook_running_forward"]

OnError = Callable[[Exception], None]


def _raise(error: Exception) -> None:
    raise error


class Hook:
    """Calls a function and drops its result, which torch would take for the hooked call's result.

    An exception of the function goes to `on_error`, by default to the caller.
    """

    __slots__ = ("_function", "_on_error")

    def __init__(self, function: Callable[..., None], on_error: OnError = _raise) -> None:
        self._function = function
        self._on_error = on_error

    def __call__(self, *args: Any) -> None:
        """Call the function."""
        try:
            self._function(*args)
        except Exception as error:
            self._on_error(error)


class HookErrors:
    """Wraps hooks so that an exception in umem's code never reaches the training loop.

    `on_error` is to report the first exception and to end what the hooks are for.
    """

    def __init__(self, on_error: OnError) -> None:
        self.on_error = on_error

    def __call__(self, function: Callable[..., None]) -> Hook:
        """A hook that calls a function and returns nothing."""
        return Hook(function, self.on_error)

    def uncompiled(self, function: Callable[..., None]) -> Callable[..., None]:
        """The same for an optimizer, whose compiled step calls this hook outside of the graph.

        Not for modules, which may be compiled as one graph; :func:`hook_calls` serves them.
        """
        hook: Callable[..., None] = torch.compiler.disable(self(function))
        return hook


class _Before(Hook):
    """A forward pre-hook, which does nothing while a compiler traces the hook itself."""

    __slots__ = ()

    def __call__(
        self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None
    ) -> None:
        # torch calls a hook that was removed during the call once more, without keywords.
        if kwargs is None or is_compiling():
            return
        try:
            self._function(args, kwargs)
        except Exception as error:
            self._on_error(error)


class _After(Hook):
    """A forward hook, which does nothing while a compiler traces the hook itself."""

    __slots__ = ()

    def __call__(self, _module: nn.Module, _args: object, output: Any) -> None:
        if is_compiling():
            return
        try:
            self._function(output, failed=output is None and sys.exc_info()[0] is not None)
        except Exception as error:
            self._on_error(error)


def hook_calls(
    module: nn.Module,
    enter: Callable[[tuple[Any, ...], dict[str, Any]], None],
    leave: Callable[..., None] | None = None,
    on_error: OnError = _raise,
    *,
    place: HookPlace = "in order",
) -> list[Undo]:
    """Call functions at both ends of every call of one module; each result removes one hook.

    `enter` is called with the positional and the keyword arguments of the call; `leave` with its
    result, and with ``failed``: whether an exception has ended it. An exception of either function
    goes to `on_error`, by default to the module's caller. `place` is that of `enter` among the
    module's own hooks. If the module was compiled in place, the hooks are around the compiled
    function.
    """
    if compiled_call(module) is not None:
        return [_hook_compiled(module, enter, leave, on_error)]
    if module in _forward_hooks:
        return [_hook_forward(module, enter, leave, on_error)]
    before = _Before(enter, on_error)
    undo = [hide(module.register_forward_pre_hook(before, with_kwargs=True), place)]
    if leave is not None:
        after = _After(leave, on_error)
        undo.append(hide(module.register_forward_hook(after, always_call=True)))
    return undo


_Pair = tuple[Hook, Hook | None]
"""Before and after a call."""


def _pair(
    enter: Callable[..., None], leave: Callable[..., None] | None, on_error: OnError
) -> _Pair:
    after = None
    if leave is not None:
        after = Hook(lambda output, failed: leave(output, failed=failed), on_error)
    return Hook(enter, on_error), after


def _call_with(
    hooks: list[_Pair],
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    own: tuple[Any, ...] = (),
) -> Any:
    """Call a function with hooks around; `own` are arguments before those that hooks see."""
    output, failed = None, True
    try:
        for before, _ in hooks:
            before(args, kwargs)
        output = function(*own, *args, **kwargs)
        failed = False
    finally:
        for _, after in hooks:
            if after is not None:
                after(output, failed)
    return output


class _CompiledCall:
    """The function that ``Module.compile`` has made, with hooks around it.

    A module's own hooks are inside of that function, where they run only while it is traced.
    """

    def __init__(self, compiled: Callable[..., Any]) -> None:
        self.compiled = compiled
        self.hooks: list[_Pair] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not are_called():  # as a part of a larger graph
            return self.compiled(*args, **kwargs)
        return _call_with(list(self.hooks), self.compiled, args, kwargs)


def _hook_compiled(
    module: nn.Module,
    enter: Callable[[tuple[Any, ...], dict[str, Any]], None],
    leave: Callable[..., None] | None,
    on_error: OnError,
) -> Undo:
    found: Any = compiled_call(module)
    call = found if isinstance(found, _CompiledCall) else _CompiledCall(found)
    pair = _pair(enter, leave, on_error)
    call.hooks.append(pair)
    set_compiled_call(module, call)

    def undo() -> None:
        call.hooks.remove(pair)
        # The module may have been compiled again since.
        if not call.hooks and compiled_call(module) is call:
            set_compiled_call(module, call.compiled)

    return undo


_forward_hooks: weakref.WeakKeyDictionary[nn.Module, list[_Pair]] = weakref.WeakKeyDictionary()
"""Of modules whose ``forward`` the program calls past their call."""

_wrapped_classes: set[type[nn.Module]] = set()


def hook_running_forward(inner: nn.Module) -> nn.Module | None:
    """Find the module around one that is called, if the program runs its ``forward`` itself.

    torch runs no hook of a module then. From now on, :func:`hook_calls` puts this module's hooks
    around its ``forward``. Returns the outermost such module, or None.
    """
    found = None
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        module = _running(frame)
        if module is not None and any(it is inner for it in module.modules()):
            found = module
        frame = frame.f_back
    if found is None or found is inner or "forward" in vars(found):
        return None
    _forward_hooks.setdefault(found, [])
    _wrap_forward(type(found))
    return found


def enter_running_forward(module: nn.Module) -> None:
    """Call what is to be called at the begin of a ``forward`` that began without it."""
    for before, _ in list(_forward_hooks.get(module, ())):
        before((), {})


def _running(frame: FrameType) -> nn.Module | None:
    """The module whose class's ``forward`` a frame runs."""
    code = frame.f_code
    # Up to Python 3.12 a frame keeps what f_locals has shown until it ends: a training loop's
    # tensors would outlive their `del`. The others are a forward's own or a decorator's.
    if "forward" not in code.co_name and not code.co_flags & inspect.CO_VARARGS:
        return None
    if code.co_argcount:
        first = frame.f_locals.get(code.co_varnames[0])
    elif code.co_flags & inspect.CO_VARARGS:  # a decorated one
        first = next(iter(frame.f_locals.get(code.co_varnames[code.co_kwonlyargcount], ())), None)
    else:
        return None
    if not isinstance(first, nn.Module):
        return None
    return first if getattr(type(first).forward, "__code__", None) is code else None


def _wrap_forward(kind: type[nn.Module]) -> None:
    if kind in _wrapped_classes:
        return
    _wrapped_classes.add(kind)
    unhooked_forward = kind.forward
    hooks_around, hooks_are_called, call_hooked = _forward_hooks, are_called, _call_with

    def hooked(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        hooks = hooks_around.get(self) if hooks_are_called() else None
        if not hooks:
            return unhooked_forward(self, *args, **kwargs)
        return call_hooked([*hooks], unhooked_forward, args, kwargs, own=(self,))

    # torch.jit.script compiles the source of the program's function with the globals of this one.
    names = getattr(unhooked_forward, "__globals__", globals())
    wrapper = FunctionType(hooked.__code__, names, closure=hooked.__closure__)
    patches.replace(
        "module_forward", functools.update_wrapper(wrapper, unhooked_forward), owner=kind
    )


def _hook_forward(
    module: nn.Module,
    enter: Callable[[tuple[Any, ...], dict[str, Any]], None],
    leave: Callable[..., None] | None,
    on_error: OnError,
) -> Undo:
    hooks = _forward_hooks[module]
    pair = _pair(enter, leave, on_error)
    hooks.append(pair)

    def undo() -> None:
        if pair in hooks:
            hooks.remove(pair)

    return undo
