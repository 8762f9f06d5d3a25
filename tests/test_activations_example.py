"""`examples/offload_activations.py` without a GPU, and the code in docs/activations.md."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

REPOSITORY = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def example() -> ModuleType:
    path = REPOSITORY / "examples" / "offload_activations.py"
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # where its dataclass looks for names
    spec.loader.exec_module(module)
    return module


@pytest.mark.skipif(torch.cuda.is_available(), reason="says more on a GPU")
def test_gradients_are_equal(example: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    example.main(["--layers", "3", "--batch", "4", "--seq", "64", "--width", "128"])
    assert capsys.readouterr().out == ("gradients of 3 layers on cpu are equal to the bit: True\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--layers", "1"], "--layers must be 2 or more"),
        (["--width", "100"], "a multiple of 64"),
        (["--offload", "9"], "--offload must be from 1 to --layers"),
    ],
)
def test_wrong_arguments(
    example: ModuleType,
    arguments: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        example.parse_arguments(arguments)
    assert message in capsys.readouterr().err


def test_the_code_in_the_docs_runs() -> None:
    text = (REPOSITORY / "docs" / "activations.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(blocks) == 3
    names: dict[str, object] = {
        "torch": torch,
        "layers": [torch.nn.Linear(8, 8) for _ in range(5)],
        "x": torch.ones(4, 8),
    }
    names["model"] = torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(5)])
    names["block"] = torch.nn.Linear(8, 8)
    for block in blocks:
        exec(compile(block, "docs/activations.md", "exec"), names)
