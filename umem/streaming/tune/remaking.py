"""Whether results of cheap modules are made again: tried where a plan without that loses time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate

from umem.streaming.activations.remade_results import RemadeResults
from umem.streaming.plan.step_timing import StreamUnit
from umem.streaming.plan.training_plan import TrainingPlan

__all__ = ["Remaking"]

_LEAST_LOSS = 0.03
"""Part of a step that a plan loses where a trial is worth its steps."""


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
        """What a plan without has in host memory, and its step."""
        self._kept: Mapping[str, StreamUnit] = {}
        """Units of steps in which all results were kept, by name."""

    @property
    def is_on(self) -> bool:
        """Whether results are made again."""
        return self._remade is not None and self._remade.is_on

    def changes_steps(
        self, units: Sequence[StreamUnit], computed_s: float, whole: TrainingPlan
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
        """
        found = whole.overflow_bytes, whole.step_s
        if self._remade is None:
            return False
        if self.is_on:
            if self._without is None or found <= self._without:
                return False
            self._remade.end()
            self._remade, self._kept = None, {}
            return True
        moves = whole.recomputed or whole.stream.copied or whole.overflow_bytes
        if not moves or whole.step_s < (1.0 + _LEAST_LOSS) * computed_s:
            return False
        if self._remade.begin():
            self._without, self._kept = found, {unit.name: unit for unit in units}
        return self.is_on

    def second_passes(
        self, units: Sequence[StreamUnit], freed_bytes: Mapping[str, int]
    ) -> tuple[Mapping[str, int], Mapping[str, int]]:
        """What is free of units that run twice, and what more they have in their second pass.

        A second pass within a checkpoint makes no results again, and keeps all for its moment.
        """
        pairs = [(unit, self._kept.get(unit.name, unit)) for unit in units]
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
