"""Conducts `umem bench training`: one process after the other, within a time."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from umem.bench.provenance import current_machine, git_commit
from umem.bench.train.build_deepspeed import building_deepspeed
from umem.bench.train.figures import median_s
from umem.bench.train.jobs import TrainingAnswer, TrainingJob
from umem.bench.train.order import Configuration, configurations
from umem.bench.train.results import (
    Method,
    Outcome,
    TrainingRun,
    TrainingSettings,
    Variant,
    WorkloadName,
)
from umem.bench.train.worker import be_ready, work
from umem.errors import PolicyError, UnsupportedError
from umem.units import format_bytes, parse_bytes

if TYPE_CHECKING:
    from multiprocessing.context import ForkServerContext, SpawnContext

__all__ = ["managed_limit_bytes", "run_training"]

MANAGED_BYTES = 16 << 30
"""Managed memory of a process, at most: there is one at a time."""

PROCESS_LIMIT_S = 150.0
"""For one variant with one budget: DeepSpeed compiles its optimizer when it is first used."""

LEAST_LIMIT_S = 20.0
"""What a process that was started has, however little is left of the run's time."""

END_S = 20.0
"""For a process that has answered to end."""

PACKAGES = ("transformers", "peft", "bitsandbytes", "torchao", "deepspeed")

_PRELOADED = ("umem.cli", "umem.bench.train.shared_imports")
_Subject = tuple[WorkloadName, Method]
_LOG_LINES = 3
_NVML_CHECK = "PYTORCH_NVML_BASED_CUDA_CHECK"


def managed_limit_bytes(environ: Mapping[str, str] = os.environ) -> int:
    """Managed memory that a process may hold: UMEM_MANAGED_LIMIT, and at most 16 GiB.

    Raises
    ------
    PolicyError
        If UMEM_MANAGED_LIMIT is not a size.
    """
    try:
        asked_bytes = parse_bytes(environ.get("UMEM_MANAGED_LIMIT", MANAGED_BYTES))
    except ValueError as error:
        raise PolicyError(f"UMEM_MANAGED_LIMIT: {error}") from error
    return min(asked_bytes, MANAGED_BYTES)


def run_training(
    settings: TrainingSettings,
    on_progress: Callable[[str], None],
    on_results: Callable[[TrainingRun], None] | None = None,
    *,
    device: Literal["cuda", "cpu"] = "cuda",
) -> TrainingRun:
    """Train with every variant and budget, each in a process of its own, never two at a time.

    What fails, is not installed or does not fit the time leaves an outcome that says so. The stock
    variant is always part of the run: budgets are shares of its peak.

    Parameters
    ----------
    settings
        What to run.
    on_progress
        Told, in words, what is being done.
    on_results
        Given what there is, after every process.
    device
        Where to train. On the CPU only the stock variant is measured, and without its memory.

    Raises
    ------
    UnsupportedError
        Where torch sees no GPU to train on.
    """
    if device == "cuda":
        _require_gpu()
    began_s = time.monotonic()
    cells = configurations(settings)
    builds = device == "cuda" and any(it.variant == "deepspeed-offload" for it in cells)
    workers = _Workers(settings, device, began_s + settings.seconds_limit)
    results = TrainingRun(
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        git_commit=git_commit(),
        machine=current_machine(),
        packages={name: _version(name) for name in PACKAGES},
        settings=settings,
        parameters={},
        device_flops_per_s=None,
        outcomes=(),
        seconds=0.0,
    )
    with building_deepspeed(wanted=builds):
        workers.start()
        on_progress(f"imports, and the planner compiled: {time.monotonic() - began_s:.1f} s")
        for configuration in cells:
            outcome = workers.outcome(configuration)
            on_progress(_progress_line(configuration, outcome))
            results = results.model_copy(
                update={
                    "parameters": dict(workers.parameters),
                    "device_flops_per_s": workers.device_flops_per_s,
                    "outcomes": (*results.outcomes, outcome),
                    "seconds": time.monotonic() - began_s,
                }
            )
            if on_results is not None:
                on_results(results)
    return results


