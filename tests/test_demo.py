"""The demo: a prediction for a GH200, and a recorded step sent through the native allocator."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import umem.cli.demo_program
from umem.cli.demo_program import example_path, explain, record_example, replay, run_example
from umem.core.classes import TensorClass
from umem.core.errors import UnsupportedError
from umem.policy import load_policy, preset_names, resolve
from umem.runtime.allocation_stream import AllocationStream
from umem.runtime.state import native_config

pytest.importorskip("transformers")
pytest.importorskip("peft")

DEVICE_BYTES = 8 << 30
WITHOUT_GPU = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}


def _record(mode: str) -> AllocationStream:
    size = ("--layers", "2", "--batch", "2", "--seq", "64")
    return record_example(["--mode", mode, *size])


@pytest.fixture(scope="module", params=["lora", "sft"])
def stream(request: pytest.FixtureRequest) -> AllocationStream:
    return _record(request.param)


def test_recorded_bytes_by_class_are_the_models() -> None:
    lora, sft = _record("lora").class_bytes(), _record("sft").class_bytes()
    # The base: what SFT trains, LoRA freezes.
    base_bytes = sft[TensorClass.WEIGHTS]
    assert lora[TensorClass.FROZEN_WEIGHTS] == base_bytes
    # Two rotary buffers of 16 floats.
    assert lora[TensorClass.OTHER] == sft[TensorClass.OTHER] == 2 * 16 * 4
    hidden, key_value, middle, layers = 256, 128, 688, 2
    attention = 2 * hidden * hidden + 2 * hidden * key_value
    per_layer = attention + 3 * hidden * middle + 2 * hidden
    assert base_bytes == 2 * (2 * 256 * hidden + layers * per_layer + hidden)
    # Two bfloat16 moments for each weight, and a float32 step count for each of 9 * 2 + 3 tensors.
    assert sft[TensorClass.OPTIMIZER_STATE] == 2 * base_bytes + 4 * (9 * layers + 3)
    # Rank-16 adapters, in float32, on seven matrices of each layer.
    rank = 16
    widths = 4 * hidden + 2 * (hidden + key_value) + 3 * (hidden + middle)
    adapter_bytes = 4 * rank * widths * layers
    adapters = 2 * 7 * layers
    assert lora[TensorClass.WEIGHTS] == adapter_bytes
    assert lora[TensorClass.OPTIMIZER_STATE] == 2 * adapter_bytes + 4 * adapters


@pytest.mark.parametrize("policy", ["lora", "sft"])
def test_the_allocators_account_is_the_streams(stream: AllocationStream, policy: str) -> None:
    outcome = replay(stream, native_config(resolve(load_policy(policy), DEVICE_BYTES)), passes=2)
    births = np.bincount(stream.block_class, minlength=len(TensorClass))
    live = stream.class_bytes()
    live_class = stream.block_class[stream.live_blocks()]
    for member in TensorClass:
        traffic = outcome.by_class[member]
        assert traffic.allocations == births[member.number]
        asked_bytes = stream.block_bytes[stream.block_class == member.number].sum()
        assert asked_bytes <= traffic.allocated_bytes
        # No block here is as large as a page, and smaller ones are rounded up to 512 bytes.
        rounding_bytes = 511 * int(np.count_nonzero(live_class == member.number))
        assert live[member] <= traffic.live_bytes <= live[member] + rounding_bytes
        assert traffic.live_bytes <= traffic.peak_bytes
    assert outcome.peak_requested_bytes == _peak_bytes(stream)
    assert outcome.peak_requested_bytes <= outcome.peak_allocated_bytes
    assert outcome.peak_allocated_bytes <= outcome.peak_reserved_bytes
    assert outcome.pair_ns > 0


def _peak_bytes(stream: AllocationStream) -> int:
    block = np.abs(stream.events) - 1
    return int(np.cumsum(np.sign(stream.events) * stream.block_bytes[block]).max())


def test_a_limit_below_the_stream_is_out_of_memory(stream: AllocationStream) -> None:
    tight = load_policy({"extends": "rmm-managed", "limits": {"managed_bytes": "4MiB"}})
    with pytest.raises(MemoryError, match="CUDA out of memory"):
        replay(stream, native_config(resolve(tight, DEVICE_BYTES)))


def test_one_pass_cannot_be_timed(stream: AllocationStream) -> None:
    config = native_config(resolve(load_policy("sft"), DEVICE_BYTES))
    with pytest.raises(ValueError, match="passes must be 2 or more"):
        replay(stream, config, passes=1)


@pytest.mark.parametrize("name", preset_names())
def test_a_policy_in_words_names_every_class_once(name: str) -> None:
    explained = explain(load_policy(name))
    names = [tensor_class for classes, _ in explained for tensor_class in classes]
    assert sorted(names) == sorted(member.value for member in TensorClass)
    assert len({sentence for _, sentence in explained}) == len(explained)


def test_words_follow_the_rule() -> None:
    rules = {
        "weights": {"kind": "device"},
        "activations": {"placement": "host", "mechanism": "map", "min_bytes": "2MiB"},
    }
    sentences = {names[0]: sentence for names, sentence in explain(load_policy({"classes": rules}))}
    assert sentences["weights"] == "plain device memory, which never moves"
    assert "kept on the host, used in place over the link" in sentences["activations"]
    assert sentences["activations"].endswith("below 2 MiB, plain device memory")


def test_without_the_example_the_remedy_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(umem.cli.demo_program, "__file__", str(tmp_path / "umem" / "demo.py"))
    with pytest.raises(UnsupportedError, match="make demo"):
        example_path()


def test_without_peft_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(UnsupportedError, match=r"needs peft: pip install 'umem\[examples\]'"):
        record_example([])


def test_the_examples_exit_status_is_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert run_example(["--policy", "stock"]) == 2
    assert run_example(["--help"]) == 0


def step_s(table: str, planner: str) -> float:
    """Time of the step in a planner's row."""
    found = re.search(rf"^{planner} +([\d.,]+) (ms|s) ", table, re.MULTILINE)
    assert found, table
    return float(found[1].replace(",", "")) * {"ms": 1e-3, "s": 1.0}[found[2]]


@pytest.mark.slow
def test_the_command_runs_end_to_end() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "from umem.cli import main; main()", "demo"],
        env=WITHOUT_GPU,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    assert "umem doctor" in done.stdout
    for mode, share in (("lora", "1.1 %"), ("sft", "9.8 %")):
        pattern = rf"^llama-2-7b-{mode} on gh200-96.*?^NVIDIA"
        (table,) = re.findall(pattern, done.stdout, re.DOTALL | re.MULTILINE)
        assert step_s(table, "planned") <= 1.001 * step_s(table, "fault")
        assert f"published: {share}" in table
    assert done.stdout.count("ns per allocation and free") == 1
    for member in TensorClass:
        assert f"\n{member.value} " in done.stdout
