"""A hook on an optimizer's step, behind all of the program's before it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch.optim.optimizer import Optimizer

__all__ = ["LastBeforeStep", "named_arguments"]


class LastBeforeStep:
    """A hook before an optimizer's step, kept behind those that the program adds.

    Parameters
    ----------
    optimizer
        The optimizer.
    hook
        Called with the optimizer, and with the arguments of ``step()``. What it returns replaces
        these, unless it is None.
    """

    def __init__(self, optimizer: Optimizer, hook: Callable[..., Any]) -> None:
        self._handle = optimizer.register_step_pre_hook(hook)

    @property
    def is_last(self) -> bool:
        """Whether no later hook of the program can change gradients before the step."""
        return next(reversed(self._hooks()), None) == self._handle.id

    def move_last(self) -> None:
        """Let it run behind all others.

        Do not call it from a hook of the optimizer, which iterates over the dictionary.
        """
        hooks = self._hooks()
        if not self.is_last and self._handle.id in hooks:
            hooks[self._handle.id] = hooks.pop(self._handle.id)

    def remove(self) -> None:
        """Remove the hook."""
        self._handle.remove()

    def _hooks(self) -> dict[int, Any]:
        """The optimizer's hooks before a step, in their order."""
        return self._handle.hooks_dict_ref() or {}


def named_arguments(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """What ``step()`` was called with, by name, but None: Accelerate calls ``step(None)``.

    Parameters
    ----------
    args, kwargs
        As a hook gets them: first the optimizer.
    """
    if len(args) == 1 and not kwargs:
        return {}
    named = {**dict(zip(("closure",), args[1:], strict=False)), **kwargs}
    return {name: value for name, value in named.items() if value is not None}
