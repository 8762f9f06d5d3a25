"""`umem.profile`: what migration costs the steps of a real run."""

from __future__ import annotations

import importlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import ModuleType, TracebackType
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from umem.errors import UmemError, UnsupportedError
from umem.report import MeasuredReport
from umem.telemetry._aggregate import report_of, step_reports
from umem.telemetry._attribution import Snapshot, attribute, snapshot_of
from umem.telemetry._cupti import CuptiCollector
from umem.telemetry._file import save_recording
from umem.telemetry._lookup import device_name, live_blocks, name_numbers, policy_name
from umem.telemetry._nsys import PHASE_PREFIX, STEP_PREFIX
from umem.telemetry._recording import NamedRange, Recording
from umem.telemetry._records import MigrationRecords, records_of

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

__all__ = ["Collector", "Profile", "profile"]


class Collector(Protocol):
    """Records memory operations; see :class:`umem.telemetry.CuptiCollector`."""

    def start(self) -> None: ...
    def now_ns(self) -> int: ...
    def stop(self) -> tuple[MigrationRecords, int]: ...


def profile(
    steps: int | None = None,
    *,
    model: nn.Module | None = None,
    name: str | None = None,
    required: bool = True,
    synchronize: bool = True,
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
        Whether it is an error that memory operations cannot be recorded here. If not, steps are
        timed and the report says what is missing.
    synchronize
        Wait for the device at the marks of steps, so that a step's work counts with that step.
        Without it a step ends when the host is done with it.

    Returns
    -------
    Profile
        Not started: use it in a ``with`` statement.

    Raises
    ------
    ValueError
        If `steps` is not a whole number above 0.

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
    return Profile(
        CuptiCollector(),
        steps=steps,
        model=model,
        name=name or Path(sys.argv[0]).stem or "run",
        required=required,
        synchronize=synchronize,
    )


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
        self._marks: list[tuple[int, int]] = []
        self._phases: list[NamedRange] = []
        self._begin_ns = 0
        self._step_begin_ns = 0
        self._running = False
        self._recording: Recording | None = None
        self._hook: Any = None
        self._nvtx = _nvtx()
        self._step_range: Any = None

    def __enter__(self) -> Profile:
        """Begin recording.

        Raises
        ------
        UnsupportedError
            If memory operations cannot be recorded here, unless that was not required.
        """
        if self._running or self._recording is not None:
            raise UmemError("a profile records once: call umem.profile() again")
        from torch.optim.optimizer import register_optimizer_step_pre_hook

        self._start_collector()
        self._running = True
        self._hook = register_optimizer_step_pre_hook(self._before_optimizer)
        self._wait()
        self._begin_ns = self._now()
        self._look()
        self._open_step()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End recording."""
        if self._running:
            self._finish()

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
        return self._recording

    def step(self) -> None:
        """Mark the end of a step; the next one begins. Does nothing after the last one."""
        if not self._running:
            return
        self._wait()
        self._marks.append((self._step_begin_ns, self._now()))
        self._close_step()
        if self._steps is not None and len(self._marks) >= self._steps:
            self._finish()
            return
        self._look()
        self._open_step()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Name a part of a step, by the time of the host: it does not wait for the device.

        The blocks that are alive when it ends are looked up: around the forward pass, it tells
        whose activations move.
        """
        if not self._running:
            yield
            return
        begin_ns = self._now()
        opened = self._nvtx.start_range(message=PHASE_PREFIX + name) if self._nvtx else None
        try:
            yield
        finally:
            if self._nvtx:
                self._nvtx.end_range(opened)
            if self._running:
                self._phases.append(NamedRange(name, begin_ns, self._now()))
                self._look()

    def report(self) -> MeasuredReport:
        """The typical step: medians over the marked ones, each figure for itself.

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
            if self._required:
                raise
            self._notes.append(f"memory operations were not recorded: {error}")
            self._collector = None
            self._now = time.time_ns

    def _finish(self) -> None:
        self._running = False
        self._hook.remove()
        self._wait()
        end_ns = self._now()
        self._look()
        self._close_step()
        records, dropped = records_of([]), 0
        if self._collector is not None:
            records, dropped = self._collector.stop()
        # Counting begins with the first mark, a little after the collector.
        records = records.taken(records.start_ns >= self._begin_ns)
        tensor_class, tensor = attribute(records, self._snapshots)
        begin_ns = self._begin_ns
        self._recording = Recording(
            workload=self._name,
            hardware=device_name(),
            policy=policy_name(),
            source="none" if self._collector is None else "cupti",
            duration_ns=end_ns - begin_ns,
            records=replace(
                records,
                start_ns=records.start_ns - begin_ns,
                end_ns=records.end_ns - begin_ns,
            ),
            tensor_class=tensor_class,
            tensor=tensor,
            tensor_names=tuple(self._names),
            step_start_ns=np.array([start - begin_ns for start, _ in self._marks], np.int64),
            step_end_ns=np.array([end - begin_ns for _, end in self._marks], np.int64),
            phases=tuple(
                NamedRange(it.name, it.start_ns - begin_ns, it.end_ns - begin_ns)
                for it in self._phases
            ),
            dropped=dropped,
            notes=tuple(self._all_notes(dropped)),
        )

    def _all_notes(self, dropped: int) -> list[str]:
        notes = list(self._notes)
        if not self._marks:
            notes.append("no step was marked: the figures are of the whole recording")
        if not self._snapshots:
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

    def _open_step(self) -> None:
        self._step_begin_ns = self._now()
        if self._nvtx:
            message = f"{STEP_PREFIX}{len(self._marks)}"
            self._step_range = self._nvtx.start_range(message=message)

    def _close_step(self) -> None:
        if self._nvtx and self._step_range is not None:
            self._nvtx.end_range(self._step_range)
            self._step_range = None

    def _wait(self) -> None:
        import torch

        if self._waits and torch.cuda.is_initialized():
            torch.cuda.synchronize()


def _nvtx() -> ModuleType | None:
    """NVIDIA's package of that name, where it is installed: its ranges show in any profiler."""
    with suppress(ImportError):
        return importlib.import_module("nvtx")
    return None
