"""Watches the steps that run under a plan: their memory, and the time that they take."""

from __future__ import annotations

import logging
from itertools import pairwise, starmap
from statistics import median
from typing import Any

from umem.capture.live.timing import Clock
from umem.core.units import format_bytes
from umem.streaming.stage.device_room import DeviceRoom

__all__ = ["Watching"]

_LOG = logging.getLogger("umem")

_SETTLING_STEPS = 2
"""Steps until a plan is in force: the first one moves state."""

_PATIENCE_STEPS = 4
"""Steps before the first plan because of short memory; before each later one, twice as many."""


_TIMED_STEPS = 3
"""Steps to take the time of, once a plan is in force."""

_TIMED_AGAIN = 4
"""So many times as many steps later it is taken again: other programs may have slowed the first."""


class Watching:
    """Sees whether memory runs short under a plan, and how long its steps take."""

    def __init__(self, room: DeviceRoom, clock: Clock, spilled_bytes: int) -> None:
        self.spilled_bytes = spilled_bytes
        """Host memory that the budget had given when the plan was in force."""
        self.lacking_bytes = 0
        """What came to that when memory ran short."""
        self.peak_bytes = 0
        """Most bytes of live tensors in the last step."""
        self.measures_again = False
        """Whether steps are to be measured once more, now that host memory is not in use."""
        self.measured_s: float | None = None
        """The middle one of the latest times that were taken under the plan; None before."""
        self._marks: list[Any] = []
        """Between these. Read when they are past: nothing waits for the device."""
        self._timed_from = _SETTLING_STEPS + 1
        """The step before which there is the first mark."""
        self.is_timed_again = False
        """Whether the time is of later steps than the first that were timed under the plan."""
        self._is_new = False
        """Whether nobody has taken it yet."""
        self._overflows = False
        self._overflow_bytes = 0
        """More host memory that the first step in force has used under a plan that overflows."""
        self._room = room
        self._clock = clock
        self._steps = 0
        """Under the plan."""
        self._shortages = 0
        self._has_given_up = False

    def begin_anew(self) -> None:
        """Other plans begin: memory has never run short under them."""
        self._shortages = 0
        self._has_given_up = False

    def plan_begins(
        self, spilled_bytes: int | None, *, measures_again: bool, overflows: bool
    ) -> None:
        """There is another plan, of steps that are to be measured again or not.

        So much host memory is in use because of the budget; as much as before for None. A plan
        that `overflows` uses more.
        """
        self._steps, self.measures_again = 0, measures_again
        self.measured_s, self._is_new, self.is_timed_again = None, False, False
        self._overflows, self._overflow_bytes = overflows, 0
        self._time_later()
        self._timed_from = _SETTLING_STEPS + 1
        if spilled_bytes is not None:
            self.spilled_bytes = spilled_bytes

    def step_ends(self) -> None:
        """A step has run under the plan."""
        self._steps += 1
        self.peak_bytes = self._room.take_peak_bytes()
        if self.is_settling:
            self.settle()
        elif self._overflows and self._steps == _SETTLING_STEPS + 1:
            self._overflow_bytes = self._room.spilled_bytes() - self.spilled_bytes
        if not self.is_settling:
            self._take_time()

    def settle(self) -> None:
        """What is in host memory because of the budget now is expected there."""
        self._room.find_homes()
        self._room.trim()
        self.spilled_bytes = self._room.spilled_bytes()

    @property
    def is_timed(self) -> bool:
        """Whether the first steps are over, and how long they took is known, or never will be."""
        are_over = self._steps > _SETTLING_STEPS + _TIMED_STEPS
        return are_over and (self.measured_s is not None or not self._marks)

    def take_measured_s(self) -> float | None:
        """The time of a step, once when it is known."""
        is_new, self._is_new = self._is_new, False
        return self.measured_s if is_new else None

    def _take_time(self) -> None:
        begun = self._steps - self._timed_from
        if begun == len(self._marks) <= _TIMED_STEPS and self._clock.is_usable():
            self._marks.append(self._clock.mark())
        elif begun == _TIMED_STEPS:
            self._time_later()
        if len(self._marks) > _TIMED_STEPS and self._clock.is_past(self._marks[-1]):
            # A step that something has held up tells nothing of the plan.
            self.is_timed_again = self.measured_s is not None
            self.measured_s = median(starmap(self._clock.seconds, pairwise(self._marks)))
            self._is_new = True
            self._time_later()

    def _time_later(self) -> None:
        self._timed_from = _TIMED_AGAIN * self._steps
        self._clock.release(self._marks)
        self._marks = []

    @property
    def is_settling(self) -> bool:
        """Whether the plan is not in force yet."""
        return self._steps <= _SETTLING_STEPS

    @property
    def _patience(self) -> int:
        """Steps before memory that runs short leads to another plan."""
        return int(_PATIENCE_STEPS * 2**self._shortages)

    @property
    def has_been_patient(self) -> bool:
        """Whether the plan has been in force for as long as it takes to see that it holds."""
        has_waited = self._steps > max(_SETTLING_STEPS, self._patience)
        return not self.measures_again and has_waited and self.is_timed and not self._marks

    @property
    def has_room(self) -> bool:
        """Whether no more host memory is in use because of the budget than at first."""
        return self._room.spilled_bytes() <= self.spilled_bytes + self._overflow_bytes

    @property
    def runs_short(self) -> bool:
        """Whether memory runs short, and is not to be waited for any more."""
        return not self.has_room and self._steps >= self._patience

    def plan_fails(self) -> None:
        """Another plan is to be made because memory runs short."""
        self.lacking_bytes = self._room.spilled_bytes() - self.spilled_bytes - self._overflow_bytes
        self._shortages += 1

    def give_up(self, plans: int) -> None:
        """Say once that memory stays short, after so many plans."""
        if not self._has_given_up:
            self._has_given_up = True
            _LOG.warning(
                "umem: %s of tensors are in host memory and slow, after %d plans: steps of this "
                "training differ too much for its device_budget of %s",
                format_bytes(self._room.spilled_bytes()),
                plans,
                format_bytes(self._room.budget_bytes),
            )
