"""Conducts `umem bench training`: one process after the other, within a time."""

from __future__ import annotations

import multiprocessing
import multiprocessing.process
import os
import re
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic import ValidationError

from umem.core.errors import PolicyError, UnsupportedError
from umem.core.units import format_bytes, parse_bytes
from umem_bench.provenance import current_machine, git_commit
from umem_bench.train.build_deepspeed import building_deepspeed
from umem_bench.train.figures import median_s, stock_of
from umem_bench.train.jobs import TrainingAnswer, TrainingJob
from umem_bench.train.order import Configuration, cell_of, configurations
from umem_bench.train.results import (
    PLANNERS,
    Method,
    Outcome,
    Sitting,
    TrainingRun,
    TrainingSettings,
    Variant,
    WorkloadName,
)
from umem_bench.train.sittings import require_same, sittings_of, still_to_run
from umem_bench.train.worker import be_ready, work

if TYPE_CHECKING:
    from multiprocessing.context import (
        ForkServerContext,
        ForkServerProcess,
        SpawnContext,
        SpawnProcess,
    )

__all__ = ["managed_limit_bytes", "run_training"]

MANAGED_BYTES = 16 << 30
"""Managed memory of a process, at most: there is one at a time."""

PROCESS_LIMIT_S = 150.0
"""For one variant with one budget: DeepSpeed compiles its optimizer when it is first used."""

LEAST_LIMIT_S = 20.0
"""What a process that was started has, however little is left of the run's time."""

END_S = 20.0
"""For a process that has answered to end."""

KILL_S = 20.0
"""For a process that was killed to end: in the driver, it may not."""

PACKAGES = ("transformers", "peft", "bitsandbytes", "torchao", "deepspeed")

_PRELOADED = ("umem.cli", "umem_bench.train.shared_imports")
_Subject = tuple[WorkloadName, Method]
_LOG_LINES = 3
_PHASE_AND_BUDGET = re.compile(
    r"uses (?P<phase>[\d.]+ \w+) at once, and the device budget is (?P<budget>[\d.]+ \w+)"
)
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
    earlier: TrainingRun | None = None,
) -> TrainingRun:
    """Train with every variant and budget, each in a process of its own, never two at a time.

    What fails, is not installed or does not fit the time leaves an outcome that says so. The stock
    variant is always part of the run: budgets are shares of its peak. SIGTERM ends the run as an
    interrupt does: nothing trains on.

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
    earlier
        Results of the same settings and machine: what they lack is run, and stock once more.

    Raises
    ------
    UnsupportedError
        Where torch sees no GPU to train on.
    UmemError
        If the earlier results are of other settings or of another machine.
    """
    if device == "cuda":
        _require_gpu()
    began_s = time.monotonic()
    begun = _begun(settings)
    if earlier is not None:
        require_same(earlier, begun)
    cells = configurations(settings)
    known = [] if earlier is None else earlier.outcomes
    wanted = list(still_to_run(cells, known))
    builds = device == "cuda" and any(it.variant == "deepspeed-offload" for it in wanted)
    workers = _Workers(settings, device, began_s + settings.seconds_limit)
    outcomes = {it.key: _not_begun(it) for it in cells}
    for outcome in known:
        outcomes[cell_of(outcome)] = outcome
        workers.learn(outcome)
    if earlier is not None:
        workers.parameters = dict(earlier.parameters)
        workers.device_flops_per_s = earlier.device_flops_per_s
    past = () if earlier is None else sittings_of(earlier)
    sitting = Sitting(date=begun.date, seconds=0.0)
    results = begun if earlier is None else earlier.model_copy(update={"settings": settings})
    if not wanted:
        on_progress("nothing is left to run")
        return results
    with _ended_by_sigterm(), building_deepspeed(wanted=builds):
        workers.start()
        on_progress(f"imports, and the planner compiled: {time.monotonic() - began_s:.1f} s")
        for number, configuration in enumerate(wanted):
            with_again = any(it.variant == "stock-again" for it in wanted[number + 1 :])
            outcome = workers.outcome(configuration, with_again=with_again)
            on_progress(_progress_line(configuration, outcome))
            stock = stock_of(results, configuration.workload, configuration.method)
            if configuration.variant == "stock" and stock is not None:
                sitting = sitting.model_copy(update={"stock": (*sitting.stock, outcome)})
            elif outcome.state != "left out" or not outcomes[configuration.key].timed_out:
                # That there is no time now says less than that there was not enough before.
                outcomes[configuration.key] = outcome
            seconds = time.monotonic() - began_s
            sitting = sitting.model_copy(update={"seconds": seconds})
            results = results.model_copy(
                update={
                    "parameters": dict(workers.parameters),
                    "device_flops_per_s": workers.device_flops_per_s,
                    "outcomes": tuple(outcomes.values()),
                    "seconds": sum(it.seconds for it in past) + seconds,
                    "sittings": (*past, sitting),
                }
            )
            if on_results is not None:
                on_results(results)
    return results


