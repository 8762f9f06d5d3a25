"""Device memory in a training step, moment by moment, by what of it leaves for the host."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from umem.streaming.plan.step_timing import (
    GRADIENTS_AHEAD,
    UNITS_WITH_GRADIENTS,
    StreamUnit,
    TemporarySlot,
)

__all__ = ["ByteCounts", "MemoryByMoment", "PlannedBytes"]

ByteCounts = npt.NDArray[np.int64]

_MOST_AHEAD = 16
"""Blocks by which activations come back early where there is room anyway."""


class MemoryByMoment:
    """Device memory of everything but streamed state and slots, moment by moment.

    Moments are the forward passes of N units, and their backward passes in reverse: 2 N in all.

    Parameters
    ----------
    units
        In forward order.
    step_peak_bytes
        The most between the passes.
    update_peak_bytes
        The most from the step on, when what comes before it, such as clipping, is over.
    copied_gradients
        Number of units whose gradients are copied out, the last ones.
    batches
        Forward and backward passes in a step.
    holds_gradients
        Whether forward passes have the gradients of updates to come.
    hosts
        Numbers of the units that the host updates, whose gradients leave, in the last batch at the
        latest, and do not come back for the step.
    adds_at_home
        Whether later batches are added to gradients at home, which do not come back for them.
    """

    def __init__(
        self,
        units: Sequence[StreamUnit],
        step_peak_bytes: int,
        update_peak_bytes: int,
        copied_gradients: int,
        batches: int,
        holds_gradients: bool,
        hosts: Collection[int] = (),
        *,
        adds_at_home: bool = False,
    ) -> None:
        self.count = len(units)
        self._hosts = hosts
        self._stay = batches > 1 and not adds_at_home
        """Whether gradients are on the device in the last batch, and may stay behind it."""
        self.step_bytes = step_peak_bytes
        self.update_bytes = update_peak_bytes
        self._makes_gradients = np.array(
            [unit.backward_s > 0 and unit.gradient_bytes > 0 for unit in units], bool
        )
        """Whether the backward pass is known to come to a unit in its turn, by its gradients."""
        forward = np.array([unit.forward_peak_bytes for unit in units], np.int64)
        backward = np.array([unit.backward_peak_bytes for unit in units], np.int64)
        every = np.array([unit.gradient_bytes for unit in units], np.int64)
        leave = np.arange(self.count) >= self.count - copied_gradients
        is_hosts = np.zeros(self.count, bool)
        is_hosts[list(hosts)] = True
        copied = np.where(leave if batches > 1 else leave | is_hosts, every, 0)
        last = np.where(is_hosts, every - copied, 0)
        copied_bytes = int(copied.sum())
        self.gradient_bytes = (copied + last).tolist()
        """Those that are copied out."""
        # Those of a unit have left when the backward pass begins with the unit so far ahead.
        behind, last_behind = _sums_behind(copied), _sums_behind(last)
        further = slice(1 + UNITS_WITH_GRADIENTS, None)
        self._last_bytes = last_behind[further]
        """By how much less there is in the last backward pass than `peak_bytes` says."""
        self._first_bytes = np.zeros(self.count, np.int64)
        """The same of the first pass, int64[N] or, where later batches follow, int64[2 N]: the
        gradients of earlier units are gone with their update, and new ones are still to come."""
        if batches > 1:
            # All gradients are there from the second batch on. The first has made only some.
            earlier = (every - copied).cumsum() - (every - copied)
            # In later ones those of some units are on their way back, or to the host.
            early = np.concatenate((np.zeros(1 + GRADIENTS_AHEAD, np.int64), copied.cumsum()))
            away = early[: self.count] + behind[further] if self._stay else copied_bytes
            made = np.minimum(away, every.cumsum() + behind[further])
            made_first = every.cumsum() - every + behind[further]
            self._first_bytes = np.concatenate(
                (
                    earlier - (last.cumsum() - last) + int(last.sum()),
                    np.maximum(0, made_first - made)[::-1],
                )
            )
            forward -= copied_bytes
            backward -= made
        else:
            forward -= behind[: self.count] if holds_gradients else 0
            backward -= behind[further]
        left_bytes = int(behind[UNITS_WITH_GRADIENTS] + last_behind[UNITS_WITH_GRADIENTS])
        self.step_bytes -= left_bytes
        self.update_bytes -= left_bytes
        self.peak_bytes = np.concatenate((forward, backward[::-1]))
        # The last unit's backward pass comes at once.
        self.can_leave = [i for i, unit in enumerate(units[:-1]) if unit.saved_bytes]
        self.left_bytes = np.cumsum(
            [0, *(units[number].saved_bytes for number in self.can_leave)], dtype=np.int64
        )
        """Activations of the first units that can leave, int64[units that can leave + 1]."""
        self._held_bytes = _held_bytes(units, self.can_leave)

    def by_moment(self, copied: int, fetch_ahead: int) -> ByteCounts:
        """Bytes at each moment, int64[2 N], if the first few leave as early as they can.

        A unit's activations have left two forward passes later, and are back `fetch_ahead` units
        before its backward pass; with 0 the program waits for both, so that they have left one
        forward pass later.
        """
        moment = np.arange(2 * self.count)
        # Units below this number are out; moment m is the backward pass of unit 2 N - 1 - m.
        out_below = np.minimum(
            moment - min(1, fetch_ahead), 2 * self.count - 1 - moment - fetch_ahead
        )
        out = np.minimum(np.searchsorted(self.can_leave, out_below), copied)
        return self.peak_bytes - self._free_bytes(out)

    def _free_bytes(self, out: npt.NDArray[Any]) -> ByteCounts:
        """What is free at each moment where so many units have left, int64[2 N]."""
        free = self.left_bytes[out]
        if self._held_bytes is not None:
            free[: self.count] -= self._held_bytes[out[: self.count], np.arange(self.count)]
        return free

    def most_bytes(self, copied: int, fetch_ahead: int) -> int:
        """The most at any moment, also between the passes."""
        return int(self.by_moment(copied, fetch_ahead).max(initial=self.step_bytes))

    def fewest_copied(self, room_bytes: int, fetch_ahead: int = 1) -> int:
        """How many have to leave to fit, if all of them are enough."""
        return bisect_left(
            range(len(self.can_leave)),
            True,
            key=lambda copied: self.most_bytes(copied, fetch_ahead) <= room_bytes,
        )

    def most_ahead(self, copied: int, room_bytes: int) -> int:
        """The number of units by which activations can be back early."""
        if not copied:
            return 1
        return bisect_left(
            range(_MOST_AHEAD),
            True,
            key=lambda ahead: self.most_bytes(copied, ahead + 1) > room_bytes,
        )

    def left_before(self, copied: int, room_bytes: int) -> dict[int, int]:
        """For each unit that leaves, the unit before whose forward pass its memory is needed."""
        lacking = self.peak_bytes[: self.count] - room_bytes
        needed = np.searchsorted(self.left_bytes, lacking)
        if self._held_bytes is not None:
            free = self.left_bytes[:, None] - self._held_bytes
            needed = (np.maximum.accumulate(free) < lacking).sum(axis=0)
        # So many units have left before each forward pass.
        needed = np.maximum.accumulate(needed) if self.count else needed
        before = np.searchsorted(needed, np.arange(copied), side="right")
        return dict(zip(self.can_leave[:copied], before.tolist(), strict=True))

    def _planned(self, left_before: Mapping[int, int], fetch_ahead: int) -> ByteCounts:
        """Bytes at each moment of a plan, without gradients that come back."""
        left = np.searchsorted(np.sort(list(left_before.values())), np.arange(self.count), "right")
        unit = np.arange(self.count)[::-1]
        away = np.searchsorted(self.can_leave[: len(left_before)], unit - fetch_ahead)
        return self.peak_bytes - self._free_bytes(np.concatenate((left, away)))

    def returning(
        self, left_before: Mapping[int, int], fetch_ahead: int, room_bytes: int
    ) -> dict[int, int]:
        """Gradients that come back for the step, each with the unit in whose backward pass.

        Each unit's must have left before, and there must be room from that moment on, for the step,
        and in the next forward pass until their update. With several batches they stay from their
        own unit's last backward pass on.
        """
        if not any(self.gradient_bytes):
            return {}
        room = room_bytes - self._planned(left_before, fetch_ahead)
        forward = room[: self.count] + self._first_bytes[: self.count]
        backward = room[self.count :][::-1]
        # From each unit's backward pass to the step.
        behind = np.minimum(np.minimum.accumulate(backward), room_bytes - self.step_bytes)
        found, all_bytes = {}, 0
        for number, size_bytes in enumerate(self.gradient_bytes):
            # They have left when the backward pass is so many units further.
            further = slice(max(0, number - UNITS_WITH_GRADIENTS))
            if self._stay:
                further = slice(number, number + 1)
            has_room = behind[further] >= all_bytes + size_bytes
            fits = np.flatnonzero(has_room & self._makes_gradients[further])
            may_return = size_bytes and number not in self._hosts
            if may_return and len(fits) and (forward[: number + 1] >= size_bytes).all():
                found[number] = number if self._stay else int(fits[-1])
                all_bytes += size_bytes
                forward[: number + 1] -= size_bytes
        return found

    def planned(
        self, left_before: Mapping[int, int], fetch_ahead: int, returning: Mapping[int, int]
    ) -> PlannedBytes:
        """Bytes of a plan, without temporary slots."""
        size_bytes, count = self.gradient_bytes, self.count
        used = self._planned(left_before, fetch_ahead)
        first = used[: len(self._first_bytes)] - self._first_bytes
        for number, unit in returning.items():
            used[2 * count - 1 - unit :] += size_bytes[number]
            first[: number + 1] += size_bytes[number]
        back_bytes = sum(size_bytes[number] for number in returning)
        return PlannedBytes(
            used[:count],
            used[count:][::-1],
            self.step_bytes + back_bytes,
            self.update_bytes + back_bytes,
            first,
            used[count:][::-1] - self._last_bytes,
        )


def _held_bytes(units: Sequence[StreamUnit], can_leave: Sequence[int]) -> ByteCounts | None:
    """What the program holds of the first units that can leave in each unit's forward pass.

    int64[units that can leave + 1, N]; None where it holds nothing.
    """
    if not any(units[number].held for number in can_leave):
        return None
    found = np.zeros((len(can_leave) + 1, len(units)), np.int64)
    for place, number in enumerate(can_leave, 1):
        left_bytes = units[number].saved_bytes
        for size_bytes, further in units[number].held:
            its_bytes = min(size_bytes, left_bytes)
            found[place, number + 1 : number + 1 + further] += its_bytes
            left_bytes -= its_bytes
    return found.cumsum(axis=0)


def _sums_behind(size_bytes: ByteCounts) -> ByteCounts:
    """Bytes of each unit and all behind it, and zeros, int64[N + 1 + UNITS_WITH_GRADIENTS]."""
    none = np.zeros(1 + UNITS_WITH_GRADIENTS, np.int64)
    return np.concatenate((size_bytes[::-1].cumsum()[::-1], none))


@dataclass(frozen=True)
class PlannedBytes:
    """Device memory of everything but state, in a step under a plan."""

    forward: ByteCounts
    """In the forward pass of each unit, int64[N]."""
    backward: ByteCounts
    """In its backward pass, int64[N]."""
    step: int
    """The most between the passes."""
    update: int
    """The most from the step on."""
    first: ByteCounts
    """In the forward pass of the first batch, while updates free gradients, int64[N]. Where other
    batches follow also in its backward pass, from the last unit on, int64[2 N]."""
    last_backward: ByteCounts
    """In the backward pass of each unit in the last batch, int64[N]."""

    @property
    def most_bytes(self) -> int:
        """The most at any moment."""
        passes = (self.forward, self.backward, self.first, self.last_backward)
        return max(self.step, *(int(it.max(initial=0)) for it in passes))

    def temporary_slots(self, most: int, slot_bytes: int, room_bytes: int) -> list[TemporarySlot]:
        """The slots for which there is room from a backward pass, or the step, to a forward pass.

        `most` of them are of use, and `room_bytes` are for them and all that these bytes count.
        """
        if most < 1 or len(self.backward) < 2:
            return []
        in_backward, in_forward = (
            np.minimum.accumulate(room_bytes - it) // slot_bytes
            for it in (self.last_backward, self.first)
        )
        # What is outside of blocks comes first: nothing tells when the backward pass is there.
        counts = np.minimum(in_backward, (room_bytes - self.step) // slot_bytes)[1:]
        early = min(most, int(counts.max(initial=0)))
        most = max(early, min(most, (room_bytes - self.update) // slot_bytes))
        return [
            TemporarySlot(
                made_in=1 + int(np.flatnonzero(counts > number)[-1]) if number < early else None,
                # Of the slots that the next forward pass begins with, the first are home first.
                freed_before=min(
                    int(np.searchsorted(-in_forward, number - most, side="right")),
                    max(len(self.backward), len(self.first) - 1),
                ),
            )
            for number in range(most)
        ]

    def bytes_with(self, slots: Sequence[TemporarySlot], slot_bytes: int) -> int:
        """The most at any moment, with temporary slots."""
        first, backward = self.first.copy(), self.last_backward.copy()
        step_bytes, update_bytes = self.step, self.update + len(slots) * slot_bytes
        for it in slots:
            if it.made_in is not None:
                backward[: it.made_in + 1] += slot_bytes
                step_bytes += slot_bytes
            first[: it.freed_before] += slot_bytes
        passes = (int(it.max(initial=0)) for it in (first, backward))
        return max(self.most_bytes, step_bytes, update_bytes, *passes)
