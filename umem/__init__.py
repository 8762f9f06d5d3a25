"""umem: unified memory for PyTorch, for training within a budget of device memory.

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
    from umem.capture.live import record
    from umem.core.classes import TensorClass
    from umem.core.errors import (
        CudaError,
        EnableError,
        HardwareError,
        NativeLibraryError,
        OffloadError,
        PauseError,
        PlanError,
        PolicyError,
        TraceError,
        UmemError,
        UnsupportedError,
    )
    from umem.core.report import MeasuredReport, MigrationReport
    from umem.core.schedule import Schedule
    from umem.hardware import Hardware, load_hardware
    from umem.hardware.capabilities import Capabilities
    from umem.integrations.figures import LoggedFigures
    from umem.integrations.trainer import UmemCallback
    from umem.managing import manage
    from umem.offloading import offload
    from umem.pages import Manager
    from umem.pages.plan import plan
    from umem.pages.simulate import simulate
    from umem.pausing import PausedMemory, pause, paused, resume
    from umem.policy import Policy, load_policy
    from umem.runtime.held_memory import Hold, hold
    from umem.runtime.inspection import (
        ClassMemory,
        LiveTensor,
        memory_by_class,
        memory_summary,
        tensor_class,
        tensors,
    )
    from umem.runtime.state import is_enabled
    from umem.streaming import join
    from umem.swap import enable
    from umem.telemetry import profile
    from umem.trace import Trace, load_trace

__all__ = [
    "Capabilities",
    "ClassMemory",
    "CudaError",
    "EnableError",
    "Hardware",
    "HardwareError",
    "Hold",
    "LiveTensor",
    "LoggedFigures",
    "Manager",
    "MeasuredReport",
    "MigrationReport",
    "NativeLibraryError",
    "OffloadError",
    "PauseError",
    "PausedMemory",
    "PlanError",
    "Policy",
    "PolicyError",
    "Schedule",
    "TensorClass",
    "Trace",
    "TraceError",
    "UmemCallback",
    "UmemError",
    "UnsupportedError",
    "__version__",
    "cuda",
    "enable",
    "hold",
    "is_enabled",
    "join",
    "load_hardware",
    "load_policy",
    "load_trace",
    "manage",
    "memory_by_class",
    "memory_summary",
    "offload",
    "pause",
    "paused",
    "plan",
    "profile",
    "record",
    "resume",
    "simulate",
    "tensor_class",
    "tensors",
]

_MODULES = {
    "umem.offloading": "offload",
    "umem.pausing": "PausedMemory pause paused resume",
    "umem.swap": "enable",
    "umem.runtime.state": "is_enabled",
    "umem.hardware.capabilities": "Capabilities",
    "umem.core.classes": "TensorClass",
    "umem.core.errors": "CudaError EnableError HardwareError NativeLibraryError OffloadError "
    "PauseError PlanError PolicyError TraceError UmemError UnsupportedError",
    "umem.managing": "manage",
    "umem.pages": "Manager",
    "umem.streaming": "join",
    "umem.hardware": "Hardware load_hardware",
    "umem.integrations.figures": "LoggedFigures",
    "umem.integrations.trainer": "UmemCallback",
    "umem.runtime.held_memory": "Hold hold",
    "umem.runtime.inspection": "ClassMemory LiveTensor memory_by_class memory_summary "
    "tensor_class tensors",
    "umem.pages.plan": "plan",
    "umem.policy": "Policy load_policy",
    "umem.capture.live": "record",
    "umem.core.report": "MeasuredReport MigrationReport",
    "umem.core.schedule": "Schedule",
    "umem.pages.simulate": "simulate",
    "umem.telemetry": "profile",
    "umem.trace": "Trace load_trace",
}
_SUBMODULES = {"cuda": "umem.cuda", "hints": "umem.runtime.hints", "managing": "umem.managing"}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    if name in _SUBMODULES:
        return importlib.import_module(_SUBMODULES[name])
    module = _MODULE_OF.get(name)
    if module is None:
        raise AttributeError(f"module 'umem' has no attribute {name!r}")
    value = getattr(importlib.import_module(module), name)
    globals()[name] = value  # the next use finds it without this function
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
