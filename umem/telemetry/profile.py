"""Marks of a run: where its steps and named phases begin and end, for reports and profilers."""

from __future__ import annotations

import importlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import ModuleType, TracebackType
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np

from umem.core.errors import UmemError, UnsupportedError
from umem.core.report import MeasuredReport
from umem.core.units import format_bytes
from umem.telemetry.aggregate import report_of, step_reports
from umem.telemetry.attribution import (
    Snapshot,
    attribute,
    current_residency,
    current_statistics,
    device_name,
    ideal_step_s,
    live_blocks,
    name_numbers,
    policy_name,
    snapshot_of,
)
from umem.telemetry.cupti import torch_profiles
from umem.telemetry.file import save_recording
from umem.telemetry.hints import HintLog
from umem.telemetry.live import LiveCollector
from umem.telemetry.nsys import PHASE_PREFIX, STEP_PREFIX
from umem.telemetry.recording import NamedRange, Recording
from umem.telemetry.records import MigrationRecords, RecordKind, records_of
from umem.telemetry.residency import ResidencySampler

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from umem.core.classes import TensorClass
    from umem.core.report import Source
    from umem.runtime.hints import HintStatistics

__all__ = [
    "Collector",
    "Marks",
    "PhaseRanges",
    "Profile",
    "nvtx_phases",
    "profile",
    "watched_phases",
]


class Marks:
    """Steps, which follow each other, and phases, by whatever clock they are given.

    Where NVIDIA's package ``nvtx`` is installed, both are NVTX ranges too, which any profiler
    shows.
    """

    def __init__(self) -> None:
        self.steps: list[tuple[int, int]] = []
        self.phases: list[NamedRange] = []
        self._step_begin_ns = 0
        self._nvtx = _nvtx()
        self._step_range: Any = None

    def open_step(self, now_ns: int) -> None:
        """The next step begins."""
        self._step_begin_ns = now_ns
        if self._nvtx:
            message = f"{STEP_PREFIX}{len(self.steps)}"
            self._step_range = self._nvtx.start_range(message=message)

    def end_step(self, now_ns: int) -> None:
        """The step is over."""
        self.steps.append((self._step_begin_ns, now_ns))
        self.abandon_step()

    def abandon_step(self) -> None:
        """What has begun is not a whole step."""
        if self._nvtx and self._step_range is not None:
            self._nvtx.end_range(self._step_range)
            self._step_range = None

    @contextmanager
    def phase(self, name: str, now_ns: Callable[[], int]) -> Iterator[None]:
        """A phase that lasts as long as the ``with`` block."""
        begin_ns = now_ns()
        opened = self._nvtx.start_range(message=PHASE_PREFIX + name) if self._nvtx else None
        try:
            yield
        finally:
            if self._nvtx:
                self._nvtx.end_range(opened)
            self.phases.append(NamedRange(name, begin_ns, now_ns()))

    def columns_since(self, begin_ns: int) -> dict[str, Any]:
        """The fields of a recording that began at a moment."""
        starts, ends = zip(*self.steps, strict=True) if self.steps else ((), ())
        return {
            "step_start_ns": np.array(starts, np.int64) - begin_ns,
            "step_end_ns": np.array(ends, np.int64) - begin_ns,
            "phases": tuple(
                NamedRange(it.name, it.start_ns - begin_ns, it.end_ns - begin_ns)
                for it in self.phases
            ),
        }


def _nvtx() -> ModuleType | None:
    with suppress(ImportError):
        return importlib.import_module("nvtx")
    return None


# Phases of a step while they run: named for profilers, and told to an open profile.

_VARIABLE = "UMEM_NVTX"

_lock = threading.Lock()
_switches = 0
_watchers: tuple[Callable[[], None], ...] = ()


