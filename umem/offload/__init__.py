"""Activation offload: saved tensors wait for the backward pass in host memory."""

from __future__ import annotations

from umem.offload.layers import OffloadContext, OffloadedBlocks, offload, offload_blocks
from umem.offload.movers import CudaMover, HostBuffer, HostMover, Mover
from umem.offload.store import ActivationStatistics, ActivationStore

__all__ = [
    "ActivationStatistics",
    "ActivationStore",
    "CudaMover",
    "HostBuffer",
    "HostMover",
    "Mover",
    "OffloadContext",
    "OffloadedBlocks",
    "offload",
    "offload_blocks",
]
