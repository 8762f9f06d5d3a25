"""What the running plan teaches about the machine: bandwidths as they are measured."""

from __future__ import annotations

from dataclasses import replace

from umem.hardware import Hardware
from umem.hints import HintEngine, HintStatistics

__all__ = ["Correction"]

_STEPS = 4
"""Planned steps between two looks."""

_MOST = 3
"""Corrections: what does not settle then, does not settle."""

_WORTH_IT = 0.15
"""Share by which a bandwidth has to fall short."""

_LEAST_BYTES = 256 << 20
"""Moved in one direction between two looks, for a bandwidth to mean anything."""


class Correction:
    """Compares the engine's bandwidths with those that plans were made with.

    Parameters
    ----------
    engine
        Whose statistics are looked at.
    """

    def __init__(self, engine: HintEngine) -> None:
        self.count = 0
        """Corrections so far."""
        self._engine = engine
        self._steps = 0
        self._before = engine.statistics()
        self._rates: dict[str, float] = {}

    def apply(self, hardware: Hardware) -> Hardware:
        """The hardware with the bandwidths measured so far."""
        return replace(
            hardware,
            to_device_bytes_per_s=self._rates.get("prefetch", hardware.to_device_bytes_per_s),
            to_host_bytes_per_s=self._rates.get("evict", hardware.to_host_bytes_per_s),
        )

    def is_due(self, steps: int, hardware: Hardware) -> bool:
        """Whether to plan anew; asked before each step.

        Parameters
        ----------
        steps
            Steps carried out as planned so far.
        hardware
            As it was before any correction.
        """
        if self.count >= _MOST or steps - self._steps < _STEPS:
            return False
        now = self._engine.statistics()
        before, self._before, self._steps = self._before, now, steps
        known = self.apply(hardware)
        found = {}
        for op, known_rate in (
            ("prefetch", known.to_device_bytes_per_s),
            ("evict", known.to_host_bytes_per_s),
        ):
            moved, seconds = _difference(before, now, op)
            # Pages that were there already count as moved, so that no link looks too slow.
            if moved >= _LEAST_BYTES and moved / seconds < known_rate * (1 - _WORTH_IT):
                found[op] = moved / seconds
        if not found:
            return False
        self._rates |= found
        self.count += 1
        return True


def _difference(before: HintStatistics, now: HintStatistics, op: str) -> tuple[int, float]:
    """Bytes moved and driver's time between two looks."""
    moved, seconds = 0, 0.0
    for (name, tensor_class), counts in now.counts.items():
        if name == op:
            earlier = before.counts.get((name, tensor_class))
            moved += counts.moved_bytes - (earlier.moved_bytes if earlier else 0)
            seconds += counts.driver_s - (earlier.driver_s if earlier else 0.0)
    return moved, seconds
