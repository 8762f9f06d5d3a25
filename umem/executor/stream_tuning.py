"""Decides which optimizer state stays on the device, from the first steps of a training."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from itertools import chain
from typing import Any, Protocol

from umem.capture.live.timing import Clock
from umem.core.errors import PlanError
from umem.hardware import Hardware
from umem.planning.stream_plan import StreamPlan, plan_stream
from umem.planning.stream_timing import StreamUnit

__all__ = ["FEWEST_SLOTS", "DeviceRoom", "StreamTuner"]

_LOG = logging.getLogger("umem")

FEWEST_SLOTS = 2
"""With one, nothing is copied in while anything is copied out."""

_MEASURED_STEPS = 2
"""Steps with all state streamed before a plan: the first ones allocate and compile."""

_UPDATE_TRAFFIC = 3.5
"""Bytes that an update reads and writes per byte of state. AdamW reads and writes its two moments
and the weight, and reads the gradient."""


class DeviceRoom(Protocol):
    """Device memory of the process against its budget."""

    def spare_bytes(self) -> int:
        """What was free at the fullest moment."""

    def is_short(self) -> bool:
        """Whether the budget has put tensors into host memory."""


class StreamTuner:
    """Measures steps with all state streamed, and plans once; anew when memory runs short.

    Parameters
    ----------
    hardware
        The machine's figures.
    clock
        Marks moments on the device.
    room
        The device's memory.
    """

    def __init__(self, hardware: Hardware, clock: Clock, room: DeviceRoom) -> None:
        self.plan: StreamPlan | None = None
        """The present plan; None while steps are measured."""
        self._hardware = hardware
        self._clock = clock
        self._room = room
        self._steps = 0
        self._begun: Any = None
        self._ended: Any = None
        self._waits: list[tuple[Any, Any]] = []
        """Begin and end of each wait for updates within the forward pass."""
        self._has_warned = False

    def forward_begins(self) -> None:
        """Note the first forward pass of a step."""
        if self._begun is None and self._clock.is_usable():
            self._begun = self._clock.mark()

    def forward_ends(self) -> None:
        """Note its end."""
        if self._begun is not None and self._ended is None:
            self._ended = self._clock.mark()

    def wait(self, block_waits: Callable[[], None]) -> None:
        """Let a block wait for its update: the wait is no part of its forward pass."""
        if self._begun is None or self._ended is not None or not self._clock.is_usable():
            block_waits()
            return
        begun = self._clock.mark()
        block_waits()
        self._waits.append((begun, self._clock.mark()))

    def step_begins(
        self, sizes: Mapping[str, int], slots_bytes: int
    ) -> tuple[frozenset[str], int] | None:
        """Note the optimizer's step.

        Parameters
        ----------
        sizes
            Bytes of state by unit, in the order of the forward pass.
        slots_bytes
            Bytes of all slots, which a plan may use in another way.

        Returns
        -------
        tuple or None
            Names of the units whose state stays on the device, and the number of slots; None to
            leave both as they are.
        """
        begun, self._begun = self._begun, None
        ended, self._ended = self._ended, None
        waits, self._waits = self._waits, []
        if self.plan is not None:
            if not self.plan.resident or not self._room.is_short():
                return None
            self.plan, self._steps = None, 0
            return frozenset(), FEWEST_SLOTS
        self._steps += 1
        if self._steps <= _MEASURED_STEPS or ended is None or not any(sizes.values()):
            return None
        stepped = self._clock.mark()
        forward_s = self._clock.seconds(begun, ended)
        forward_s -= sum(self._clock.seconds(*wait) for wait in waits)
        backward_s = self._clock.seconds(ended, stepped)
        self._clock.release([begun, ended, stepped, *chain.from_iterable(waits)])
        spare_bytes = max(0, self._room.spare_bytes() + slots_bytes)
        try:
            self.plan = self._make(sizes, forward_s, backward_s, spare_bytes)
        except PlanError as error:
            if not self._has_warned:
                self._has_warned = True
                _LOG.warning("umem: all optimizer state is streamed: %s", error)
            self._steps = 0
            return None
        names = list(sizes)
        return frozenset(names[number] for number in self.plan.resident), self.plan.slots

    def _make(
        self, sizes: Mapping[str, int], forward_s: float, backward_s: float, spare_bytes: int
    ) -> StreamPlan:
        total_bytes = sum(sizes.values())
        units = [
            StreamUnit(
                name=name,
                state_bytes=state_bytes,
                update_s=_UPDATE_TRAFFIC * state_bytes / self._hardware.memory_bytes_per_s,
                forward_s=forward_s * state_bytes / total_bytes,
                backward_s=backward_s * state_bytes / total_bytes,
            )
            for name, state_bytes in sizes.items()
        ]
        return plan_stream(units, budget_bytes=spare_bytes, hardware=self._hardware)
