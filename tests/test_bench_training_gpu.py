"""The training benchmark on a GPU, as short as it can be: that it measures, not what."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from umem_bench.train.results import read_training

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

VARIANTS = (
    "umem-planned",
    "umem-backward-step",
    "umem-optimizer-host",
    "backward-step",
    "save-on-cpu",
    "stock-again",
)


def test_variants_train_to_the_same_losses_within_a_budget(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    path = tmp_path / "training.json"
    words = ["--workload", "activations", "--methods", "sft",
             "--variants", ",".join(VARIANTS),
             "--budgets", "60", "--batch", "1", "--seq", "1024", "--steps", "3",
             "--deterministic", "--output", str(path)]  # fmt: skip

    done = subprocess.run(
        [str(Path(sys.executable).with_name("umem")), "bench", "training", *words],
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stdout + done.stderr
    run = read_training(path)
    assert run.machine.gpu
    assert run.device_flops_per_s
    by_variant = {it.variant: it for it in run.outcomes}
    assert set(by_variant) == {"stock", *VARIANTS}
    for it in run.outcomes:
        assert len(it.steps_s) == 3
        assert 1e-3 < min(it.steps_s) < 10
        assert it.sm_clock_mhz is not None
        assert 100 < it.sm_clock_mhz < 5000
        # One that settles for longer has the losses of more steps.
        pairs = list(zip(it.losses_hex, by_variant["stock"].losses_hex, strict=False))
        assert len(pairs) >= 6
        assert [mine for mine, _ in pairs] == [its for _, its in pairs], it.variant
    stock = by_variant["stock"]
    assert stock.peak_allocated_bytes is not None
    for planned in (by_variant["umem-planned"], by_variant["umem-backward-step"]):
        assert planned.budget_bytes == int(0.6 * stock.peak_allocated_bytes)
        assert planned.plan_running
        assert planned.resident_bytes is not None
        assert 0 < planned.resident_bytes <= planned.budget_bytes
        assert planned.hinted is not None
        assert planned.hinted.predicted_bytes is not None
    mapped = by_variant["umem-optimizer-host"]
    assert mapped.optimizer_state_bytes == stock.optimizer_state_bytes
    assert mapped.optimizer_state_bytes is not None
    assert mapped.host_state_bytes is not None
    assert mapped.host_state_bytes >= mapped.optimizer_state_bytes
    assert mapped.mapped_bytes_per_s is not None
    assert 5e9 < mapped.mapped_bytes_per_s < 1e12
    in_backward = by_variant["backward-step"]
    assert in_backward.optimizer_state_bytes == stock.optimizer_state_bytes
    assert in_backward.peak_allocated_bytes is not None
    # No more than the same: the peak may come before the first gradient.
    assert in_backward.peak_allocated_bytes <= stock.peak_allocated_bytes
    assert by_variant["save-on-cpu"].peak_allocated_bytes is not None
    assert by_variant["save-on-cpu"].peak_allocated_bytes < stock.peak_allocated_bytes
    for it in run.outcomes:
        if it.variant.startswith("umem-") and it.profile is None:
            (lost,) = (note for note in it.notes if "unified-memory figures are not known" in note)
            pytest.skip(f"{it.variant}: {lost}")
    for planned in (by_variant["umem-planned"], by_variant["umem-backward-step"]):
        assert planned.profile is not None
        assert planned.profile.predicted_bytes is not None
