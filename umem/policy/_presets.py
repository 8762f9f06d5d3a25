"""The policies that come with umem."""

from __future__ import annotations

from pathlib import Path

from umem.config import Kind, shipped_dir, shipped_names
from umem.errors import PolicyError
from umem.policy._models import stated_keys

__all__ = ["POLICY", "preset_names", "presets_dir"]

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
