"""Tensors that work on a stream uses and that nobody else holds."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch

__all__ = ["HeldTensors"]


class HeldTensors:
    """Tensors of the work of one lane, held until the lane has passed it.

    An allocator hands out a freed tensor's memory at the next request of the tensor's own stream,
    whatever other streams still do with it. ``Tensor.record_stream`` tells it of one of them, and
    would have it ask for the end of that work at each request of the program from then on.

    Parameters
    ----------
    has_passed
        Whether the lane has passed a moment. It is asked once for each new sequence of tensors.
    """

    def __init__(self, has_passed: Callable[[Any], bool]) -> None:
        self._has_passed = has_passed
        self._held: deque[tuple[Sequence[torch.Tensor], Any]] = deque()
        """Tensors, with the moment after the last work that uses them, in the order of the work."""
        self._lock = threading.RLock()  # trainings of several threads share the lanes

    def hold(self, tensors: Sequence[torch.Tensor], moment: Any) -> None:
        """Hold tensors until a moment has passed, and forget earlier ones whose moment has.

        Parameters
        ----------
        tensors
            The same object for all pieces of a step takes one entry.
        moment
            The moment after the work that uses them.
        """
        with self._lock:
            held = self._held
            if held and held[-1][0] is tensors:
                held[-1] = tensors, moment
                return
            while held and self._has_passed(held[0][1]):
                held.popleft()
            held.append((tensors, moment))
