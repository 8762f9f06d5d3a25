"""Detection of the machine at hand, and its measurement in the short form."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from other_process import run_python

from umem.core.units import parse_bytes
from umem.hardware import load_hardware
from umem.hardware.capabilities import detect
from umem.hardware.load import describe_machine


def test_detect_describes_this_machine() -> None:
    hardware = load_hardware("detect")
    properties = torch.cuda.get_device_properties(0)
    assert hardware.name == properties.name
    assert hardware.device_bytes == properties.total_memory
    assert hardware.one_pool == bool(properties.is_integrated)
    assert hardware.sources["device_bytes"].text == "detected"
    assert hardware.one_pool or hardware.to_host_bytes_per_s > 0
    assert hardware.to_device_bytes_per_s <= hardware.link_bytes_per_s
    assert load_hardware("detect") == hardware


MEASURE = """
import json
from umem.cuda import bindings
from umem.hardware.capabilities import detect
from umem.hardware.measure import measure, profile_text, save_profile

asked, titles, allocate = [], [], bindings.allocate_managed

def note(size_bytes):
    asked.append(size_bytes)
    return allocate(size_bytes)

bindings.allocate_managed = note
machine = detect()
found = {one.figure: one for one in measure(machine, titles.append, short=True)}
path = save_profile(profile_text(machine, found), None, machine.device_name)
values = {name: one.value for name, one in found.items()}
print(json.dumps({"managed": asked, "titles": titles, "path": str(path), "values": values}))
"""
"""A process of its own: this one has umem's allocator."""


@pytest.mark.parametrize("limit", ["32MiB", "8MiB"])
def test_measured_figures_become_those_of_detect(
    limit: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setenv("UMEM_MANAGED_LIMIT", limit)
    done = json.loads(run_python("-c", MEASURE))
    values, machine = done["values"], detect()
    assert len(done["titles"]) > 8
    assert {
        *("flops_per_s.fp32", "flops_per_s.bf16", "memory_bytes_per_s", "unvectorised_bytes_per_s"),
        *("attention_flops_per_s", "attention_backward_flops_per_s", "launch_s"),
        *("copy_to_device_bytes_per_s", "copy_to_host_bytes_per_s", "copy_link_bytes_per_s"),
        "host_update_bytes_per_s",
    } <= set(values)
    assert all(value > 0 or name == "fault_service_s" for name, value in values.items())
    assert sum(done["managed"]) <= parse_bytes(limit)
    has_pages = machine.concurrent_managed_access and not machine.integrated and limit != "8MiB"
    assert ("fault_service_s" in values) is has_pages

    assert Path(done["path"]).is_relative_to(tmp_path)
    here, card = load_hardware("detect"), describe_machine(machine, None, measured=False)
    assert here.rates == "measured"
    assert here.memory_bytes_per_s == pytest.approx(values["memory_bytes_per_s"], rel=1e-4)
    if card.rates != "unknown":  # a tenth of what the card sustains would be a mistake
        for figure in ("memory_bytes_per_s", "copy_to_device_bytes_per_s", "attention_flops_per_s"):
            assert 0.1 < getattr(here, figure) / getattr(card, figure) < 3
        assert 0.1 < here.flops_per_s["bf16"] / card.flops_per_s["bf16"] < 3


def test_the_command_writes_a_profile_that_others_take(tmp_path: Path) -> None:
    target = tmp_path / "mine.yaml"
    umem = [sys.executable, "-m", "umem"]
    words = ["hardware", "measure", "--short", "--output", str(target)]
    done = subprocess.run([*umem, *words], capture_output=True, text=True, check=True)
    assert str(target) in done.stdout
    words = ["fit", "llama-3.2-1b", "--gpu", str(target), "--json"]
    done = subprocess.run([*umem, *words], capture_output=True, text=True, check=True)
    (row,) = json.loads(done.stdout)["results"]
    assert row["rates"] == "measured"
    assert row["ways"]["stock"]["step_s"] > 0 or not row["ways"]["stock"]["fits"]
