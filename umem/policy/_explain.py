"""Validation errors in a policy's own words: where they were written and what to do."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from pydantic import ValidationError

from umem.config import (
    Document,
    Entry,
    KeyPath,
    Problem,
    did_you_mean,
    nearest,
    problem_at,
    shown,
)
from umem.policy._choices import CHOICES
from umem.policy._conflicts import CONFLICT
from umem.policy._models import Policy

__all__ = ["explain"]


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
