"""Hooks that never get into the way of the training."""

from __future__ import annotations

from collections.abc import Callable

import torch

from umem.runtime.torch_hooks.modules import Hook, OnError

__all__ = ["Guard"]


class Guard:
    """Calls functions, and ends the recording where one of them raises.

    Parameters
    ----------
    on_error
        Called with what was raised.
    """

    def __init__(self, on_error: OnError) -> None:
        self.on_error = on_error

    def __call__(self, function: Callable[..., None]) -> Hook:
        """A hook that calls a function and returns nothing."""
        return Hook(function, self.on_error)

    def uncompiled(self, function: Callable[..., None]) -> Callable[..., None]:
        """The same for an optimizer: a compiler that has its step calls this hook outside.

        Not for modules, which may be compiled as one graph; there the compiler leaves hooks out.
        """
        hook: Callable[..., None] = torch.compiler.disable(self(function))
        return hook
