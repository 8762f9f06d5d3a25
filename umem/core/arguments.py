"""Checks of arguments at the public entries."""

from __future__ import annotations

__all__ = ["check_argument"]


def check_argument(name: str, value: object, types: type | tuple[type, ...], remedy: str) -> None:
    """Refuse an argument of another type: ``TypeError`` with its name and the remedy.

    True and False, which Python counts as integers, are none here.
    """
    allowed = types if isinstance(types, tuple) else (types,)
    if not isinstance(value, allowed) or (isinstance(value, bool) and bool not in allowed):
        raise TypeError(f"{name}: got {type(value).__name__}; {remedy}")
