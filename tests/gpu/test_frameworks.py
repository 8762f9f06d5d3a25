"""Hugging Face's Trainer, Lightning and accelerate have the same losses under umem."""

from __future__ import annotations

import importlib.util
import os
from typing import Any

import pytest
from gpu_jobs import DETERMINISTIC, Job, Start

NEEDED = {
    "trainer": ("transformers", "accelerate"),
    "lightning": ("transformers", "lightning"),
    "accelerate": ("transformers", "accelerate"),
}


@pytest.fixture(scope="module")
def jobs(start: Start) -> dict[tuple[str, str], Job]:
    """Every installed framework, under both allocators, all at once."""
    return {
        (framework, allocator): start(
            "frameworks.py",
            framework,
            allocator,
            **DETERMINISTIC,
            # With more, the Trainer would spread the batch.
            CUDA_VISIBLE_DEVICES=os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0],
        )
        for framework, modules in NEEDED.items()
        if all(importlib.util.find_spec(module) for module in modules)
        for allocator in ("stock", "umem")
    }


@pytest.fixture(params=NEEDED)
def facts(
    request: pytest.FixtureRequest, jobs: dict[tuple[str, str], Job]
) -> dict[str, dict[str, Any]]:
    """The reports of one framework's runs, by allocator."""
    framework = request.param
    if (framework, "umem") not in jobs:
        pytest.skip(f"{framework} needs {' and '.join(NEEDED[framework])}")
    return {allocator: jobs[framework, allocator].facts() for allocator in ("stock", "umem")}


def test_losses_equal_those_of_the_stock_allocator(facts: dict[str, dict[str, Any]]) -> None:
    losses = facts["umem"]["losses"]
    assert len(losses) >= 4
    assert losses == facts["stock"]["losses"]


def test_forward_allocates_activations(facts: dict[str, dict[str, Any]]) -> None:
    """In every step, also if a framework runs forward inside the optimizer's step."""
    found = facts["umem"]["logits"]
    assert len(found) >= 4
    assert found == ["activations"] * len(found)


def test_weights_are_the_models(facts: dict[str, dict[str, Any]]) -> None:
    if "weights" not in facts["umem"]:
        pytest.skip("this framework leaves the model on the CPU")
    held, expected = facts["umem"]["weights"]
    # A framework may keep a little from before the first forward, such as a running loss.
    assert expected <= held <= expected + 64 * 1024


def test_the_trainers_memory_metrics(jobs: dict[tuple[str, str], Job]) -> None:
    if ("trainer", "umem") not in jobs:
        pytest.skip("needs transformers and accelerate")
    stock, umem = (
        jobs["trainer", allocator].facts()["memory_metrics"] for allocator in ("stock", "umem")
    )
    assert set(umem) == set(stock) != set()
    assert umem["train_mem_gpu_alloc_delta"] > 0
    assert umem["train_mem_gpu_peaked_delta"] > 0
