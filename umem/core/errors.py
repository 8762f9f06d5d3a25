"""The errors umem raises. Each message names the place and the remedy."""

from __future__ import annotations

__all__ = [
    "CudaError",
    "EnableError",
    "HardwareError",
    "NativeLibraryError",
    "OffloadError",
    "PlanError",
    "PolicyError",
    "TraceError",
    "UmemError",
    "UnsupportedError",
]


class UmemError(Exception):
    """Base of every error that umem raises on purpose."""


class PolicyError(UmemError, ValueError):
    """A policy, or a setting that overrides one, that cannot be used."""


class TraceError(UmemError, ValueError):
    """A trace that cannot be read or recorded, or that contradicts itself."""


class HardwareError(UmemError, ValueError):
    """A hardware profile that cannot be used, or a machine that cannot be described."""


class PlanError(UmemError, ValueError):
    """No plan exists (an unknown planner, a phase past the budget), or a run breaks its plan."""


class EnableError(UmemError, RuntimeError):
    """`umem.enable` cannot take over the allocator in this process."""


class NativeLibraryError(UmemError, ImportError):
    """The native library, or a library that it needs, cannot be loaded."""


class UnsupportedError(UmemError, RuntimeError):
    """This machine, driver or torch lacks what a call needs."""


class CudaError(UmemError, RuntimeError):
    """A CUDA call failed; the message names the call and CUDA's own error."""


class OffloadError(UmemError, RuntimeError):
    """Activation offload is used in a way that it cannot serve."""
