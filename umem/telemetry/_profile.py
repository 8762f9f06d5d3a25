"""A run being recorded: its marks, and whoever is asked what moved between them."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import numpy as np

from umem.errors import UmemError, UnsupportedError
from umem.report import MeasuredReport
from umem.telemetry._aggregate import report_of, step_reports
from umem.telemetry._attribution import Snapshot, attribute, snapshot_of
from umem.telemetry._cupti import torch_profiles
from umem.telemetry._file import save_recording
from umem.telemetry._hints import HintLog
from umem.telemetry._lookup import (
    current_residency,
    current_statistics,
    device_name,
    ideal_step_s,
    live_blocks,
    name_numbers,
    policy_name,
)
from umem.telemetry._marks import Marks
from umem.telemetry._phases import nvtx_phases, watched_phases
from umem.telemetry._recording import Recording
from umem.telemetry._records import MigrationRecords, RecordKind, records_of
from umem.telemetry._residency import ResidencySampler
from umem.units import format_bytes

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from umem.classes import TensorClass
    from umem.hints import HintStatistics
    from umem.report import Source

__all__ = ["Collector", "Profile"]


class Collector(Protocol):
    """Records memory operations; see :class:`umem.telemetry.LiveCollector`."""

    @property
    def source(self) -> Source: ...
    def start(self) -> None: ...
    def now_ns(self) -> int: ...
    def stop(self) -> tuple[MigrationRecords, int]: ...


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
