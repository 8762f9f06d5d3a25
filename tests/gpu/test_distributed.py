"""A process for each GPU under torchrun: DDP and FSDP2, swapped and managed within a budget."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu_jobs import DETERMINISTIC, Job, Start

pytestmark = [
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]

RANKS = 2
STEPS = 24
SHARE = 0.6
WRAPPERS = ("ddp", "fsdp2")

TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS))
UMEM_RUN = (
    "--no-python",
    str(Path(sys.executable).with_name("umem")),
    "run",
    "--policy",
    "managed",
)


@pytest.fixture(scope="module")
def stock(start: Start) -> dict[str, Any]:
    """What each rank of a stock run says, by wrapper."""
    jobs = {
        wrapper: start("ranks.py", wrapper, str(STEPS), launcher=TORCHRUN, **DETERMINISTIC)
        for wrapper in WRAPPERS
    }
    return {wrapper: job.facts() for wrapper, job in jobs.items()}


@pytest.fixture(scope="module")
def managed(start: Start, stock: dict[str, Any]) -> dict[str, Job]:
    """The same under umem, by wrapper, all at once."""
    return {
        wrapper: start(
            "ranks.py",
            wrapper,
            str(STEPS),
            launcher=(*TORCHRUN, *UMEM_RUN),
            UMEM_DEVICE_BUDGET=str(int(SHARE * max(it["peak_bytes"] for it in stock[wrapper]))),
            UMEM_MANAGED_LIMIT="1536MiB",
            **DETERMINISTIC,
        )
        for wrapper in WRAPPERS
    }


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_each_rank_trains_within_its_budget(
    wrapper: str, stock: dict[str, Any], managed: dict[str, Job]
) -> None:
    ranks = managed[wrapper].facts()
    assert len(ranks) == RANKS
    for run, alone in zip(ranks, stock[wrapper], strict=True):
        assert run["swapped"]
        assert not alone["swapped"]
        assert run["state"] == "running", run["reason"]
        assert run["steps"] > 0
        assert run["diverged_steps"] == 0
        assert run["wait_timeouts"] == 0
        assert run["failures"] == []
        assert run["moved_bytes"] + run["copied_bytes"] > 0
        assert run["losses"] == alone["losses"]
    assert ranks[0]["losses"] != ranks[1]["losses"]


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_each_rank_knows_its_part_by_class(wrapper: str, managed: dict[str, Job]) -> None:
    for run in managed[wrapper].facts():
        trained_bytes, found = run["trained_bytes"], run["by_class"]
        assert found["weights"] >= trained_bytes > 0
        assert found["gradients"] >= trained_bytes
        assert found["optimizer_state"] >= 2 * trained_bytes
