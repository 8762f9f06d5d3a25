"""Two GPUs of a host: ranks that share its memory, and two trainings in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gpu_jobs import DETERMINISTIC, Job, Start, under

from umem.hardware.host_memory import PINNED_SHARE

pytestmark = [
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]

MIB = 1 << 20
STEPS, RANK_STEPS = 18, 6
STREAMED_SHARE, MANAGED_SHARE = 0.8, 0.6
HOST_BYTES = 2048 * MIB


@pytest.fixture(scope="module")
def stock(start: Start) -> Any:
    """By device, what a stock training there says."""
    return start("two_cards.py", "both", str(STEPS), **DETERMINISTIC).facts()


def budget_bytes(share: float, stock: Any) -> int:
    return int(share * max(it["peak_bytes"] for it in stock))


@pytest.fixture(scope="module")
def jobs(start: Start, stock: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Job]:
    """Two ranks, and one process with both trainings; all at once."""
    folder = tmp_path_factory.mktemp("ranks")
    ranks = {
        f"rank {number}": start(
            *("two_cards.py", "rank", str(RANK_STEPS), str(number), str(folder), str(HOST_BYTES)),
            **under("sft", budget_bytes(STREAMED_SHARE, stock)),
            LOCAL_WORLD_SIZE="2",
            **DETERMINISTIC,
        )
        for number in (0, 1)
    }
    both = start(
        *("two_cards.py", "both", str(STEPS)),
        **under("managed", budget_bytes(MANAGED_SHARE, stock)),
        **DETERMINISTIC,
    )
    return ranks | {"both": both}


def test_ranks_take_equal_shares_of_the_host(jobs: dict[str, Job]) -> None:
    ranks = [jobs[f"rank {number}"].facts() for number in (0, 1)]
    assert [it["share_bytes"] for it in ranks] == [HOST_BYTES // 2] * 2
    taken = [it["pinned_bytes"] for it in ranks]
    assert all(0.7 * HOST_BYTES / 2 < it <= PINNED_SHARE * HOST_BYTES / 2 for it in taken)
    assert sum(taken) <= PINNED_SHARE * HOST_BYTES


@pytest.mark.parametrize("number", [0, 1])
def test_a_rank_keeps_its_own_budget(number: int, jobs: dict[str, Job], stock: Any) -> None:
    facts = jobs[f"rank {number}"].facts()
    assert facts["losses"] == stock[number]["losses"][:RANK_STEPS]
    assert facts["streamed"] == 1
    assert 0 < facts["budget_peak_bytes"] <= budget_bytes(STREAMED_SHARE, stock)
    assert facts["others_bytes"] == 0


@pytest.mark.parametrize("device", [0, 1])
def test_two_managers_on_two_devices_count_their_own_bytes(
    device: int, jobs: dict[str, Job], stock: Any
) -> None:
    facts = jobs["both"].facts()[device]
    assert facts["losses"] == stock[device]["losses"]
    assert facts["state"] == "running", facts["reason"]
    assert facts["budget_bytes"] == budget_bytes(MANAGED_SHARE, stock)
    assert facts["steps"] > 0
    assert facts["diverged_steps"] == 0
    assert facts["moved_bytes"] + facts["copied_bytes"] > 0
    assert facts["resident"]
