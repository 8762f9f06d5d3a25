"""Programs of the systems that people use have the same losses under `umem run`, on the CPU.

There umem cannot take over, and ``--fallback`` leaves torch's own allocator in place. What is
shown is that the command starts programs as Python or torchrun does, and that the programs and the
matrix work.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

ROOT = Path(__file__).resolve().parents[1]
SYSTEMS = ("hf_trainer_sft", "hf_trainer_device_map", "ddp", "trl_sft", "deepspeed_zero2")
"""By Python and by torchrun; `make systems` and tests/gpu/test_systems.py run all of them."""


def matrix(*arguments: str) -> str:
    """Output of the matrix's command."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests" / "systems" / "matrix.py"), *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT / "benchmarks")},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("system", SYSTEMS)
def test_losses_equal_stocks(system: str, tmp_path: Path) -> None:
    file = tmp_path / "systems.jsonl"
    matrix(
        *("--cpu", "--size", "tiny", "--deterministic"),
        *("--systems", system, "--output", str(file)),
    )
    header, *rows = map(json.loads, file.read_text().splitlines())
    assert header["benchmark"] == "systems"
    found: dict[str, dict[str, Any]] = {row["variant"]: row for row in rows}
    stock = found["stock"]
    if stock["state"] == "not installed":
        pytest.skip(f"{system}: {stock['reason']}")
    assert len(stock["losses_hex"]) == header["settings"]["steps"]
    assert len(set(stock["losses_hex"])) > 1
    assert found["stock-again"]["losses_hex"] == stock["losses_hex"]
    assert found["umem-fallback"]["losses_hex"] == stock["losses_hex"]


def test_the_table_of_a_results_file(tmp_path: Path) -> None:
    gib = 1 << 30
    machine = {"gpu": "a card", "driver": "580.1"}
    header = {
        "format": "umem-bench-2",
        "benchmark": "systems",
        "date": None,
        "commit": None,
        "umem": "0.1.0",
        "machine": machine,
        "packages": {"torch": "2.11.0"},
        "settings": {"size": "small", "steps": 3, "deterministic": 1, "budget_percent": 60},
    }
    stock = {
        "system": "ddp",
        "variant": "stock",
        "state": "measured",
        "steps_s": [1.0, 1.0],
        "losses_hex": ["0x1p+1", "0x1p+0"],
        "card_peak_bytes": 11 * gib,
        "outside_bytes": gib,
    }
    same = {
        **stock,
        "variant": "umem",
        "steps_s": [9.0, 1.25],
        "card_peak_bytes": 7 * gib,
        "plan_running": True,
        "budget_bytes": 6 * gib,
        "notes": ["it is slow"],
    }
    other = {
        **stock,
        "variant": "umem-budget",
        "losses_hex": ["0x1p+1", "0x1p+2"],
        "plan_running": False,
        "budget_bytes": 6 * gib,
    }
    lacking = {"state": "not installed", "reason": "it lacks trl", "system": "trl_sft"}
    rows = [stock, same, other, *(lacking | {"variant": it} for it in ("stock", "umem"))]
    file = tmp_path / "systems.jsonl"
    file.write_text("".join(json.dumps(it) + "\n" for it in (header, *rows)))
    shown = matrix("--report", str(file), "--markdown")
    cells = [line.strip("| ").split(" | ") for line in shown.splitlines() if line.startswith("|")]
    assert [it[:4] for it in cells if it[0] == "ddp"] == [
        ["ddp", "stock", "—", "100 %"],
        ["ddp", "umem", "equal", "80 %"],
        ["ddp", "umem-budget", "differ from step 2 on", "100 %"],
    ]
    assert [it[4:7] for it in cells if it[:2] == ["ddp", "umem"]] == [
        ["7 GiB (1 GiB)", "6 GiB", "yes"]
    ]
    assert [it[4:7] for it in cells if it[:2] == ["ddp", "umem-budget"]] == [
        ["11 GiB (1 GiB), over its budget", "6 GiB", "no"]
    ]
    assert [it[1:3] for it in cells if it[0] == "trl_sft"] == [
        ["stock", "not installed: it lacks trl"]
    ]
    assert ["ddp, umem", "6 GiB", "note", "it is slow"] in cells
