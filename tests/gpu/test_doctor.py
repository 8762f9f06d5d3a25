"""The doctor on a machine with a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import torch

RUN = "from umem.cli.doctor import app; app()"


def run_doctor(**variables: str) -> tuple[int, dict[str, Any]]:
    """Exit status and report of a doctor of its own process, with only these variables."""
    unset = ("UMEM_", "PYTORCH_", "CUDA_VISIBLE_DEVICES")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(unset)}
    result = subprocess.run(
        [sys.executable, "-c", RUN, "--json"],
        capture_output=True,
        text=True,
        check=False,
        env=kept | variables,
    )
    return result.returncode, json.loads(result.stdout)


def checks(report: dict[str, Any]) -> dict[str, dict[str, str]]:
    """Every check by name."""
    return {check["name"]: check for section in report["sections"] for check in section["checks"]}


def test_finds_the_gpu() -> None:
    """Every device that torch sees, with its name and managed memory."""
    name = "CUDA_VISIBLE_DEVICES"
    _, report = run_doctor(**{name: os.environ[name]} if name in os.environ else {})
    found = checks(report)
    assert len(report["devices"]) == torch.cuda.device_count()
    for index in range(torch.cuda.device_count()):
        assert torch.cuda.get_device_name(index) in found[f"GPU {index}"]["value"]
        assert found[f"GPU {index} managed memory"]["status"] in ("ok", "warn")
    assert found["driver"]["status"] == "ok"
    assert found["allocator can be swapped"]["status"] == "ok"


def test_exit_status_is_whether_the_swap_works() -> None:
    """The verdict, held against the swap itself."""
    status, report = run_doctor()
    code = (
        "import umem; umem.enable('sft'); import torch; torch.ones(4, device='cuda').sum().item()"
    )
    # A cap keeps a mistake small on a machine with little host memory.
    swap = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"UMEM_MANAGED_LIMIT": "1GiB"},
    )
    assert report["swap_works"] is (swap.returncode == 0), (report["sections"], swap.stderr)
    assert (status == 0) is report["swap_works"]


def test_hidden_gpu() -> None:
    """With no device visible the doctor says so, and why."""
    status, report = run_doctor(CUDA_VISIBLE_DEVICES="")
    assert status == 1
    gpu = checks(report)["GPU"]
    assert gpu["status"] == "fail"
    assert "CUDA_VISIBLE_DEVICES=''" in gpu["why"]
