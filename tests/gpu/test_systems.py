"""Programs of the systems and fields that people use: losses, plan and memory on a GPU.

Each is a row of the matrix of tests/systems, run by `umem run`, with a small model.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from matrix import FIELDS, is_installed
from matrix import SYSTEMS as EVERY

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

ROOT = Path(__file__).resolve().parents[2]
DIVIDED = "transformer_lens_two_devices"
"""A model on two GPUs of one process, which keeps its weights where they are."""

INFERENCE = ("transformer_lens_forward", "transformer_lens_cache", "hf_generate", DIVIDED)
TWO_GPUS = ("megatron_core_tensor", "megatron_core_pipeline", DIVIDED)
SYSTEMS = (
    *("hf_trainer_sft", "hf_trainer_device_map", "hf_trainer_lora", "hf_trainer_qlora", "trl_sft"),
    *("accelerate_loop", "lightning_fit", "torch_compile", "deepspeed_zero2", "deepspeed_zero3"),
    *("fsdp2", "ddp"),
    *("megatron_core", "megatron_core_tensor", "megatron_core_pipeline"),
    *INFERENCE,
    *FIELDS,
)
SEARCHED = "residual_net_search"
"""Its bits are those of the algorithms that cuDNN's search finds, which umem leaves off."""

UNPLANNED = {
    "lstm_by_hand": "without an optimizer no training is found",
    "lstm": "the loss takes most of the memory",
    "graph_net": "the operands of one operator take most of the memory",
}

VARIANTS = ("stock", "stock-again", "umem", "umem-budget")
MARGIN_BYTES = 64 << 20

Rows = dict[str, dict[str, Any]]


@pytest.fixture(scope="module", params=SYSTEMS)
def rows(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Rows:
    """A system's rows by variant. Skips if it is not installed, or there are too few GPUs."""
    ranks = 2 if request.param in TWO_GPUS else 1
    if torch.cuda.device_count() < ranks:
        pytest.skip("needs two GPUs")
    if lacking := [it for it in EVERY[request.param].packages if not is_installed(it)]:
        pytest.skip(f"it lacks {', '.join(lacking)}")
    file = tmp_path_factory.mktemp("systems") / "systems.jsonl"
    folders = (ROOT / "benchmarks", ROOT / "tests" / "support")
    paths = (*map(str, folders), os.environ.get("PYTHONPATH", ""))
    done = subprocess.run(
        [
            *(sys.executable, str(ROOT / "tests" / "systems" / "matrix.py"), "--deterministic"),
            *("--systems", request.param, "--size", "small", "--output", str(file)),
            *("--ranks", str(ranks), "--forked"),
            # Of one process NVML tells the memory, whatever else the card is used for.
            *(() if ranks > 1 else ("--shared",)),
        ],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
        capture_output=True,
        text=True,
    )
    assert file.exists(), done.stdout + done.stderr
    found = [json.loads(line) for line in file.read_text().splitlines()[1:]]
    by_variant: Rows = {row["variant"]: row for row in found}
    stock = by_variant["stock"]
    assert stock["state"] == "measured", stock["reason"]
    return by_variant


@pytest.mark.parametrize("variant", VARIANTS[1:])
def test_losses_equal_stocks(rows: Rows, variant: str) -> None:
    row = rows[variant]
    assert row["state"] == "measured", row["reason"]
    if row["system"] == SEARCHED:
        assert variant == "stock-again" or any("cudnn.benchmark" in it for it in row["notes"])
        return
    assert row["losses_hex"] == rows["stock"]["losses_hex"]


def test_a_plan_runs_within_a_budget(rows: Rows) -> None:
    row = rows["umem-budget"]
    if row["system"] == DIVIDED:
        assert row["state"] == "measured", row["reason"]
        assert not row["plan_running"]
        assert any("not streamed" in it and "among 2 GPUs" in it for it in row["notes"])
        return
    if row["system"] in INFERENCE:
        pytest.skip("only trainings are planned")
    if row["system"] in UNPLANNED:
        pytest.skip(UNPLANNED[row["system"]])
    assert row["state"] == "measured", row["reason"]
    assert row["plan_running"], row.get("notes")


def test_the_card_holds_the_budget_and_the_base(rows: Rows) -> None:
    row = rows["umem-budget"]
    assert row["state"] == "measured", row["reason"]
    if row["card_peak_bytes"] is None:
        pytest.skip("NVML does not tell processes apart")
    more_bytes = row["card_peak_bytes"] - row["budget_bytes"] - rows["stock"]["outside_bytes"]
    assert more_bytes <= MARGIN_BYTES
