"""The words that a policy chooses from."""

from __future__ import annotations

from typing import Literal, get_args

__all__ = ["CHOICES", "Eviction", "Mechanism", "MemoryKind", "Placement", "ShareLibrary"]

MemoryKind = Literal["managed", "device", "system", "pinned"]
Placement = Literal["device", "host", "any"]
Mechanism = Literal["auto", "migrate", "map", "duplicate", "copy", "discard", "fault", "keep"]
Eviction = Literal["auto", "lru", "first", "never"]
ShareLibrary = Literal["numba", "cupy"]

CHOICES: dict[str, tuple[str, ...]] = {
    "kind": get_args(MemoryKind),
    "placement": get_args(Placement),
    "mechanism": get_args(Mechanism),
    "eviction": get_args(Eviction),
    "share": get_args(ShareLibrary),
}
"""Valid words by key of the policy."""
