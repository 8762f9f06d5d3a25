"""Conducts a benchmark: starts the workers, gives them turns, gathers their answers."""

from __future__ import annotations

import contextlib
import os
import queue
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from datetime import UTC, datetime
from types import TracebackType
from typing import Self

from pydantic import ValidationError

from umem.core.errors import PolicyError, UmemError
from umem.core.units import parse_bytes
from umem_bench.core import run_core
from umem_bench.jobs import MODES, Answer, Job, cases_of, step_case
from umem_bench.provenance import current_machine, git_commit
from umem_bench.results import AllocatorName, BenchmarkName, Measurement, Run, Settings

__all__ = ["Plan", "run", "worker_managed_limit_bytes"]

MANAGED_TOTAL_BYTES = 15 << 30
"""Managed memory of all workers together: they are all there at once."""

MANAGED_WORKER_BYTES = 8 << 30
"""The most for one of them, where UMEM_MANAGED_LIMIT does not say."""

READY_TIMEOUT_S = 180.0
"""Imports, CUDA's start, the model and its first steps."""

ANSWER_TIMEOUT_S = 60.0
"""One round takes one or two seconds under the slowest allocator."""

EXIT_TIMEOUT_S = 20.0

_ERROR_LINES = 3


class Plan(Settings):
    """What to run, beside the settings that the results keep."""

    benchmarks: tuple[BenchmarkName, ...]
    allocators: tuple[AllocatorName, ...]
    sizes: tuple[str, ...]


