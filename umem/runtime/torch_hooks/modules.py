"""The layers of a model: modules in a list that run one after another."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.compiler import is_compiling

__all__ = ["Hook", "OnError", "Undo", "find_chains", "hook_calls", "main_chain", "members"]


def members(module: nn.Module) -> list[nn.Module]:
    """A module's children that have parameters, each once."""
    return [child for child in module.children() if any(True for _ in child.parameters())]


def find_chains(model: nn.Module) -> list[nn.Module]:
    """Every :class:`~torch.nn.ModuleList` and :class:`~torch.nn.Sequential` of two members or more.

    Outermost first; the model itself may be one.
    """
    return [
        module
        for module in model.modules()
        if isinstance(module, nn.ModuleList | nn.Sequential) and len(members(module)) > 1
    ]


def main_chain(model: nn.Module) -> nn.Module | None:
    """The chain with the largest product of length and bytes: the layers of a transformer."""
    return max(find_chains(model), key=_weight, default=None)


def _weight(chain: nn.Module) -> int:
    return len(members(chain)) * sum(parameter.nbytes for parameter in chain.parameters())


# Hooks on the calls of modules, which neither copies of a module nor compilers take along.

Undo = Callable[[], None]
OnError = Callable[[Exception], None]


def _raise(error: Exception) -> None:
    raise error


class _Copyable:
    """Has a function to call. A copy of it, such as in a copied or pickled model, does nothing.

    What calls it is one function without layers in it: it runs around every call of a module.
    """

    __slots__ = ("_function", "_on_error")

    def __init__(self, function: Callable[..., None], on_error: OnError = _raise) -> None:
        self._function = function
        self._on_error = on_error

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (_idle,)


class Hook(_Copyable):
    """Calls a function. A copy of it, such as in a copied or pickled model, does nothing.

    Parameters
    ----------
    function
        What it returns is dropped: torch takes what a hook returns for another result.
    on_error
        Called with what the function raises. By default that is raised to the caller.
    """

    __slots__ = ()

    def __call__(self, *args: Any) -> None:
        """Call the function."""
        try:
            self._function(*args)
        except Exception as error:
            self._on_error(error)


# Neither of the two does anything where a compiler traces the call: they are no part of the
# program.


class _Before(_Copyable):
    __slots__ = ()

    def __call__(
        self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None
    ) -> None:
        # Where it was taken away since the call began, torch still calls it, without keywords.
        if kwargs is None or is_compiling():
            return
        try:
            self._function(args, kwargs)
        except Exception as error:
            self._on_error(error)


class _After(_Copyable):
    __slots__ = ()

    def __call__(self, _module: nn.Module, _args: object, output: Any) -> None:
        if is_compiling():
            return
        try:
            self._function(output, failed=output is None and sys.exc_info()[0] is not None)
        except Exception as error:
            self._on_error(error)


def _idle(*_args: object, **_kwargs: object) -> None:
    pass


def hook_calls(
    module: nn.Module,
    enter: Callable[[tuple[Any, ...], dict[str, Any]], None],
    leave: Callable[..., None] | None = None,
    on_error: OnError = _raise,
) -> list[Undo]:
    """Call functions at both ends of every call of one module.

    Parameters
    ----------
    module
        Called from now on. If it was compiled in place, the hooks are around what was compiled.
    enter
        Called with the arguments of the call, by position and by keyword.
    leave
        Called with what the call returns, and with ``failed``: whether an exception has ended it.
    on_error
        Called with what they raise. By default that goes through the call.
    """
    if module._compiled_call_impl is not None:
        return [_hook_compiled(module, enter, leave, on_error)]
    undo = [module.register_forward_pre_hook(_Before(enter, on_error), with_kwargs=True).remove]
    if leave is not None:
        after = _After(leave, on_error)
        undo.append(module.register_forward_hook(after, always_call=True).remove)
    return undo


class _CompiledCall:
    """What ``Module.compile`` has made, with hooks around it.

    The compiler has the module's own hooks inside, where they would run while it traces only.

    Attributes
    ----------
    hooks
        By registration: what is called before, and after if there is anything.
    """

    def __init__(self, compiled: Callable[..., Any]) -> None:
        self.compiled = compiled
        self.hooks: list[tuple[Hook, Hook | None]] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if is_compiling():  # as a part of something larger
            return self.compiled(*args, **kwargs)
        hooks = list(self.hooks)
        output, failed = None, True
        try:
            for before, _ in hooks:
                before(args, kwargs)
            output = self.compiled(*args, **kwargs)
            failed = False
        finally:
            for _, after in hooks:
                if after is not None:
                    after(output, failed)
        return output


def _hook_compiled(
    module: nn.Module,
    enter: Callable[[tuple[Any, ...], dict[str, Any]], None],
    leave: Callable[..., None] | None,
    on_error: OnError,
) -> Undo:
    owner: Any = module
    found = owner._compiled_call_impl
    call = found if isinstance(found, _CompiledCall) else _CompiledCall(found)
    after = None
    if leave is not None:
        after = Hook(lambda output, failed: leave(output, failed=failed), on_error)
    pair = Hook(enter, on_error), after
    call.hooks.append(pair)
    owner._compiled_call_impl = call

    def undo() -> None:
        call.hooks.remove(pair)
        # The module may have been compiled anew since.
        if not call.hooks and owner._compiled_call_impl is call:
            owner._compiled_call_impl = call.compiled

    return undo
