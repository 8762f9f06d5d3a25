"""`umem trace`: recording, converting and showing traces."""

from __future__ import annotations

import json
import re
from functools import partial
from pathlib import Path

import pytest
from command_line import Run

from umem.core.classes import TensorClass
from umem.trace import load_trace

MIB = 1 << 20

SCRIPT = """
import torch

print("importing")


def make_step():
    model = torch.nn.Linear(1024, 512, bias=False)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    inputs = torch.randn(16, 1024)

    def step():
        model(inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def broken():
    raise RuntimeError("no data here")
"""
# One float32 matrix; its two moments are as large, each with a step count.
WEIGHT_BYTES = 4 * 1024 * 512

# One weight of 4 MiB; an activation of 2 MiB lives over the first two of three phases.
EXCHANGE = {
    "format": "umem-trace/1",
    "name": "three phases",
    "tensors": [
        {"id": 0, "bytes": 4 * MIB, "class": "weights", "persistent": True},
        {"id": 1, "bytes": 2 * MIB, "class": "activations", "persistent": False},
    ],
    "phases": [
        {"name": "in", "duration_us": 1000, "reads": [0], "writes": [1]},
        {"name": "out", "duration_us": 2000, "reads": [1], "writes": []},
        {"name": "update", "duration_us": 3000, "reads": [0], "writes": [0]},
    ],
}


@pytest.fixture
def run(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    """`umem trace` in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    return partial(run, "trace")


@pytest.fixture
def files(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(SCRIPT, encoding="utf-8")
    (tmp_path / "three.json").write_text(json.dumps(EXCHANGE), encoding="utf-8")
    (tmp_path / "broken.json").write_text("{", encoding="utf-8")
    return tmp_path


@pytest.mark.slow
def test_a_script_is_recorded_and_summarised(run: Run, files: Path) -> None:
    status, output, errors = run("train.py:make_step", "-o", "step.npz", "--json")
    assert status == 0
    # What the script prints does not end up in the JSON.
    assert errors == "importing\n"
    summary = json.loads(output)
    weights, state = summary["classes"]["weights"], summary["classes"]["optimizer_state"]
    assert weights["tensors"] == 1
    assert weights["persistent_bytes"] == WEIGHT_BYTES
    assert 2 * WEIGHT_BYTES <= state["persistent_bytes"] <= 2 * WEIGHT_BYTES + 1024
    assert summary["classes"]["gradients"]["transient_bytes"] >= WEIGHT_BYTES
    # Forward pass and gradient of the weights: two matrix products.
    assert summary["flops"] >= 2 * 2 * 16 * 1024 * 512
    assert summary["hardware"] == "gh200-96"
    assert summary["step_s"] > 0
    assert summary["own_durations"] is False
    trace = load_trace(files / "step.npz")
    assert trace.tensor_count == summary["tensors"]
    assert trace.phase_count == sum(summary["phases"].values())


def test_the_summary_is_of_what_is_live(run: Run, files: Path) -> None:
    status, output, errors = run("--show", "three.json", "--json")
    assert (status, errors) == (0, "")
    summary = json.loads(output)
    assert summary["step_s"] == pytest.approx(6e-3)
    assert summary["own_durations"] is True
    assert summary["peak_live_bytes"] == 6 * MIB
    assert summary["peak_phase"] == "in"
    assert summary["phases"] == {"kernel": 3, "memcpy": 0, "memset": 0}
    assert list(summary["classes"]) == [member.value for member in TensorClass]
    assert summary["classes"]["activations"] == {
        "tensors": 1,
        "persistent_bytes": 0,
        "transient_bytes": 2 * MIB,
        "bytes_at_peak": 2 * MIB,
    }


def test_show_prints_a_table_and_writes_nothing(run: Run, files: Path) -> None:
    before = sorted(files.iterdir())
    status, output, errors = run("--show", "three.json")
    assert (status, errors) == (0, "")
    assert re.search(r"^weights +1 +4 MiB +0 B +4 MiB$", output, re.MULTILINE)
    assert re.search(r"^activations +1 +0 B +2 MiB +2 MiB$", output, re.MULTILINE)
    assert re.search(r"^peak +6 MiB live, in in *$", output, re.MULTILINE)
    assert re.search(r"^all resident +6 ms, by the trace itself *$", output, re.MULTILINE)
    assert all(len(line) <= 80 for line in output.splitlines())
    assert sorted(files.iterdir()) == before


@pytest.mark.slow
def test_a_known_model_is_recorded(run: Run, files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    monkeypatch.setenv("XDG_CACHE_HOME", str(files))
    status, output, _ = run("--model", "llama-tiny", "--mode", "sft", "--seq", "64", "--json")
    assert status == 0
    summary = json.loads(output)
    assert summary["name"] == "llama-tiny-sft"
    assert (summary["metadata"]["batch"], summary["metadata"]["seq"]) == (2, 64)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--json"], "give script.py:function, --model, --params or --show"),
        (["train.py", "--show", "three.json"], "a script and --show: give one of them"),
        (["--show", "three.json", "-o", "x.npz"], "--show writes nothing"),
        (["train.py", "--batch", "2"], "--batch: a script has no such option"),
        (
            ["--show", "three.json", "--mode", "sft"],
            "--mode: a trace has no such option: give --mode or --show",
        ),
        (["--show", "nowhere.json"], "umem: nowhere.json: "),
        (["--show", "broken.json"], "broken.json: not valid JSON"),
        (["nowhere.py:make_step"], "nowhere.py"),
        (["train.py:make_stop"], "make_step"),
        (["train.py:broken"], "no data here"),
        (["--model", "llama", "--mode", "both"], "--mode: 'both' is not known"),
        (["--show", "three.json", "--hardware", "none-such"], "--hardware: no hardware profile is"),
        (["--model", "llama-tiny", "--precision", "fp8"], "--precision: 'fp8' is not known"),
        (["train.py:make_step", "-o", "train.py/x.npz"], "train.py is a file and no folder"),
        (["train.py:make_step", "-o", "folder.npz"], "folder.npz is a folder: give the name of a"),
        (["train.py:make_step", "-o", "x.txt"], "--output: x.txt does not end in .npz: give a"),
        (["train.py:make_step", "-o", "nowhere/x.npz"], "there is no folder nowhere: make it"),
    ],
)
def test_bad_input_gets_one_message(run: Run, files: Path, arguments: list[str], says: str) -> None:
    (files / "folder.npz").mkdir()
    before = sorted(files.iterdir())
    status, output, errors = run(*arguments)
    assert (status, output) == (2, "")
    assert says in errors
    assert "Traceback" not in errors
    (message,) = [line for line in errors.splitlines() if line != "importing"]
    assert message.startswith("umem: ")
    assert [path for path in sorted(files.iterdir()) if path.name != "__pycache__"] == before
