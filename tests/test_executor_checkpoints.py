"""Inputs that a checkpoint keeps of each block, which are saved outside of blocks."""

from __future__ import annotations

import pytest
import torch
from managed_training import MIB, Checkpointed, Net, Training, program_of

from umem.executor.program import MODEL

pytestmark = pytest.mark.usefixtures("one_thread")


class Deep(Checkpointed):
    """So many layers that their inputs exceed the budget."""

    def __init__(self) -> None:
        super().__init__(8)


class Reentrant(Deep):
    """Reentrant checkpoints keep the inputs in their own autograd node."""

    use_reentrant = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.requires_grad_())


@pytest.mark.parametrize("model", [Deep, Reentrant])
def test_inputs_of_checkpointed_blocks_are_copied_out_and_back(model: type[Net]) -> None:
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
def test_inputs_of_checkpointed_blocks_move_as_pages(planner: str) -> None:
    plain, managed = Training(Deep), Training(Deep)
    manager = managed.manage(planner, 56 * MIB)
    for training in (plain, managed):
        training.steps(12, rows=4)
    assert managed.losses == plain.losses
    assert program_of(manager).paged[MODEL, 0]
    assert manager.status().diverged_steps == 0
