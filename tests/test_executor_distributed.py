"""Trainings of several processes with a manager each: DDP and FSDP on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from managed_training import MIB, WIDTH, Net, Scale, Training
from rank_processes import WarningLines, meeting, run_ranks_once
from torch import distributed, nn

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not distributed.is_available() or not distributed.is_gloo_available(),
        reason="this torch has no gloo",
    ),
]

RANKS = 2
NUMBERS = RANKS * WIDTH
"""Elements of a weight: each rank's part of it is large enough to move."""

STEPS = 9
BUDGETS = {"DDP": 60 * MIB, "FSDP1": 50 * MIB, "FSDP2": 50 * MIB}
"""Below the memory that a step needs at once, above that of each of its phases."""

WAYS = ("alone", "planned")


def make_model() -> Net:
    return Net(numbers=NUMBERS)


class Ranked(Training):
    """Each rank has its own batches."""

    def batch(self, _rows: int = 2) -> torch.Tensor:
        torch.manual_seed(100 + len(self.losses) + 1000 * distributed.get_rank())
        return torch.randn(1, NUMBERS)


def data_parallel() -> Ranked:
    training = Ranked(make_model)
    training.model = nn.parallel.DistributedDataParallel(training.model)
    return training


def flattened() -> Ranked:
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    training = Ranked(make_model)
    training.model = FullyShardedDataParallel(
        training.model,
        auto_wrap_policy=ModuleWrapPolicy({Scale}),
        use_orig_params=True,
        device_id=torch.device("cpu"),
    )
    training.optimizer = torch.optim.AdamW(training.model.parameters(), lr=1e-3)
    return training


def sharded() -> Ranked:
    from torch.distributed.fsdp import fully_shard

    training = Ranked(make_model)
    for layer in training.model.get_submodule("layers").children():
        fully_shard(layer)
    fully_shard(training.model)
    training.optimizer = torch.optim.AdamW(training.model.parameters(), lr=1e-3)
    return training


MAKERS: dict[str, Callable[[], Ranked]] = {
    "DDP": data_parallel,
    "FSDP1": flattened,
    "FSDP2": sharded,
}


def train(wrapper: str, way: str) -> dict[str, Any]:
    with WarningLines() as warnings:
        training = MAKERS[wrapper]()
        manager = None
        if way != "alone":
            manager = training.manage(budget_bytes=BUDGETS[wrapper])
        training.steps(STEPS)
    found: dict[str, Any] = {"losses": training.losses, "warnings": warnings}
    if manager is not None:
        status, hints = manager.status(), manager.engine.statistics()
        found |= {
            "state": status.state,
            "reason": status.reason,
            "steps": status.steps,
            "diverged_steps": status.diverged_steps,
            "moved_bytes": manager.store.statistics.bytes_out
            + sum(it.moved_bytes for it in hints.counts.values()),
        }
        manager.close()
    return found


def run_rank(rank: int, folder: Path) -> None:
    """The main function of a rank's process: all runs, one after the other."""
    with meeting(rank, folder, RANKS, timeout=timedelta(seconds=60)) as found:
        for wrapper in MAKERS:
            found[wrapper] = {way: train(wrapper, way) for way in WAYS}


Runs = dict[str, dict[str, dict[str, Any]]]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> tuple[Runs, ...]:
    """Results of each rank, by wrapper and way."""
    return tuple(run_ranks_once(run_rank, tmp_path_factory, RANKS))


@pytest.mark.parametrize("wrapper", MAKERS)
def test_each_rank_trains_within_its_budget_as_without_a_manager(
    wrapper: str, ranks: tuple[Runs, ...]
) -> None:
    for runs in ranks:
        alone, run = runs[wrapper]["alone"], runs[wrapper]["planned"]
        assert run["state"] == "running", run
        assert run["diverged_steps"] == 0
        assert run["steps"] > 0
        assert run["moved_bytes"] > 0
        assert len(run["losses"]) == STEPS
        assert run["losses"] == alone["losses"]
    assert ranks[0][wrapper]["planned"]["losses"] != ranks[1][wrapper]["planned"]["losses"]
