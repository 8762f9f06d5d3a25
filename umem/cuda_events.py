"""CUDA events that a forked child leaves alone.

torch destroys an event with a call into CUDA, which is not there in a forked child: it would end
with an abort where a plain ``sys.exit`` was meant.
"""

from __future__ import annotations

import ctypes
import os
import weakref

import torch

__all__ = ["new_event"]

_events: weakref.WeakSet[torch.cuda.Event] = weakref.WeakSet()


def new_event(*, timing: bool = False) -> torch.cuda.Event:
    """Make an event.

    Parameters
    ----------
    timing
        Whether its time can be read.
    """
    event = torch.cuda.Event(enable_timing=timing)
    _events.add(event)
    return event


def _never_destroy() -> None:
    for event in list(_events):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(event))


os.register_at_fork(after_in_child=_never_destroy)
