"""The life of a recording, from the first step to the trace."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from types import TracebackType
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from umem.allocator import is_enabled, runtime
from umem.errors import TraceError
from umem.module_hooks import Undo, hook_calls
from umem.recorder._blocks import Block, find_blocks
from umem.recorder._clock import Clock, clock_for
from umem.recorder._collector import MOST_LOOKS, RecordedSteps, StepCollector
from umem.recorder._follower import Follower
from umem.recorder._guard import Guard
from umem.recorder._memory import StepMemory
from umem.recorder._outside import outside_bytes
from umem.recorder._parameters import Parameters, find_parameters
from umem.recorder._phases import FollowedPhase
from umem.recorder._saved_tensor import SavedTensor
from umem.recorder._signature import CallShapes, SignatureWatch, StepSignature
from umem.recorder._trace import build_trace
from umem.tensor_memory import plain_tensors
from umem.trace import Trace

__all__ = ["StepRecording"]

_MOST_METADATA_TEXT = 1000


class StepRecording:
    """A recording of a training run's steps; made by :func:`umem.record`.

    As a context manager it records the steps that run inside the block. It takes its hooks away as
    soon as it has enough of them.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        steps: int,
        warmup: int,
        blocks: Iterable[str | nn.Module] | None,
        name: str | None,
        clock: Clock | None,
        optimizer_parts: bool,
        peak_bytes: Callable[[], int] | None,
        known: Collection[CallShapes],
    ) -> None:
        self._optimizer: Optimizer | None = optimizer
        self._parameters: Parameters | None = None
        self._blocks = find_blocks(model, blocks)
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
        self._guard = Guard(self._fail)
        self._watch = SignatureWatch()
        self._watch_hooks: list[Undo] = []
        self._collector: StepCollector | None = None
        self._follower: Follower | None = None
        self._steps_seen = 0
        self._signature: StepSignature | None = None
        self._recorded: RecordedSteps | None = None
        self._built: tuple[Trace, tuple[SavedTensor, ...]] | None = None
        self._error: Exception | None = None

    # ------------------------------------------------------------------ what is known

    @property
    def done(self) -> bool:
        """Whether :attr:`trace` is there without waiting."""
        return self._find(wait=False) is not None

    @property
    def failed(self) -> bool:
        """Whether it has ended with an error of the recorder, which :attr:`trace` tells."""
        return self._error is not None

    @property
    def trace(self) -> Trace:
        """The recorded step.

        Raises
        ------
        TraceError
            If too few steps were recorded, or recording them failed.
        """
        return self._build()[0]

    @property
    def saved_tensors(self) -> tuple[SavedTensor, ...]:
        """The activations that autograd saved in the forward calls of blocks, in order.

        Those that hooks of the program put away, as a checkpoint does, are not among them, nor are
        leaves that gradients are taken of, which the program may hold.

        Raises
        ------
        TraceError
            As for :attr:`trace`.
        """
        return self._build()[1]

    @property
    def phases(self) -> tuple[FollowedPhase, ...]:
        """What a :class:`~umem.recorder.StepListener` is told of in such a step, in order.

        They are more than the phases of the trace, which joins those that use nothing.

        Raises
        ------
        TraceError
            As for :attr:`trace`.
        """
        recorded = self._require()
        numbers = recorded.joined.numbers.tolist()
        return tuple(map(FollowedPhase, recorded.look.labels, numbers))

    @property
    def outside_bytes(self) -> int:
        """Bytes that were allocated all the step long and are in no tensor of the trace.

        0 where no allocator of umem's tells.

        Raises
        ------
        TraceError
            As for :attr:`trace`.
        """
        return outside_bytes(self._require().look)

    def _find(self, *, wait: bool) -> RecordedSteps | None:
        if self._recorded is None and self._collector is not None:
            self._recorded = self._collector.complete(wait=wait)
        return self._recorded

    def _require(self) -> RecordedSteps:
        recorded = self._find(wait=True)
        if recorded is None:
            raise TraceError(f"{self._name}: {self._why_not()}") from self._error
        return recorded

    @property
    def signature(self) -> StepSignature | None:
        """Signature of the recorded step; None until all steps of it have run."""
        return self._signature

    @property
    def step_signature(self) -> StepSignature | None:
        """Signature of the step in flight, as far as it has got; between steps, of the last one.

        It is followed until the ``with`` block ends.
        """
        return self._watch.signature

    @property
    def matches(self) -> bool:
        """Whether the step in flight can be the recorded one, by the shapes of its batches so far.

        False from the call of the model on whose shapes differ, so that a plan for the recorded
        step can be put aside before that call does anything.
        """
        return self._signature is not None and self._watch.agrees(self._signature)

    def _why_not(self) -> str:
        if self._error is not None:
            return f"recording ended with {type(self._error).__name__}: {self._error}"
        if self._collector is None:
            return "nothing is recorded yet: train inside `with umem.record(...) as recording:`"
        timed, looks = self._collector.timed_count, self._collector.looks
        needed = self._warmup + 1 + self._steps
        text = (
            f"{timed} of {self._steps} steps are recorded after {self._steps_seen} of the "
            f"optimizer's: train {needed} steps or more of equal shapes inside the `with` block"
        )
        if looks >= MOST_LOOKS:
            text += f". {looks} steps unlike each other were seen; pad batches to a few lengths"
        return text

    # ------------------------------------------------------------------ life

    def __enter__(self) -> StepRecording:
        if self._collector is not None:
            raise TraceError("a recording is used once: call umem.record again for another one")
        assert self._root is not None
        assert self._optimizer is not None
        model = self._root.module
        self._device = _main_device(model)
        self._device_name = _device_name(self._device)
        self._parameters = find_parameters(model, self._blocks, self._optimizer)
        self._collector = StepCollector(
            self._watch,
            self._clock or clock_for(self._device),
            self._steps,
            self._root,
            self._blocks,
            known=self._known,
            make_memory=self._make_memory,
            on_enough=self._on_enough,
        )
        optimizer, uncompiled = self._optimizer, self._guard.uncompiled
        self._watch_hooks = [
            *hook_calls(model, self._on_call, on_error=self._guard.on_error),
            optimizer.register_step_pre_hook(uncompiled(self._on_optimizer_begin)).remove,
            optimizer.register_step_post_hook(uncompiled(self._on_optimizer_end)).remove,
        ]
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        self._stop()
        for undo in self._watch_hooks:
            undo()
        self._watch_hooks.clear()
        self._watch.forget_storages()
        self._root = self._optimizer = self._parameters = None
        self._blocks = ()

    def _stop(self) -> None:
        if self._follower is not None:
            self._follower.stop()
            self._follower = None

    def _fail(self, error: Exception) -> None:
        self._error = self._error or error
        self._stop()

    # ------------------------------------------------------------------ steps

    def _on_call(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if not torch.is_grad_enabled():
            return
        if torch._C._current_graph_task_id() != -1:  # a checkpoint computes again
            return
        self._watch.add(args, kwargs, note_storages=self._signature is None)

    def _make_memory(self) -> StepMemory:
        assert self._parameters is not None
        assert self._optimizer is not None
        return StepMemory(
            self._parameters,
            self._optimizer,
            self._device,
            self._watch.kept_storages(),
            self._guard,
            self._peak_bytes or _allocator_peak(self._device),
        )

    def _on_optimizer_begin(self, *_: object) -> None:
        if self._follower is not None:
            self._follower.optimizer_begins()

    def _on_optimizer_end(self, *_: object) -> None:
        self._steps_seen += 1
        self._watch.end_step()
        if self._follower is not None:
            self._follower.optimizer_ends()
        elif self._steps_seen == self._warmup and self._error is None:
            assert self._root is not None
            assert self._collector is not None
            self._follower = Follower(self._root, self._blocks, self._guard, self._collector)
            self._follower.start()

    def _on_enough(self, signature: StepSignature) -> None:
        self._signature = signature
        self._stop()

    def _build(self) -> tuple[Trace, tuple[SavedTensor, ...]]:
        if self._built is not None:
            return self._built
        recorded = self._require()
        self._built = build_trace(
            recorded.look,
            recorded.joined,
            recorded.seconds,
            name=self._name,
            source=f"recorded in training with torch {torch.__version__} on {self._device_name}",
            metadata={
                "warmup": self._warmup,
                "steps": len(recorded.totals),
                "blocks": self._block_count,
                "median_step_s": float(np.median(recorded.totals)),
                "signature": str(self._signature)[:_MOST_METADATA_TEXT],
            },
            optimizer_parts=self._optimizer_parts,
        )
        return self._built


def _main_device(model: nn.Module) -> torch.device:
    """Where most bytes of a model's parameters are."""
    held: Counter[torch.device] = Counter()
    for parameter in model.parameters():
        for part in plain_tensors(parameter):
            held[part.device] += part.nbytes
    return held.most_common(1)[0][0]


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "the CPU"


def _allocator_peak(device: torch.device) -> Callable[[], int] | None:
    """Where umem's allocator serves a device, the most bytes that it had allocated of late."""
    if device.type != "cuda" or not is_enabled():
        return None
    return partial(runtime().allocator.take_peak_bytes, device.index)
