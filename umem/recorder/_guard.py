"""Hooks that never get into the way of the training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["Guard", "Hook"]


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
        return Hook(function, self.on_error)


class Hook:
    """One hook. A copy of it, such as in a copied or pickled model, does nothing."""

    __slots__ = ("_function", "_on_error")

    def __init__(
        self, function: Callable[..., None], on_error: Callable[[Exception], None]
    ) -> None:
        self._function = function
        self._on_error = on_error

    def __call__(self, *args: Any) -> None:
        """Call the function; training goes on whatever happens in it."""
        try:
            self._function(*args)
        except Exception as error:
            self._on_error(error)

    def __reduce__(self) -> tuple[Any, ...]:
        return _make_idle, ()


def _idle(*_args: object) -> None:
    pass


def _make_idle() -> Callable[..., None]:
    return _idle
