"""The training benchmark: its command line, and real processes on the CPU."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from training_runs import GIB, TINY, settings
from typer.testing import CliRunner

from umem.bench.train.jobs import TrainingAnswer, TrainingJob
from umem.bench.train.results import TrainingRun, Variant, read_training, write_training
from umem.bench.train.runner import _Workers, managed_limit_bytes, run_training
from umem.bench.train.step import (
    _OPTIMIZER_ON_HOST,
    NotInstalledError,
    place_allocator,
    require_package,
)
from umem.bench.train.worker import _answer, work
from umem.classes import TensorClass
from umem.cli.bench import app
from umem.errors import PolicyError, UmemError, UnsupportedError
from umem.policy import class_rule, load_policy

needs_no_gpu = pytest.mark.skipif(
    torch.cuda.device_count() > 0, reason="it is about a machine without a GPU"
)


def ask(workers: _Workers, job: TrainingJob, limit_s: float = 60.0) -> TrainingAnswer:
    return workers._ask(work, (job.model_dump_json(),), limit_s)


# --- the command line ---


@needs_no_gpu
def test_without_a_gpu_it_says_so_at_once() -> None:
    begin_s = time.process_time()

    done = CliRunner().invoke(app, ["training"])

    assert isinstance(done.exception, UnsupportedError)
    assert "training is measured on an NVIDIA GPU, and torch sees none" in str(done.exception)
    assert "umem doctor" in str(done.exception)
    assert time.process_time() - begin_s < 2


@pytest.mark.parametrize(
    "option",
    ["--workload=short", "--methods=qlora", "--variants=vllm", "--budgets=0", "--budgets=120",
     "--budgets=60,half", "--steps=0", "--batch=0", "--loss-chunk=0", "--seconds-limit=0"],
)  # fmt: skip
def test_unknown_choices_end_with_status_2(option: str) -> None:
    assert CliRunner().invoke(app, ["training", option]).exit_code == 2


def test_an_output_that_cannot_be_written_is_found_before_the_run(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["training", "--output", str(tmp_path)])

    assert isinstance(done.exception, UmemError)
    assert f"--output: {tmp_path} is a folder" in str(done.exception)


def test_a_process_has_at_most_16_gib_of_managed_memory() -> None:
    assert managed_limit_bytes({}) == 16 * GIB
    assert managed_limit_bytes({"UMEM_MANAGED_LIMIT": "4GiB"}) == 4 * GIB
    assert managed_limit_bytes({"UMEM_MANAGED_LIMIT": "64GiB"}) == 16 * GIB
    with pytest.raises(PolicyError, match="UMEM_MANAGED_LIMIT"):
        managed_limit_bytes({"UMEM_MANAGED_LIMIT": "much"})


# --- real processes, on the CPU ---


def test_processes_train_the_same_model_and_say_what_they_cannot_do(tmp_path: Path) -> None:
    said: list[str] = []
    seen: list[int] = []
    path = tmp_path / "results.json"
    asked = settings(variants=("stock", "umem-planned", "save-on-cpu"), deterministic=True)

    def keep(so_far: TrainingRun) -> None:
        write_training(so_far, path)
        seen.append(len(so_far.outcomes))

    run = run_training(asked, said.append, keep, device="cpu")
    checkpoints = settings(
        TINY.model_copy(update={"checkpoint": True}), methods=("sft",), deterministic=True
    )
    again = run_training(checkpoints, said.append, device="cpu")

    # What there was by then is in the file after each of them.
    assert seen == list(range(1, len(run.outcomes) + 1))
    assert read_training(path) == run
    first, adapters = (it for it in run.outcomes if it.variant == "stock")
    assert [(it.method, it.variant, it.state) for it in (first, adapters)] == [
        ("sft", "stock", "measured"), ("lora", "stock", "measured")
    ]  # fmt: skip
    for it in (first, adapters):
        losses = [float.fromhex(loss) for loss in it.losses_hex]
        assert len(it.steps_s) == 3
        assert min(it.steps_s) > 0
        assert losses == sorted(losses, reverse=True)
        assert len(losses) == it.warm_steps + 3
        assert it.process_s > sum(it.steps_s)
    # The same seed gives the same bits, with checkpoints too, and adapters begin as the model that
    # they are put on.
    assert again.outcomes[0].losses_hex == first.losses_hex
    assert adapters.losses_hex[0] == first.losses_hex[0] != adapters.losses_hex[1]
    weights = 2 * 256 * 64 + 2 * (4 * 64 * 64 + 3 * 64 * 128) + 5 * 64
    adapter = 2 * 4 * 2 * 64 * 16
    assert run.parameters == {"sft": weights, "lora": weights + adapter}
    assert first.optimizer_state_bytes == 2 * weights * 2  # two moments in bfloat16
    # The CPU counts no peak, so that no budget is a share of it.
    budgeted = [it for it in run.outcomes if it.variant == "umem-planned"]
    assert len(budgeted) == 6
    assert {it.state for it in budgeted} == {"left out"}
    assert all("which was not measured" in str(it.reason) for it in budgeted)
    saving = next(it for it in run.outcomes if it.variant == "save-on-cpu")
    assert saving.state == "failed"
    assert saving.reason == (
        "UnsupportedError: save-on-cpu needs a GPU: on the CPU there is only stock"
    )
    assert len(said) == len(run.outcomes) + 1 + 2
    assert said[0].startswith("imports, and the planner compiled: ")
    assert said[1].startswith("long, sft, stock: ")
    assert " ms a step" in said[1]


def test_what_does_not_fit_the_time_is_left_out() -> None:
    run = run_training(settings(seconds_limit=0.05), lambda _: None, device="cpu")

    first, second = run.outcomes
    assert first.state == "measured"  # nobody knew how long it would take
    assert second.state == "left out"
    assert second.reason is not None
    assert second.reason.startswith("0 s were left of 0.05 s, and such a process takes ")
    assert second.reason.endswith(" s or more: give more with --seconds-limit")


def test_a_process_that_fails_says_why_and_the_run_goes_on() -> None:
    broken = TINY.model_copy(update={"heads": 3})

    run = run_training(settings(broken), lambda _: None, device="cpu")

    assert [it.state for it in run.outcomes] == ["failed", "failed"]
    assert all(it.reason and "heads" in it.reason for it in run.outcomes)


def test_a_process_that_does_not_answer_is_ended() -> None:
    workers = _Workers(settings(), "cpu", time.monotonic() + 100)
    job = tiny_job("stock", device="cpu").model_copy(update={"steps": 1_000_000})
    begin_s = time.monotonic()

    answer = ask(workers, job, 1.0)

    assert answer.state == "failed"
    assert answer.reason is not None
    assert answer.reason.startswith("no answer within 1 s")
    assert time.monotonic() - begin_s < 30


@pytest.mark.slow
def test_processes_that_cannot_be_forked_are_started_anew() -> None:
    workers = _Workers(settings(), "cpu", time.monotonic() + 100)
    forked = ask(workers, tiny_job("stock", device="cpu"))

    workers._forks = False
    anew = ask(workers, tiny_job("stock", device="cpu"))

    assert anew.state == forked.state == "measured"
    assert len(anew.losses_hex) == len(forked.losses_hex) == 4


@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")
def test_a_process_that_dies_leaves_its_last_words() -> None:
    workers = _Workers(settings(), "cpu", time.monotonic() + 100)
    no_job = tiny_job("stock").model_copy(update={"device": "tpu"})

    answer = ask(workers, no_job)

    assert answer.state == "failed"
    assert answer.reason is not None
    assert answer.reason.startswith("ended with status 1 / ")
    assert "device" in answer.reason


# --- variants ---


def tiny_job(variant: Variant, **changes: Any) -> TrainingJob:
    asked: dict[str, Any] = {
        "model": TINY,
        "method": "sft",
        "variant": variant,
        "budget_bytes": None,
        "steps": 1,
        "deterministic": False,
        "managed_limit_bytes": GIB,
    }
    return TrainingJob.model_validate(asked | changes)


@pytest.mark.parametrize(
    ("variant", "package"),
    [
        ("bnb-paged-adamw", "bitsandbytes"),
        ("torchao-offload", "torchao"),
        ("deepspeed-offload", "deepspeed"),
    ],
)
def test_what_is_not_installed_is_no_failure(variant: Variant, package: str) -> None:
    if importlib.util.find_spec(package):
        pytest.skip(f"{package} is installed")

    answer = _answer(tiny_job(variant))

    assert answer.state == "not installed"
    assert answer.reason is not None
    assert answer.reason.startswith(package)
    assert f"No module named '{package}'" in answer.reason
    with pytest.raises(NotInstalledError, match=package):
        require_package(variant)


@needs_no_gpu
@pytest.mark.parametrize(
    ("variant", "planner", "budget"),
    [
        ("umem-planned", "planned", "6000"),
        ("umem-backward-step", "planned", "6000"),
        ("umem-lookahead", "lookahead", "6000"),
        ("umem-fault", "fault", "6000"),
        ("umem-optimizer-host", "none", None),
        ("backward-step", None, None),
        ("save-on-cpu", None, None),
    ],
)
def test_umem_is_told_planner_and_budget(
    variant: Variant, planner: str | None, budget: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("UMEM_PLANNER", "UMEM_DEVICE_BUDGET", "UMEM_POLICY", "UMEM_MANAGED_LIMIT"):
        monkeypatch.setenv(name, "another's")

    with pytest.raises(UmemError):
        place_allocator(tiny_job(variant, budget_bytes=6000))

    assert os.environ.get("UMEM_PLANNER") == planner
    assert os.environ.get("UMEM_DEVICE_BUDGET") == budget
    assert os.environ["UMEM_MANAGED_LIMIT"] == str(GIB)
    assert "UMEM_POLICY" not in os.environ


def test_the_policy_for_state_on_the_host_says_so() -> None:
    policy = load_policy(_OPTIMIZER_ON_HOST)

    state = class_rule(policy, TensorClass.OPTIMIZER_STATE)
    assert (state.placement, state.mechanism, state.accessed_by_device) == ("host", "map", True)
    assert class_rule(policy, TensorClass.WEIGHTS).placement == "device"
    assert policy.device_budget is None


def test_shared_imports_leave_out_what_would_start_cuda(tmp_path: Path) -> None:
    for name in ("bitsandbytes", "torchao", "deepspeed"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(f"raise SystemExit('{name} was imported')")
    script = (
        "import importlib.util, sys\n"
        "import umem.bench.train.shared_imports\n"
        "print('peft' in sys.modules, 'umem.bench.train.task' in sys.modules,\n"
        "      importlib.util.find_spec('bitsandbytes') is not None)\n"
    )

    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )

    assert done.returncode == 0, done.stderr
    # Afterwards they are to be found again.
    assert done.stdout.split() == ["True", "True", "True"]
