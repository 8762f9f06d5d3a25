"""Watches the steps that run under a plan."""

from __future__ import annotations

import logging

from umem.core.units import format_bytes
from umem.streaming.stage.device_room import DeviceRoom

__all__ = ["Watching"]

_LOG = logging.getLogger("umem")

_SETTLING_STEPS = 2
"""Steps until a plan is in force: the first one moves state."""

_PATIENCE_STEPS = 4
"""Steps before the first plan because of short memory; before each later one, twice as many."""


class Watching:
    """Sees whether memory runs short under a plan."""

    def __init__(self, room: DeviceRoom, spilled_bytes: int) -> None:
        self.spilled_bytes = spilled_bytes
        """Host memory that the budget had given when the plan was in force."""
        self.lacking_bytes = 0
        """What came to that when memory ran short."""
        self.peak_bytes = 0
        """Most bytes of live tensors in the last step."""
        self.measures_again = False
        """Whether steps are to be measured once more, now that host memory is not in use."""
        self._room = room
        self._steps = 0
        """Under the plan."""
        self._shortages = 0
        self._has_given_up = False

    def begin_anew(self) -> None:
        """Other plans begin: memory has never run short under them."""
        self._shortages = 0
        self._has_given_up = False

    def plan_begins(self, spilled_bytes: int | None, *, measures_again: bool) -> None:
        """There is another plan, of steps that are to be measured again or not.

        So much host memory is in use because of the budget; as much as before for None.
        """
        self._steps, self.measures_again = 0, measures_again
        if spilled_bytes is not None:
            self.spilled_bytes = spilled_bytes

    def step_ends(self) -> None:
        """A step has run under the plan."""
        self._steps += 1
        self.peak_bytes = self._room.take_peak_bytes()
        if self.is_settling:
            self._room.find_homes()
            self._room.trim()
            self.spilled_bytes = self._room.spilled_bytes()

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
        return not self.measures_again and self._steps > max(_SETTLING_STEPS, self._patience)

    @property
    def has_room(self) -> bool:
        """Whether no more host memory is in use because of the budget than at first."""
        return self._room.spilled_bytes() <= self.spilled_bytes

    @property
    def runs_short(self) -> bool:
        """Whether memory runs short, and is not to be waited for any more."""
        return not self.has_room and self._steps >= self._patience

    def plan_fails(self) -> None:
        """Another plan is to be made because memory runs short."""
        self.lacking_bytes = self._room.spilled_bytes() - self.spilled_bytes
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
