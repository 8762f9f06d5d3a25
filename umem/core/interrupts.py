"""Changes that belong together, and that Ctrl-C does not divide.

Python raises ``KeyboardInterrupt`` where one of its own functions begins, and behind each call. So
it may come between two calls, and between the begin or end of a ``with`` block and the block itself
where the context manager is written in Python. Nothing comes between calls that C makes.
"""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

__all__ = ["call_all", "exhaust"]

exhaust: Callable[[Iterable[Any]], object] = deque(maxlen=0).extend
"""Runs an iterator to its end. In a ``finally`` block, before which nothing comes either, with a
``map`` over functions of C that was made before."""


def call_all(*functions: Callable[[], object]) -> None:
    """Call functions of C, such as partial ones, one behind the other."""
    exhaust(map(operator.call, functions))
