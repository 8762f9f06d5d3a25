"""Compiles DeepSpeed's optimizer beside a run, before a training process needs it."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["building_deepspeed"]

_END_S = 10.0

# An interrupt ends it, whatever the shell has told background jobs: then its lock is taken away,
# which later compilations would wait for without an end.
_BUILD = """
import os, signal
signal.signal(signal.SIGINT, signal.default_int_handler)
os.nice(10)
from deepspeed.ops.op_builder import CPUAdamBuilder
CPUAdamBuilder().load(verbose=False)
"""


@contextmanager
def building_deepspeed(*, wanted: bool) -> Iterator[None]:
    """Compile DeepSpeed's optimizer for the CPU in a process of its own, if it is installed.

    Whoever trains with it meanwhile waits for that. What is not ready at the end is given up.
    """
    if not wanted or importlib.util.find_spec("deepspeed") is None:
        yield
        return
    process = subprocess.Popen(
        [sys.executable, "-c", _BUILD],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        yield
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGINT)
            try:
                process.wait(_END_S)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
