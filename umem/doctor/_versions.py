"""Versions as pairs of numbers, (major, minor)."""

from __future__ import annotations

import re

__all__ = ["dotted", "version_numbers"]


def version_numbers(version: str) -> tuple[int, int]:
    """Return (major, minor) of a version, (0, 0) for what is none."""
    match = re.match(r"(\d+)\.(\d+)", version)
    return (int(match.group(1)), int(match.group(2))) if match else (0, 0)


def dotted(version: tuple[int, int]) -> str:
    """Write (major, minor) as versions are written."""
    return "{}.{}".format(*version)
