"""Activations that wait for the backward pass in host memory."""

from __future__ import annotations

from umem.activations._cuda_mover import CudaMover
from umem.activations._host_mover import HostMover
from umem.activations._host_pool import HostBuffer
from umem.activations._modules import OffloadedBlocks, offload_blocks
from umem.activations._mover import Mover
from umem.activations._offload import offload
from umem.activations._statistics import ActivationStatistics
from umem.activations._store import ActivationStore
from umem.errors import OffloadError

__all__ = [
    "ActivationStatistics",
    "ActivationStore",
    "CudaMover",
    "HostBuffer",
    "HostMover",
    "Mover",
    "OffloadError",
    "OffloadedBlocks",
    "offload",
    "offload_blocks",
]