class PhaseRanges:
    """NVTX ranges of the phases that follow each other in a step.

    Whoever runs the step calls :meth:`begin` where a phase begins, in the thread that runs it. The
    ranges are pushed and popped in that thread, as NVTX wants it: a phase that another thread began
    stays open there until that thread comes to its next phase, or ends.

    Ranges are made inside of :func:`nvtx_phases`, and always where the environment variable
    ``UMEM_NVTX`` is ``1`` when the object is made. Otherwise calls cost well below a microsecond.
    """

    def __init__(self) -> None:
        self._always = os.environ.get(_VARIABLE) == "1"
        self._thread = threading.local()

    def begin(self, label: str) -> None:
        """Say that a phase begins, which ends the one before it in this thread."""
        for watch in _watchers:
            watch()
        self.end()
        if _switches or self._always:
            nvtx = _torch_nvtx()
            if nvtx is not None:
                nvtx.range_push(PHASE_PREFIX + label)
                self._thread.open = True

    def end(self) -> None:
        """Say that the phase which this thread began is over. Does nothing where none is open."""
        if getattr(self._thread, "open", False):
            self._thread.open = False
            nvtx = _torch_nvtx()
            if nvtx is not None:
                nvtx.range_pop()


@contextmanager
def nvtx_phases() -> Iterator[None]:
    """Make NVTX ranges of the phases of every step that runs in the ``with`` block.

    They show in Nsight Systems, and ``umem report`` finds them in its exports. A torch without CUDA
    makes none.

    Examples
    --------
    >>> with nvtx_phases():
    ...     pass  # training steps
    """
    global _switches
    with _lock:
        _switches += 1
    try:
        yield
    finally:
        with _lock:
            _switches -= 1


@contextmanager
def watched_phases(watch: Callable[[], None]) -> Iterator[None]:
    """Call a function wherever a phase begins, in the thread that runs it."""
    global _watchers
    with _lock:
        _watchers = (*_watchers, watch)
    try:
        yield
    finally:
        with _lock:
            _watchers = tuple(it for it in _watchers if it is not watch)


def _torch_nvtx() -> ModuleType | None:
    import torch

    return torch.cuda.nvtx if torch.version.cuda is not None else None


# A run being recorded: its marks, and whoever is asked what moved between them.


class Collector(Protocol):
    """Records memory operations; see :class:`umem.telemetry.LiveCollector`."""

    @property
    def source(self) -> Source:
        """Who is asked."""

    def start(self) -> None:
        """Begin to record."""

    def now_ns(self) -> int:
        """The time by the clock of the records, ns."""

    def stop(self) -> tuple[MigrationRecords, int]:
        """End, and return the records with the count of those that were lost."""


@runtime_checkable
class _KnowsLosses(Collector, Protocol):
    """A collector that may lose records, and says so."""

    def late(self) -> int: ...
    def notes(self) -> tuple[str, ...]: ...


