"""Methods that keep nothing alive."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TypeVar

__all__ = ["weakly"]

_Result = TypeVar("_Result")


def weakly(method: Callable[[], _Result]) -> Callable[[], _Result | None]:
    """A method of an object that may be gone when it is called, which returns None then."""
    reference = weakref.WeakMethod(method)

    def call() -> _Result | None:
        found = reference()
        return None if found is None else found()

    return call
