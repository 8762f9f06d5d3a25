"""Loading a policy: what it extends is merged below it, and the whole is checked."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from umem.errors import PolicyError
from umem.policy._explain import explain
from umem.policy._models import EXTENDS_FOLLOWED, Policy
from umem.policy._presets import is_preset_name, preset_path
from umem.policy._problems import KeyPath, Place, PolicyProblem, UnusableError, reject
from umem.policy._reader import Document, read_file, read_mapping

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
) -> tuple[PolicyProblem, ...]:
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
    document = _read(source)
    try:
        return Policy.model_validate(document.data, context=EXTENDS_FOLLOWED)
    except ValidationError as error:
        raise UnusableError(explain(error, document)) from None


def _read(source: str | os.PathLike[str] | Mapping[str, Any]) -> Document:
    """Read a policy and all that it extends, and merge them."""
    if isinstance(source, Mapping):
        return _with_parents(read_mapping(source), Path(), ())
    if isinstance(source, str) and is_preset_name(source):
        return _read_with_parents(preset_path(source, Place("policy"), ()), ())
    if isinstance(source, str | os.PathLike):
        return _read_with_parents(Path(os.path.expanduser(source)), ())
    raise TypeError(
        "a policy is the name of a preset, a path, a mapping or a Policy, "
        f"not {type(source).__name__}"
    )


def _read_with_parents(path: Path, children: tuple[Path, ...]) -> Document:
    document = read_file(path)
    document.data.setdefault("name", path.stem)
    return _with_parents(document, path.parent, (*children, path))


def _with_parents(document: Document, folder: Path, children: tuple[Path, ...]) -> Document:
    extends = document.data.get("extends")
    # What is neither null nor text is left for validation to report.
    if not isinstance(extends, str):
        return document
    key: KeyPath = ("extends",)
    place = document.entries[key].value
    if is_preset_name(extends):
        path = preset_path(extends, place, key)
    else:
        path = folder / os.path.expanduser(extends)
        if not os.path.isfile(path):
            reject(place, key, f"there is no file {path}: check the path")
    if path.resolve() in [child.resolve() for child in children]:
        cycle = " -> ".join(map(str, (*children, path)))
        reject(place, key, f"a cycle: {cycle}; remove one `extends`")
    return _overlay(_read_with_parents(path, children), document)


def _overlay(parent: Document, child: Document) -> Document:
    """Child over parent, mapping by mapping; the name and description are the child's own."""
    data = {key: said for key, said in parent.data.items() if key not in ("name", "description")}
    entries = dict(parent.entries)

    def lay(below: dict[str, Any], above: dict[str, Any], path: KeyPath) -> dict[str, Any]:
        merged = dict(below)
        for key, value in above.items():
            here = (*path, key)
            covered = merged.get(key)
            if isinstance(value, dict) and isinstance(covered, dict):
                merged[key] = lay(covered, value, here)
                continue
            merged[key] = value
            for gone in [place for place in entries if place[: len(here)] == here]:
                del entries[gone]
        return merged

    return Document(lay(data, child.data, ()), entries | child.entries)
