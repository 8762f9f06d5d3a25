"""`examples/finetune_llama.py` on a GPU: umem changes where memory is, and not one bit of the loss.

One process can swap its allocator once, so each run is a process; runs are shared by the tests.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

# peft is not imported here: it imports bitsandbytes, which starts CUDA before the tests' swap.
pytestmark = [
    pytest.mark.skipif(not find_spec("peft"), reason="peft is not installed"),
]

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "finetune_llama.py"
VARIANTS = {
    "lora": ("--mode", "lora", "--steps", "30"),
    "sft": ("--mode", "sft", "--steps", "30"),
    "accumulated": (
        *("--mode", "sft", "--steps", "5"),
        *("--grad-accumulation", "2", "--checkpointing"),
    ),
}
Run = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Run the example once per set of arguments; its results and what it printed."""
    folder = tmp_path_factory.mktemp("finetune")
    done: dict[tuple[str, ...], dict[str, Any]] = {}

    def run_once(variant: str, *arguments: str, planner: str = "") -> dict[str, Any]:
        key = (*VARIANTS[variant], *arguments)
        if (*key, planner) not in done:
            path = folder / f"{len(done)}.json"
            process = subprocess.run(
                [sys.executable, str(EXAMPLE), *key, "--deterministic", "--json", str(path)],
                env={
                    **os.environ,
                    "UMEM_MANAGED_LIMIT": "8GiB",
                    **({"UMEM_PLANNER": planner} if planner else {}),
                },
                capture_output=True,
                text=True,
                timeout=300,
            )
            assert process.returncode == 0, process.stdout + process.stderr
            done[*key, planner] = {**json.loads(path.read_text()), "output": process.stdout}
        return done[*key, planner]

    return run_once


@pytest.mark.parametrize("variant", VARIANTS)
def test_bits_equal_the_stock_allocators(run: Run, variant: str) -> None:
    stock, umem = run(variant, "--policy", "stock"), run(variant)
    assert umem["policy"] == umem["mode"]
    assert umem["losses"] == stock["losses"]
    assert umem["parameters_sha256"] == stock["parameters_sha256"]


@pytest.mark.parametrize("mode", ["lora", "sft"])
def test_loss_falls(run: Run, mode: str) -> None:
    losses = run(mode)["losses"]
    assert sum(losses[-3:]) / 3 < losses[0] - 1.0


@pytest.mark.parametrize("mode", ["lora", "sft"])
def test_memory_by_class_is_the_models(run: Run, mode: str) -> None:
    results = run(mode)
    parameters, classes = results["parameter_bytes"], results["memory"]["by_class"]
    held = {name: memory["requested_bytes"] for name, memory in classes.items()}
    assert held["weights"] == parameters["trained"]
    assert held["frozen_weights"] == parameters["frozen"]
    # AdamW's two moments in the weights' type, and a float32 step count for each.
    assert held["optimizer_state"] == 2 * parameters["trained"] + 4 * results["trained_count"]
    # Dropped at the end of each step.
    assert held["gradients"] == 0
    assert classes["gradients"]["peak_allocated_bytes"] >= parameters["trained"]
    assert classes["activations"]["peak_allocated_bytes"] > 0
    for memory in classes.values():
        assert memory["requested_bytes"] <= memory["allocated_bytes"]
        assert memory["allocated_bytes"] <= memory["peak_allocated_bytes"]
    assert results["memory"]["peak_allocated_bytes"] <= results["memory"]["peak_reserved_bytes"]


def test_checkpointing_keeps_fewer_activations(run: Run) -> None:
    plain, checkpointed = (
        run(variant)["memory"]["by_class"]["activations"]["peak_allocated_bytes"]
        for variant in ("sft", "accumulated")
    )
    assert checkpointed < plain


def test_a_budget_below_the_working_set_changes_no_loss(run: Run) -> None:
    """Without a planner: the allocator keeps the budget, by what it maps on the host."""
    stock = run("sft", "--policy", "stock")
    # Not all of the working set is managed: tensors below the policy's min_bytes are not.
    budget_bytes = stock["memory"]["peak_allocated_bytes"] // 4
    tight = run("sft", "--policy", "managed", "--budget", str(budget_bytes), planner="none")
    assert "over the budget" in tight["output"]
    assert tight["losses"] == stock["losses"]
    assert tight["parameters_sha256"] == stock["parameters_sha256"]
