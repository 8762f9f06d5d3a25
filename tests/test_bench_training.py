"""The training benchmark: its command line, and real processes on the CPU."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import training_runs
from training_runs import GIB, TINY, made_up_run, outcome, settings
from training_workers import answer_what_json_cannot_say, print_and_hang
from typer.testing import CliRunner
from umem_bench.cli.commands import app
from umem_bench.provenance import git_commit
from umem_bench.train.jobs import TrainingAnswer, TrainingJob
from umem_bench.train.order import WORKLOADS, Configuration, configurations
from umem_bench.train.results import (
    BUDGETED,
    METHODS,
    PLANNERS,
    Method,
    TrainingRun,
    Variant,
    read_training,
    write_training,
)
from umem_bench.train.runner import _Workers, managed_limit_bytes, run_training
from umem_bench.train.sittings import still_to_run
from umem_bench.train.step import (
    _OPTIMIZER_ON_HOST,
    NotInstalledError,
    place_allocator,
    require_package,
)
from umem_bench.train.task import KEPT_LOSSES
from umem_bench.train.worker import _answer, work

from umem.core.classes import TensorClass
from umem.core.errors import PolicyError, UmemError, UnsupportedError
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

    # What there was by then is in the file after each of them, and what was still to come.
    assert seen == [len(run.outcomes)] * len(run.outcomes)
    assert read_training(path) == run
    assert [it.stock for it in run.sittings] == [()]
    assert all((it.date is None) == (it.state == "left out") for it in run.outcomes)
    first, adapters = (it for it in run.outcomes if it.variant == "stock")
    assert [(it.method, it.variant, it.state) for it in (first, adapters)] == [
        ("sft", "stock", "measured"), ("lora", "stock", "measured")
    ]  # fmt: skip
    for it in (first, adapters):
        losses = [float.fromhex(loss) for loss in it.losses_hex]
        assert len(it.steps_s) == 3
        assert min(it.steps_s) > 0
        assert losses == sorted(losses, reverse=True)
        assert len(losses) == KEPT_LOSSES > it.warm_steps + 3
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
    assert second.reason.endswith("give more with --seconds-limit, or go on with --continue")


def test_a_later_sitting_runs_what_is_missing_and_stock_again(tmp_path: Path) -> None:
    said: list[str] = []
    path = tmp_path / "results.json"
    first = run_training(settings(seconds_limit=0.05), said.append, device="cpu")
    write_training(first, path)

    second = run_training(settings(), said.append, device="cpu", earlier=read_training(path))
    third = run_training(settings(), said.append, device="cpu", earlier=second)

    assert second.outcomes[0] == first.outcomes[0]
    assert [it.state for it in first.outcomes] == ["measured", "left out"]
    assert [it.state for it in second.outcomes] == ["measured", "measured"]
    assert (second.date, second.sittings[0]) == (first.date, first.sittings[0])
    (again,) = second.sittings[1].stock
    assert (again.method, again.state) == ("sft", "measured")
    assert set(second.parameters) == {"sft", "lora"}
    assert second.seconds == pytest.approx(sum(it.seconds for it in second.sittings))
    assert third == second
    assert said[-1] == "nothing is left to run"


def test_what_was_too_slow_stays_so_until_it_is_run_again() -> None:
    asked = settings(methods=("sft",), variants=("stock", "save-on-cpu"))
    first = run_training(asked, lambda _: None, device="cpu")
    slow = first.outcomes[1].model_copy(update={"timed_out": True, "reason": "no answer"})
    earlier = first.model_copy(update={"outcomes": (first.outcomes[0], slow)})
    no_time = asked.model_copy(update={"seconds_limit": 0.01})

    still = run_training(no_time, lambda _: None, device="cpu", earlier=earlier)
    again = run_training(asked, lambda _: None, device="cpu", earlier=still)

    assert still.outcomes == earlier.outcomes
    assert not again.outcomes[1].timed_out
    assert "save-on-cpu needs a GPU" in str(again.outcomes[1].reason)


def test_results_of_another_machine_or_other_settings_are_not_continued() -> None:
    other = made_up_run(outcome("stock"), variants=("stock", "save-on-cpu"))

    with pytest.raises(UmemError) as error:
        run_training(settings(steps=4), lambda _: None, device="cpu", earlier=other)

    words = str(error.value)
    assert words.startswith("the earlier results cannot be continued: they have gpu Made-up GPU, ")
    for part in (
        "driver 1.2, and now ",
        "transformers 5.0, and now ",
        "steps 3, and now 4",
        "commit 0123456789ab, and now ",
        "variants of long ('stock', 'save-on-cpu'), ",
    ):
        assert part in words  # fmt: skip


def test_what_is_missing_is_run_and_what_was_too_slow_comes_last() -> None:
    cells = configurations(settings(variants=("stock", "save-on-cpu", "torchao-offload")))
    there = {it.key: outcome(it.variant, method=it.method) for it in cells}
    left = {"state": "left out", "steps_s": ()}
    slow = {"state": "failed", "timed_out": True, "steps_s": ()}

    def run_of(*missing: tuple[Variant, Method, dict[str, Any]]) -> list[tuple[str, str]]:
        found = dict(there)
        for variant, method, what in missing:
            key = cell(variant, method=method).key
            found[key] = found[key].model_copy(update=what)
        return [(it.method, it.variant) for it in still_to_run(cells, found.values())]

    failed = {"state": "failed", "steps_s": ()}
    assert run_of(("save-on-cpu", "sft", failed)) == []
    assert run_of(("torchao-offload", "sft", left), ("save-on-cpu", "sft", slow)) == [
        ("sft", "stock"), ("sft", "torchao-offload"), ("sft", "save-on-cpu")
    ]  # fmt: skip
    # At the beginning stock runs in any case.
    assert run_of(("save-on-cpu", "lora", left)) == [
        ("sft", "stock"), ("lora", "stock"), ("lora", "save-on-cpu")
    ]  # fmt: skip


# --- what comes of processes, without any ---


def told(monkeypatch: pytest.MonkeyPatch, answers: dict[str, TrainingAnswer]) -> list[str]:
    """Answer in the place of processes, by variant; the variants that were started."""
    started: list[str] = []

    def answer(_: _Workers, _target: object, words: tuple[str, ...], _limit: float) -> object:
        job = TrainingJob.model_validate_json(words[0])
        started.append(job.variant)
        return answers[job.variant]

    monkeypatch.setattr(_Workers, "_ask", answer)
    return started


def cell(variant: Variant, percent: float | None = None, method: Method = "sft") -> Configuration:
    return Configuration("long", method, variant, percent)


STOCK = TrainingAnswer(state="measured", steps_s=(0.1,), peak_allocated_bytes=10 * GIB)


def test_a_variant_that_hangs_is_not_waited_for_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    hung = TrainingAnswer(state="failed", reason="no answer within 150 s", timed_out=True)
    started = told(monkeypatch, {"stock": STOCK, "deepspeed-offload": hung})
    workers = _Workers(settings(), "cuda", time.monotonic() + 100)

    found = [
        workers.outcome(cell(it, method=method))
        for method in METHODS
        for it in ("stock", "deepspeed-offload")
    ]

    assert started == ["stock", "deepspeed-offload", "stock"]
    assert [it.state for it in found] == ["measured", "failed", "measured", "left out"]
    assert found[1].timed_out
    assert found[3].reason == (
        "this variant gave no answer before: long, sft, deepspeed-offload: no answer within 150 s"
    )


def test_a_new_variant_is_taken_to_be_as_slow_as_the_slowest() -> None:
    workers = _Workers(settings(), "cuda", time.monotonic() + 20)
    # What gave up or failed has told how long it takes too.
    workers.learn(outcome("stock", process_s=5.0))
    workers.learn(outcome("umem-planned", percent=60.0, state="off", steps_s=(), process_s=30.0))
    workers.learn(outcome("deepspeed-offload", state="failed", timed_out=True, process_s=150.0))

    assert workers._needed_s(cell("torchao-offload")) == 30.0
    assert workers._needed_s(cell("stock-again")) == 5.0
    late = workers.outcome(cell("torchao-offload"))
    assert late.state == "left out"
    assert "such a process takes 30 s or more" in str(late.reason)


def test_time_is_kept_for_stock_once_more(monkeypatch: pytest.MonkeyPatch) -> None:
    started = told(monkeypatch, {"save-on-cpu": STOCK, "stock-again": STOCK})
    workers = _Workers(settings(), "cuda", time.monotonic() + 14)
    workers.learn(outcome("stock", process_s=5.0))
    workers.learn(outcome("save-on-cpu", process_s=10.0))

    left_out = workers.outcome(cell("save-on-cpu"), with_again=True)
    again = workers.outcome(cell("stock-again"))

    assert (left_out.state, again.state) == ("left out", "measured")
    assert workers.outcome(cell("save-on-cpu")).state == "measured"
    assert started == ["stock-again", "save-on-cpu"]


LARGER = (
    "trace 'CausalLoss': phases[82] (backward network.model.layers.23) uses {} at once, and the "
    "device budget is {}, less 100.61 MiB that the policy keeps there: raise the budget"
)


@pytest.mark.parametrize(
    ("reason", "shared"),
    [
        (LARGER.format("3.15 GiB", "3 GiB"), True),
        # Another planner may keep less on the device beside that phase.
        (LARGER.format("2.95 GiB", "3 GiB"), False),
        ("the model was changed", False),
    ],
)
def test_a_phase_that_fits_under_no_planner_is_tried_once(
    reason: str, shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    off = TrainingAnswer(state="off", reason=reason)
    everyone: dict[str, TrainingAnswer] = dict.fromkeys(PLANNERS, off)
    started = told(monkeypatch, {"stock": STOCK, "save-on-cpu": STOCK, **everyone})
    workers = _Workers(settings(), "cuda", time.monotonic() + 100)
    workers.outcome(cell("stock"))

    first = workers.outcome(cell("umem-planned", 30.0))
    second = workers.outcome(cell("umem-fault", 30.0))
    workers.outcome(cell("umem-fault", 60.0))
    workers.outcome(cell("save-on-cpu"))

    once = ["stock", "umem-planned", "umem-fault", "save-on-cpu"]
    assert started == (once if shared else [*once[:2], "umem-fault", *once[2:]])
    assert (second.state, second.reason) == (first.state, first.reason) == ("off", reason)
    assert second.budget_bytes == 3 * GIB
    assert second.notes == (
        ("no process was started: umem-planned found the same budget too small",) if shared else ()
    )


def test_no_process_is_started_beside_one_that_cannot_be_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Stuck:
        pid = 1234
        killed = False

        def is_alive(self) -> bool:
            return True

        def kill(self) -> None:
            self.killed = True

        def join(self, limit_s: float) -> None:
            assert limit_s > 0

    started = told(monkeypatch, {})
    workers, process = _Workers(settings(), "cuda", time.monotonic() + 100), Stuck()

    workers._end(process)  # type: ignore[arg-type]
    later = workers.outcome(cell("stock"))

    assert process.killed
    assert (started, later.state) == ([], "left out")
    assert str(later.reason).startswith("process 1234 did not end within 20 s of being killed")


# --- the order ---


def test_what_targets_are_about_comes_first() -> None:
    asked = settings().model_copy(update={"workloads": tuple(WORKLOADS.values())})

    every = configurations(asked)
    order = [str(it) for it in every]

    assert order[:13] == [
        "long, sft, stock",
        "long, sft, umem-planned at 60 %",
        "long, sft, umem-backward-step at 60 %",
        "long, sft, umem-fault at 60 %",
        "long, sft, umem-planned at 30 %",
        "long, sft, umem-backward-step at 30 %",
        "long, sft, umem-optimizer-host",
        "long, sft, save-on-cpu",
        "long, sft, bnb-paged-adamw",
        "long, sft, torchao-offload",
        "long, sft, deepspeed-offload",
        "long, sft, backward-step",
        "long, lora, stock",
    ]
    whole = [n for n, words in enumerate(order) if words.endswith("at 100 %")]
    assert len(whole) == len(PLANNERS) * len(METHODS)
    assert min(whole) > order.index("long, lora, backward-step")
    first = next(n for n, words in enumerate(order) if words.startswith("activations"))
    assert max(whole) < first
    assert all("activations" in words for words in order[first:-4])
    assert len(set(order)) == len(order) == 55
    for name in WORKLOADS:
        for method in METHODS:
            own = [words for words in order if words.startswith(f"{name}, {method}")]
            assert own[0] == f"{name}, {method}, stock"
    at_most = [it for it in every if it.percent == 100]
    assert {(it.workload, it.method, it.variant) for it in at_most} == {
        ("long", method, variant) for method in METHODS for variant in BUDGETED
    }
    assert not any("lora, umem-optimizer-host" in words for words in order)
    # Only what was measured long after the first can show that the machine drifts.
    assert sorted(order[-4:]) == sorted(
        f"{name}, {method}, stock-again" for name in WORKLOADS for method in METHODS
    )


# --- how processes end ---


def test_an_answer_that_cannot_be_read_is_that_process_s_failure() -> None:
    workers = _Workers(settings(), "cpu", time.monotonic() + 100)

    answer = workers._ask(answer_what_json_cannot_say, (), 60.0)

    assert answer.state == "failed"
    assert answer.reason == ("its answer cannot be used: steps_s.0: Input should be a valid number")


def test_a_process_that_cannot_be_started_is_a_failure_too() -> None:
    workers = _Workers(settings(), "cpu", time.monotonic() + 100)

    answer = workers._ask(work, (lambda: None,), 60.0)  # type: ignore[arg-type]

    assert answer.state == "failed"
    assert "pickle" in str(answer.reason)


def test_what_hangs_leaves_its_words_and_where_it_was() -> None:
    workers = _Workers(settings(), "cpu", time.monotonic() + 100)

    answer = workers._ask(print_and_hang, (), 2.0)

    words = str(answer.reason).split(" / ")
    assert (answer.state, answer.timed_out) == ("failed", True)
    assert words[:2] == ["no answer within 2 s", "compiling"]
    assert words[2].endswith("in _hang")
    assert words[3].endswith("in print_and_hang")


_ENDLESS = """
import sys
sys.path[:0] = {paths!r}
from training_runs import TINY, settings
from umem_bench.train.runner import run_training

