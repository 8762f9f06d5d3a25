"""The benchmarks on a GPU, as short as they can be: that they measure, not what."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from umem_bench.results import ALLOCATORS, Run, read_run

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

UMEM = str(Path(sys.executable).with_name("umem"))


def bench(output: Path, *words: str) -> Run:
    done = subprocess.run(
        [UMEM, "bench", *words, "--quick", "--rounds", "2", "--output", str(output)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "UMEM_MANAGED_LIMIT": "4GiB"},
    )
    assert done.returncode == 0, done.stderr
    return read_run(output)


def test_every_allocator_allocates(tmp_path: Path) -> None:
    run = bench(tmp_path / "alloc.json", "alloc")

    assert run.machine.gpu
    assert run.machine.driver
    assert {it.allocator for it in run.measurements} == set(ALLOCATORS)
    for measurement in run.measurements:
        assert len(measurement.rounds_s) == 2
        assert 1e-7 < min(measurement.rounds_s) < 1


def test_every_allocator_trains_to_the_same_loss(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("peft")

    run = bench(tmp_path / "step.json", "step", "--size", "small")

    for case in ("LoRA, small", "SFT, small"):
        row = {it.allocator: it for it in run.measurements if it.case == case}
        assert set(row) == set(ALLOCATORS)
        assert len({it.loss_hex for it in row.values()}) == 1
        for name in ("torch", "umem"):
            reserved_bytes, allocated_bytes = (
                row[name].peak_reserved_bytes,
                row[name].peak_allocated_bytes,
            )
            assert reserved_bytes is not None
            assert allocated_bytes is not None
            assert reserved_bytes >= allocated_bytes > 100 << 20
