"""Reading a file with all that it extends, merged."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from umem.config._kind import Kind
from umem.config._problems import KeyPath, Place, reject
from umem.config._reader import Document, read_mapping, read_path
from umem.config._shipped import is_shipped_name, shipped_path

__all__ = ["read"]


def read(source: str | os.PathLike[str] | Mapping[str, Any], kind: Kind) -> Document:
    """Read a file or a mapping, and merge it over what its key ``extends`` names.

    Parameters
    ----------
    source
        The name of a file that comes with umem; a path, which as a string ends in ``.yaml`` or
        ``.yml`` or holds a ``/``; or a mapping with the keys of such a file.
    kind
        What the file is.

    Returns
    -------
    Document
        A file's ``name``, where it states none, is that of the file.

    Raises
    ------
    UnusableError
        If it cannot be read, or something that it extends cannot.
    TypeError
        If `source` is neither a name, a path nor a mapping.
    """
    if isinstance(source, Mapping):
        return _with_parents(read_mapping(source, kind), Path(), (), kind)
    if isinstance(source, str) and is_shipped_name(source):
        return _read_with_parents(shipped_path(source, Place(kind.noun), (), kind), (), kind)
    if isinstance(source, str | os.PathLike):
        return _read_with_parents(Path(os.path.expanduser(source)), (), kind)
    raise TypeError(
        f"a {kind.noun} is the name of a {kind.shipped}, a path or a mapping, "
        f"not {type(source).__name__}"
    )


def _read_with_parents(path: Path, children: tuple[Path, ...], kind: Kind) -> Document:
    document = read_path(path, kind)
    document.data.setdefault("name", path.stem)
    return _with_parents(document, path.parent, (*children, path), kind)


def _with_parents(
    document: Document, folder: Path, children: tuple[Path, ...], kind: Kind
) -> Document:
    extends = document.data.get("extends")
    # What is neither null nor text is left for the check of the keys to report.
    if not isinstance(extends, str):
        return document
    key: KeyPath = ("extends",)
    place = document.entries[key].value
    if is_shipped_name(extends):
        path = shipped_path(extends, place, key, kind)
    else:
        path = folder / os.path.expanduser(extends)
        if not os.path.isfile(path):
            reject(place, key, f"there is no file {path}: check the path")
    if path.resolve() in [child.resolve() for child in children]:
        cycle = " -> ".join(map(str, (*children, path)))
        reject(place, key, f"a cycle: {cycle}; remove one `extends`")
    return _overlay(_read_with_parents(path, children, kind), document, kind)


def _overlay(parent: Document, child: Document, kind: Kind) -> Document:
    """Child over parent, mapping by mapping; the name and description are the child's own."""
    data = {key: said for key, said in parent.data.items() if key not in ("name", "description")}
    entries = dict(parent.entries)

    def lay(below: dict[str, Any], above: dict[str, Any], path: KeyPath) -> dict[str, Any]:
        merged = dict(below)
        for key, value in above.items():
            here = (*path, key)
            covered = merged.get(key)
            if isinstance(value, dict) and isinstance(covered, dict) and not kind.is_replaced(here):
                merged[key] = lay(covered, value, here)
                continue
            merged[key] = value
            for gone in [place for place in entries if place[: len(here)] == here]:
                del entries[gone]
        return merged

    return Document(lay(data, child.data, ()), entries | child.entries)
