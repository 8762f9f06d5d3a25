"""`examples/finetune_llama.py` without a GPU: its command line, data, model and step."""

from __future__ import annotations

import os
import subprocess
import sys
from types import ModuleType

import pytest
import torch

from umem.cli.demo_program import example_path, load_example

pytest.importorskip("transformers")
pytest.importorskip("peft")

EXAMPLE = example_path()
SMALLEST = ["--hidden", "128", "--layers", "2", "--intermediate", "256", "--batch", "4"]


@pytest.fixture(scope="module")
def example() -> ModuleType:
    return load_example()


def _run_without_gpu(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(EXAMPLE), *arguments],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_without_a_gpu_it_points_to_the_demo() -> None:
    done = _run_without_gpu("--policy", "stock")
    assert done.returncode == 2
    assert "umem demo" in done.stderr
    assert "make demo" in done.stderr
    assert done.stdout == ""


def test_help_names_every_choice(example: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        example.parse_arguments(["--help"])
    assert stopped.value.code == 0
    text = capsys.readouterr().out
    for word in ("lora", "sft", "stock", "--budget", "--deterministic", *example.SIZES):
        assert word in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--hidden", "100"], "--hidden must be a multiple of --heads"),
        (["--policy", "stock", "--budget", "1GiB"], "--budget needs umem"),
        (["--policy", "stock", "--step-in-backward"], "--step-in-backward needs umem"),
        (["--grad-accumulation", "2", "--step-in-backward"], "do not accumulate"),
        (["--grad-accumulation", "0"], "--grad-accumulation must be 1 or more"),
        (["--seq", "1"], "--seq must be 2 or more"),
    ],
)
def test_a_wrong_command_line_says_why(
    example: ModuleType,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    with pytest.raises(SystemExit) as stopped:
        example.parse_arguments(arguments)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


def test_sizes_come_from_size_unless_given(example: ModuleType) -> None:
    arguments = example.parse_arguments(["--size", "small", "--layers", "3"])
    assert (arguments.hidden, arguments.layers) == (768, 3)
    assert arguments.policy == "lora"


def test_batches_are_windows_of_the_text_and_repeat_with_the_seed(example: ModuleType) -> None:
    text = example.standard_library_text(limit_bytes=100_000)
    assert text.dtype == torch.uint8
    assert len(text) == 100_000
    batch = next(example.batches(text, 3, 50, seed=1))
    assert batch.shape == (3, 50)
    assert batch.dtype == torch.int64
    whole = bytes(text.tolist())
    assert all(bytes(row) in whole for row in batch.tolist())
    assert torch.equal(batch, next(example.batches(text, 3, 50, seed=1)))
    assert not torch.equal(batch, next(example.batches(text, 3, 50, seed=2)))


def _losses(example: ModuleType, arguments: list[str], steps: int) -> list[float]:
    options = example.parse_arguments([*SMALLEST, "--seq", "64", *arguments])
    model = example.build_model(options)
    optimizer = example.build_optimizer(model, options.learning_rate)
    source = example.batches(example.standard_library_text(), options.batch, options.seq, seed=0)
    return [
        example.train_step(
            model, optimizer, [next(source) for _ in range(options.grad_accumulation)]
        )
        for _ in range(steps)
    ]


@pytest.mark.parametrize("mode", ["lora", "sft"])
def test_the_loss_falls_and_repeats_with_the_seed(example: ModuleType, mode: str) -> None:
    losses = _losses(example, ["--mode", mode], steps=20)
    assert sum(losses[-3:]) / 3 < losses[0] - 0.5
    assert _losses(example, ["--mode", mode], steps=3) == losses[:3]


@pytest.mark.parametrize("mode", ["lora", "sft"])
def test_checkpointing_changes_no_loss(example: ModuleType, mode: str) -> None:
    plain = _losses(example, ["--mode", mode], steps=3)
    assert _losses(example, ["--mode", mode, "--checkpointing"], steps=3) == plain


def test_modes_train_what_they_say(example: ModuleType) -> None:
    sizes: dict[str, dict[str, int]] = {}
    for mode in ("lora", "sft"):
        options = example.parse_arguments([*SMALLEST, "--mode", mode])
        sizes[mode] = example.parameter_bytes(example.build_model(options))
    assert sizes["sft"]["frozen"] == 0
    assert sizes["lora"]["frozen"] == sizes["sft"]["trained"]
    assert 0 < sizes["lora"]["trained"] < sizes["lora"]["frozen"]


def test_a_digest_tells_one_bit(example: ModuleType) -> None:
    options = example.parse_arguments(SMALLEST)
    model, same = example.build_model(options), example.build_model(options)
    digest = example.parameters_sha256(model)
    assert example.parameters_sha256(same) == digest
    with torch.no_grad():
        next(iter(same.parameters())).view(torch.int16)[0, 0] ^= 1
    assert example.parameters_sha256(same) != digest
