"""Recording of a training step under fake tensors: without memory and without a GPU.

Listing the models and reading a script's name need no torch; recording imports it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from umem.capture.offline.known_models import (
    find_model,
    llama_of_size,
    model_config,
    model_names,
)
from umem.capture.offline.models import (
    LORA_RANK,
    LORA_TARGETS,
    MODES,
    PRECISIONS,
    model_trace,
)
from umem.capture.offline.script import script_trace
from umem.core.lazy_names import lazy_names

if TYPE_CHECKING:
    from umem.capture.offline.record import record_step

__all__ = [
    "LORA_RANK",
    "LORA_TARGETS",
    "MODES",
    "PRECISIONS",
    "find_model",
    "llama_of_size",
    "model_config",
    "model_names",
    "model_trace",
    "record_step",
    "script_trace",
]

__getattr__ = lazy_names(__name__, {"record": "record_step"})
