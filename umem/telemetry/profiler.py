"""`umem.profile`: records what migrates while a run goes on."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Protocol, TypeVar

import numpy as np

from umem.core.arguments import check_argument
from umem.core.errors import UmemError, UnsupportedError
from umem.core.report import MeasuredReport
from umem.core.units import format_bytes
from umem.runtime.copies import copy_counts
from umem.telemetry.attribution import Snapshot, attribute, snapshot_of
from umem.telemetry.file import save_run
from umem.telemetry.live import (
    LiveCollector,
    ResidencySampler,
    StepLog,
    current_residency,
    current_statistics,
    device_name,
    ideal_step_s,
    live_blocks,
    name_numbers,
    policy_name,
)
from umem.telemetry.phases import watched_phases
from umem.telemetry.records import MigrationRecords, Recording, RecordKind, make_records
from umem.telemetry.reports import run_of
from umem.torch_compat import torch_profiler_runs

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from umem.core.classes import TensorClass
    from umem.core.report import Source
    from umem.runtime.hints import HintStatistics
    from umem.runtime.inspection import LiveTensor

__all__ = ["Profile", "profile"]

_LOG = logging.getLogger("umem")

_T = TypeVar("_T")


class _Collector(Protocol):
    """Records memory operations, as :class:`umem.telemetry.live.LiveCollector` does."""

    @property
    def source(self) -> Source: ...
    def start(self) -> None: ...
    def now_ns(self) -> int: ...
    def stop(self) -> tuple[MigrationRecords, int]: ...
    def late(self) -> int: ...
    def notes(self) -> tuple[str, ...]: ...


class Profile:
    """A run being recorded; made by :func:`umem.profile`.

    Reports, `recording` and `save` raise :class:`umem.UmemError` until the recording has ended.
    Live blocks are listed at the marks of steps, by :meth:`snapshot` and when an optimizer's step
    begins: those in between are not attributed. Once the recording has begun, no failure of what it
    observes ends the training: what fails once is logged, noted in the report, and no longer asked
    for.
    """

    def __init__(
        self,
        collector: _Collector,
        *,
        steps: int | None = None,
        model: nn.Module | None = None,
        name: str = "run",
        required: bool = True,
        hints: Callable[[], HintStatistics | None] = current_statistics,
        residency: Callable[[], Mapping[TensorClass, int] | None] = current_residency,
        blocks: Callable[[], Sequence[LiveTensor] | None] = live_blocks,
        ideal_s: float | None = None,
    ) -> None:
        self._collector: _Collector | None = collector
        self._steps = steps
        self._model = model
        self._name = name
        self._required = required
        self._now: Callable[[], int] = collector.now_ns
        self._notes: list[str] = []
        self._failed: set[str] = set()
        self._names: dict[str, int] = {}
        self._optimizers: list[Optimizer] = []
        self._list_blocks = blocks
        self._find_snapshot = self._guarded("live blocks", self._snapshot)
        self._snapshots: list[Snapshot] = []
        self._step_ns: list[tuple[int, int]] = []
        self._step_begin_ns = 0
        self._ask_hints = hints
        self._log = StepLog(self._guarded("hint statistics", hints))
        self._residency = ResidencySampler(residency)
        self._sample_residency = self._guarded("residency", lambda: self._residency.take(self._now))
        self._ideal_s = ideal_s
        self._hardware = ""
        self._begin_ns = 0
        self._is_entered = False
        self._has_begun = False
        self._running = False
        self._saw_torch_profiler = False
        self._recording: Recording | None = None
        self._installed = ExitStack()

    def __enter__(self) -> Profile:
        """Begin recording.

        Raises UnsupportedError if nothing here can record what moves, unless that was not required.
        """
        if self._is_entered:
            raise UmemError("a profile records once: call umem.profile() again")
        self._is_entered = True
        from torch.optim.optimizer import register_optimizer_step_pre_hook

        self._start_collector()
        try:
            hook = register_optimizer_step_pre_hook(self._before_optimizer)
            self._installed.callback(hook.remove)
            self._installed.enter_context(copy_counts.timed())
            self._wait()
            # Now, because a device that fails in the block does not give its name.
            self._hardware = device_name()
            self._begin_ns = self._now()
            self._take_snapshot()
            self._log.mark()
            self._step_begin_ns = self._now()
            self._running = self._has_begun = True
            # From now on it is guarded: nothing that it raises reaches the step that it watches.
            self._installed.enter_context(watched_phases(self._sample_residency))
        except BaseException:
            # __exit__ is not called, and CUPTI would stay in use.
            self._installed.close()
            self._stop_collector()
            raise
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        """End recording.

        Raises RuntimeError if the device has failed in the block, and the block has not raised an
        error itself.
        """
        failure = self._finish() if self._running else None
        if failure is not None and error is None:
            raise failure

    @property
    def running(self) -> bool:
        """Whether the run is being recorded: in the block, until its last step."""
        return self._running

    @property
    def recording(self) -> Recording:
        """What was recorded."""
        if self._recording is None:
            raise UmemError(
                "the profile has no results yet: leave its `with` block, or mark all its steps"
            )
        late = self._collector.late() if self._collector is not None else 0
        if not late:
            return self._recording
        return replace(
            self._recording,
            dropped=self._recording.dropped + late,
            notes=(
                *self._recording.notes,
                f"{late} records came after the end of the recording, so the figures are too low: "
                "record fewer steps",
            ),
        )

    def step(self) -> None:
        """Mark the end of a step; the next one begins. Does nothing after the last one."""
        if not self._running:
            return
        self._wait()
        self._step_ns.append((self._step_begin_ns, self._now()))
        self._log.mark()
        self._note_torch_profiler(len(self._step_ns) - 1)
        if self._steps is not None and len(self._step_ns) >= self._steps:
            self._finish()
            return
        self._take_snapshot()
        self._step_begin_ns = self._now()

    def snapshot(self) -> None:
        """List the blocks that are live now: after the forward pass, activations among them."""
        if self._running:
            self._take_snapshot()

    def report(self) -> MeasuredReport:
        """The typical step: the marked one whose time is the median."""
        return run_of(self.recording).typical

    def step_reports(self) -> tuple[MeasuredReport, ...]:
        """One report for each marked step; one of the whole recording where none is marked."""
        return run_of(self.recording).steps

    def save(self, path: str | os.PathLike[str]) -> None:
        """Save the reports, for ``umem report``, in a file such as ``run.json``.

        Names of tensors are in the file, values are not. An :class:`umem.UmemError` says why the
        file cannot be written.
        """
        save_run(run_of(self.recording), path)

    # ------------------------------------------------------------------ begin and end

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
        """End, and return the device's error if it has failed."""
        self._running = False
        self._installed.close()
        self._note_torch_profiler(len(self._step_ns))
        failure = None
        try:
            self._wait()
        except RuntimeError as error:
            failure = error
            self._notes.append(
                f"the device has failed ({error}), so the last transfers may be missing"
            )
        try:
            end_ns = self._now()
        finally:
            # In any case: CUPTI would stay in use.
            records, dropped = self._stop_collector()
        self._take_snapshot()
        if not self._step_ns:
            self._log.mark()
        hints = self._log.hints()
        source: Source = "hints" if hints else "none"
        if self._collector is not None:
            source = self._collector.source
        records, outside = _within(records, self._begin_ns, end_ns)
        if outside and source == "cupti":
            self._notes.append(outside)
        step_ns = np.array(self._step_ns, np.int64).reshape(-1, 2) - self._begin_ns
        self._recording = Recording(
            workload=self._name,
            hardware=self._hardware,
            policy=policy_name(),
            source=source,
            duration_ns=end_ns - self._begin_ns,
            records=attribute(records, self._snapshots).since(self._begin_ns),
            tensor_names=tuple(self._names),
            step_start_ns=step_ns[:, 0],
            step_end_ns=step_ns[:, 1],
            dropped=dropped,
            notes=tuple(self._all_notes(source, dropped)),
            ideal_s=ideal_step_s() if self._ideal_s is None else self._ideal_s,
            hints=hints,
            copies=self._log.copies(),
            residency=self._residency.series(self._begin_ns),
        )
        return failure

    def _stop_collector(self) -> tuple[MigrationRecords, int]:
        if self._collector is not None:
            try:
                return self._collector.stop()
            except UnsupportedError as error:
                # The steps are done, and a training is worth more than its figures.
                self._notes.append(f"memory operations were lost: {error}")
                self._collector = None
        return make_records(0), 0

    def _all_notes(self, source: Source, dropped: int) -> list[str]:
        notes = list(self._notes)
        if self._collector is not None:
            notes += self._collector.notes()
        if source == "hints":
            notes.append(
                "what moved is the hint engine's own count: it lacks pages that faulted, and "
                "includes pages that were there already"
            )
        notes += self._log.notes()
        if not self._step_ns:
            notes.append("no step was marked: the figures are of the whole recording")
        if self._collector is not None and not self._snapshots and not self._failed:
            notes.append("umem is not enabled: all traffic is of class other")
        if dropped:
            notes.append(
                f"{dropped} records were lost, so the figures are too low: record fewer steps"
            )
        return notes

    # ------------------------------------------------------------------ while it goes on

    def _guarded(self, what: str, ask: Callable[[], _T | None]) -> Callable[[], _T | None]:
        """A function that returns None once `ask` has failed after the recording has begun."""

        def guarded() -> _T | None:
            if what in self._failed:
                return None
            try:
                return ask()
            except Exception as error:
                if not self._has_begun:
                    raise
                self._failed.add(what)
                self._notes.append(f"{what} could not be read ({error!r}), and are left out")
                _LOG.warning("umem: the profile leaves out %s", what, exc_info=True)
                return None

        return guarded

    def _before_optimizer(self, optimizer: Optimizer, _args: object, _kwargs: object) -> None:
        # Gradients are live now, and at the end of the step they may not be.
        if all(known is not optimizer for known in self._optimizers):
            self._optimizers.append(optimizer)
        self._take_snapshot()

    def _take_snapshot(self) -> None:
        snapshot = self._find_snapshot()
        if snapshot is not None:
            self._snapshots.append(snapshot)
        self._sample_residency()

    def _snapshot(self) -> Snapshot | None:
        blocks = self._list_blocks()
        if blocks is None:
            return None
        time_ns = self._now()
        numbers = name_numbers(self._model, self._optimizers, self._names)
        return snapshot_of(blocks, time_ns, numbers)

    def _note_torch_profiler(self, step: int) -> None:
        if self._collector is None or self._saw_torch_profiler or not torch_profiler_runs():
            return
        self._saw_torch_profiler = True
        what = "figures" if self._collector.source == "cupti" else "copies and memory sets"
        self._notes.append(
            f"the {what} are incomplete: torch.profiler began inside of the recording, and CUPTI "
            f"serves one profiler: records from step {step} on may be missing. Use umem.profile() "
            "outside of torch.profiler, or leave torch.profiler out"
        )

    def _wait(self) -> None:
        import torch

        if torch.cuda.is_initialized():
            torch.cuda.synchronize()