if __name__ == "__main__":
    run_training(settings(steps=10**9), lambda words: print(words, flush=True), device="cpu")
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_nothing_trains_on_when_the_run_is_ended(number: signal.Signals, tmp_path: Path) -> None:
    script = tmp_path / "endless.py"
    script.write_text(_ENDLESS.format(paths=[str(Path(training_runs.__file__).parent)]))
    run = subprocess.Popen(
        [sys.executable, str(script)], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert run.stdout is not None
    try:
        assert run.stdout.readline().startswith("imports, ")
        # A worker, what it was forked from, and the run itself.
        assert wait_until(lambda: len(of_session(run.pid)) >= 3)
        run.send_signal(number)
        run.wait(30)

        assert run.returncode == (143 if number == signal.SIGTERM else -number)
        assert wait_until(lambda: not of_session(run.pid))
    finally:
        for pid in of_session(run.pid):
            os.kill(pid, signal.SIGKILL)
        run.wait()
        run.stdout.close()


def wait_until(holds: Callable[[], bool]) -> bool:
    end_s = time.monotonic() + 30
    while not holds() and time.monotonic() < end_s:
        time.sleep(0.1)
    return holds()


def of_session(session: int) -> list[int]:
    """Processes that a program has started, and it itself, as long as they live."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            state, _, _, own = folder.joinpath("stat").read_text().rpartition(")")[2].split()[:4]
        except (OSError, ValueError):  # it has ended meanwhile
            continue
        if int(own) == session and state != "Z":
            found.append(int(folder.name))
    return found


# --- what a run says of itself ---


def test_the_commit_may_be_told_where_git_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("umem_bench.provenance._git", lambda *_: None)

    assert git_commit({}) is None
    assert git_commit({"UMEM_COMMIT": "0123456789abcdef" * 2 + "01234567"}) == "0123456789ab"
    for wrong in ("", "main", "0123", "0123456789ab; rm"):
        with pytest.raises(UmemError, match="UMEM_COMMIT"):
            git_commit({"UMEM_COMMIT": wrong})


def test_a_checkout_knows_its_commit_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    said = {"ls-files": "provenance.py", "rev-parse": "0123456789ab", "status": ""}
    monkeypatch.setattr("umem_bench.provenance._git", lambda _, command, *__: said[command])

    assert git_commit({"UMEM_COMMIT": "fedcba9876543210"}) == "0123456789ab"


def test_the_command_goes_on_with_a_file_and_writes_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "results.json"
    before, after = made_up_run(outcome("stock")), made_up_run()
    write_training(before, path)

    def run(_: object, __: object, keep: Callable[[TrainingRun], None], **more: object) -> object:
        assert more == {"earlier": before}
        keep(after)
        return after

    monkeypatch.setattr("umem_bench.cli.training.run_training", run)

    done = CliRunner().invoke(app, ["training", "--continue", str(path)])

    assert done.exit_code == 0, done.output
    assert read_training(path) == after
    both = ["training", "--continue", str(path), "--show", str(path)]
    assert CliRunner().invoke(app, both).exit_code == 2


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
    assert anew.losses_hex == forked.losses_hex


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
        ("umem-optimizer-host", None, None),
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
        "import umem_bench.train.shared_imports\n"
        "print('peft' in sys.modules, 'umem_bench.train.task' in sys.modules,\n"
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
