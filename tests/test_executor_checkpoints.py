"""What a checkpoint keeps of each block lies outside of blocks, and moves all the same."""

from __future__ import annotations

import pytest
import torch
from managed_training import MIB, Checkpointed, Net, Training

from umem.executor import Manager
from umem.executor.program import MODEL, Program

pytestmark = pytest.mark.usefixtures("one_thread")


class Deep(Checkpointed):
    """Has more layers than a budget takes the inputs of."""

    def __init__(self) -> None:
        super().__init__(8)


class Reentrant(Deep):
    """By the older way, which keeps the inputs in a node of its own."""

    use_reentrant = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.requires_grad_())


def program_of(manager: Manager) -> Program:
    program = manager._runner.program
    assert program is not None, manager.status()
    return program


@pytest.mark.parametrize("model", [Deep, Reentrant])
def test_inputs_of_checkpointed_blocks_leave_and_come_back(model: type[Net]) -> None:
    plain, managed = Training(model), Training(model)
    manager = managed.manage("planned", 56 * MIB)
    for training in (plain, managed):
        training.steps(12, rows=4)
    assert managed.losses == plain.losses
    assert all(map(torch.equal, managed.model.parameters(), plain.model.parameters()))
    status = manager.status()
    assert (status.diverged_steps, status.wait_timeouts) == (0, 0)
    assert status.steps > 0
    copied = program_of(manager).copied
    assert copied[MODEL, 0]
    moved = manager.store.statistics
    assert moved.bytes_out == moved.bytes_in > 0
    assert moved.late_fetches == 0


@pytest.mark.parametrize("planner", ["lookahead", "fault"])
def test_as_pages_too(planner: str) -> None:
    plain, managed = Training(Deep), Training(Deep)
    manager = managed.manage(planner, 56 * MIB)
    for training in (plain, managed):
        training.steps(12, rows=4)
    assert managed.losses == plain.losses
    assert program_of(manager).paged[MODEL, 0]
    assert manager.status().diverged_steps == 0