def _within(records: MigrationRecords, begin_ns: int, end_ns: int) -> tuple[MigrationRecords, str]:
    """Records that start in a recording, and a note of migrations and faults that do not.

    CUPTI's may be of an earlier recording; the driver's are of other threads' work. A record that
    seems to be longer than the recording gets no length.
    """
    inside = (records.start_ns >= begin_ns) & (records.start_ns <= end_ns)
    outside = ~inside & ~np.isin(records.kind, (RecordKind.MEMCPY, RecordKind.MEMSET))
    kept = records.select(inside)
    is_possible = kept.end_ns - kept.start_ns <= end_ns - begin_ns
    kept = replace(kept, end_ns=np.where(is_possible, kept.end_ns, kept.start_ns))
    if not outside.any():
        return kept, ""
    return kept, (
        f"{int(outside.sum())} records ({format_bytes(int(records.bytes[outside].sum()))}) from "
        "CUPTI start outside of the recording, and are left out"
    )


def profile(
    steps: int | None = None,
    *,
    model: nn.Module | None = None,
    name: str | None = None,
    required: bool = True,
    hints: Callable[[], HintStatistics | None] | None = None,
) -> Profile:
    """Record what migrates while a ``with`` block runs.

    Parameters
    ----------
    steps
        Stop recording after this many calls of :meth:`Profile.step`; the block may go on.
    model
        Its parameters, their gradients and their optimizer state are reported by name.
    name
        Of the workload; by default the script's name.
    required
        Whether it is an error if nothing here can record what moves: the driver's event queue is
        not available, CUPTI is missing or used by another profiler, and there is no hint engine.
        If not required, steps are timed and the report says what is missing. With a hint engine,
        its own counts are used instead, and the report says so too.
    hints
        Returns the statistics of the hint engine at the marks of steps, such as
        :meth:`HintEngine.statistics`. By default those of umem's executor, if it runs.

    Returns
    -------
    Profile
        Not started: use it in a ``with`` statement.

    Raises
    ------
    TypeError
        If `model` or `name` is of another type.
    ValueError
        If `steps` is not a whole number above 0.

    Examples
    --------
    >>> with umem.profile(steps=3, model=model) as profile:  # doctest: +SKIP
    ...     for batch in batches:
    ...         train(batch)
    ...         profile.step()
    >>> profile.report().um_time_share  # doctest: +SKIP
    >>> profile.save("run.json")  # doctest: +SKIP
    """
    if model is not None:
        from torch import nn  # loaded already; not at the top, for reports need no torch

        check_argument("model", model, nn.Module, "give the module that is trained, or None")
    check_argument("name", name, (str, NoneType), "give a name for the workload, or None")
    if steps is not None and (type(steps) is not int or steps < 1):
        raise ValueError(f"steps={steps!r}: give a whole number above 0, or None for all")
    return Profile(
        LiveCollector(),
        steps=steps,
        model=model,
        name=name or Path(sys.argv[0]).stem or "run",
        required=required,
        hints=hints or current_statistics,
    )
