"""CUDA events that a forked child leaves alone.

torch destroys an event with a call into CUDA, which is not there in a forked child: it would end
with an abort where a plain ``sys.exit`` was meant.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["LeftToItsProcess", "new_event"]


class LeftToItsProcess:
    """An object that lives for ever in a process that did not make it.

    It has no list of weak references to all of its kind: those of torch's events outlive them and
    dangle, in versions without https://github.com/pytorch/pytorch/pull/183403.
    """

    def __init__(self, *_: object, **__: object) -> None:
        self._made_in = os.getpid()

    # What it needs is at hand also when the interpreter has cleared its modules.
    def __del__(
        self,
        process: Callable[[], int] = os.getpid,
        keep: Any = ctypes.pythonapi.Py_IncRef,
        reference: Any = ctypes.py_object,
    ) -> None:
        if process() != self._made_in:
            keep(reference(self))


class _Event(LeftToItsProcess, torch.cuda.Event):
    pass


def new_event(*, timing: bool = False) -> torch.cuda.Event:
    """Make an event.

    Parameters
    ----------
    timing
        Whether its time can be read.
    """
    return _Event(enable_timing=timing)
