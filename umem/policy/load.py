"""Loading policies: presets, files and mappings, merged with the policies that they extend."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from umem.core.errors import PolicyError
from umem.io.problems import InvalidFileError, KeyPath, Problem, validate
from umem.io.yaml_files import FileKind, read, shipped_names
from umem.policy.models import EXTENDS_FOLLOWED, Policy

__all__ = ["find_problems", "load_policy", "preset_names"]

_KIND = FileKind(
    noun="policy",
    shipped="preset",
    plural="preset policies",
    folder="",
    example="sft",
    instead_of_aliases="put common keys of classes under `defaults`, and common keys of files in a "
    "file to `extends`",
    error=PolicyError,
)


def preset_names() -> tuple[str, ...]:
    """Names of the preset policies, sorted; ``PolicyError`` if they are missing."""
    return shipped_names(_KIND)


def load_policy(source: str | os.PathLike[str] | Policy | Mapping[str, Any]) -> Policy:
    """Load a policy, merged with the policies that it extends.

    Parameters
    ----------
    source
        The name of a preset (:func:`preset_names`); the path of a YAML file, which as a string ends
        in ``.yaml`` or ``.yml`` or holds a ``/``; a mapping with the keys of such a file; or a
        :class:`Policy`, which is returned as it is.

    Returns
    -------
    Policy
        With every rule complete.

    Raises
    ------
    PolicyError
        If there is no such preset or file, or it is no valid policy. The message has one line for
        each problem: file, line, column, key, the error, and the nearest valid key or value.
    TypeError
        If `source` is none of these.

    Examples
    --------
    >>> load_policy("managed").classes.weights.kind
    'managed'
    >>> load_policy({"extends": "sft", "device_budget": "64GiB"}).device_budget
    68719476736
    """
    if isinstance(source, Policy):
        return source
    try:
        return _load(source)
    except InvalidFileError as error:
        raise PolicyError(str(error)) from None


def find_problems(source: str | os.PathLike[str] | Mapping[str, Any]) -> tuple[Problem, ...]:
    """Problems for which :func:`load_policy` would refuse a policy, in the order of the text.

    Empty for a valid policy. ``TypeError`` if `source` is neither a name, a path nor a mapping.
    """
    try:
        _load(source)
    except InvalidFileError as error:
        return error.problems
    return ()


def _load(source: str | os.PathLike[str] | Mapping[str, Any]) -> Policy:
    document = read(source, _KIND)

    def written_at(path: KeyPath, involved: tuple[str, ...]) -> list[KeyPath]:
        # A class's rule includes the keys of `defaults`, which are to blame where the class itself
        # says nothing.
        if path[:1] != ("classes",) or len(path) < 3:
            return [path]
        keys = (path[2], *involved)
        own = any((*path[:2], key) in document.entries for key in keys)
        return [path, ("defaults", path[2])] if own else [("defaults", *path[2:])]

    return validate(Policy, document, written_at, context=EXTENDS_FOLLOWED)
