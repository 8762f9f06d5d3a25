"""CUDA events that are not destroyed in a forked child.

torch destroys an event with a call into CUDA, which does not work in a forked child: the child
would abort where it only wanted to exit.
"""

from __future__ import annotations

import ctypes
import os
from typing import Any

import torch

__all__ = ["new_event"]

_forks = [0]
"""How many forks lead from the first process to this one: less work than to ask for its number."""


def _forked() -> None:
    _forks[0] += 1


os.register_at_fork(after_in_child=_forked)


class KeptInForks:
    """An object that is never destroyed in a process other than the one that made it.

    It has no list of weak references to its instances: those to torch's events outlive the events
    and dangle, in versions without https://github.com/pytorch/pytorch/pull/183403.
    """

    def __init__(self, *_: object, **__: object) -> None:
        self._made_behind = _forks[0]

    # As defaults, the functions are still there when the interpreter has cleared its modules.
    def __del__(
        self,
        forks: list[int] = _forks,
        keep: Any = ctypes.pythonapi.Py_IncRef,
        reference: Any = ctypes.py_object,
    ) -> None:
        if forks[0] != self._made_behind:
            keep(reference(self))


class _Event(KeptInForks, torch.cuda.Event):
    """umem's own event: nothing that is added to a stream's order counts for it."""

    # torch's own, whatever takes their place in the class above.
    record = torch.cuda.Event.record
    wait = torch.cuda.Event.wait
    synchronize = torch.cuda.Event.synchronize
    query = torch.cuda.Event.query


def new_event(*, timing: bool = False) -> torch.cuda.Event:
    """Make an event, which records its time if `timing` is true."""
    return _Event(enable_timing=timing)
