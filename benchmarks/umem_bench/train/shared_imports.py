"""Imports that training workers share: for the process that they are forked from, and it alone.

The planner is compiled here too, once for all of them. A process that has started CUDA cannot be
forked. The packages of some variants start it when they are imported, and PEFT imports them where
it finds them: here it does not.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

__all__: list[str] = []

_SHARED = (
    "umem_bench.train.task",
    "umem.executor",
    "umem.capture.live",
    "umem.telemetry",
    "transformers.models.llama.modeling_llama",
    "peft",
)
_START_CUDA = ("bitsandbytes", "torchao", "deepspeed")


@contextmanager
def _hidden(packages: Sequence[str]) -> Iterator[None]:
    """Let packages look as if they were not installed."""
    absent = [name for name in packages if name not in sys.modules]
    for name in absent:
        sys.modules[name] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        for name in absent:
            del sys.modules[name]


with _hidden(_START_CUDA):
    for _name in _SHARED:
        # A worker that needs what cannot be imported says so.
        with suppress(Exception):
            importlib.import_module(_name)

with suppress(Exception):  # then a worker compiles what it needs, and says what is wrong
    importlib.import_module("umem_bench.train.compile_planner").compile_planner()
