"""Python calls with arguments of another type or value name the argument, and what to give."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import Run
from other_process import run_forked

import umem
from umem.capture.offline import script_trace
from umem.core.errors import PolicyError
from umem.policy import resolve
from umem.telemetry import load_run
from umem.trace import save_trace


@pytest.mark.parametrize(
    ("call", "argument"),
    [
        (lambda: umem.enable(3), "policy"),  # type: ignore[arg-type]
        (lambda: umem.manage("x"), "model"),  # type: ignore[arg-type]
        (lambda: umem.manage(torch.nn.Linear(1, 1), "x"), "optimizer"),  # type: ignore[arg-type]
        (lambda: umem.offload(num_layers="2"), "num_layers"),  # type: ignore[arg-type]
        (lambda: umem.offload(2, "3"), "model_layers"),  # type: ignore[arg-type]
        (lambda: umem.offload(True), "num_layers"),
        (lambda: umem.offload(2, min_bytes="3"), "min_bytes"),  # type: ignore[arg-type]
        (lambda: umem.tensors("0"), "device"),  # type: ignore[arg-type]
        (lambda: umem.load_trace(3), "path"),  # type: ignore[arg-type]
        (lambda: umem.plan(1, 2, 3), "trace"),  # type: ignore[arg-type]
        (lambda: umem.simulate(1, 2, 3, 4), "trace"),  # type: ignore[arg-type]
        (lambda: umem.load_hardware(3), "hardware"),  # type: ignore[arg-type]
        (lambda: umem.profile(model="x"), "model"),  # type: ignore[arg-type]
        (lambda: umem.profile(name=3), "name"),  # type: ignore[arg-type]
        (lambda: resolve("sft", None), "policy"),  # type: ignore[arg-type]
        (lambda: save_trace(3, "x"), "trace"),  # type: ignore[arg-type]
        (lambda: script_trace(3), "spec"),  # type: ignore[arg-type]
        (lambda: load_run(3), "path"),  # type: ignore[arg-type]
    ],
)
def test_an_argument_of_another_type(call: Any, argument: str) -> None:
    with pytest.raises(TypeError, match=rf"\b{argument}\b.*(int|str|bool)"):
        call()


def test_a_planner_of_another_type(make_trace: Any, machine: Any) -> None:
    trace = make_trace({"w": (4096, "weights")}, [(1e-3, ["w"], [])])
    policy = resolve(umem.load_policy("managed"), machine)
    with pytest.raises(TypeError, match="planner"):
        umem.plan(trace, machine, policy, 3)  # type: ignore[arg-type]


def test_a_fallback_that_is_neither_true_nor_false() -> None:
    with pytest.raises(TypeError, match=r"fallback.*str.*True or False"):
        umem.enable("sft", fallback="yes")  # type: ignore[arg-type]


def test_steps_of_a_profile_that_are_no_number() -> None:
    with pytest.raises(ValueError, match="steps='a'"):
        umem.profile(steps="a")  # type: ignore[arg-type]


@pytest.mark.slow
def test_offload_is_a_function_wherever_its_package_was_imported_first() -> None:
    code = "import umem.streaming, umem.pages.run.manager, umem; umem.offload(2)"
    assert run_forked(code) == ""


@pytest.mark.parametrize("variable", ["DEVICE_BUDGET", "MANAGED_LIMIT", "PLANNER"])
def test_a_fallback_hides_no_bad_variable(monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    monkeypatch.setenv(f"UMEM_{variable}", "abc")
    with pytest.raises(PolicyError, match=f"UMEM_{variable}.*'abc'"):
        umem.enable("sft", fallback=True)


def test_umem_run_with_fallback_and_a_bad_variable(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UMEM_DEVICE_BUDGET", "abc")
    script = tmp_path / "train.py"
    script.write_text("print('ran')\n")
    status, text, errors = run("run", "--fallback", script)
    assert (status, text) == (2, "")
    assert "UMEM_DEVICE_BUDGET" in errors
