"""What torch loses with a swapped allocator, given back: its memory statistics and their kin.

torch's pluggable allocator raises for every statistic. The functions below `torch.cuda.memory_*`
and `torch.accelerator.memory.*` are replaced by ones that ask umem, so that the public ones, and
all that build on them, work as documented.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from umem.runtime._native import Allocator

__all__ = ["install_parity"]


def install_parity(allocator: Allocator) -> None:
    """Let torch's memory functions ask `allocator`.

    Parameters
    ----------
    allocator
        The process's allocator, already torch's own.
    """

    def snapshot(pool: tuple[Any, ...] | None = None) -> dict[str, Any]:
        # (0, 0) asks for every pool, as torch's own does; newer versions add a third item.
        wanted = tuple(pool[:2]) if pool else (0, 0)
        segments = [
            segment
            for device in range(allocator.device_count())
            for segment in allocator.segments(device)
            if wanted in ((0, 0), segment["segment_pool_id"])
        ]
        return {
            "segments": segments,
            "device_traces": [[] for _ in range(allocator.device_count())],
            "allocator_settings": {"backend": "umem"},
            "external_annotations": [],
        }

    functions = {
        # torch asks this before every statistic, and a swapped allocator says no.
        "_accelerator_isAllocatorInitialized": torch.cuda.is_initialized,
        "_cuda_memoryStats": allocator.stats,
        "_cuda_resetPeakMemoryStats": allocator.reset_peak_stats,
        "_cuda_resetAccumulatedMemoryStats": allocator.reset_accumulated_stats,
        "_cuda_getMemoryFraction": allocator.memory_fraction,
        # torch.accelerator's go to the allocator that torch started with, swapped or not.
        "_accelerator_emptyCache": allocator.empty_cache,
        "_accelerator_getDeviceStats": allocator.stats,
        "_accelerator_resetPeakStats": allocator.reset_peak_stats,
        "_accelerator_resetAccumulatedStats": allocator.reset_accumulated_stats,
    }
    for name, function in functions.items():
        # Not every version of torch has every one.
        if hasattr(torch._C, name):
            setattr(torch._C, name, function)
    setattr(torch._C, "_cuda_memorySnapshot", snapshot)  # noqa: B010 - its stub wants every pool
