"""Imports that workers share; imported by the server process that they are forked from.

A process that has started CUDA cannot be forked. The packages of some variants start it when they
are imported, and PEFT imports them where it finds them: here they look as if not installed.
The Trainer's module belongs here too: it takes from accelerate what that has only beside DeepSpeed.
"""

from __future__ import annotations

import importlib
import sys
from contextlib import suppress

__all__: list[str] = []

_START_CUDA = ("bitsandbytes", "torchao", "deepspeed")
_SHARED = (
    "umem_bench.training.measure",
    "umem.managing",
    "umem.capture.live",
    "umem.telemetry",
    "transformers.models.llama.modeling_llama",
    "transformers.trainer",
    "peft",
)

for _name in _START_CUDA:
    sys.modules[_name] = None  # type: ignore[assignment]
for _name in _SHARED:
    with suppress(Exception):  # a worker that needs the module reports what is wrong
        importlib.import_module(_name)
for _name in _START_CUDA:
    del sys.modules[_name]
