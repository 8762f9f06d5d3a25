"""Loading policies: presets, files and mappings, merged with the policies that they extend."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from umem.core.errors import PolicyError
from umem.io.problems import InvalidFileError, Problem
from umem.io.yaml_files import FileKind, read, shipped, validate
from umem.policy.models import EXTENDS_FOLLOWED, ClassRules, Policy

__all__ = ["find_problems", "load_policy", "preset_names"]

_KIND = FileKind("policy", folder="", error=PolicyError)


def preset_names() -> tuple[str, ...]:
    """Names of the preset policies, sorted; ``PolicyError`` if they are missing."""
    return tuple(shipped(_KIND))


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
    # A class's rule includes the keys of `defaults`, which are to blame for what is wrong in them.
    for path, place in list(document.places.items()):
        if path[:1] == ("defaults",):
            for name in ClassRules.model_fields:
                document.places.setdefault(("classes", name, *path[1:]), place)
    return validate(Policy, document, context=EXTENDS_FOLLOWED)
