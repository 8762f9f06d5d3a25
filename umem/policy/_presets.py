"""The policies that come with umem, and how a preset's name is told from a path."""

from __future__ import annotations

import os
from pathlib import Path

import umem
from umem.errors import PolicyError
from umem.policy._problems import KeyPath, Place, did_you_mean, reject

__all__ = ["is_preset_name", "preset_names", "preset_path", "presets_dir"]


def presets_dir() -> Path:
    """Folder of the preset policies: inside the installed package, else in the source checkout.

    Raises
    ------
    PolicyError
        If neither exists.
    """
    package = Path(umem.__file__).resolve().parent
    candidates = [package / "policies", package.parent / "policies"]
    for folder in candidates:
        # Beside an installed package a folder of this name may belong to somebody else.
        if (folder / "sft.yaml").is_file():
            return folder
    raise PolicyError(
        f"no preset policies in {candidates[0]} or {candidates[1]}: reinstall umem, or give the "
        "path of a policy file"
    )


def preset_names() -> tuple[str, ...]:
    """Names of the preset policies, sorted.

    Raises
    ------
    PolicyError
        If umem's preset policies are missing.
    """
    return tuple(sorted(path.stem for path in presets_dir().glob("*.yaml")))


def is_preset_name(source: str) -> bool:
    """Whether a string names a preset, whether or not there is one, and not a path."""
    return "/" not in source and not source.endswith((".yaml", ".yml"))


def preset_path(name: str, place: Place, key: KeyPath) -> Path:
    """File of a preset; `place` and `key` say who asks for it.

    Raises
    ------
    UnusableError
        If there is no such preset.
    """
    names = preset_names()
    if name not in names:
        hint = did_you_mean(name, names) or "."
        if os.path.isfile(name):
            hint = f"; to read the file of this name, write './{name}'."
        reject(place, key, f"no preset is called {name!r}{hint} Presets: {', '.join(names)}")
    return presets_dir() / f"{name}.yaml"
