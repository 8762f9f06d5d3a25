"""Replaces methods of classes that are written in C, which do not let attributes be set."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from typing import Any

__all__ = ["set_method"]


def set_method(kind: type, name: str, method: Callable[..., Any]) -> None:
    """Set a method of a class, which may be one of a C extension."""
    try:
        setattr(kind, name, method)
    except TypeError:
        # The class has no subclass that could stand for it: instances are made in C too.
        (attributes,) = gc.get_referents(vars(kind))
        attributes[name] = method
        ctypes.pythonapi.PyType_Modified(ctypes.py_object(kind))
