"""The present figures of this process, for `umem top`."""

from __future__ import annotations

import os
import sys
import time
from collections import defaultdict
from functools import cache
from typing import Any

from umem._version import __version__
from umem.core.classes import TensorClass
from umem.hardware.load import describe_machine
from umem.runtime.copies import copy_counts
from umem.runtime.managed_runs import managed_runs
from umem.runtime.state import Runtime, fallback_reason, is_enabled, runtime

__all__ = ["FORMAT", "live_figures"]

FORMAT = "umem-live-1"

_BLOCKS_EVERY_S = 2.0
"""Live blocks are listed at most so often: there may be tens of thousands."""

_CLASSES = tuple(TensorClass)
_begun_s = time.monotonic()


class _BlocksByPlace:
    """Bytes of live blocks by GPU, class and kind of memory, as of a moment ago."""

    def __init__(self) -> None:
        self._sums: dict[int, dict[str, dict[str, int]]] = {}
        self._looked_s = -_BLOCKS_EVERY_S

    def of(self, state: Runtime, device: int) -> dict[str, dict[str, int]]:
        now_s = time.monotonic()
        if now_s - self._looked_s >= _BLOCKS_EVERY_S:
            self._looked_s = now_s
            sums: Any = defaultdict(lambda: defaultdict(lambda: defaultdict(int)))
            for _, _, block_bytes, number, where, kind in state.allocator.live_blocks():
                sums[where][_CLASSES[number].value][kind] += block_bytes
            self._sums = sums
        return self._sums.get(device, {})


_blocks = _BlocksByPlace()


def live_figures() -> dict[str, Any]:
    """Figures of umem in this process, as data for JSON; any thread may ask.

    ``runs`` are the managed trainings and models, ``copied`` the bytes of umem's own copies so far,
    and ``classes`` the live bytes by class and kind of memory: ``device`` and ``pinned`` are where
    they say, pages of ``managed`` memory on either side.
    """
    return {
        "format": FORMAT,
        "umem": __version__,
        "pid": os.getpid(),
        "program": sys.argv,
        "uptime_s": time.monotonic() - _begun_s,
        "policy": runtime().policy.name if is_enabled() else None,
        "not_in_use": fallback_reason(),
        "devices": _devices(runtime()) if is_enabled() else [],
        "copied": [
            {"direction": direction, "class": tensor_class.value, "bytes": size_bytes}
            for (direction, tensor_class), size_bytes in copy_counts.copied_bytes().items()
        ],
        "link_bytes_per_s": _link_bytes_per_s() if is_enabled() else {},
        "runs": [
            {
                "model": it.model,
                "unit": it.unit,
                "count": it.count,
                "planned": it.planned,
                "predicted_s": it.predicted_s,
                "measured_s": it.measured_s,
                "waited_s": it.waited_s,
                "late": it.late(),
            }
            for it in managed_runs()
        ],
    }


@cache
def _link_bytes_per_s() -> dict[str, float]:
    """Speed of copies by direction, by the profile of the first GPU."""
    hardware = describe_machine(runtime().capabilities[0], None)
    return {
        "to_device": hardware.copy_to_device_bytes_per_s,
        "to_host": hardware.copy_to_host_bytes_per_s,
    }


def _devices(state: Runtime) -> list[dict[str, Any]]:
    found = []
    for number, (budget_bytes, machine) in enumerate(
        zip(state.device_budgets, state.capabilities, strict=True)
    ):
        kinds = state.allocator.kind_stats(number)
        if not any(kind["reserved_bytes"] for kind in kinds.values()):
            continue
        found.append(
            {
                "number": number,
                "name": machine.device_name,
                "total_bytes": machine.total_bytes,
                "budget_bytes": budget_bytes,
                "kinds": kinds,
                "classes": _blocks.of(state, number),
            }
        )
    return found