@dataclass
class _Workers:
    """Starts the processes, and knows what earlier ones said."""

    settings: TrainingSettings
    device: Literal["cuda", "cpu"]
    end_s: float
    """When the run's time is over, on the monotonic clock."""
    parameters: dict[str, int] = field(default_factory=dict)
    device_flops_per_s: float | None = None
    _working_set_bytes: dict[_Subject, int] = field(default_factory=dict)
    _longest_s: dict[tuple[WorkloadName, Variant], float] = field(default_factory=dict)
    _forks: bool = True

    def start(self) -> None:
        """Have ready what processes are forked from; nobody's time is its time."""
        self._ask(be_ready, (), PROCESS_LIMIT_S)

    def outcome(self, configuration: Configuration) -> Outcome:
        """What comes of one configuration."""
        told: dict[str, object] = {
            "workload": configuration.workload,
            "method": configuration.method,
            "variant": configuration.variant,
            "budget_percent": configuration.percent,
            "budget_bytes": None,
        }
        if configuration.percent is not None:
            subject = configuration.workload, configuration.method
            whole_bytes = self._working_set_bytes.get(subject)
            if whole_bytes is None:
                reason = "budgets are shares of the stock variant's peak, which was not measured"
                return Outcome.model_validate(told | {"state": "left out", "reason": reason})
            told["budget_bytes"] = int(configuration.percent / 100 * whole_bytes)
        left_s, needed_s = self.end_s - time.monotonic(), self._needed_s(configuration)
        if self._longest_s and left_s < needed_s:
            reason = (
                f"{max(0.0, left_s):.0f} s were left of {self.settings.seconds_limit:g} s, and "
                f"such a process takes {needed_s:.0f} s or more: give more with --seconds-limit"
            )
            return Outcome.model_validate(told | {"state": "left out", "reason": reason})

        job = TrainingJob(
            model=self.settings.workload(configuration.workload).model,
            method=configuration.method,
            variant=configuration.variant,
            budget_bytes=told["budget_bytes"],
            steps=self.settings.steps,
            deterministic=self.settings.deterministic,
            managed_limit_bytes=self.settings.managed_limit_bytes,
            device=self.device,
        )
        begin_s = time.monotonic()
        limit_s = min(PROCESS_LIMIT_S, max(LEAST_LIMIT_S, left_s))
        answer = self._ask(work, (job.model_dump_json(),), limit_s)
        took_s = time.monotonic() - begin_s
        if answer.state == "measured":
            self._learn(configuration, answer, took_s)
        figures = answer.model_dump(exclude={"parameters", "device_flops_per_s"})
        return Outcome.model_validate(told | figures | {"process_s": took_s})

    def _learn(self, configuration: Configuration, answer: TrainingAnswer, took_s: float) -> None:
        kind = configuration.workload, configuration.variant
        self._longest_s[kind] = max(self._longest_s.get(kind, 0.0), took_s)
        if configuration.variant == "stock":
            self.parameters[configuration.method] = answer.parameters
            self.device_flops_per_s = answer.device_flops_per_s
            if answer.peak_allocated_bytes is not None:
                subject = configuration.workload, configuration.method
                self._working_set_bytes[subject] = answer.peak_allocated_bytes

    def _needed_s(self, configuration: Configuration) -> float:
        """The longest that such a process took, or else the least of the others; 0 at first."""
        kind = configuration.workload, configuration.variant
        return self._longest_s.get(kind, min(self._longest_s.values(), default=0.0))

    def _ask(
        self, target: Callable[..., None], words: tuple[str, ...], limit_s: float
    ) -> TrainingAnswer:
        with tempfile.TemporaryDirectory(prefix="umem-bench-") as folder:
            log = Path(folder, "log")
            answer = self._run(target, words, log, limit_s)
            if isinstance(answer, TrainingAnswer) and answer.state == "cannot fork":
                # An import has started CUDA: every process has its own imports from here on.
                self._forks = False
                answer = self._run(target, words, log, limit_s)
            if isinstance(answer, TrainingAnswer):
                return answer
            lines = log.read_text(errors="replace").splitlines() if log.exists() else []
        last = [line.strip() for line in lines if line.strip()][-_LOG_LINES:]
        return TrainingAnswer(state="failed", reason=" / ".join([answer, *last]))

    def _run(
        self, target: Callable[..., None], words: tuple[str, ...], log: Path, limit_s: float
    ) -> TrainingAnswer | str:
        """Start a process, and wait until it has ended; its answer, or why there is none."""
        context: ForkServerContext | SpawnContext = multiprocessing.get_context("spawn")
        if self._forks:
            context = multiprocessing.get_context("forkserver")
            context.set_forkserver_preload(list(_PRELOADED))
        receiver, sender = context.Pipe(duplex=False)
        with _nvml_check():
            process = context.Process(target=target, args=(*words, sender, str(log)), daemon=True)
            process.start()
        sender.close()
        try:
            if not receiver.poll(limit_s):
                return f"no answer within {limit_s:.0f} s"
            answer = TrainingAnswer.model_validate_json(receiver.recv())
            process.join(END_S)
        except EOFError:  # it ended before it answered
            process.join(END_S)
            return f"ended with status {process.exitcode}"
        finally:
            receiver.close()
            if process.is_alive():
                process.kill()
                process.join()
        return answer


@contextmanager
def _nvml_check() -> Iterator[None]:
    """Let the processes ask NVML whether there is a GPU: CUDA does not start, and they can fork."""
    before = os.environ.get(_NVML_CHECK)
    os.environ[_NVML_CHECK] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_NVML_CHECK]
        else:
            os.environ[_NVML_CHECK] = before


def _require_gpu() -> None:
    import torch

    # Through NVML: the driver is not started.
    if torch.version.cuda is None or torch.cuda.device_count() == 0:
        raise UnsupportedError(
            "training is measured on an NVIDIA GPU, and torch sees none: `umem doctor` says what "
            "is missing, and `umem simulate` predicts steps without one"
        )


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _progress_line(configuration: Configuration, outcome: Outcome) -> str:
    step_s = median_s(outcome)
    if step_s is None:
        return f"{configuration}: {outcome.state}: {outcome.reason}"
    budget = f" of {format_bytes(outcome.budget_bytes)}" if outcome.budget_bytes else ""
    lost = "; its plan was not running" if outcome.plan_running is False else ""
    return f"{configuration}{budget}: {step_s * 1e3:.4g} ms a step, {outcome.process_s:.1f} s{lost}"
