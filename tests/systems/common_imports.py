"""Imports of many programs of the matrix that take long, for the process they are forked from.

A process that has started CUDA cannot be forked. Some packages start it when they are imported, and
transformers imports them where it finds them: here they look as if not installed.
"""

from __future__ import annotations

import importlib
import sys
from contextlib import suppress

_START_CUDA = ("bitsandbytes", "torchao", "deepspeed")

for _name in _START_CUDA:
    sys.modules[_name] = None  # type: ignore[assignment]
for _name in (
    *("torch", "transformers.models.llama.modeling_llama", "transformers.trainer"),
    "transformers.models.t5.modeling_t5",
):
    with suppress(Exception):  # a program that needs the module says what is wrong
        importlib.import_module(_name)
for _name in _START_CUDA:
    del sys.modules[_name]
