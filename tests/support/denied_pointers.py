"""Whether this torch has what umem denies pointers of unfilled memory with."""

from __future__ import annotations

from pathlib import Path

from torch.utils.cpp_extension import include_paths


def can_deny_pointers() -> bool:
    """Whether this torch can raise for a pointer, and stop to."""
    headers = [Path(it) / "c10/core/StorageImpl.h" for it in include_paths()]
    return any("clear_data_ptr_access" in it.read_text() for it in headers if it.is_file())
