"""From steps that were looked at and timed to a trace."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.optim.optimizer import Optimizer

from umem.capture.live.blocks import Block, Parameters, find_blocks, find_parameters
from umem.capture.live.clock import Clock, clock_for
from umem.capture.live.collector import (
    MOST_LOOKS,
    CallShapes,
    RecordedSteps,
    SignatureWatch,
    StepCollector,
    StepSignature,
)
from umem.capture.live.memory_tracker import (
    LEAST_BYTES,
    OptimizerPart,
    StepLook,
    StepMemory,
    note_access,
    outside_bytes,
    temporary_bytes,
)
from umem.capture.live.phase_tracker import FollowedPhase, Follower, JoinedPhases
from umem.capture.live.saved_tensors import Save, SavedTensor
from umem.capture.offline.operators import BEFORE, Storage
from umem.core.block_sizes import block_bytes
from umem.core.classes import TensorClass
from umem.core.errors import TraceError
from umem.runtime.model_parts import optimizer_parameters, plain_tensors
from umem.runtime.state import is_enabled, runtime
from umem.runtime.torch_hooks.modules import Guard, Undo, hook_calls
from umem.trace import Access, PhaseKind, Precision, Trace, check_trace, ranges

__all__ = ["StepRecording", "build_trace", "record"]


@dataclass(frozen=True)
class _Column:
    """A tensor of the trace."""

    name: str
    nbytes: int
    tensor_class: TensorClass
    first: int
    last: int
    is_persistent: bool = False


def build_trace(
    look: StepLook,
    joined: JoinedPhases,
    seconds: Sequence[Sequence[float]],
    *,
    name: str,
    source: str,
    metadata: Mapping[str, str | int | float],
    optimizer_parts: bool,
) -> tuple[Trace, tuple[SavedTensor, ...]]:
    """Join what a step did to memory with how long its phases took.

    Parameters
    ----------
    look
        The phases that were followed, of which the last one is the optimizer's.
    joined
        Which of them are one.
    seconds
        Of each joined phase, its durations in the steps that have timed it; the medians count.
    name, source, metadata
        For :class:`umem.trace.Trace`.
    optimizer_parts
        Whether the optimizer's phase is split into its parts, whose durations are in proportion to
        the bytes that they use.

    Returns
    -------
    Trace
        With durations and no FLOPs.
    tuple of SavedTensor
        What autograd saved in the blocks' calls.
    """
    parts = look.optimizer_parts if optimizer_parts else _one_part(look.optimizer_parts)
    parts = parts or (OptimizerPart("", {}),)
    count = len(joined.labels) - 1
    labels = (*joined.labels[:-1], *(f"{joined.labels[-1]} {p.name}".rstrip() for p in parts))
    accesses: list[dict[int, Access]] = [{} for _ in range(count)]
    for phase, used in enumerate(look.accesses[:-1]):
        for number, access in used.items():
            note_access(accesses[joined.numbers[phase]], number, access)
    accesses += [dict(part.accesses) for part in parts]
    touched = np.array([_touched_bytes(phase, look.storages) for phase in accesses], np.int64)

    columns, position = _find_columns(look.storages, joined.numbers, len(labels) - 1)
    all_accesses = [
        [(position[number], mode) for number, mode in sorted(phase.items())] for phase in accesses
    ]
    if look.peak_bytes:
        for column in _find_temporaries(look, joined, columns, labels):
            all_accesses[column.first].append((len(columns), Access.WRITE))
            columns.append(column)
    medians = np.array([np.median(durations) for durations in seconds])
    shares = touched[count:] / touched[count:].sum() if touched[count:].any() else np.ones(1)
    trace = Trace(
        name=name,
        source=source,
        tensor_names=tuple(column.name for column in columns),
        tensor_bytes=np.array([column.nbytes for column in columns], np.int64),
        tensor_class=np.array([column.tensor_class.number for column in columns], np.uint8),
        persistent=np.array([column.is_persistent for column in columns], np.bool_),
        first_phase=np.array([column.first for column in columns], np.int32),
        last_phase=np.array([column.last for column in columns], np.int32),
        phase_names=labels,
        phase_kind=np.full(len(labels), PhaseKind.KERNEL, np.uint8),
        phase_precision=np.full(len(labels), Precision.FP32, np.uint8),
        flops=np.zeros(len(labels)),
        memory_bytes=touched,
        duration_s=np.concatenate([medians[:-1], medians[-1] * shares]),
        access_start=ranges(np.array([len(phase) for phase in all_accesses], np.int64)),
        access_tensor=np.array([tensor for phase in all_accesses for tensor, _ in phase], np.int32),
        access_mode=np.array([mode for phase in all_accesses for _, mode in phase], np.uint8),
        metadata=metadata,
    )
    check_trace(trace, name)
    return trace, tuple(_find_saved(look.saves, columns, position))


def _one_part(parts: Sequence[OptimizerPart]) -> tuple[OptimizerPart, ...]:
    used: dict[int, Access] = {}
    for part in parts:
        used.update(part.accesses)  # tied parameters are written by every part that has them
    return (OptimizerPart("", used),)


def _find_columns(
    storages: Sequence[Storage], numbers: NDArray[np.int64], last_phase: int
) -> tuple[list[_Column], dict[int, int]]:
    """Tensors of the trace, and where each storage is among them."""
    last = len(numbers) - 1
    columns: list[_Column] = []
    position: dict[int, int] = {}
    for number, storage in enumerate(storages):
        first, final, is_persistent = _lifetime(storage, last)
        if first <= final:
            position[number] = len(columns)
            columns.append(
                _Column(
                    storage.name,
                    storage.bytes,
                    storage.tensor_class,
                    int(numbers[first]),
                    last_phase if final == last else int(numbers[final]),
                    is_persistent,
                )
            )
    return columns, position


def _find_temporaries(
    look: StepLook, joined: JoinedPhases, columns: Sequence[_Column], labels: Sequence[str]
) -> Iterator[_Column]:
    """One tensor for what each phase holds beside the others; the optimizer's lives to the end."""
    sizes = block_bytes(np.array([column.nbytes for column in columns], np.int64))
    change = np.zeros(len(labels) + 1, np.int64)
    np.add.at(change, [column.first for column in columns], sizes)
    np.add.at(change, [column.last + 1 for column in columns], -sizes)
    found = temporary_bytes(look, joined.numbers, change.cumsum()[:-1])
    optimizer = len(joined.labels) - 1
    for phase in np.flatnonzero(found > LEAST_BYTES).tolist():
        is_optimizer = phase == optimizer
        yield _Column(
            f"temporary of {joined.labels[phase]}",
            int(found[phase]),
            TensorClass.ACTIVATIONS,
            phase,
            len(labels) - 1 if is_optimizer else phase,
        )