def worker_managed_limit_bytes(
    allocators: Sequence[AllocatorName], environ: Mapping[str, str] = os.environ
) -> int:
    """The managed memory that one worker may hold, in bytes.

    UMEM_MANAGED_LIMIT, or 8 GiB, and in any case an equal share of 15 GiB: what a run holds in all
    stays below 16 GiB.

    Raises
    ------
    PolicyError
        If UMEM_MANAGED_LIMIT is not a size.
    """
    holders = sum(name != "torch" for name in allocators)
    asked_bytes = MANAGED_WORKER_BYTES
    if "UMEM_MANAGED_LIMIT" in environ:
        try:
            asked_bytes = parse_bytes(environ["UMEM_MANAGED_LIMIT"])
        except ValueError as error:
            raise PolicyError(f"UMEM_MANAGED_LIMIT: {error}") from error
    return min(asked_bytes, MANAGED_TOTAL_BYTES // max(1, holders))


class _WorkerError(UmemError):
    """A worker stopped answering, or answered with an error."""


class _Worker:
    """One allocator's process. Leaving the context ends it."""

    def __init__(self, job: Job) -> None:
        self.job = job
        # A file, not a pipe: nobody reads it before the worker has ended.
        self._errors = tempfile.TemporaryFile(  # noqa: SIM115 - closed on leaving the context
            "w+", encoding="utf-8", errors="replace"
        )
        environment = dict(
            os.environ,
            UMEM_MANAGED_LIMIT=str(job.managed_limit_bytes),
            # torch's deterministic algorithms ask for it before cuBLAS starts.
            CUBLAS_WORKSPACE_CONFIG=":4096:8",
        )
        self._process = subprocess.Popen(
            [sys.executable, "-m", "umem_bench._worker", job.model_dump_json()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env=environment,
        )
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it ended before it read its last command
            self._process.stdin.close()
        try:
            # End of input ends a waiting worker; one that is stuck gets no patience.
            self._process.wait(EXIT_TIMEOUT_S if kind is None else 1)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._errors.close()

    def ready(self) -> Answer:
        """Wait until the worker has prepared its task."""
        return self._answer(READY_TIMEOUT_S)

    def round(self) -> Answer:
        """Let the worker measure once."""
        return self._command("round")

    def finish(self) -> Answer:
        """Ask for what there is to say at the end."""
        return self._command("finish")

    def _command(self, word: str) -> Answer:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(word + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise _WorkerError(self._last_words()) from None
        return self._answer(ANSWER_TIMEOUT_S)

    def _answer(self, timeout_s: float) -> Answer:
        try:
            line = self._lines.get(timeout=timeout_s)
        except queue.Empty:
            self._process.kill()
            raise _WorkerError(f"no answer within {timeout_s:.0f} s") from None
        if not line:
            raise _WorkerError(self._last_words())
        try:
            answer = Answer.model_validate_json(line)
        except ValidationError:
            raise _WorkerError(f"answered {line.strip()!r}, which is no answer") from None
        if answer.error:
            raise _WorkerError(answer.error)
        return answer

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as output:
            for line in output:
                self._lines.put(line)
        self._lines.put("")

    def _last_words(self) -> str:
        status = self._process.wait()
        self._errors.seek(0)
        lines = self._errors.read().strip().splitlines()[-_ERROR_LINES:]
        return f"ended with status {status}" + (": " + " / ".join(lines) if lines else "")


def run(plan: Plan, on_progress: Callable[[str], None]) -> Run:
    """Run the benchmarks of a plan, one after the other.

    A worker that fails does not end the run: its measurements say why.

    Parameters
    ----------
    plan
        What to run.
    on_progress
        Told, in words, what is being done.

    Raises
    ------
    umem.core.errors.PolicyError, umem.core.errors.NativeLibraryError
        By the benchmark `core`, if the policy or the native library is not usable.
    """
    measurements: list[Measurement] = []
    for benchmark in plan.benchmarks:
        if benchmark == "core":
            on_progress("core: the native core over host memory")
            measurements += run_core(plan.policy, rounds=plan.rounds, quick=plan.quick)
        elif benchmark == "alloc":
            jobs = [_job(plan, "alloc", name) for name in plan.allocators]
            measurements += _take_turns("alloc", jobs, plan.rounds, on_progress)
        else:
            for size in plan.sizes:
                for mode in MODES:
                    jobs = [
                        _job(plan, "step", name).model_copy(update={"mode": mode, "size": size})
                        for name in plan.allocators
                    ]
                    label = f"step: {step_case(mode, size)}"
                    measurements += _take_turns(label, jobs, plan.rounds, on_progress)
    return Run(
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        git_commit=git_commit(),
        machine=current_machine(),
        settings=Settings(**plan.model_dump(include=set(Settings.model_fields))),
        measurements=tuple(measurements),
    )


def _job(plan: Plan, benchmark: BenchmarkName, allocator: AllocatorName) -> Job:
    return Job.model_validate(
        {
            "benchmark": benchmark,
            "allocator": allocator,
            "policy": plan.policy,
            "managed_limit_bytes": plan.worker_managed_limit_bytes,
            "quick": plan.quick,
        }
    )


def _take_turns(
    label: str, jobs: Sequence[Job], rounds: int, on_progress: Callable[[str], None]
) -> list[Measurement]:
    """Start a worker for each job, then let them measure in turn, never two at a time."""
    failures: dict[AllocatorName, str] = {}
    times_s: dict[AllocatorName, dict[str, list[float]]] = {
        job.allocator: {case: [] for case in cases_of(job)} for job in jobs
    }
    final: dict[AllocatorName, Answer] = {}
    with ExitStack() as stack:
        on_progress(f"{label}: starting {len(jobs)} workers")
        workers = [stack.enter_context(_Worker(job)) for job in jobs]

        def attempt(worker: _Worker, act: Callable[[_Worker], Answer]) -> Answer | None:
            name = worker.job.allocator
            if name in failures:
                return None
            try:
                return act(worker)
            except _WorkerError as error:
                failures[name] = str(error)
                on_progress(f"{label}: {name} failed: {error}")
                return None

        for worker in workers:
            attempt(worker, _Worker.ready)
        for number in range(1, rounds + 1):
            if len(failures) == len(jobs):
                break
            on_progress(f"{label}: round {number} of {rounds}")
            for worker in workers:
                answer = attempt(worker, _Worker.round)
                for case, case_s in (answer.times_s if answer else {}).items():
                    times_s[worker.job.allocator][case].append(case_s)
        for worker in workers:
            answer = attempt(worker, _Worker.finish)
            if answer:
                final[worker.job.allocator] = answer
    return [
        _measurement(job, case, rounds_s, final.get(job.allocator), failures.get(job.allocator))
        for job in jobs
        for case, rounds_s in times_s[job.allocator].items()
    ]


def _measurement(
    job: Job, case: str, rounds_s: list[float], final: Answer | None, error: str | None
) -> Measurement:
    if final is None:
        return Measurement(benchmark=job.benchmark, case=case, allocator=job.allocator, error=error)
    return Measurement(
        benchmark=job.benchmark,
        case=case,
        allocator=job.allocator,
        rounds_s=tuple(rounds_s),
        peak_reserved_bytes=final.peak_reserved_bytes,
        peak_allocated_bytes=final.peak_allocated_bytes,
        loss_hex=final.loss_hex,
    )
