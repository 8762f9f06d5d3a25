"""Loading a policy: what it extends is merged below it, and the whole is checked."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from umem.config import Problem, UnusableError, read
from umem.errors import PolicyError
from umem.policy._explain import explain
from umem.policy._models import EXTENDS_FOLLOWED, Policy
from umem.policy._presets import POLICY

__all__ = ["find_problems", "load_policy"]


def load_policy(source: str | os.PathLike[str] | Policy | Mapping[str, Any]) -> Policy:
    """Load a policy and whatever it extends.

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
        each problem: file, line, column, key, what is wrong, and the nearest valid key or value.
    TypeError
        If `source` is none of these.

    Examples
    --------
    >>> load_policy("sft").classes.weights.kind
    'managed'
    >>> load_policy({"extends": "sft", "device_budget": "64GiB"}).device_budget
    68719476736
    """
    if isinstance(source, Policy):
        return source
    try:
        return _load(source)
    except UnusableError as error:
        raise PolicyError("\n".join(map(str, error.problems))) from None


def find_problems(
    source: str | os.PathLike[str] | Mapping[str, Any],
) -> tuple[Problem, ...]:
    """What :func:`load_policy` would object to in a policy, in the order of the text.

    Empty for a policy that can be used.

    Raises
    ------
    TypeError
        If `source` is neither a name, a path nor a mapping.
    """
    try:
        _load(source)
    except UnusableError as error:
        return error.problems
    return ()


def _load(source: str | os.PathLike[str] | Mapping[str, Any]) -> Policy:
    document = read(source, POLICY)
    try:
        return Policy.model_validate(document.data, context=EXTENDS_FOLLOWED)
    except ValidationError as error:
        raise UnusableError(explain(error, document)) from None
