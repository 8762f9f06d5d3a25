"""The slots that the optimizers of one model share: they step one after another."""

from __future__ import annotations

import threading
import weakref
from typing import Protocol

from umem.streaming.plan.step_timing import FIRST_SLOTS
from umem.streaming.stage.lanes import Lanes
from umem.streaming.stage.staged_state import Slot, StateMemory
from umem.streaming.step.unit import Piece

__all__ = ["SlotPool", "SlotUser"]


class SlotUser(Protocol):
    """The units of an optimizer, whose pieces of state have slots."""

    def piece_bytes(self) -> list[int]:
        """Bytes of each piece of state that is staged, in the order of a step."""

    def leave_slots(self) -> None:
        """Wait for all copies from and to slots, and use state at home until slots are taken."""


class SlotPool:
    """Buffers on the device, each as large as the largest piece of any user.

    Parameters
    ----------
    memory
        The device's memory.
    lanes
        Tells the stream that slots are made on.
    """

    def __init__(self, memory: StateMemory, lanes: Lanes) -> None:
        self.lock = threading.RLock()
        """Held by all users while they change units or slots."""
        self.count = FIRST_SLOTS
        """Number of slots that are wanted."""
        self.slots: list[Slot] = []
        """Those that there are. Another list has taken its place when they were made anew."""
        self.temporary: list[Slot] = []
        """Further ones, each for one piece of a step."""
        self.leaving: dict[Slot, Piece] = {}
        """Slots with updated state that is not on its way home yet."""
        self.is_current = False
        """Whether they are for the users' pieces as they are now."""
        self._memory = memory
        self._lanes = lanes
        self._users: list[weakref.ref[SlotUser]] = []

    @property
    def users(self) -> list[SlotUser]:
        """The users, in the order of their first steps."""
        return [user for it in self._users if (user := it()) is not None]

    @property
    def slots_bytes(self) -> int:
        """Bytes of all slots."""
        return sum(slot.memory.nbytes for slot in (*self.slots, *self.temporary))

    @property
    def device_bytes(self) -> int:
        """Bytes of all slots, and of the buffers beside them."""
        operands = (slot.operands for slot in (*self.slots, *self.temporary))
        return self.slots_bytes + sum(0 if it is None else it.nbytes for it in operands)

    def add(self, user: SlotUser) -> None:
        """Let an optimizer's units use the slots."""
        self._users.append(weakref.ref(user))

    def leave(self, user: SlotUser, *, is_over: bool = False) -> None:
        """Have no pieces any more, at any moment, also amid a step of another optimizer.

        The next step makes the slots anew. With `is_over` the user never comes back.
        """
        self.is_current = False
        if self.users == [user]:
            self.slots, self.temporary = [], []
        if is_over:
            self._users = [it for it in self._users if it() not in (None, user)]

    def take_back(self) -> None:
        """Free all slots, behind the work that uses them."""
        for user in self.users:
            user.leave_slots()
        self.slots, self.temporary, self.is_current = [], [], False

    def make(self) -> None:
        """Make slots for all pieces of the users, as many as are wanted and have room."""
        self.take_back()
        sizes = [size_bytes for user in self.users for size_bytes in user.piece_bytes()]
        wanted = min(max(self.count, 1), len(sizes))
        buffers = [self._memory.buffer(max(sizes)) for _ in range(wanted)]
        made = self._lanes.mark()
        self.slots = [Slot(memory, made) for memory in buffers if memory is not None]
        # Where the device has no room for one, the next step asks again.
        self.is_current = bool(self.slots) or not wanted

    def place_of(self, user: SlotUser) -> int:
        """Place of a user's first piece among all pieces, which take the slots in turn."""
        before = self.users
        return sum(len(it.piece_bytes()) for it in before[: before.index(user)])
