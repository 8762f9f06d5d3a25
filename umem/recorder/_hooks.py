"""Hooks on modules."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from umem.recorder._guard import Guard

__all__ = ["Undo", "hook_calls"]

Undo = Callable[[], None]


def hook_calls(
    module: nn.Module,
    enter: Callable[[tuple[Any, ...], dict[str, Any]], None],
    leave: Callable[..., None],
    guard: Guard,
) -> list[Undo]:
    """Call functions at both ends of every call of one module.

    Parameters
    ----------
    module
        Called from now on.
    enter
        Called with the arguments of the call, by position and by keyword.
    leave
        Called with what the call returns, and with ``failed``: whether an exception has ended it.
    guard
        Makes hooks.
    """

    # Not where a compiler traces the call: the hooks are no part of the program.
    # Nor where it was taken away since the call began: torch still calls it, without keywords.
    def before(
        _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None
    ) -> None:
        if kwargs is not None and not torch.compiler.is_compiling():
            enter(args, kwargs)

    def after(_module: nn.Module, _args: object, output: Any) -> None:
        if not torch.compiler.is_compiling():
            leave(output, failed=output is None and sys.exc_info()[0] is not None)

    return [
        module.register_forward_pre_hook(guard(before), with_kwargs=True).remove,
        module.register_forward_hook(guard(after), always_call=True).remove,
    ]
