"""What one kind of configuration file is called, and where umem's own files of it are."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from umem.config._problems import KeyPath
from umem.errors import UmemError

__all__ = ["Kind"]


def _keys_of_mapping(value: Any) -> Mapping[Any, Any] | None:
    return value if isinstance(value, Mapping) else None


def _never(path: KeyPath) -> bool:
    return False


@dataclass(frozen=True)
class Kind:
    """A kind of configuration file, in the words of its messages.

    Parameters
    ----------
    noun : str
        What one file holds, such as ``policy``.
    shipped : str
        What a file that comes with umem is called, such as ``preset``.
    plural : str
        All of these, such as ``preset policies``.
    folder : str
        Where they are below umem's folder ``policies``.
    landmark : str
        One of them, by which that folder is told from somebody else's.
    example : str
        Shortest useful file.
    instead_of_aliases : str
        What does the work of YAML's aliases.
    error : type of UmemError
        Raised where umem's own files are missing.
    keys_of : callable
        Keys that a value stated in Python has below it, or None where it is no mapping.
    is_replaced : callable
        Whether the mapping at a path replaces the one that it inherits, and is not merged with it.
    """

    noun: str
    shipped: str
    plural: str
    folder: str
    landmark: str
    example: str
    instead_of_aliases: str
    error: type[UmemError]
    keys_of: Callable[[Any], Mapping[Any, Any] | None] = _keys_of_mapping
    is_replaced: Callable[[KeyPath], bool] = _never
