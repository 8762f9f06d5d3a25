"""Hooks that never get into the way of the training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from umem.module_hooks import Hook

__all__ = ["Guard"]


class Guard:
    """Calls functions, and ends the recording where one of them raises.

    Parameters
    ----------
    on_error
        Called with what was raised.
    """

    def __init__(self, on_error: Callable[[Exception], None]) -> None:
        self.on_error = on_error

    def __call__(self, function: Callable[..., None]) -> Hook:
        """A hook that calls a function and returns nothing."""
        return _GuardedHook(function, self.on_error)

    def uncompiled(self, function: Callable[..., None]) -> Callable[..., None]:
        """The same for an optimizer: a compiler that has its step calls this hook outside.

        Not for modules, which may be compiled as one graph; there the compiler leaves hooks out.
        """
        hook: Callable[..., None] = torch.compiler.disable(self(function))
        return hook


class _GuardedHook(Hook):
    __slots__ = ("_on_error",)

    def __init__(
        self, function: Callable[..., None], on_error: Callable[[Exception], None]
    ) -> None:
        super().__init__(function)
        self._on_error = on_error

    def __call__(self, *args: Any) -> None:
        """Call the function; training goes on whatever happens in it."""
        try:
            self._function(*args)
        except Exception as error:
            self._on_error(error)
