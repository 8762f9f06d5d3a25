"""``umem.record``: the trace of a running training's steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from contextlib import ExitStack
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from umem.capture.live.blocks import Block, Parameters, find_blocks, find_parameters
from umem.capture.live.collector import (
    MAX_TRACKED_STEPS,
    CallShapes,
    RecordedSteps,
    SignatureWatch,
    StepCollector,
    StepSignature,
)
from umem.capture.live.memory_tracker import MemoryTracker
from umem.capture.live.phase_tracker import PhaseTracker
from umem.capture.live.saved_tensors import SavedTensor
from umem.capture.live.timing import Clock, clock_for
from umem.capture.live.trace_builder import TrackedPhase, build_step_trace, outside_bytes
from umem.core.errors import TraceError
from umem.runtime.model_parts import innermost, optimizer_parameters, plain_tensors
from umem.runtime.peak_reader import PeakReader
from umem.runtime.state import is_enabled, runtime
from umem.runtime.torch_hooks.clock import Hearing, Listener, Order
from umem.runtime.torch_hooks.hidden import hide
from umem.runtime.torch_hooks.modules import HookErrors
from umem.runtime.torch_hooks.passes import Pass
from umem.trace import Trace

__all__ = ["StepRecording", "record"]

_MAX_METADATA_TEXT = 1000


class StepRecording(Listener):
    """A recording of a training run's steps; made by :func:`umem.record`.

    As a context manager it records the steps that run inside the block. It removes its hooks as
    soon as it has enough of them.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        steps: int,
        warmup: int,
        name: str | None,
        clock: Clock | None,
        optimizer_parts: bool,
        peak_bytes: Callable[[], int] | None,
        known: Collection[CallShapes],
    ) -> None:
        self._optimizer: Optimizer | None = optimizer
        self._parameters: Parameters | None = None
        self._blocks = find_blocks(model)
        self._block_count = len(self._blocks)
        self._steps = steps
        self._warmup = warmup
        self._name = name or type(model).__name__
        self._root: Block | None = Block(type(model).__name__, model)
        self._clock = clock
        self._optimizer_parts = optimizer_parts
        self._peak_bytes = peak_bytes
        self._known = known
        self._device = torch.device("cpu")
        self._device_name = ""
        self._guard = HookErrors(self._fail)
        self._watch = SignatureWatch()
        self._hooks = ExitStack()
        self._collector: StepCollector | None = None
        self._tracker: PhaseTracker | None = None
        self._steps_seen = 0
        self._signature: StepSignature | None = None
        self._recorded: RecordedSteps | None = None
        self._error: Exception | None = None

    @property
    def done(self) -> bool:
        """Whether :attr:`trace` is ready without waiting."""
        return self._find(wait=False) is not None

    @property
    def failed(self) -> bool:
        """Whether an error of the recorder has ended it, which :attr:`trace` raises."""
        return self._error is not None

    @property
    def trace(self) -> Trace:
        """The recorded step.

        Raises ``TraceError`` if too few steps were recorded, or recording them failed, as do
        :attr:`saved_tensors`, :attr:`phases` and :attr:`outside_bytes`.
        """
        return self._built[0]

    @property
    def saved_tensors(self) -> tuple[SavedTensor, ...]:
        """The activations that autograd saved in the forward calls of blocks, in order.

        Left out are tensors that hooks of the program pack, as a checkpoint's do, and leaves that
        gradients are taken of, which the program may hold.
        """
        return self._built[1]

    @property
    def phases(self) -> tuple[TrackedPhase, ...]:
        """The phases that a :class:`~umem.capture.live.StepListener` receives in such a step.

        They are more than the phases of the trace, which joins those that use nothing.
        """
        recorded = self._require()
        numbers = recorded.joined.numbers.tolist()
        return tuple(map(TrackedPhase, recorded.memory.labels, numbers))

    @property
    def outside_bytes(self) -> int:
        """Bytes that were allocated all the step long and are in no tensor of the trace.

        0 where umem's allocator does not serve.
        """
        return outside_bytes(self._require().memory)

    @property
    def signature(self) -> StepSignature | None:
        """Signature of the recorded step; None until all steps of it have run."""
        return self._signature

    def _find(self, *, wait: bool) -> RecordedSteps | None:
        if self._recorded is None and self._collector is not None:
            self._recorded = self._collector.complete(wait=wait)
        return self._recorded

    def _require(self) -> RecordedSteps:
        recorded = self._find(wait=True)
        if recorded is None:
            raise TraceError(f"{self._name}: {self._why_not()}") from self._error
        return recorded

    def _why_not(self) -> str:
        if self._error is not None:
            return f"recording ended with {type(self._error).__name__}: {self._error}"
        if self._collector is None:
            return "nothing is recorded yet: train inside `with umem.record(...) as recording:`"
        timed, tracked = self._collector.timed_count, self._collector.tracked_count
        needed = self._warmup + 1 + self._steps
        text = (
            f"{timed} of {self._steps} steps are recorded after {self._steps_seen} of the "
            f"optimizer's: train {needed} steps or more of equal shapes inside the `with` block"
        )
        if tracked >= MAX_TRACKED_STEPS:
            text += f". {tracked} steps unlike each other were seen; pad batches to a few lengths"
        return text

    @cached_property
    def _built(self) -> tuple[Trace, tuple[SavedTensor, ...]]:
        recorded = self._require()
        return build_step_trace(
            recorded.memory,
            recorded.joined,
            recorded.seconds,
            name=self._name,
            source=f"recorded in training with torch {torch.__version__} on {self._device_name}",
            metadata={
                "warmup": self._warmup,
                "steps": len(recorded.totals),
                "blocks": self._block_count,
                "median_step_s": float(np.median(recorded.totals)),
                "signature": str(self._signature)[:_MAX_METADATA_TEXT],
            },
            optimizer_parts=self._optimizer_parts,
        )

    def __enter__(self) -> StepRecording:
        if self._collector is not None:
            raise TraceError("a recording is used once: call umem.record again for another one")
        assert self._root is not None
        assert self._optimizer is not None
        model, optimizer = self._root.module, self._optimizer
        self._device = _main_device(model)
        is_cuda = self._device.type == "cuda"
        self._device_name = torch.cuda.get_device_name(self._device) if is_cuda else "the CPU"
        self._parameters = find_parameters(model, self._blocks, optimizer)
        self._collector = StepCollector(
            self._watch,
            self._clock or clock_for(self._device),
            self._steps,
            self._root,
            known=self._known,
            make_tracker=self._make_memory_tracker,
            on_enough=self._on_enough,
        )
        uncompiled = self._guard.uncompiled
        before, after = uncompiled(self._before_optimizer), uncompiled(self._after_optimizer)
        with ExitStack() as hooks:
            hooks.callback(Hearing(self, Order.SHAPES, self._guard.on_error, model).close)
            # Ahead of the hook that streams the step, which is part of it.
            hooks.callback(hide(optimizer.register_step_pre_hook(before), "first"))
            hooks.callback(hide(optimizer.register_step_post_hook(after)))
            self._hooks = hooks.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        with self._hooks:
            self._stop()
        self._watch.forget_storages()
        self._root = self._optimizer = self._parameters = None
        self._blocks = ()

    def _stop(self) -> None:
        tracker, self._tracker = self._tracker, None
        if tracker is not None:
            tracker.stop()

    def _fail(self, error: Exception) -> None:
        self._error = self._error or error
        self._stop()

    def pass_begins(self, now: Pass, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note what the call is like."""
        if now.has_gradients and not now.is_second and self._signature is None:
            self._watch.add(args, kwargs)

    def _make_memory_tracker(self) -> MemoryTracker:
        assert self._parameters is not None
        assert self._optimizer is not None
        peak_bytes = self._peak_bytes
        if peak_bytes is None and self._device.type == "cuda" and is_enabled():
            peak_bytes = PeakReader(runtime().allocator, self._device.index).take
        return MemoryTracker(
            self._parameters,
            self._optimizer,
            self._device,
            self._watch.kept_storages(),
            self._guard,
            peak_bytes,
        )

    def _before_optimizer(self, *_: object) -> None:
        if self._tracker is not None:
            self._tracker.optimizer_begins()

    def _after_optimizer(self, *_: object) -> None:
        self._steps_seen += 1
        self._watch.end_step()
        if self._tracker is not None:
            self._tracker.optimizer_ends()
        elif self._steps_seen == self._warmup and self._error is None:
            assert self._root is not None
            assert self._collector is not None
            self._tracker = PhaseTracker(self._root, self._blocks, self._guard, self._collector)
            self._tracker.start()

    def _on_enough(self, signature: StepSignature) -> None:
        self._signature = signature
        self._stop()


def _main_device(model: nn.Module) -> torch.device:
    """The device that holds most bytes of a model's parameters."""
    held: Counter[torch.device] = Counter()
    for parameter in model.parameters():
        for part in plain_tensors(parameter):
            held[part.device] += part.nbytes
    return held.most_common(1)[0][0]


def record(
    model: nn.Module,
    optimizer: Optimizer,
    *,
    steps: int = 9,
    warmup: int = 2,
    name: str | None = None,
    clock: Clock | None = None,
    optimizer_parts: bool = True,
    peak_bytes: Callable[[], int] | None = None,
    known: Collection[CallShapes] = (),
) -> StepRecording:
    """Record a training run's own steps, as a trace at the level of modules.

    The training calls nothing else: a step ends with ``optimizer.step()``. After `warmup` steps the
    memory of one step is tracked, then `steps` are timed. The rest of the block runs as without a
    recording.

    Parameters
    ----------
    model
        The module that the training calls, or the one inside a wrapper such as DDP's.
    optimizer
        Its steps end the training steps.
    steps
        Number of timed steps; durations are their medians.
    warmup
        Number of steps before: 1 or more, as the first one makes the optimizer's state.
    name
        Of the trace; by default the model's class.
    clock
        Takes the time; by default CUDA events for a model on a GPU, else the host's clock.
    optimizer_parts
        Whether the optimizer's step is split by block. If not, it is one phase, as a fused step is
        for a listener.
    peak_bytes
        Returns the most bytes allocated on the device since its last call, which shows the
        temporaries of operators. By default umem's allocator reports them where it serves.
    known
        Steps in which the model is first called with one of these shapes are not recorded.

    Returns
    -------
    StepRecording
        A context manager. Its ``trace`` is ready when ``done`` is true.

    Raises
    ------
    TraceError
        If a number is too small, or the optimizer trains none of the model's parameters.

    Examples
    --------
    >>> import torch, umem
    >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    >>> optimizer = torch.optim.AdamW(model.parameters())
    >>> with umem.record(model, optimizer) as recording:
    ...     for _ in range(12):
    ...         model(torch.randn(4, 8)).sum().backward()
    ...         optimizer.step()
    ...         optimizer.zero_grad()
    >>> recording.trace.phase_names[-1]
    'optimizer 1'
    """
    optimizer = innermost(optimizer)
    if not isinstance(model, nn.Module):
        raise TraceError(f"model is a {type(model).__name__}: give a torch.nn.Module")
    if not isinstance(optimizer, Optimizer):
        raise TraceError(f"optimizer is a {type(optimizer).__name__}: give a torch.optim.Optimizer")
    for key, value in (("steps", steps), ("warmup", warmup)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise TraceError(f"{key} is {value!r}: give a whole number from 1 on")
    if set(model.parameters()).isdisjoint(optimizer_parameters(optimizer)):
        raise TraceError(
            f"the optimizer trains no parameter of {type(model).__name__}: give the optimizer of "
            "this model, made after the model was moved or wrapped"
        )
    return StepRecording(
        model,
        optimizer,
        steps=steps,
        warmup=warmup,
        name=name,
        clock=clock,
        optimizer_parts=optimizer_parts,
        peak_bytes=peak_bytes,
        known=known,
    )
