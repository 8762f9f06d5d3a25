"""The server that processes of tests are forked from, with the imports that they share.

Importing torch and transformers takes a process several seconds. There is one server for each
process of pytest, and what it imports is what its first user asks for: all of them call
`start_fork_server` before.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from multiprocessing import forkserver

import pytest

_SHARED = [
    # First: it hides packages from others that would start CUDA with them.
    "umem_bench.training.shared_imports",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "managed_training",
]


def start_fork_server() -> None:
    """Start it, if it does not run; its imports go on while the caller does."""
    with pytest.MonkeyPatch.context() as patch:
        # The server of some versions of Python imports from nowhere else.
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
        # To ask for GPUs starts no CUDA, behind which a process cannot be forked.
        patch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
        multiprocessing.set_forkserver_preload(_SHARED)
        forkserver.ensure_running()
