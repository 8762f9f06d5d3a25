"""umem's errors. Each message names the place and the remedy."""

from __future__ import annotations

__all__ = [
    "CudaError",
    "EnableError",
    "HardwareError",
    "NativeLibraryError",
    "OffloadError",
    "PauseError",
    "PlanError",
    "PolicyError",
    "TraceError",
    "UmemError",
    "UnsupportedError",
]


class UmemError(Exception):
    """Base of umem's errors."""


class PolicyError(UmemError, ValueError):
    """An invalid policy, or an invalid setting that overrides one."""


class TraceError(UmemError, ValueError):
    """A trace that cannot be read or recorded, or is inconsistent."""


class HardwareError(UmemError, ValueError):
    """An invalid hardware profile, or a machine that cannot be detected."""


class PlanError(UmemError, ValueError):
    """No plan exists (an unknown planner, a phase past the budget), or a run breaks its plan."""


class EnableError(UmemError, RuntimeError):
    """`umem.enable` cannot replace the allocator in this process."""


class NativeLibraryError(UmemError, ImportError):
    """The native library, or a library that it needs, cannot be loaded."""


class UnsupportedError(UmemError, RuntimeError):
    """This machine, driver or torch lacks what a call needs."""


class CudaError(UmemError, RuntimeError):
    """A CUDA call failed; the message names the call and CUDA's own error."""


class PauseError(UmemError, RuntimeError):
    """A GPU cannot be paused or resumed now."""


class OffloadError(UmemError, RuntimeError):
    """An unsupported use of activation offload."""