def _begun(settings: TrainingSettings) -> TrainingRun:
    return TrainingRun(
        date=_now(),
        git_commit=git_commit(),
        machine=current_machine(),
        packages={name: _version(name) for name in PACKAGES},
        settings=settings,
        parameters={},
        device_flops_per_s=None,
        outcomes=(),
        seconds=0.0,
    )


def _not_begun(configuration: Configuration) -> Outcome:
    """What stands in the file of a run that is ended early."""
    return Outcome(
        workload=configuration.workload,
        method=configuration.method,
        variant=configuration.variant,
        budget_percent=configuration.percent,
        budget_bytes=None,
        state="left out",
        reason="the run was ended before its turn",
    )


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
    _silent: dict[Variant, str] = field(default_factory=dict)
    """Why variants were given up that did not answer in this sitting."""
    _too_small: dict[tuple[_Subject, float | None], Outcome] = field(default_factory=dict)
    """Who found that a budget is smaller than what one phase uses."""
    _forks: bool = True
    _stuck: str = ""
    """Of a process that could not be ended: no other may hold managed memory beside it."""

    def start(self) -> None:
        """Have ready what processes are forked from; nobody's time is its time."""
        self._ask(be_ready, (), PROCESS_LIMIT_S)

    def outcome(self, configuration: Configuration, *, with_again: bool = False) -> Outcome:
        """What comes of one configuration.

        Parameters
        ----------
        configuration
            Which one.
        with_again
            Whether time is to be left for stock once more, at the end of the run.
        """
        subject = configuration.workload, configuration.method
        told: dict[str, object] = {
            "workload": configuration.workload,
            "method": configuration.method,
            "variant": configuration.variant,
            "budget_percent": configuration.percent,
            "budget_bytes": None,
        }
        if configuration.percent is not None:
            whole_bytes = self._working_set_bytes.get(subject)
            if whole_bytes is None:
                reason = "budgets are shares of the stock variant's peak, which was not measured"
                return Outcome.model_validate(told | {"state": "left out", "reason": reason})
            told["budget_bytes"] = int(configuration.percent / 100 * whole_bytes)
        first = self._too_small.get((subject, configuration.percent))
        if first is not None and configuration.variant in PLANNERS:
            note = f"no process was started: {first.variant} found the same budget too small"
            found = {"state": "off", "reason": first.reason, "notes": (note,)}
            return Outcome.model_validate(told | found)
        left_s = self.end_s - time.monotonic() - (self._stock_s() if with_again else 0.0)
        reason = self._why_not(configuration, left_s)
        if reason:
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
        date, begin_s = _now(), time.monotonic()
        limit_s = min(PROCESS_LIMIT_S, max(LEAST_LIMIT_S, left_s))
        answer = self._ask(work, (job.model_dump_json(),), limit_s)
        took_s = time.monotonic() - begin_s
        figures = answer.model_dump(exclude={"parameters", "device_flops_per_s"})
        outcome = Outcome.model_validate(told | figures | {"process_s": took_s, "date": date})
        if answer.timed_out:
            self._silent[configuration.variant] = f"{configuration}: {answer.reason}"
        if answer.state == "measured" and configuration.variant == "stock":
            self.parameters[configuration.method] = answer.parameters
            self.device_flops_per_s = answer.device_flops_per_s
        self.learn(outcome)
        return outcome

    def learn(self, outcome: Outcome) -> None:
        """Know how long such a process takes, and what budgets follow from it."""
        kind, subject = (outcome.workload, outcome.variant), (outcome.workload, outcome.method)
        if outcome.process_s and not outcome.timed_out:
            self._longest_s[kind] = max(self._longest_s.get(kind, 0.0), outcome.process_s)
        if outcome.variant == "stock" and outcome.peak_allocated_bytes is not None:
            # In a later sitting, budgets are those of the first one.
            self._working_set_bytes.setdefault(subject, outcome.peak_allocated_bytes)
        if outcome.state == "off" and _one_phase_is_larger(outcome.reason or ""):
            self._too_small.setdefault((subject, outcome.budget_percent), outcome)

    def _why_not(self, configuration: Configuration, left_s: float) -> str:
        """Why a process is not to be started; empty where it is."""
        if self._stuck:
            return self._stuck
        if configuration.variant in self._silent:
            return f"this variant gave no answer before: {self._silent[configuration.variant]}"
        needed_s = self._needed_s(configuration)
        if not self._longest_s or left_s >= needed_s:
            return ""
        return (
            f"{max(0.0, left_s):.0f} s were left of {self.settings.seconds_limit:g} s, and "
            f"such a process takes {needed_s:.0f} s or more: give more with --seconds-limit, or "
            "go on with --continue"
        )

    def _stock_s(self) -> float:
        """The longest that a stock process took."""
        return max(
            (it for (_, variant), it in self._longest_s.items() if variant == "stock"), default=0.0
        )

    def _needed_s(self, configuration: Configuration) -> float:
        """The longest that such a process took, or else the longest of all; 0 at first."""
        variant = configuration.variant
        kind = configuration.workload, variant if variant != "stock-again" else "stock"
        return self._longest_s.get(kind, max(self._longest_s.values(), default=0.0))

    def _ask(
        self, target: Callable[..., None], words: tuple[str, ...], limit_s: float
    ) -> TrainingAnswer:
        with tempfile.TemporaryDirectory(prefix="umem-bench-") as folder:
            log = Path(folder, "log")
            answer = self._run(target, words, log, limit_s)
            if answer.state == "cannot fork" and not self._stuck:
                # An import has started CUDA: every process has its own imports from here on.
                self._forks = False
                answer = self._run(target, words, log, limit_s)
            if answer.state == "no answer":
                last = _last_words(log.read_text(errors="replace") if log.exists() else "")
                reason = " / ".join([answer.reason or "", *last])
                answer = answer.model_copy(update={"state": "failed", "reason": reason})
        return answer

    def _run(
        self, target: Callable[..., None], words: tuple[str, ...], log: Path, limit_s: float
    ) -> TrainingAnswer:
        """Start a process, and wait until it has ended; its answer, or why there is none.

        Whatever goes wrong is this process's failure, and not the run's.
        """
        context: ForkServerContext | SpawnContext = multiprocessing.get_context("spawn")
        if self._forks:
            context = multiprocessing.get_context("forkserver")
            context.set_forkserver_preload(list(_PRELOADED))
        receiver, sender = context.Pipe(duplex=False)
        arguments = (*words, sender, str(log), limit_s)
        process = context.Process(target=target, args=arguments, daemon=True)
        try:
            with _nvml_check():
                process.start()
            sender.close()
            if not receiver.poll(limit_s):
                reason = f"no answer within {limit_s:.0f} s"
                return TrainingAnswer(state="no answer", reason=reason, timed_out=True)
            answer = TrainingAnswer.model_validate_json(receiver.recv())
            process.join(END_S)
        except Exception as error:
            reason = _words_of(error)
            if isinstance(error, EOFError) and process.pid is not None:
                process.join(END_S)
                reason = f"ended with status {process.exitcode}"
            return TrainingAnswer(state="no answer", reason=reason)
        finally:
            sender.close()
            receiver.close()
            self._end(process)
        return answer

    def _end(self, process: ForkServerProcess | SpawnProcess) -> None:
        if process.pid is None or not process.is_alive():
            return
        process.kill()
        process.join(KILL_S)
        if process.is_alive():
            self._stuck = (
                f"process {process.pid} did not end within {KILL_S:.0f} s of being killed, and may "
                "hold managed memory: no other was started beside it"
            )
            # Python would wait for it, without an end, before it ends itself.
            multiprocessing.process._children.discard(process)  # type: ignore[attr-defined]


