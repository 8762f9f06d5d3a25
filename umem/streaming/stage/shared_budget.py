"""Divides a device's budget among the trainings and models that have memory placed there by plans.

Each of them keeps optimizer state, weights and staging buffers on the device all the time, and they
hold for one another. Everything else, such as activations, comes and goes: there has to be room for
the most that any of them needs at once. What that leaves is divided in proportion to what each one
could use beyond its least.
"""

from __future__ import annotations

import functools
import weakref
from dataclasses import dataclass
from typing import Protocol

__all__ = ["BudgetMember", "BudgetPart", "SharedBudget", "shared_budget"]


class BudgetMember(Protocol):
    """A training, or a model whose weights are streamed. Bytes are of memory that it places."""

    @property
    def placed_bytes(self) -> int:
        """What it has placed: on the device, and weights at home as if they were there."""

    @property
    def device_bytes(self) -> int:
        """The part of it that is on the device now."""

    @property
    def least_bytes(self) -> int:
        """Device memory that it cannot do without."""

    @property
    def most_bytes(self) -> int:
        """Device memory with which nothing of it is in host memory."""

    @property
    def need_bytes(self) -> int:
        """The most live tensors while it works that nobody has placed; 0 if it is not known yet."""


@dataclass(frozen=True)
class BudgetPart:
    """A member's part of the budget."""

    most_bytes: int | None
    """What it may place on the device; None for a member that is alone."""
    others_bytes: int
    """What the others hold or may place."""


class SharedBudget:
    """The members on one device."""

    def __init__(self) -> None:
        self.changes = 0
        """How often members have come or gone: what each one needs is to be measured anew."""
        self.calls = 0
        """Forward passes of trainings."""
        self.plans = 0
        """How often a training has put a plan in force, by which others have other memory."""
        self.unplanned = weakref.WeakSet[BudgetMember]()
        """Trainings whose steps are measured for a first plan."""
        self.surrounding = weakref.WeakSet[BudgetMember]()
        """Trainings between whose forward and backward passes others have theirs."""
        self._members: list[weakref.ref[BudgetMember]] = []

    @property
    def members(self) -> list[BudgetMember]:
        """The members, in the order in which they came."""
        return [member for it in self._members if (member := it()) is not None]

    @property
    def placed_bytes(self) -> int:
        """What all members have placed."""
        return sum(it.placed_bytes for it in self.members)

    def join(self, member: BudgetMember) -> None:
        """Divide the budget with a member from now on."""
        if member not in self.members:
            self._members.append(weakref.ref(member, self._forget))
            self.changes += 1

    def leave(self, member: BudgetMember) -> None:
        """Leave a member's part to the others."""
        for it in self._members:
            if it() is member:
                self._forget(it)
                return

    def waits(self, member: BudgetMember) -> bool:
        """Whether a training is to be measured under another one's plan, which is not made yet.

        Trainings within whose passes others run come first: what they keep is idle for longest.
        """
        before = [it for it in self.members if it in self.surrounding]
        if member in before:
            before = before[: before.index(member)]
        return any(it in self.unplanned for it in before)

    def _forget(self, reference: weakref.ref[BudgetMember]) -> None:
        self._members.remove(reference)
        self.changes += 1

    def part_of(self, member: BudgetMember, budget_bytes: int) -> BudgetPart:
        """The part of a member.

        Parameters
        ----------
        member
            One of the members.
        budget_bytes
            The budget, without what plans leave free.
        """
        others = [it for it in self.members if it is not member]
        if not others:
            return BudgetPart(None, 0)
        every = [member, *others]
        need_bytes = max(it.need_bytes for it in every)
        least_bytes = sum(it.least_bytes for it in every)
        wanted_bytes = sum(max(it.most_bytes, it.least_bytes) for it in every) - least_bytes
        free_bytes = min(max(0, budget_bytes - need_bytes - least_bytes), wanted_bytes)

        def share_bytes(it: BudgetMember) -> int:
            beyond_bytes = max(0, it.most_bytes - it.least_bytes)
            return it.least_bytes + free_bytes * beyond_bytes // max(1, wanted_bytes)

        return BudgetPart(
            share_bytes(member), sum(max(share_bytes(it), it.device_bytes) for it in others)
        )


@functools.cache
def shared_budget(device: int) -> SharedBudget:
    """The one of a GPU of this process."""
    del device  # the key of the cache
    return SharedBudget()
