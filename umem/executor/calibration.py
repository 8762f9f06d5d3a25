"""Compares measured bandwidths with those that plans were made with, and corrects the latter."""

from __future__ import annotations

from dataclasses import replace

from umem.hardware import Hardware
from umem.runtime.hints import HintEngine, HintStatistics, OpName

__all__ = ["SETTLING_STEPS", "BandwidthCalibration"]

_STEPS = 4
"""Planned steps between two comparisons."""

_MOST = 3
"""Corrections at most: bandwidths that have not settled by then never do."""

SETTLING_STEPS = _STEPS * _MOST
"""Planned steps after which no further correction can come."""

_WORTH_IT = 0.15
"""Relative error of a bandwidth that makes a new plan worth its time."""

_LEAST_BYTES = 256 << 20
"""Bytes moved in one direction before its bandwidth is believed: as much as the engine has in
driver calls at once, so that the fixed cost of a call does not count."""

_LEAST_S = 0.02
"""Link time that these bytes have taken at least. The driver pauses for a few milliseconds now and
then, to load a kernel or to serve another process; 3 ms of 20 are the relative error above."""


class BandwidthCalibration:
    """Corrects the hardware's bandwidths by what the hint engine measures.

    A direction's bandwidth is its moved bytes over the time that its link was busy, however many
    workers share the link. Both directions share a link, so that one of them is slow only below its
    share of what both have together. Bytes that are too few for a judgement count in the next
    comparison. A direction that was slow at first, such as while the host's pages were new, can
    become as fast as expected. Memory used in place on the host takes link time too, and it is not
    known how much of that fell together with moving pages: a link that this alone may slow does not
    count as slow.

    Parameters
    ----------
    engine
        Its statistics are the measurement.
    """

    def __init__(self, engine: HintEngine) -> None:
        self.count = 0
        """Corrections so far."""
        self._engine = engine
        self._steps = 0
        now = engine.statistics()
        self._before: dict[OpName, tuple[HintStatistics, int]] = {
            "prefetch": (now, 0),
            "evict": (now, 0),
        }
        self._rates: dict[str, float] = {}

    def apply(self, hardware: Hardware) -> Hardware:
        """The hardware with the bandwidths measured so far."""
        return replace(
            hardware,
            to_device_bytes_per_s=self._rates.get("prefetch", hardware.to_device_bytes_per_s),
            to_host_bytes_per_s=self._rates.get("evict", hardware.to_host_bytes_per_s),
        )

    def is_due(self, steps: int, hardware: Hardware, in_place_s: float = 0.0) -> bool:
        """Whether to plan again; asked before each step.

        Parameters
        ----------
        steps
            Steps carried out as planned so far.
        hardware
            As it was before any correction.
        in_place_s
            How long in each step accesses in place have the link, in both directions.
        """
        if self.count >= _MOST or steps - self._steps < _STEPS:
            return False
        now = self._engine.statistics()
        self._steps = steps
        known = self.apply(hardware)
        to_device, to_host = known.to_device_bytes_per_s, known.to_host_bytes_per_s
        share = min(1.0, known.link_bytes_per_s / (to_device + to_host))
        found: dict[str, float] = {}
        rates: tuple[tuple[OpName, float, float], ...] = (
            ("prefetch", to_device, hardware.to_device_bytes_per_s),
            ("evict", to_host, hardware.to_host_bytes_per_s),
        )
        for op, known_rate, usual_rate in rates:
            before, steps_before = self._before[op]
            moved, seconds = _difference(before, now, op)
            if moved < _LEAST_BYTES or seconds < _LEAST_S:
                continue
            self._before[op] = now, steps
            alone_s = seconds - in_place_s * (steps - steps_before)
            # Pages that were there already count as moved, so that no link looks too slow. No link
            # is believed to be faster than the hardware's figure.
            measured, expected = moved / seconds, share * known_rate
            if moved < expected * (1 - _WORTH_IT) * alone_s:
                found[op] = moved / alone_s
            elif measured > expected * (1 + _WORTH_IT) and known_rate < usual_rate:
                found[op] = min(usual_rate, measured / share)
        if not found:
            return False
        self._rates |= found
        self.count += 1
        return True


def _difference(before: HintStatistics, now: HintStatistics, op: OpName) -> tuple[int, float]:
    """Bytes moved and link time in one direction between two comparisons."""
    moved, seconds = 0, 0.0
    for (name, tensor_class), counts in now.counts.items():
        if name == op:
            earlier = before.counts.get((name, tensor_class))
            moved += counts.moved_bytes - (earlier.moved_bytes if earlier else 0)
            seconds += counts.driver_s - (earlier.driver_s if earlier else 0.0)
    return moved, seconds
