"""Hooks on the calls of modules, which neither copies of a module nor compilers take along."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

__all__ = ["Hook", "Undo", "hook_calls"]

Undo = Callable[[], None]


class Hook:
    """Calls a function. A copy of it, such as in a copied or pickled model, does nothing."""

    __slots__ = ("_function",)

    def __init__(self, function: Callable[..., None]) -> None:
        self._function = function

    def __call__(self, *args: Any) -> None:
        """Call the function; torch takes what a hook returns for another result."""
        self._function(*args)

    def __reduce__(self) -> tuple[Any, ...]:
        return Hook, (_idle,)


def _idle(*_args: object) -> None:
    pass


def hook_calls(
    module: nn.Module,
    enter: Callable[[tuple[Any, ...], dict[str, Any]], None],
    leave: Callable[..., None] | None = None,
    make_hook: Callable[[Callable[..., None]], Hook] = Hook,
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
    make_hook
        Makes hooks of functions.
    """
    if module._compiled_call_impl is not None:
        return [_hook_compiled(module, enter, leave, make_hook)]

    # Not where a compiler traces the call: the hooks are no part of the program.
    # Nor where it was taken away since the call began: torch still calls it, without keywords.
    def before(
        _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None
    ) -> None:
        if kwargs is not None and not torch.compiler.is_compiling():
            enter(args, kwargs)

    undo = [module.register_forward_pre_hook(make_hook(before), with_kwargs=True).remove]
    if leave is not None:

        def after(_module: nn.Module, _args: object, output: Any) -> None:
            if not torch.compiler.is_compiling():
                leave(output, failed=output is None and sys.exc_info()[0] is not None)

        undo.append(module.register_forward_hook(make_hook(after), always_call=True).remove)
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
        if torch.compiler.is_compiling():  # as a part of something larger
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
    make_hook: Callable[[Callable[..., None]], Hook],
) -> Undo:
    owner: Any = module
    found = owner._compiled_call_impl
    call = found if isinstance(found, _CompiledCall) else _CompiledCall(found)
    after = None
    if leave is not None:
        after = make_hook(lambda output, failed: leave(output, failed=failed))
    pair = make_hook(enter), after
    call.hooks.append(pair)
    owner._compiled_call_impl = call

    def undo() -> None:
        call.hooks.remove(pair)
        # The module may have been compiled anew since.
        if not call.hooks and owner._compiled_call_impl is call:
            owner._compiled_call_impl = call.compiled

    return undo
