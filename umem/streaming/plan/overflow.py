"""Plans for a budget in which nothing has room with the usual number of copies under way.

First copies are waited for, and state is updated in host memory: that takes time, and least memory
of the device. What has no room even then is put into host memory by the allocator, tensor by
tensor, and the device uses it there, in place. A step takes longer by that, and is right. So a plan
is made as if those bytes were not there, and the passes were so much longer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from umem.hardware import Hardware
from umem.streaming.plan.state_plan import (
    StreamProblem,
    least_state_bytes,
    most_copied_gradients,
)

__all__ = ["LEAST", "in_place_s", "without_overflow"]

LEAST = ((2, 1), (2, 0), (1, 1), (1, 0), (0, 1), (0, 0))
"""Numbers of slots, and of blocks by which activations come back early, to be content with. With
fewer, the step waits for copies; without a slot, state is updated in host memory."""

_READS = 8
"""How often a pass reads what has no room, after it was written once. Sums and activation functions
do so once; a matrix product reads an operand for each 128 or so columns of its result."""


def in_place_s(size_bytes: int, hardware: Hardware) -> float:
    """Time by which a pass is longer that uses so much over the link."""
    read_s = _READS * size_bytes / hardware.mapped_read_bytes_per_s
    return size_bytes / hardware.mapped_write_bytes_per_s + read_s


def without_overflow(
    problem: StreamProblem, fewest_slots: int, least_ahead: int
) -> tuple[StreamProblem, int]:
    """A problem that fits its budget: what has no room takes time, and counts no more.

    Returns
    -------
    tuple
        The problem, and the most bytes that have no room at a time.
    """
    hardware, count = problem.hardware, len(problem.units)
    least = replace(
        problem,
        fewest_slots=fewest_slots,
        least_ahead=least_ahead,
        copied_gradients=most_copied_gradients(problem),
        adds_at_home=True,
    )
    state_bytes, memory = least_state_bytes(least), least.memory
    room_bytes = max(0, problem.budget_bytes - state_bytes)

    def over(moments: Sequence[int]) -> list[int]:
        return [max(0, size_bytes - room_bytes) for size_bytes in moments]

    def longer_s(seconds: float, size_bytes: int) -> float:
        """Of a pass. What is outside of blocks is used in the model's own."""
        return seconds + in_place_s(size_bytes, hardware) if seconds else 0.0

    passes = over(memory.by_moment(len(memory.can_leave), least_ahead).tolist())
    (between,) = over([memory.step_bytes])
    units = [
        replace(
            unit,
            forward_peak_bytes=unit.forward_peak_bytes - forward,
            backward_peak_bytes=unit.backward_peak_bytes - backward,
            forward_s=longer_s(unit.forward_s, forward),
            backward_s=longer_s(unit.backward_s, backward),
        )
        for unit, forward, backward in zip(
            problem.units, passes[:count], passes[count:][::-1], strict=True
        )
    ]
    step_bytes, update_bytes = problem.step_peak_bytes - between, problem.update_peak_bytes
    most_bytes = problem.most_state_bytes
    fitting = replace(
        problem,
        units=units,
        budget_bytes=max(problem.budget_bytes, state_bytes),
        other_s=problem.other_s + in_place_s(between, hardware),
        step_peak_bytes=step_bytes,
        update_peak_bytes=None if update_bytes is None else min(update_bytes, step_bytes),
        most_state_bytes=None if most_bytes is None else max(most_bytes, state_bytes),
        fewest_slots=fewest_slots,
        least_ahead=least_ahead,
        adds_at_home=True,
    )
    more_bytes = fitting.budget_bytes - problem.budget_bytes
    return fitting, more_bytes + max([between, *passes])
