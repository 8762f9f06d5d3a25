"""Whether results of cheap modules are made again: tried where a plan without that loses time.

It ends unless steps without it were longer. Both are measured, but where a plan without has no
room: predictions are of steps that are measured block by block, which takes the processor longer,
and where that is the bound they tell little of steps under a plan.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from itertools import accumulate

from umem.streaming.activations.remade_results import RemadeResults
from umem.streaming.plan.step_timing import StreamUnit
from umem.streaming.plan.training_plan import TrainingPlan

__all__ = ["Remaking"]

_LOG = logging.getLogger("umem")

_LEAST_LOSS = 0.03
"""Part of a step that a plan loses where a trial is worth its steps, and by which steps have to be
shorter with it: each call of such a module takes the processor longer."""


_LARGE_SHARE = 1 / 16
"""Part of the budget from which on to make a result twice costs less than to keep it for a while: a
norm's takes about as long as three copies in the device's memory."""


class Remaking:
    """Begins and ends to make results again, which other steps are measured for.

    Parameters
    ----------
    remade
        What does so; None if nothing may.
    budget_bytes
        The device's.
    """

    def __init__(self, remade: RemadeResults | None, budget_bytes: int) -> None:
        self._remade = remade
        self._large_bytes = int(_LARGE_SHARE * budget_bytes)
        self._without: tuple[int, float] | None = None
        """What steps without had in host memory, and their time, once it has begun."""
        self._kept: Mapping[str, StreamUnit] = {}
        """Units of steps in which all results were kept, by name."""

    @property
    def is_on(self) -> bool:
        """Whether results are made again."""
        return self._remade is not None and self._remade.is_on

    def begins(
        self,
        units: Sequence[StreamUnit],
        computed_s: float,
        whole: TrainingPlan,
        measured_s: float | None,
    ) -> bool:
        """Begin where steps under a plan lose time, or have no room.

        Steps that are shorter than predicted are also shorter than `computed_s` says, by nobody
        knows how much: they may lose time all the same.

        Parameters
        ----------
        units
            Those that the plan is made for.
        computed_s
            A step with all on the device.
        whole
            The plan.
        measured_s
            A step under it; None before it is known.
        """
        if self._remade is None or self.is_on or self._without is not None:
            return False
        if not whole.overflow_bytes:
            moves = whole.recomputed or whole.stream.copied
            if not moves or measured_s is None:
                return False
            is_foretold = measured_s >= (1.0 - _LEAST_LOSS) * whole.step_s
            if is_foretold and measured_s < (1.0 + _LEAST_LOSS) * computed_s:
                return False
        if not self._remade.begin(self._large_bytes):
            self._remade = None
            return False
        _LOG.info("umem: results of cheap modules are made again in the backward pass")
        self._without = whole.overflow_bytes, whole.step_s if measured_s is None else measured_s
        self._kept = {unit.name: unit for unit in units}
        return True

    def ends(self, overflow_bytes: int, measured_s: float | None) -> bool:
        """End it, for good, unless steps without were longer, or had more in host memory.

        Parameters
        ----------
        overflow_bytes
            What a plan has in host memory.
        measured_s
            A step under it; None before it is known.
        """
        if self._remade is None or not self.is_on or self._without is None:
            return False
        without_bytes, without_s = self._without
        if without_bytes > overflow_bytes:
            return False
        if without_bytes == overflow_bytes and (
            measured_s is None or measured_s < (1.0 - _LEAST_LOSS) * without_s
        ):
            return False
        _LOG.info("umem: results are kept again: a step took %.3f s", without_s)
        self._remade.end()
        self._remade = None
        return True

    def second_passes(
        self, units: Sequence[StreamUnit], freed_bytes: Mapping[str, int]
    ) -> tuple[Mapping[str, int], Mapping[str, int]]:
        """What is free of units that run twice, and what more they have in their second pass.

        A second pass within a checkpoint makes no results again, and keeps all for its moment.
        """
        kept_units = self._kept if self.is_on else {}
        pairs = [(unit, kept_units.get(unit.name, unit)) for unit in units]
        less = [max(0, kept.saved_bytes - unit.saved_bytes) for unit, kept in pairs]
        gone = (0, *accumulate(less))
        free = {
            u.name: max(0, freed_bytes.get(u.name, 0) - its)
            for u, its in zip(units, less, strict=True)
        }
        more = {
            unit.name: max(0, kept.backward_peak_bytes - unit.backward_peak_bytes - before)
            for (unit, kept), before in zip(pairs, gone, strict=False)
        }
        return free, more
