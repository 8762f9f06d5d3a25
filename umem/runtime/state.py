"""The state that `umem.enable` leaves in the process: policy, allocator and classifier."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from umem.core.errors import EnableError
from umem.hardware.capabilities import Capabilities
from umem.policy import Policy, ResolvedPolicy, poisons, without
from umem.runtime.native_library import native

if TYPE_CHECKING:
    from umem.runtime import _native
    from umem.runtime.classification import Classifier

__all__ = [
    "Runtime",
    "fallback_reason",
    "fell_back",
    "is_enabled",
    "native_config",
    "record_fallback",
    "runtime",
    "set_runtime",
]


@dataclass(frozen=True)
class Runtime:
    """The policy, allocator and classifier that `umem.enable` installed."""

    policy: Policy
    resolved: ResolvedPolicy
    """The policy on the first GPU."""
    device_budgets: tuple[int | None, ...]
    """Bytes by GPU; None for no limit."""
    capabilities: tuple[Capabilities, ...]
    allocator: _native.Allocator
    classifier: Classifier
    pinned_share: float
    """What page-locked memory may take of this process's share of the host."""


_runtime: Runtime | None = None
_fallback_reason: str | None = None


def set_runtime(state: Runtime) -> None:
    """Record what `umem.enable` installed."""
    global _runtime
    _runtime = state


def record_fallback(reason: str) -> None:
    """Record why `umem.enable(..., fallback=True)` left torch's own allocator in place."""
    global _fallback_reason
    _fallback_reason = reason


def is_enabled() -> bool:
    """Whether torch allocates from umem in this process."""
    return _runtime is not None


def runtime() -> Runtime:
    """The state that `umem.enable` installed.

    Raises ``EnableError`` if umem is not enabled; after a fallback the message says why.
    """
    if _runtime is None:
        reason = f": {_fallback_reason}" if _fallback_reason else ": call umem.enable() first"
        raise EnableError(f"umem is not enabled in this process{reason}")
    return _runtime


def fell_back() -> bool:
    """Whether `enable(..., fallback=True)` left torch's own allocator in place."""
    return fallback_reason() is not None


def fallback_reason() -> str | None:
    """Why `enable(..., fallback=True)` left torch's own allocator in place; None if it did not."""
    return _fallback_reason if _runtime is None else None


def native_config(
    resolved: ResolvedPolicy,
    pinned_limit_bytes: int = 0,
    managed_bytes_of_device: Sequence[int] = (),
) -> _native.Config:
    """The native allocator's configuration, by a resolved policy.

    `pinned_limit_bytes` is the most page-locked memory of all GPUs together, 0 for no limit;
    `managed_bytes_of_device` has what the first allocation on each GPU adds to the policy's cap on
    managed memory.
    """
    library, refused = native(), without()
    return library.Config(
        classes=[
            library.ClassSetting(
                kind=rule.kind,
                placement=rule.placement,
                accessed_by_device=rule.accessed_by_device,
                read_mostly=rule.read_mostly,
                min_bytes=rule.min_bytes,
            )
            for rule in resolved.rules
        ],
        managed_limit_bytes=resolved.managed_limit_bytes or 0,
        managed_bytes_of_device=list(managed_bytes_of_device),
        device_budget_bytes=resolved.device_budget_bytes or 0,
        system_headroom_bytes=resolved.system_headroom_bytes,
        pinned_limit_bytes=pinned_limit_bytes,
        advises="advice" not in refused,
        prefetches="prefetch" not in refused,
        poisons=poisons(),
    )
