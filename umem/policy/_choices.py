"""The words that a policy chooses from."""

from __future__ import annotations

from typing import Literal, get_args

__all__ = [
    "CHOICES",
    "Eviction",
    "Mechanism",
    "MemoryKind",
    "Placement",
    "PolicyPlanner",
    "ShareLibrary",
]

MemoryKind = Literal["managed", "device", "system", "pinned"]
Placement = Literal["device", "host", "any"]
Mechanism = Literal["auto", "migrate", "map", "duplicate", "copy", "discard", "fault", "keep"]
Eviction = Literal["auto", "lru", "first", "never"]
ShareLibrary = Literal["numba", "cupy"]
PolicyPlanner = Literal["planned", "lookahead", "fault", "none"]

CHOICES: dict[str, tuple[str, ...]] = {
    "kind": get_args(MemoryKind),
    "placement": get_args(Placement),
    "mechanism": get_args(Mechanism),
    "eviction": get_args(Eviction),
    "share": get_args(ShareLibrary),
    "planner": get_args(PolicyPlanner),
}
"""Valid words by key of the policy."""
