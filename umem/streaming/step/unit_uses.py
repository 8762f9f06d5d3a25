"""In what order a program uses units behind a step: in passes, and before their pass."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["UnitUses"]

_ALIKE_STEPS = 4
"""Steps one after another that show a habit: an average may be taken in every second step only."""


class UnitUses:
    """The first uses of units since a step.

    A use before the unit's pass is early: it is ordered behind the unit's update by a guard. An
    average of weights uses all units so, in the order of the model's parameters.
    """

    def __init__(self) -> None:
        self.are_all_early = False
        """Whether the unit that is updated last is used early in each step, so that the next
        forward pass begins behind all updates."""
        self._called: dict[str, None] = {}
        """Units in the order of their passes."""
        self._first: dict[str, bool] = {}
        """Units in the order of their first uses, and whether these were early."""
        self._early_before: list[str] = []
        """Units that were used early after the step before, in that order."""
        self._last: str | None = None
        """The unit that the last step updates last, of those that it has deferred."""
        self._others = 0
        """Steps one after another that differ from :attr:`are_all_early`."""

    def in_pass(self, name: str) -> None:
        """A pass uses a unit, or a library gathers it for one."""
        self._called.setdefault(name)
        self._first.setdefault(name, False)

    def early(self, name: str) -> None:
        """Something uses a unit before its pass."""
        self._first.setdefault(name, True)

    def order(self, *, of_passes: bool) -> Iterable[str]:
        """Units in the order in which the next step is to update them.

        That is the order of their passes. But units that were used early after both of the last
        steps, in one order, have the places of these uses, unless `of_passes` is true: a program
        that reads the norm of the head then waits for its update alone.
        """
        is_habit = not of_passes and self._early == self._early_before
        return self._first if is_habit else self._called

    def begin(self) -> None:
        """A step begins: later uses are behind it."""
        early = self._early
        if self._last is not None:
            differs = (self._last in early) != self.are_all_early
            self._others = self._others + 1 if differs else 0
            if self._others == _ALIKE_STEPS:
                self.are_all_early, self._others = not self.are_all_early, 0
        self._early_before, self._last = early, None
        self._called, self._first = {}, {}

    def defer(self, name: str) -> None:
        """The step has deferred a unit's update, behind those before."""
        self._last = name

    @property
    def _early(self) -> list[str]:
        return [name for name, is_early in self._first.items() if is_early]
