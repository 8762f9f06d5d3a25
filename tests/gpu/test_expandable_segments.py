"""Plain device memory in expandable segments: the card holds what the allocator counts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from gpu_jobs import DETERMINISTIC, Start

MIB = 1 << 20
BUDGET_MIB = 1536  # 1,280 MiB of tensors, and what lies between them

PLAIN = """
name: plain
defaults: {kind: device}
"""


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> str:
    path: Path = tmp_path_factory.mktemp("policies") / "plain.yaml"
    path.write_text(PLAIN)
    return str(path)


@pytest.fixture(scope="module")
def changing(start: Start, policy: str) -> Any:
    """The facts of one job, which has ended before another one uses the card: NVML counts all."""
    job = start("expandable.py", "changing", policy, UMEM_DEVICE_BUDGET=f"{BUDGET_MIB}MiB")
    facts = job.facts()
    if facts["expandable"] == 0:
        pytest.skip("the driver maps no physical memory by handles")
    return facts


def test_the_card_holds_what_is_counted(changing: Any) -> None:
    # Tables of pages, and what the driver keeps for kernels.
    assert max(map(abs, changing["differences"])) <= 16 * MIB, changing["differences"]
    # A tensor of 8 MiB, and the graph's: one in a segment of 20 MiB, and a small segment.
    assert changing["left_bytes"] <= 32 * MIB


def test_changing_sizes_stay_within_the_budget(changing: Any) -> None:
    assert changing["budget_peak_bytes"] <= BUDGET_MIB * MIB
    assert changing["unmapped"] > 0  # the budget was met, and handles moved
    assert changing["broken"] == 0


def test_streams_share_a_budget_in_turns(start: Start, policy: str) -> None:
    facts = start(
        "expandable.py", "borrowing", policy, UMEM_DEVICE_BUDGET=f"{BUDGET_MIB}MiB", **DETERMINISTIC
    ).facts()
    assert facts["wrong"] == 0
    assert facts["calls"] == 0  # each one uses what the other one has freed, where it is
    assert facts["spilled_bytes"] == 0
    assert facts["budget_peak_bytes"] <= BUDGET_MIB * MIB


def test_a_training_is_stocks_to_the_last_bit(start: Start, policy: str) -> None:
    mapped = start("expandable.py", "train", policy, **DETERMINISTIC).facts()
    stock = start("expandable.py", "train", "stock", **DETERMINISTIC).facts()
    assert mapped["losses"] == stock["losses"]
    assert mapped["digest"] == stock["digest"]
    # Steps of one size map and unmap nothing.
    assert mapped["calls"][-1] == mapped["calls"][-6]
