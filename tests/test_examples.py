"""The programs in examples/, without a GPU: command lines, data, models, and the demo."""

from __future__ import annotations

import ast
import json
import re
import sys
from pathlib import Path
from typing import Any

import demo
import finetune_llama
import offload_activations
import pytest
import torch

import umem
from umem.cli import main
from umem.cli.demo import examples_folder
from umem.core.errors import UnsupportedError

pytest.importorskip("transformers")
pytest.importorskip("peft")
REPOSITORY = Path(__file__).resolve().parents[1]


# The fine-tuning example.

SMALLEST = ["--hidden", "128", "--layers", "2", "--intermediate", "256", "--batch", "4"]


def test_without_a_gpu_it_points_to_the_demo(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert finetune_llama.main(["--policy", "stock"]) == 2
    output, errors = capsys.readouterr()
    assert output == ""
    assert "umem demo" in errors
    assert "make demo" in errors


def test_help_names_every_choice(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        finetune_llama.parse_arguments(["--help"])
    assert stopped.value.code == 0
    text = capsys.readouterr().out
    for word in ("lora", "sft", "stock", "--budget", "--deterministic", *finetune_llama.SIZES):
        assert word in text


@pytest.mark.parametrize(
    ("example", "arguments", "message"),
    [
        (finetune_llama, ["--hidden", "100"], "--hidden must be a multiple of --heads"),
        (finetune_llama, ["--policy", "stock", "--budget", "1GiB"], "--budget needs umem"),
        (
            finetune_llama,
            ["--policy", "stock", "--step-in-backward"],
            "--step-in-backward needs umem",
        ),
        (finetune_llama, ["--grad-accumulation", "2", "--step-in-backward"], "do not accumulate"),
        (finetune_llama, ["--grad-accumulation", "0"], "--grad-accumulation must be 1 or more"),
        (finetune_llama, ["--seq", "1"], "--seq must be 2 or more"),
        (offload_activations, ["--layers", "1"], "--layers must be 2 or more"),
        (offload_activations, ["--width", "100"], "a multiple of 64"),
        (offload_activations, ["--offload", "9"], "--offload must be from 1 to --layers"),
    ],
)
def test_a_wrong_command_line_says_why(
    example: Any, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        example.parse_arguments(arguments)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


def test_sizes_come_from_size_unless_given() -> None:
    arguments = finetune_llama.parse_arguments(["--size", "small", "--layers", "3"])
    assert (arguments.hidden, arguments.layers) == (768, 3)
    assert arguments.policy == "lora"


def test_batches_are_windows_of_the_text_and_repeat_with_the_seed() -> None:
    text = finetune_llama.standard_library_text(limit_bytes=100_000)
    assert text.dtype == torch.uint8
    assert len(text) == 100_000
    batch = next(finetune_llama.batches(text, 3, 50, seed=1))
    assert batch.shape == (3, 50)
    assert batch.dtype == torch.int64
    whole = bytes(text.tolist())
    assert all(bytes(row) in whole for row in batch.tolist())
    assert torch.equal(batch, next(finetune_llama.batches(text, 3, 50, seed=1)))
    assert not torch.equal(batch, next(finetune_llama.batches(text, 3, 50, seed=2)))


def _losses(arguments: list[str], steps: int) -> list[float]:
    options = finetune_llama.parse_arguments([*SMALLEST, "--seq", "64", *arguments])
    model = finetune_llama.build_model(options)
    optimizer = finetune_llama.build_optimizer(model, options.learning_rate)
    source = finetune_llama.batches(
        finetune_llama.standard_library_text(), options.batch, options.seq, seed=0
    )
    return [
        finetune_llama.train_step(
            model, optimizer, [next(source) for _ in range(options.grad_accumulation)]
        )
        for _ in range(steps)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["lora", "sft"])
def test_the_loss_falls_repeats_with_the_seed_and_is_the_same_with_checkpointing(mode: str) -> None:
    losses = _losses(["--mode", mode], steps=20)
    assert sum(losses[-3:]) / 3 < losses[0] - 0.5
    assert _losses(["--mode", mode], steps=3) == losses[:3]
    assert _losses(["--mode", mode, "--checkpointing"], steps=3) == losses[:3]


def test_modes_train_what_they_say() -> None:
    sizes: dict[str, dict[str, int]] = {}
    for mode in ("lora", "sft"):
        options = finetune_llama.parse_arguments([*SMALLEST, "--mode", mode])
        sizes[mode] = finetune_llama.parameter_bytes(finetune_llama.build_model(options))
    assert sizes["sft"]["frozen"] == 0
    assert sizes["lora"]["frozen"] == sizes["sft"]["trained"]
    assert 0 < sizes["lora"]["trained"] < sizes["lora"]["frozen"]


@pytest.mark.slow
def test_a_digest_changes_with_one_bit() -> None:
    options = finetune_llama.parse_arguments(SMALLEST)
    model, same = finetune_llama.build_model(options), finetune_llama.build_model(options)
    digest = finetune_llama.parameters_sha256(model)
    assert finetune_llama.parameters_sha256(same) == digest
    with torch.no_grad():
        next(iter(same.parameters())).view(torch.int16)[0, 0] ^= 1
    assert finetune_llama.parameters_sha256(same) != digest


# The offloading example.


@pytest.mark.skipif(torch.cuda.is_available(), reason="prints more on a GPU")
def test_offloading_changes_no_gradient(capsys: pytest.CaptureFixture[str]) -> None:
    offload_activations.main(["--layers", "3", "--batch", "4", "--seq", "64", "--width", "128"])
    assert capsys.readouterr().out == "gradients of 3 layers on cpu are equal to the bit: True\n"


@pytest.mark.slow
def test_a_loop_trains_and_generates_in_turns(capsys: pytest.CaptureFixture[str]) -> None:
    train_and_generate = pytest.importorskip("train_and_generate")
    size = 64, 2
    digest = train_and_generate.main(
        ["--way", "move", "--steps", "2", "--hidden", str(size[0]), "--layers", str(size[1])]
    )
    output = capsys.readouterr().out
    assert output.count("mean reward 0.") == 2
    assert f"weights {digest[:16]}" in output
    untrained = train_and_generate.digest_of(train_and_generate.build_model(*size))
    assert digest != untrained


def is_print(value: ast.expr) -> bool:
    return isinstance(value, ast.Call) and ast.unparse(value.func) == "print"


@pytest.mark.slow
def test_the_notebook(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    plt = pytest.importorskip("matplotlib.pyplot")
    monkeypatch.chdir(REPOSITORY / "examples")
    cells = json.loads(Path("tour.ipynb").read_text(encoding="utf-8"))["cells"]
    names: dict[str, Any] = {}
    for cell in cells:
        if cell["cell_type"] == "code":
            assert cell["outputs"] == []  # figures of another version would stay in it
            source = "".join(cell["source"])
            exec(compile(source, "tour.ipynb", "exec"), names)
            # A notebook prints the value of the last expression, unless a semicolon ends it.
            last = ast.parse(source).body[-1]
            assert not isinstance(last, ast.Expr) or source.endswith(";") or is_print(last.value)
    assert plt.get_fignums()  # which a notebook shows
    plt.close("all")
    steps = list(names["steps"].values())
    assert steps == sorted(steps)
    assert capsys.readouterr().out.count("passes' speed") == 7


def test_the_code_in_the_activations_page_runs() -> None:
    text = (REPOSITORY / "docs" / "offload.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(blocks) == 2
    names: dict[str, object] = {
        "torch": torch,
        "layers": [torch.nn.Linear(8, 8) for _ in range(5)],
        "x": torch.ones(4, 8),
    }
    names["block"] = torch.nn.Linear(8, 8)
    for block in blocks:
        exec(compile(block, "docs/offload.md", "exec"), names)


def test_missing_examples_are_said_to_be(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(umem, "__file__", str(tmp_path / "umem" / "__init__.py"))
    with pytest.raises(UnsupportedError, match=r"umem: reinstall"):
        examples_folder()


def test_without_peft_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(UnsupportedError, match=r"needs peft: pip install .*\[examples\]'"):
        demo.run_example([])


@pytest.mark.slow
def test_on_a_gpu_the_examples_exit_status_is_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert demo.main() == finetune_llama.NO_GPU_STATUS


def check_prediction(said: str, committed: str) -> None:
    """Words and numbers are equal; another torch may record a few operators more or less."""
    words, expected_words = said.split(), committed.split()
    assert len(words) == len(expected_words)
    for word, expected in zip(words, expected_words, strict=True):
        number = expected.rstrip(",%").replace(",", "")
        if re.fullmatch(r"[0-9.]+", number):
            found = float(word.rstrip(",%").replace(",", ""))
            assert found == pytest.approx(float(number), rel=0.03)
        else:
            assert word == expected


@pytest.mark.slow
def test_the_demo_runs_end_to_end(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(sys, "argv", ["umem", "demo"])
    with pytest.raises(SystemExit) as ended:
        main()
    output, errors = capfd.readouterr()
    assert (ended.value.code, errors) == (0, ""), output
    assert "`umem doctor` shows them all" in output
    fit, step = (
        re.search(rf"^\$ umem {' '.join(words)}\n(.*?)(^─|\Z)", output, re.DOTALL | re.MULTILINE)
        for words in demo.PREDICTIONS
    )
    assert fit is not None
    assert "stock does not fit" in fit[1]
    assert step is not None
    results = REPOSITORY / "benchmarks" / "results" / "predicted-streamed.txt"
    command = " ".join(demo.PREDICTIONS[1])
    committed = results.read_text(encoding="utf-8").split(f"$ umem {command}\n")[1]
    said = step[1].strip().partition("\n\n")[0]  # without what its rates rest on
    check_prediction(said, committed.partition("\n\n")[0])
