"""Recording a training step without memory and without a GPU, under fake tensors.

Recording imports torch when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from umem.capture.offline.models import MODELS, MODES, model_trace
    from umem.capture.offline.record import record_step
    from umem.capture.offline.script import script_trace

__all__ = ["MODELS", "MODES", "model_trace", "record_step", "script_trace"]

_MODULE_OF = {
    "MODELS": "umem.capture.offline.models",
    "MODES": "umem.capture.offline.models",
    "model_trace": "umem.capture.offline.models",
    "record_step": "umem.capture.offline.record",
    "script_trace": "umem.capture.offline.script",
}


def __getattr__(name: str) -> Any:
    module = _MODULE_OF.get(name)
    if module is None:
        raise AttributeError(f"module 'umem.capture.offline' has no attribute {name!r}")
    return getattr(importlib.import_module(module), name)
