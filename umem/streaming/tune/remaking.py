"""Whether results of cheap modules are made again: tried where a plan without that loses time.

It ends where a plan without promises shorter steps than were measured. If those turn out longer, it
begins again, for good.
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
"""Part of a step that a plan loses where a trial is worth its steps, and by which steps of the
other kind have to be shorter."""


class Remaking:
    """Begins and ends to make results again, which other steps are measured for.

    Parameters
    ----------
    remade
        What does so; None if nothing may.
    """

    def __init__(self, remade: RemadeResults | None) -> None:
        self._remade = remade
        self._without: tuple[int, float] | None = None
        """What a plan without has in host memory, and its step; None where it is not to come."""
        self._with: tuple[int, float] | None = None
        """The same with it, as measured, once it has ended because of a prediction."""
        self._kept: Mapping[str, StreamUnit] = {}
        """Units of steps in which all results were kept, by name."""

    @property
    def is_on(self) -> bool:
        """Whether results are made again."""
        return self._remade is not None and self._remade.is_on

    def changes_steps(
        self,
        units: Sequence[StreamUnit],
        computed_s: float,
        whole: TrainingPlan,
        measured_s: float | None,
    ) -> bool:
        """Begin or end it, by a plan for the steps as they are; whether they are other ones now.

        Parameters
        ----------
        units
            Those that the plan is made for.
        computed_s
            A step with all on the device.
        whole
            The plan.
        measured_s
            The shortest step under a plan for such steps; None before one is known.
        """
        if self._remade is None:
            return False
        found = whole.overflow_bytes, whole.step_s if measured_s is None else measured_s
        if self.is_on:
            if self._without is None or not _is_shorter(self._without, found):
                return False
            _LOG.info("umem: results are kept again: %.3f s a step predicted", self._without[1])
            self._remade.end()
            self._with = found
            if measured_s is None:
                self._remade = None
            return True
        if self._with is not None:
            return False
        moves = whole.recomputed or whole.stream.copied or whole.overflow_bytes
        if not moves or whole.step_s < (1.0 + _LEAST_LOSS) * computed_s:
            return False
        if self._remade.begin():
            _LOG.info("umem: results of cheap modules are made again in the backward pass")
            self._without, self._kept = found, {unit.name: unit for unit in units}
        return self.is_on

    def resumes(self, overflow_bytes: int, measured_s: float) -> bool:
        """Begin again, for good, where the steps without it take longer than those with it did.

        Parameters
        ----------
        overflow_bytes
            What a plan for steps without has in host memory.
        measured_s
            The shortest step under such a plan.
        """
        if self._remade is None or self._with is None:
            return False
        if not _is_shorter(self._with, (overflow_bytes, measured_s)):
            return False
        self._with = self._without = None
        _LOG.info("umem: results of cheap modules are made again: steps were shorter")
        return self._remade.begin()

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


def _is_shorter(some: tuple[int, float], others: tuple[int, float]) -> bool:
    """Whether steps have less in host memory, or as much and are shorter by enough to tell."""
    if some[0] != others[0]:
        return some[0] < others[0]
    return some[1] < (1.0 - _LEAST_LOSS) * others[1]
