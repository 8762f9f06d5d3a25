"""`umem verify` on a GPU, in a few minutes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

# They are not imported here: peft imports bitsandbytes, which starts CUDA before the tests' swap.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (find_spec("peft") and find_spec("transformers")), reason="peft is not installed"
    ),
]


def test_verify_predicts_and_measures_within_its_time(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "umem", "verify", "--minutes", "6", "--output", str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
        timeout=480,
        env={**os.environ, "UMEM_MANAGED_LIMIT": "8GiB"},
    )
    print(done.stdout, (tmp_path / "umem-verify.md").read_text(), sep="\n")
    assert done.returncode == 0, done.stdout + done.stderr
    record = json.loads((tmp_path / "umem-verify.json").read_text())
    assert record["state"] == "finished"
    assert "copy_to_device_bytes_per_s" in record["hardware"]
    rows = record["rows"] + record["managed"]
    assert len(rows) == 10
    assert {it["state"] for it in rows} == {"measured"}
    assert all(it["predicted_s"] > 0 for it in record["rows"])
    # Bits of two streamed trainings and two in managed memory; budgets of three and a generation.
    assert len(record["checks"]) == 8
    assert all(it["passed"] for it in record["checks"])
    assert all(it["plan_running"] for it in rows if it.get("plan_running") is not None)
