"""Memory statistics for a pluggable allocator: replaces torch.cuda.memory_*, which raise otherwise.

The functions below `torch.cuda.memory_*` and `torch.accelerator.memory.*` are replaced, so that
the public ones, and all that build on them, work as documented.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from umem.patches import replace
from umem.runtime.giving_back import let_go
from umem.runtime.memory_history import MemoryHistory

if TYPE_CHECKING:
    from umem.runtime._native import Allocator

__all__ = ["install_memory_stats"]


def install_memory_stats(allocator: Allocator) -> None:
    """Answer torch's memory statistics from an allocator, which is torch's own already."""
    history = MemoryHistory(allocator)

    def snapshot(pool: tuple[Any, ...] | None = None) -> dict[str, Any]:
        # (0, 0) asks for every pool, as torch's own does; newer versions add a third item.
        wanted = tuple(pool[:2]) if pool else (0, 0)
        segments = [
            segment
            for device in range(allocator.device_count())
            for segment in allocator.segments(device)
            if wanted in ((0, 0), segment["segment_pool_id"])
        ]
        history.add_frames(segments)
        if pool is None:  # of torch.cuda.memory._snapshot
            for segment in segments:
                if segment["memory_kind"] == "pinned":
                    segment["device"] = allocator.device_count()
        return {
            "segments": segments,
            "device_traces": history.traces(segments) if pool is None else [],
            "allocator_settings": {"backend": "umem"},
            "external_annotations": [],
        }

    def empty_cache() -> None:
        let_go()
        allocator.empty_cache()

    replace("cuda_empty_cache", empty_cache)
    replace("cuda_memory_stats", allocator.stats)
    replace("cuda_memory_snapshot", snapshot)
    replace("cuda_memory_history", history.record)
    replace("cuda_memory_history_legacy", history.record_legacy)
    replace("cuda_reset_peak_stats", allocator.reset_peak_stats)
    replace("cuda_reset_accumulated_stats", allocator.reset_accumulated_stats)
    replace("cuda_memory_fraction", allocator.memory_fraction)
    # torch asks this before every statistic, and a swapped allocator says no.
    replace("accelerator_is_initialized", torch.cuda.is_initialized)
    # torch.accelerator's go to the allocator that torch started with, swapped or not.
    replace("accelerator_empty_cache", empty_cache)
    replace("accelerator_stats", allocator.stats)
    replace("accelerator_reset_peak_stats", allocator.reset_peak_stats)
    replace("accelerator_reset_accumulated_stats", allocator.reset_accumulated_stats)
