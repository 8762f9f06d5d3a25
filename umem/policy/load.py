"""The policies that come with umem."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from umem.core.errors import PolicyError
from umem.io.yaml_files import (
    Document,
    Entry,
    KeyPath,
    Kind,
    Problem,
    UnusableError,
    did_you_mean,
    nearest,
    problem_at,
    read,
    shipped_dir,
    shipped_names,
    shown,
)
from umem.policy.models import CHOICES, CONFLICT, EXTENDS_FOLLOWED, Policy, stated_keys

__all__ = ["POLICY", "explain", "find_problems", "load_policy", "preset_names", "presets_dir"]

POLICY = Kind(
    noun="policy",
    shipped="preset",
    plural="preset policies",
    folder="",
    landmark="sft.yaml",
    example="extends: sft",
    instead_of_aliases="put what classes have in common under `defaults`, and what files have in "
    "common in a file to `extends`",
    error=PolicyError,
    keys_of=stated_keys,
)


def presets_dir() -> Path:
    """Folder of the preset policies: inside the installed package, else in the source checkout.

    Raises
    ------
    PolicyError
        If neither exists.
    """
    return shipped_dir(POLICY)


def preset_names() -> tuple[str, ...]:
    """Names of the preset policies, sorted.

    Raises
    ------
    PolicyError
        If umem's preset policies are missing.
    """
    return shipped_names(POLICY)


# Validation errors in a policy's own words: where they were written and what to do.


def explain(error: ValidationError, document: Document) -> list[Problem]:
    """Problems that pydantic found in a document, each once, in the order of the text."""
    problems = {
        problem
        for detail in error.errors(include_url=False)
        for problem in _problems_of(detail, document)
    }
    return sorted(problems, key=lambda p: (p.file, p.line or 0, p.column or 0, p.key, p.message))


def _problems_of(detail: Any, document: Document) -> Iterator[Problem]:
    code, path = detail["type"], detail["loc"]
    if code == "default_factory_not_called":
        return  # follows from another error
    if code == CONFLICT:
        yield from _conflict_problems(detail, document)
        return
    # A class's key that was written only under `defaults`.
    if len(path) >= 3 and path[0] == "classes" and path[:3] not in document.entries:
        path = ("defaults", *path[2:])
    entry = _nearest_entry(document, path)
    if code == "extra_forbidden":
        yield problem_at(entry.key, path, _unknown_key(path))
    else:
        yield problem_at(entry.value, path, _message(detail, path))


def _conflict_problems(detail: Any, document: Document) -> Iterator[Problem]:
    for conflict in detail["ctx"]["conflicts"]:
        rule: KeyPath = detail["loc"]
        if conflict.tensor_class is not None:
            rule = (*rule, conflict.tensor_class)
        elif not any((*rule, key) in document.entries for key in conflict.keys):
            # What comes from the defaults alone is their problem, and is reported once.
            rule = ("defaults",)
        path = (*rule, conflict.keys[0])
        yield problem_at(_nearest_entry(document, path).value, path, conflict.message)


def _nearest_entry(document: Document, path: KeyPath) -> Entry:
    """The entry of a key, or else of what it follows from: the defaults, or an outer key."""
    ways = [path[:length] for length in range(len(path), -1, -1)]
    if path[:1] == ("classes",) and len(path) == 3:
        ways.insert(1, ("defaults", path[2]))
    return next(document.entries[way] for way in ways if way in document.entries)


def _message(detail: Any, path: KeyPath) -> str:
    value = shown(detail["input"])
    match detail["type"]:
        case "value_error":
            return str(detail["ctx"]["error"])
        case "literal_error":
            name = next(part for part in reversed(path) if isinstance(part, str))
            words = CHOICES[name]
            said = detail["input"]
            hint = (did_you_mean(said, words) if isinstance(said, str) else "") or "."
            return f"{value} is not valid{hint} Valid values: {', '.join(words)}"
        case "bool_type":
            return f"{value} is not true or false: write one of the two"
        case "string_type":
            return f"{value} is not text: write one word, or a string in quotes"
        case "tuple_type":
            return f"{value} is not a list: write it as [{', '.join(CHOICES['share'])}]"
        case "model_type":
            keys = ", ".join(_keys_at(path))
            return f"{value} is not a mapping: write keys below it. Valid keys: {keys}"
    return str(detail["msg"])


def _unknown_key(path: KeyPath) -> str:
    *outer, last = path
    name = str(last)
    keys = _keys_at(outer)
    hint = did_you_mean(name, keys)
    if not hint:
        # A key that is right, but one level too high or too low.
        dotted = {key.rpartition(".")[2]: key for key in _dotted_keys()}
        near = nearest(name, dotted, likeness=0.85)
        hint = f", did you mean {dotted[near]}?" if near else "."
    return f"unknown key{hint} Valid keys: {', '.join(keys)}"


def _keys_at(path: Iterable[str | int]) -> list[str]:
    """Keys of the mapping at a path."""
    model: Any = Policy
    for key in path:
        model = model.model_fields[key].annotation
    return list(model.model_fields)


def _dotted_keys() -> Iterator[str]:
    """Keys of a policy and of its mappings, such as ``defaults`` and ``defaults.kind``."""
    for name, field in Policy.model_fields.items():
        yield name
        yield from (f"{name}.{key}" for key in getattr(field.annotation, "model_fields", ()))


# Loading a policy: what it extends is merged below it, and the whole is checked.


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
