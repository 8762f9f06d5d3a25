"""What goes wrong where activations are offloaded."""

from __future__ import annotations

from umem.errors import UmemError

__all__ = ["OffloadError"]


class OffloadError(UmemError, RuntimeError):
    """Activation offload is used in a way that it cannot serve."""
