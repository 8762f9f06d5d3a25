"""Traces of a user's own script: how it is loaded, the example, and every error."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

from umem.capture.offline import script_trace
from umem.core.classes import TensorClass
from umem.core.errors import TraceError
from umem.trace import check_trace

EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "trace_my_model.py"

STEP = """
import torch

def make_step():
    model = torch.nn.Linear(4, 4)
    inputs = torch.zeros(2, 4)
    return lambda: model(inputs).sum().backward()
"""


def write(folder: Path, text: str, name: str = "train.py") -> str:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return str(path)


@pytest.mark.slow
def test_the_example_is_recorded() -> None:
    trace = script_trace(f"{EXAMPLE}:make_step")
    check_trace(trace, "example")
    assert trace.name == "trace_my_model"
    assert trace.metadata == {"script": "trace_my_model.py", "function": "make_step"}
    # Two tables, of which the head shares one; four layers; the last norm.
    layer = 256 * 768 + 768 + 256 * 256 + 256 + 2 * 256 * 1024 + 1024 + 256 + 4 * 256
    parameters = 256 * 256 + 128 * 256 + 4 * layer + 2 * 256
    weights = trace.tensor_class == TensorClass.WEIGHTS.number
    assert trace.tensor_bytes[weights].sum() == 4 * parameters
    assert "forward blocks.2.feed_forward.0: aten.addmm" in trace.phase_names
    kernels = [name for name in trace.phase_names if "attention_for_cpu" in name]
    assert len(kernels) == 2 * 4


@pytest.mark.slow
def test_the_example_trains(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(EXAMPLE))["main"](steps=3)
    losses = [float(line.split()[-1]) for line in capsys.readouterr().out.splitlines()]
    assert losses == sorted(losses, reverse=True)
    assert len(set(losses)) == 3


@pytest.mark.slow
def test_another_function_is_part_of_the_name(tmp_path: Path) -> None:
    assert script_trace(write(tmp_path, STEP)).name == "train"
    spec = write(tmp_path, STEP.replace("make_step", "large")) + ":large"
    assert script_trace(spec).name == "train-large"


@pytest.mark.slow
def test_modules_beside_a_script_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, STEP, "umem_test_neighbour.py")
    spec = write(
        tmp_path,
        "def make_step():\n    import umem_test_neighbour as n\n    return n.make_step()\n",
    )
    monkeypatch.delitem(sys.modules, "umem_test_neighbour", raising=False)
    before = list(sys.path)
    assert script_trace(spec).phase_count
    assert sys.path == before
    assert not any(name.startswith("_umem_script") for name in sys.modules)


DATACLASS = """
from __future__ import annotations
from dataclasses import dataclass
@dataclass
class Options:
    width: int = 4
"""
ON_A_GPU = STEP.replace("ar(4, 4)", "ar(4, 4).cuda()").replace("s(2, 4)", "s(2, 4, device='cuda')")


@pytest.mark.slow
@pytest.mark.parametrize(
    "text",
    [
        pytest.param(
            STEP + "\nif __name__ == '__main__':\n    exit('ran')\n", id="main does not run"
        ),
        pytest.param(DATACLASS + STEP, id="dataclasses"),
        pytest.param(ON_A_GPU, id="needs no GPU"),
    ],
)
def test_a_script_is_recorded(text: str, tmp_path: Path) -> None:
    assert script_trace(write(tmp_path, text)).phase_count


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("def make_setp(): ...", r"no function make_step, did you mean 'make_setp'\?"),
        ("x = 1", r"no function make_step\. Define it to make the model"),
        ("make_step = 3", r"make_step is a int, not a function"),
        ("def make_step(config): ...", r"make_step must take no arguments \(missing a required"),
        ("def make_step(): ...", r"make_step returned NoneType, which cannot be called"),
        ("import umem_no_such_module", r"train\.py:1 in <module>: importing it raised ModuleNot"),
        ("def broken(:", r"importing it raised SyntaxError: invalid syntax .*line 1"),
        ("import sys\nsys.exit(2)", r"train\.py:2 in <module>: importing it ended the program"),
        ("def make_step():\n    1 / 0", r"train\.py:2 in make_step: make_step raised ZeroDiv"),
        (
            STEP.replace(".backward()", ".item()"),
            r"train\.py:7 in <lambda>: .*_local_scalar_dense.* leave out \.item\(\)",
        ),
    ],
)
def test_errors_name_file_function_and_remedy(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(TraceError, match=message) as caught:
        script_trace(write(tmp_path, text))
    assert "train" in str(caught.value)


def test_an_error_names_the_function_that_was_given(tmp_path: Path) -> None:
    file = write(tmp_path, "def build(): raise ValueError('lost')")
    with pytest.raises(TraceError, match=r"in build: build raised ValueError: lost"):
        script_trace(f"{file}:build")


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("no_such.py:make_step", r"no_such\.py: no such file: give a Python file and a function"),
        ("train.txt", r"'train\.txt' is not a script and a function"),
        ("train.py:make step", r"is not a script and a function"),
        ("", r"'' is not a script and a function: give a Python file .* train\.py:make_step"),
    ],
)
def test_bad_specs_are_explained(spec: str, message: str) -> None:
    with pytest.raises(TraceError, match=message):
        script_trace(spec)
