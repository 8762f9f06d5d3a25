"""What is on the device beside a recorded step's own tensors."""

from __future__ import annotations

from umem.capture.live.memory_tracker import StepMemory
from umem.capture.live.trace_builder import outside_bytes
from umem.capture.storages import BEFORE, Storage
from umem.core.classes import TensorClass

MIB = 1 << 20


def look(start_mib: list[int]) -> StepMemory:
    """Three phases with a weight of 4 MiB, and an activation of 2 MiB made in the first."""
    return StepMemory(
        labels=("forward", "backward", "optimizer"),
        storages=(
            Storage("weight", 4 * MIB, TensorClass.WEIGHTS, BEFORE),
            Storage("activation", 2 * MIB, TensorClass.ACTIVATIONS, 0, 2),
        ),
        accesses=({}, {}, {}),
        optimizer_parts={},
        saves=(),
        peak_bytes=tuple(20 * MIB for _ in start_mib),
        start_bytes=tuple(mib * MIB for mib in start_mib),
    )


def test_what_is_there_in_all_phases_and_in_no_tensor_is_outside() -> None:
    assert outside_bytes(look([4 + 6, 4 + 2 + 6, 4 + 6])) == 6 * MIB
    # What is there in some phases is the step's own.
    assert outside_bytes(look([4, 4 + 2 + 6, 4 + 6])) == 0


def test_without_an_allocator_nothing_is_known_to_be_outside() -> None:
    assert outside_bytes(look([])) == 0
