"""The files that come with umem, and how the name of one is told from a path."""

from __future__ import annotations

import os
from pathlib import Path

import umem
from umem.config._kind import Kind
from umem.config._problems import KeyPath, Place, did_you_mean, reject

__all__ = ["is_shipped_name", "shipped_dir", "shipped_names", "shipped_path"]


def shipped_dir(kind: Kind) -> Path:
    """Folder of umem's own files: inside the installed package, else in the source checkout.

    Raises
    ------
    UmemError
        ``kind.error``, if neither exists.
    """
    package = Path(umem.__file__).resolve().parent
    candidates = [root / "policies" / kind.folder for root in (package, package.parent)]
    for folder in candidates:
        # Beside an installed package a folder of this name may belong to somebody else.
        if (folder / kind.landmark).is_file():
            return folder
    raise kind.error(
        f"no {kind.plural} in {candidates[0]} or {candidates[1]}: reinstall umem, or give the "
        f"path of a {kind.noun} file"
    )


def shipped_names(kind: Kind) -> tuple[str, ...]:
    """Names of umem's own files, sorted.

    Raises
    ------
    UmemError
        ``kind.error``, if they are missing.
    """
    return tuple(sorted(path.stem for path in shipped_dir(kind).glob("*.yaml")))


def is_shipped_name(source: str) -> bool:
    """Whether a string names a file of umem's, whether or not there is one, and not a path."""
    return "/" not in source and not source.endswith((".yaml", ".yml"))


def shipped_path(name: str, place: Place, key: KeyPath, kind: Kind) -> Path:
    """File of a name; `place` and `key` say who asks for it.

    Raises
    ------
    UnusableError
        If there is none of this name.
    """
    names = shipped_names(kind)
    if name not in names:
        hint = did_you_mean(name, names) or "."
        if os.path.isfile(name):
            hint = f"; to read the file of this name, write './{name}'."
        known = f"{kind.shipped.capitalize()}s: {', '.join(names)}"
        reject(place, key, f"no {kind.shipped} is called {name!r}{hint} {known}")
    return shipped_dir(kind) / f"{name}.yaml"
