"""Recording a training step of PyTorch, without memory and without a GPU."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
from torch._subclasses.fake_tensor import FakeTensorMode

from umem.errors import TraceError
from umem.trace._check import check_trace
from umem.trace._failures import explained
from umem.trace._model import Access, Trace
from umem.trace._one_device import one_device
from umem.trace._places import Places
from umem.trace._recorder import Recorder
from umem.trace._storages import BEFORE, Storage

__all__ = ["Progress", "Step", "record_step"]

Step = Callable[[], object]
"""Runs one training step; what it returns is dropped."""

Progress = Callable[[str, float], None]
"""Called with what is being done and how much of that is done, 0 to 1."""

_PROGRESS_OPERATORS = 256


def record_step(
    make_step: Callable[[], Step],
    *,
    name: str,
    source: str,
    metadata: Mapping[str, str | int | float] | None = None,
    progress: Progress | None = None,
) -> Trace:
    """Run a training step without memory and record what it does to memory, operator by operator.

    `make_step` and the step run as they are, under torch's :class:`FakeTensorMode`: tensors have
    shapes and types but no data, so a step of any size runs anywhere. The step runs twice. The
    first run makes what later ones find: optimizer state, and gradients that are kept. The second
    one is recorded, so the trace is of a step that repeats.

    A phase is an operator that reads or writes memory; views are none. An operator on lists of
    tensors, such as a fused optimizer's, is one phase for each launch that it takes on a GPU. A
    tensor of the trace is a storage, with the time from its allocation to the moment when the last
    reference to it goes.

    Parameters
    ----------
    make_step : callable
        Makes model, optimizer and data, and returns the step: a function of no arguments that runs
        forward pass, backward pass and optimizer. Whatever either puts on a GPU counts as being on
        the one device of the trace, as does what they put on the CPU.
    name, source : str
        For :class:`Trace`.
    metadata : mapping, optional
        For :class:`Trace`.
    progress : callable, optional
        Called as ``progress("record", 0.25)``: what is being done, ``build``, ``warm up`` or
        ``record``, and the share of it that is done, of which only ``record`` knows more than 0
        and 1.

    Returns
    -------
    Trace
        Without durations: :func:`umem.hardware.with_durations` has them. Its classes: parameters
        that need a gradient are ``weights`` and others ``frozen_weights``; what is accumulated into
        ``grad`` is ``gradients``; what an optimizer holds is ``optimizer_state``; what else is
        born in the step is ``activations``, or ``other`` inside an optimizer's step; the rest, such
        as data that is kept from step to step, is ``other``.

    Raises
    ------
    TraceError
        If `make_step` does not return a function, if it or the step raises, which is then the
        cause, if the step needs the data of a tensor, or if it does nothing with memory.

    Examples
    --------
    >>> import torch
    >>> def make_step():
    ...     model = torch.nn.Linear(1024, 1024)
    ...     optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ...     inputs = torch.randn(32, 1024)
    ...     def step():
    ...         model(inputs).square().mean().backward()
    ...         optimizer.step()
    ...         optimizer.zero_grad()
    ...     return step
    >>> record_step(make_step, name="linear", source="example").phase_names[0]
    'forward: aten.addmm'
    """
    report = progress or _no_progress
    warm_operators = 0

    def on_operator(count: int) -> None:
        if warm_operators and count % _PROGRESS_OPERATORS == 0:
            report("record", min(count / warm_operators, 1.0))

    places = Places()
    fake = FakeTensorMode()
    recorder = Recorder(fake, places, on_operator)
    with places, one_device(), fake, recorder:
        with _stage("build", report), explained(name, "make_step"):
            step = make_step()
        if not callable(step):
            raise TraceError(
                f"{name}: make_step returned {type(step).__name__}, which cannot be called: "
                "return a function of no arguments that runs one training step"
            )
        with _stage("warm up", report), explained(name, "the step"):
            recorder.warm_up()
            step()
        warm_operators = recorder.operator_count
        with (
            _stage("record", report),
            explained(name, "the step"),
            _no_garbage(),
            recorder.recording(),
        ):
            step()
    if not recorder.phases:
        raise TraceError(f"{name}: the step ran no operator that reads or writes memory")
    trace = _as_trace(recorder, name, source, metadata or {})
    check_trace(trace, name)
    return trace


@contextmanager
def _stage(stage: str, report: Progress) -> Iterator[None]:
    report(stage, 0.0)
    yield
    report(stage, 1.0)


def _no_progress(_stage: str, _share: float) -> None:
    pass


@contextmanager
def _no_garbage() -> Iterator[None]:
    """Keep Python's collector out: when it runs differs from one recording to the next."""
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _as_trace(recorder: Recorder, name: str, source: str, metadata: Mapping[str, Any]) -> Trace:
    phases = recorder.phases
    lifetimes = [_lifetime(storage, len(phases)) for storage in recorder.storages.records]
    kept = [number for number, (first, last, _) in enumerate(lifetimes) if first <= last]
    storages = [recorder.storages.records[number] for number in kept]
    number_in_trace = {number: position for position, number in enumerate(kept)}
    accesses = [sorted(phase.accesses.items()) for phase in phases]
    return Trace(
        name=name,
        source=source,
        tensor_names=tuple(storage.name for storage in storages),
        tensor_bytes=np.array([storage.bytes for storage in storages], np.int64),
        tensor_class=np.array([storage.tensor_class.number for storage in storages], np.uint8),
        persistent=np.array([lifetimes[number][2] for number in kept], np.bool_),
        first_phase=np.array([lifetimes[number][0] for number in kept], np.int32),
        last_phase=np.array([lifetimes[number][1] for number in kept], np.int32),
        phase_names=tuple(phase.name for phase in phases),
        phase_kind=np.array([phase.kind for phase in phases], np.uint8),
        phase_precision=np.array([phase.precision for phase in phases], np.uint8),
        flops=np.array([phase.flops for phase in phases], np.float64),
        memory_bytes=np.array([phase.memory_bytes for phase in phases], np.int64),
        duration_s=None,
        access_start=np.cumsum([0, *map(len, accesses)], dtype=np.int64),
        access_tensor=np.array(
            [number_in_trace[number] for phase in accesses for number, _ in phase], np.int32
        ),
        access_mode=np.array([mode for phase in accesses for _, mode in phase], np.uint8),
        metadata=metadata,
    )


def _lifetime(storage: Storage, phase_count: int) -> tuple[int, int, bool]:
    """First and last phase of a storage, and whether it lives from step to step.

    The first lies after the last for one that no phase sees.
    """
    last = phase_count - 1 if storage.died is None else storage.died - 1
    if storage.born != BEFORE:
        return storage.born, last, False
    # What the step before left, and this one reads before letting go of it, is carried over from
    # step to step, though each time in another storage.
    is_carried = storage.first_access is not None and Access.READ in storage.first_access
    if storage.died is None or is_carried:
        return 0, phase_count - 1, True
    return 0, last, False
