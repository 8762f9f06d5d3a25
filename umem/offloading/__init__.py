"""Activation offload: saved tensors wait for the backward pass in host memory."""

from __future__ import annotations

from umem.offloading.layers import offload
from umem.offloading.movers import CudaMover, HostBuffer, Mover
from umem.offloading.store import ActivationStatistics, ActivationStore

__all__ = [
    "ActivationStatistics",
    "ActivationStore",
    "CudaMover",
    "HostBuffer",
    "Mover",
    "offload",
]