class Profile:
    """A run being recorded; made by :func:`umem.profile`.

    Blocks are looked up at the marks of steps, at the end of named phases and when an optimizer's
    step begins: what is born and dies in between is not attributed.
    """

    def __init__(
        self,
        collector: Collector,
        *,
        steps: int | None = None,
        model: nn.Module | None = None,
        name: str = "run",
        required: bool = True,
        synchronize: bool = True,
        hints: Callable[[], HintStatistics | None] = current_statistics,
        residency: Callable[[], Mapping[TensorClass, int] | None] = current_residency,
        ideal_s: float | None = None,
        nvtx: bool = False,
    ) -> None:
        self._collector: Collector | None = collector
        self._steps = steps
        self._model = model
        self._name = name
        self._required = required
        self._waits = synchronize
        self._now: Callable[[], int] = collector.now_ns
        self._notes: list[str] = []
        self._names: dict[str, int] = {}
        self._optimizers: list[Optimizer] = []
        self._snapshots: list[Snapshot] = []
        self._marks = Marks()
        self._ask_hints = hints
        self._hints = HintLog(hints)
        self._residency = ResidencySampler(residency)
        self._ideal_s = ideal_s
        self._wants_nvtx = nvtx
        self._hardware = ""
        self._begin_ns = 0
        self._entered = False
        self._running = False
        self._is_robbed = False
        self._recording: Recording | None = None
        self._installed = ExitStack()

    def __enter__(self) -> Profile:
        """Begin recording.

        Raises
        ------
        UnsupportedError
            If nobody can say here what moves, unless that was not required.
        """
        if self._entered:
            raise UmemError("a profile records once: call umem.profile() again")
        self._entered = True
        from torch.optim.optimizer import register_optimizer_step_pre_hook

        self._start_collector()
        try:
            hook = register_optimizer_step_pre_hook(self._before_optimizer)
            self._installed.callback(hook.remove)
            self._installed.enter_context(watched_phases(self._sample))
            if self._wants_nvtx:
                self._installed.enter_context(nvtx_phases())
            self._wait()
            # Now, because a device that has failed in the block does not tell its name.
            self._hardware = device_name()
            self._begin_ns = self._now()
            self._look()
            self._hints.mark()
            self._marks.open_step(self._now())
            self._running = True
        except BaseException:
            # Nobody calls __exit__ for us, and CUPTI would stay taken.
            self._installed.close()
            self._stop_collector()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End recording.

        Raises
        ------
        RuntimeError
            If the device has failed in the block, and the block has not raised an error itself.
        """
        failure = self._finish() if self._running else None
        if failure is not None and error is None:
            raise failure

    @property
    def running(self) -> bool:
        """Whether the run is being recorded: not before the block, and not after its last step."""
        return self._running

    @property
    def recording(self) -> Recording:
        """What was recorded.

        Raises
        ------
        UmemError
            If the recording has not ended.
        """
        if self._recording is None:
            raise UmemError(
                "the profile has no results yet: leave its `with` block, or mark all its steps"
            )
        late = self._collector.late() if isinstance(self._collector, _KnowsLosses) else 0
        if not late:
            return self._recording
        return replace(
            self._recording,
            dropped=self._recording.dropped + late,
            notes=(
                *self._recording.notes,
                f"{late} records came after the end of the recording, so that the figures are too "
                "low: record fewer steps",
            ),
        )

    def step(self) -> None:
        """Mark the end of a step; the next one begins. Does nothing after the last one."""
        if not self._running:
            return
        self._wait()
        self._marks.end_step(self._now())
        self._hints.mark()
        self._look_for_torch(len(self._marks.steps) - 1)
        if self._steps is not None and len(self._marks.steps) >= self._steps:
            self._finish()
            return
        self._look()
        self._marks.open_step(self._now())

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Name a part of a step, by the time of the host: it does not wait for the device.

        The blocks that are alive when it ends are looked up: around the forward pass, it tells
        whose activations move.
        """
        if not self._running:
            yield
            return
        self._sample()
        with self._marks.phase(name, self._now):
            yield
        if self._running:
            self._look()

    def report(self) -> MeasuredReport:
        """The typical step: the marked one whose time is the median.

        Raises
        ------
        UmemError
            If the recording has not ended.
        """
        return report_of(self.recording)

    def step_reports(self) -> tuple[MeasuredReport, ...]:
        """One report for each marked step; one of the whole recording where none is marked.

        Raises
        ------
        UmemError
            If the recording has not ended.
        """
        return step_reports(self.recording)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Save what was recorded, for ``umem report``.

        Parameters
        ----------
        path
            Such as ``run.json.gz``. Names of tensors and phases are in the file, values are not.

        Raises
        ------
        UmemError
            If the recording has not ended or the file cannot be written.
        """
        save_recording(self.recording, path)

    # ------------------------------------------------------------------ how it goes

    def _start_collector(self) -> None:
        import torch

        if torch.cuda.is_available():
            torch.cuda.synchronize()  # CUPTI's counters need the driver to have started
        assert self._collector is not None
        try:
            self._collector.start()
        except UnsupportedError as error:
            if self._required and self._ask_hints() is None:
                raise
            self._notes.append(f"memory operations were not recorded: {error}")
            self._collector = None
            self._now = time.monotonic_ns

    def _finish(self) -> RuntimeError | None:
        """End, and return what the device said if it has failed."""
        self._running = False
        self._installed.close()
        self._look_for_torch(len(self._marks.steps))
        failure = None
        try:
            self._wait()
        except RuntimeError as error:
            failure = error
            self._notes.append(
                f"the device has failed ({error}), so that what moved last may be missing"
            )
        try:
            end_ns = self._now()
        finally:
            # Whatever has failed: CUPTI would stay taken.
            records, dropped = self._stop_collector()
        self._look()
        self._marks.abandon_step()
        if not self._marks.steps:
            self._hints.mark()
        hints = self._hints.reports()
        source: Source = "hints" if hints else "none"
        if self._collector is not None:
            source = self._collector.source
        records, strange = _within(records, self._begin_ns, end_ns)
        if strange and source == "cupti":
            self._notes.append(strange)
        tensor_class, tensor, shares = attribute(records, self._snapshots)
        begin_ns = self._begin_ns
        self._recording = Recording(
            workload=self._name,
            hardware=self._hardware,
            policy=policy_name(),
            source=source,
            duration_ns=end_ns - begin_ns,
            records=replace(
                records,
                start_ns=records.start_ns - begin_ns,
                end_ns=records.end_ns - begin_ns,
            ),
            tensor_class=tensor_class,
            tensor=tensor,
            tensor_names=tuple(self._names),
            **self._marks.columns_since(begin_ns),
            dropped=dropped,
            notes=tuple(self._all_notes(source, dropped)),
            ideal_s=ideal_step_s() if self._ideal_s is None else self._ideal_s,
            hints=hints,
            residency=self._residency.series(begin_ns),
            shares=shares,
        )
        return failure

    def _stop_collector(self) -> tuple[MigrationRecords, int]:
        if self._collector is not None:
            try:
                return self._collector.stop()
            except UnsupportedError as error:
                # The steps are done, and whoever trains has more to lose than figures.
                self._notes.append(f"memory operations were lost: {error}")
                self._collector = None
        return records_of([]), 0

    def _all_notes(self, source: Source, dropped: int) -> list[str]:
        notes = list(self._notes)
        if isinstance(self._collector, _KnowsLosses):
            notes += self._collector.notes()
        if source == "hints":
            notes.append(
                "what moved is the hint engine's own count: pages that faulted are not in it, and "
                "pages that were there already are"
            )
        notes += self._hints.notes()
        if not self._marks.steps:
            notes.append("no step was marked: the figures are of the whole recording")
        if self._collector is not None and not self._snapshots:
            notes.append("umem is not enabled: all traffic is of class other")
        if dropped:
            notes.append(
                f"{dropped} records were lost, so that the figures are too low: record fewer steps"
            )
        return notes

    def _before_optimizer(self, optimizer: Optimizer, _args: object, _kwargs: object) -> None:
        # Gradients are alive now, and by the end of the step they may not be.
        if all(known is not optimizer for known in self._optimizers):
            self._optimizers.append(optimizer)
        self._look()

    def _look(self) -> None:
        blocks = live_blocks()
        if blocks is not None:
            time_ns = self._now()
            numbers = name_numbers(self._model, self._optimizers, self._names)
            self._snapshots.append(snapshot_of(blocks, time_ns, numbers))
        self._sample()

    def _look_for_torch(self, step: int) -> None:
        if self._collector is not None and not self._is_robbed and torch_profiles():
            self._is_robbed = True
            of_what = "figures" if self._collector.source == "cupti" else "copies and memory sets"
            self._notes.append(
                f"the {of_what} are not whole: torch.profiler began inside of the recording, and "
                f"CUPTI serves one profiler: what it recorded from step {step} on may be "
                "missing. Begin umem.profile() outside of torch.profiler, or leave that out"
            )

    def _sample(self) -> None:
        self._residency.take(self._now)

    def _wait(self) -> None:
        import torch

        if self._waits and torch.cuda.is_initialized():
            torch.cuda.synchronize()


def _within(records: MigrationRecords, begin_ns: int, end_ns: int) -> tuple[MigrationRecords, str]:
    """Records that start in a recording, and a note of migrations and faults that do not.

    Those of CUPTI are what an earlier recording of the process has left there; those of the driver
    are of what was at work in other threads before the first mark and after the last. What is said
    to have taken longer than the recording has no length.
    """
    inside = (records.start_ns >= begin_ns) & (records.start_ns <= end_ns)
    of_memory = np.isin(records.kind, (RecordKind.MEMCPY, RecordKind.MEMSET))
    strange = ~inside & ~of_memory
    kept = records.taken(inside)
    is_possible = kept.end_ns - kept.start_ns <= end_ns - begin_ns
    kept = replace(kept, end_ns=np.where(is_possible, kept.end_ns, kept.start_ns))
    if not strange.any():
        return kept, ""
    return kept, (
        f"{int(strange.sum())} records ({format_bytes(int(records.bytes[strange].sum()))}) that "
        "CUPTI handed over start outside of the recording, and are left out"
    )


# `umem.profile`: what migration costs the steps of a real run.


def profile(
    steps: int | None = None,
    *,
    model: nn.Module | None = None,
    name: str | None = None,
    required: bool = True,
    synchronize: bool = True,
    hints: Callable[[], HintStatistics | None] | None = None,
    residency: Callable[[], Mapping[TensorClass, int] | None] | None = None,
    ideal_s: float | None = None,
    nvtx: bool = False,
) -> Profile:
    """Record what migrates while a ``with`` block runs.

    Parameters
    ----------
    steps
        Stop recording after so many calls of :meth:`Profile.step`; the block may go on.
    model
        Its parameters, their gradients and their optimizer state are reported by name.
    name
        Of the workload; the script's name when none is given.
    required
        Whether it is an error that nobody can say here what moves: the driver's event queue cannot
        be had, CUPTI is missing or in another profiler's hands, and no hint engine is at work. If
        not, steps are timed and the report says what is missing. With a hint engine its own counts
        stand in, and the report says so too.
    synchronize
        Wait for the device at the marks of steps, so that a step's work counts with that step.
        Without it a step ends when the host is done with it.
    hints
        Asked for the statistics of the hint engine at the marks of steps, such as
        :meth:`HintEngine.statistics`. By default that of umem's executor, if it runs.
    residency
        Asked for the bytes on the device by class, at the marks of steps and phases. By default the
        executor's books, if it runs.
    ideal_s
        Time of a step with everything resident, from which the exposed stall follows. By default
        that of the step that the executor has recorded, if it runs.
    nvtx
        Make NVTX ranges of the executor's phases while recording, as :func:`nvtx_phases` does.

    Returns
    -------
    Profile
        Not started: use it in a ``with`` statement.

    Raises
    ------
    ValueError
        If `steps` is not a whole number above 0, or `ideal_s` is not a time above 0.

    Examples
    --------
    >>> with umem.profile(steps=3, model=model) as profile:  # doctest: +SKIP
    ...     for batch in batches:
    ...         train(batch)
    ...         profile.step()
    >>> profile.report().um_time_share  # doctest: +SKIP
    >>> profile.save("run.json.gz")  # doctest: +SKIP
    """
    if steps is not None and (type(steps) is not int or steps < 1):
        raise ValueError(f"steps={steps!r}: give a whole number above 0, or None for all")
    if ideal_s is not None and not 0 < ideal_s < float("inf"):
        raise ValueError(f"ideal_s={ideal_s!r}: give a time above 0 in seconds, or None")
    return Profile(
        LiveCollector(),
        steps=steps,
        model=model,
        name=name or Path(sys.argv[0]).stem or "run",
        required=required,
        synchronize=synchronize,
        hints=hints or current_statistics,
        residency=residency or current_residency,
        ideal_s=ideal_s,
        nvtx=nvtx,
    )