def _find_saved(
    saves: Iterable[Save], columns: Sequence[_Column], position: Mapping[int, int]
) -> Iterator[SavedTensor]:
    for save in saves:
        tensor = position.get(save.storage)
        if tensor is not None and columns[tensor].tensor_class is TensorClass.ACTIVATIONS:
            yield SavedTensor(save.block, save.call, save.ordinal, tensor, columns[tensor].nbytes)


def _lifetime(storage: Storage, last: int) -> tuple[int, int, bool]:
    """First and last phase of a storage, and whether it lives from step to step."""
    final = last if storage.died is None else min(storage.died - 1, last)
    if storage.born != BEFORE:
        return storage.born, max(final, storage.born), False
    # What the step before left, and this one reads before it lets go of it, is carried over.
    is_carried = storage.first_access is not None and Access.READ in storage.first_access
    if storage.died is None or is_carried:
        return 0, last, True
    return 0, final, False


def _touched_bytes(accesses: Mapping[int, Access], storages: Sequence[Storage]) -> int:
    """Bytes that a phase reads and writes, each tensor as a whole."""
    return sum(
        storages[number].bytes * ((Access.READ in mode) + (Access.WRITE in mode))
        for number, mode in accesses.items()
    )


# The life of a recording, from the first step to the trace.

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
        """What a :class:`~umem.capture.live.StepListener` is told of in such a step, in order.

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


# `umem.record`.


def record(
    model: nn.Module,
    optimizer: Optimizer,
    *,
    steps: int = 9,
    warmup: int = 2,
    blocks: Iterable[str | nn.Module] | None = None,
    name: str | None = None,
    clock: Clock | None = None,
    optimizer_parts: bool = True,
    peak_bytes: Callable[[], int] | None = None,
    known: Collection[CallShapes] = (),
) -> StepRecording:
    """Record a training run's own steps, as a trace at the level of modules.

    Nothing else has to be called: a step ends with ``optimizer.step()``. After `warmup` steps the
    memory of one is looked at, then `steps` are timed, and the rest of the block runs as if there
    was no recording, but for one look at the shapes of each batch. Where `steps` are 6 or more,
    each of them times only a part of the model's blocks, by turns.

    Parameters
    ----------
    model
        As it is called, or what is inside a wrapper such as DDP's.
    optimizer
        Its steps are the steps.
    steps
        How many are timed; durations are their medians. Each phase is timed in 3 of them or more,
        if there are so many.
    warmup
        How many are let pass first: 1 or more, for the first one makes the optimizer's state.
    blocks
        Modules whose passes are phases of their own, or their names. By default the layers of the
        model's longest chain of modules.
    name
        Of the trace; by default the model's class.
    clock
        Takes the time; by default CUDA's events for a model on a GPU, else the host's clock.
    optimizer_parts
        Whether the optimizer's step is cut by block. If not, it is one phase, as a fused one is to
        whoever follows it.
    peak_bytes
        The most bytes allocated on the device since it was called last, which tells what operators
        hold for a moment. By default umem's allocator is asked where it serves.
    known
        Shapes that a step's first call of the model has in steps that are not to be recorded.

    Returns
    -------
    StepRecording
        A context manager. Its ``trace`` is there when ``done`` is true.

    Raises
    ------
    TraceError
        If a number is too small, `blocks` are not the model's, or the optimizer trains none of its
        parameters.

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
    # A wrapper, such as accelerate's, calls the step of the optimizer in it.
    while isinstance(getattr(optimizer, "optimizer", None), Optimizer):
        optimizer = cast(Any, optimizer).optimizer
    _check(model, optimizer, steps, warmup)
    return StepRecording(
        model,
        optimizer,
        steps=steps,
        warmup=warmup,
        blocks=blocks,
        name=name,
        clock=clock,
        optimizer_parts=optimizer_parts,
        peak_bytes=peak_bytes,
        known=known,
    )


def _check(model: object, optimizer: object, steps: int, warmup: int) -> None:
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