def _one_phase_is_larger(reason: str) -> bool:
    """Whether a manager gave up for what no planner can help: one phase uses more than the budget.

    Where the policy keeps something on the device besides, another planner may keep less of it.
    """
    found = _PHASE_AND_BUDGET.search(reason)
    return found is not None and parse_bytes(found["phase"]) > parse_bytes(found["budget"])


def _words_of(error: Exception) -> str:
    if isinstance(error, ValidationError):
        first = error.errors()[0]
        return f"its answer cannot be used: {'.'.join(map(str, first['loc']))}: {first['msg']}"
    return f"{type(error).__name__}: {error}"


def _last_words(log: str) -> list[str]:
    """The last lines of a log; after those, where the main thread was when time was short."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    stacks = next((n for n, line in enumerate(lines) if line.startswith("Timeout (")), len(lines))
    # The main thread's is the last stack, and its innermost call comes first.
    inner = max((n for n, line in enumerate(lines) if line.startswith("Thread 0x")), default=None)
    calls = [] if inner is None or inner < stacks else lines[inner + 1 :][:_LOG_LINES]
    return [*lines[:stacks][-_LOG_LINES:], *calls]


@contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """Let SIGTERM end this process as `sys.exit` does, so that its workers are ended with it."""
    if threading.current_thread() is not threading.main_thread():  # others cannot ask for signals
        yield
        return

    def end(number: int, _frame: object) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


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


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


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
