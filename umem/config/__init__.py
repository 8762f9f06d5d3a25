"""Configuration files: YAML that people write, read strictly, with the place of every key.

A policy and a hardware profile are both such files: :class:`Kind` says what makes the difference.
Every problem is found with its file, line, column and key, and is data until a loader raises it.
"""

from __future__ import annotations

from umem.config._extends import read
from umem.config._kind import Kind
from umem.config._problems import (
    KeyPath,
    Place,
    Problem,
    UnusableError,
    did_you_mean,
    nearest,
    problem_at,
    reject,
    shown,
)
from umem.config._reader import Document, Entry
from umem.config._shipped import shipped_dir, shipped_names

__all__ = [
    "Document",
    "Entry",
    "KeyPath",
    "Kind",
    "Place",
    "Problem",
    "UnusableError",
    "did_you_mean",
    "nearest",
    "problem_at",
    "read",
    "reject",
    "shipped_dir",
    "shipped_names",
    "shown",
]
