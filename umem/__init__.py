"""umem: unified memory for PyTorch, placed by policy and class.

>>> import umem
>>> umem.enable("sft")  # doctest: +SKIP
True

Names are imported when they are first used: `umem doctor` and `umem policy` work where torch does
not.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from umem._version import __version__

if TYPE_CHECKING:
    from umem import cuda
    from umem.activations import offload
    from umem.allocator import enable, is_enabled
    from umem.capabilities import Capabilities
    from umem.classes import TensorClass
    from umem.errors import (
        CudaError,
        EnableError,
        HardwareError,
        NativeLibraryError,
        OffloadError,
        PlanError,
        PolicyError,
        TraceError,
        UmemError,
        UnsupportedError,
    )
    from umem.executor import Manager, manage
    from umem.hardware import Hardware, load_hardware
    from umem.inspection import (
        ClassMemory,
        LiveTensor,
        memory_by_class,
        memory_summary,
        tensor_class,
        tensors,
    )
    from umem.planner import plan
    from umem.policy import Policy, load_policy
    from umem.recorder import record
    from umem.report import MeasuredReport, MigrationReport
    from umem.schedule import Schedule
    from umem.simulator import simulate
    from umem.telemetry import profile
    from umem.trace import Trace, load_trace

__all__ = [
    "Capabilities",
    "ClassMemory",
    "CudaError",
    "EnableError",
    "Hardware",
    "HardwareError",
    "LiveTensor",
    "Manager",
    "MeasuredReport",
    "MigrationReport",
    "NativeLibraryError",
    "OffloadError",
    "PlanError",
    "Policy",
    "PolicyError",
    "Schedule",
    "TensorClass",
    "Trace",
    "TraceError",
    "UmemError",
    "UnsupportedError",
    "__version__",
    "cuda",
    "enable",
    "is_enabled",
    "load_hardware",
    "load_policy",
    "load_trace",
    "manage",
    "memory_by_class",
    "memory_summary",
    "offload",
    "plan",
    "profile",
    "record",
    "simulate",
    "tensor_class",
    "tensors",
]

_MODULES = {
    "umem.activations": ("offload",),
    "umem.allocator": ("enable", "is_enabled"),
    "umem.capabilities": ("Capabilities",),
    "umem.classes": ("TensorClass",),
    "umem.errors": (
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
    ),
    "umem.executor": ("Manager", "manage"),
    "umem.hardware": ("Hardware", "load_hardware"),
    "umem.inspection": (
        "ClassMemory",
        "LiveTensor",
        "memory_by_class",
        "memory_summary",
        "tensor_class",
        "tensors",
    ),
    "umem.planner": ("plan",),
    "umem.policy": ("Policy", "load_policy"),
    "umem.recorder": ("record",),
    "umem.report": ("MeasuredReport", "MigrationReport"),
    "umem.schedule": ("Schedule",),
    "umem.simulator": ("simulate",),
    "umem.telemetry": ("profile",),
    "umem.trace": ("Trace", "load_trace"),
}
_SUBMODULES = ("cuda", "executor", "hints")
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name in _SUBMODULES:
        return importlib.import_module(f"umem.{name}")
    module = _MODULE_OF.get(name)
    if module is None:
        raise AttributeError(f"module 'umem' has no attribute {name!r}")
    value = getattr(importlib.import_module(module), name)
    globals()[name] = value  # the next use finds it without this function
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
