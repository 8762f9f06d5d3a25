"""What is on the device beside a step's own tensors, which only the allocator sees."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import _C
from torch.optim.optimizer import Optimizer

from umem.capture.live.blocks import OUTSIDE, Block, Parameters
from umem.capture.live.saved_tensors import Save, SavedTensors, SaveLog
from umem.capture.offline.operators import BEFORE, Storage, Storages
from umem.core.block_sizes import block_bytes
from umem.core.classes import TensorClass
from umem.runtime.model_parts import (
    named_parts,
    named_tensors,
    optimizer_state,
    plain_tensors,
    weight_classes,
)
from umem.runtime.torch_hooks.modules import Guard, Undo, hook_calls
from umem.runtime.torch_hooks.saved_tensors import may_leave
from umem.trace import Access

__all__ = [
    "LEAST_BYTES",
    "Look",
    "OptimizerPart",
    "StepLook",
    "StepMemory",
    "live_at_starts",
    "note_access",
    "outside_bytes",
    "temporary_bytes",
]


def outside_bytes(look: StepLook) -> int:
    """Bytes allocated from a step's first phase to its last that are none of its tensors'.

    Such as another model, or a copy of the weights.

    Parameters
    ----------
    look
        Of the step.

    Returns
    -------
    int
        0 where no allocator tells.
    """
    if not look.start_bytes:
        return 0
    known = live_at_starts(look.storages, len(look.start_bytes))
    return max(int((np.array(look.start_bytes, np.int64) - known).min()), 0)


# What operators hold for a moment inside a phase, which only the allocator sees.

LEAST_BYTES = 1 << 20
"""Less than this is not worth a tensor of its own in the trace."""


def temporary_bytes(
    look: StepLook, numbers: NDArray[np.int64], live_bytes: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Bytes allocated at the worst moment of each phase beyond those of the trace's tensors.

    Parameters
    ----------
    look
        L phases, with what the allocator has told.
    numbers
        Number in the trace of each of them, (L,).
    live_bytes
        Bytes of the blocks of all tensors that the trace says are there in its P phases, (P,).

    Returns
    -------
    array of int64, (P,)
        0 or more. What is allocated from the first phase to the last and no tensor of the step,
        such as another model, counts for nothing.
    """
    peaks = np.zeros(len(live_bytes), np.int64)
    np.maximum.at(peaks, numbers, np.array(look.peak_bytes, np.int64))
    unknown = np.array(look.start_bytes, np.int64) - live_at_starts(look.storages, len(numbers))
    return np.maximum(peaks - live_bytes - unknown.min(), 0)


def live_at_starts(storages: Sequence[Storage], phase_count: int) -> NDArray[np.int64]:
    """Bytes of the blocks of the storages that are there when each phase begins."""
    sizes = block_bytes(np.array([storage.bytes for storage in storages], np.int64))
    change = np.zeros(phase_count + 1, np.int64)
    for storage, size in zip(storages, sizes, strict=True):
        # Born in one phase, it is there when the next one begins; `died` is the phase after the
        # one in which it goes.
        change[storage.born + 1] += size
        if storage.died is not None:
            change[max(storage.died, storage.born + 1)] -= size
    return change.cumsum()[:-1]


# What one step does to memory, as far as modules show it.


@dataclass(frozen=True)
class OptimizerPart:
    """What an optimizer does for the parameters of one block."""

    name: str
    accesses: Mapping[int, Access]
    """By number of the storage."""


@dataclass(frozen=True)
class StepLook:
    """One step that was looked at: its phases, storages, and who used what when."""

    labels: tuple[str, ...]
    """Of the phases in order; the last one is the optimizer's."""
    storages: tuple[Storage, ...]
    accesses: tuple[Mapping[int, Access], ...]
    """Of each phase, by number of the storage."""
    optimizer_parts: tuple[OptimizerPart, ...]
    saves: tuple[Save, ...]
    peak_bytes: tuple[int, ...]
    """The most that was allocated in each phase; empty where no allocator tells."""
    start_bytes: tuple[int, ...]
    """What was allocated when each of them began."""


def note_access(phase: dict[int, Access], number: int, access: Access) -> None:
    """Add an access to those of a phase; what it writes first is its own when it reads it."""
    before = phase.get(number)
    if before is None:
        phase[number] = access
    elif before == Access.READ:
        phase[number] = before | access


class StepMemory:
    """Follows the storages of one step from the first call of the model to the optimizer's end.

    Only weak references to memory are held.

    Parameters
    ----------
    known
        Parameters and buffers of the model and the optimizer.
    optimizer
        Its step ends the step.
    device
        Tensors elsewhere are not looked at.
    kept
        Addresses of the storages that were there in the step before; an input among them is kept
        from step to step.
    guard
        Makes hooks.
    peak_bytes
        The most bytes allocated on the device since it was called last.

    Attributes
    ----------
    saves
        Told when forward calls of blocks begin and end.
    """

    def __init__(
        self,
        known: Parameters,
        optimizer: Optimizer,
        device: torch.device,
        kept: Collection[int],
        guard: Guard,
        peak_bytes: Callable[[], int] | None = None,
    ) -> None:
        self.saves = SaveLog()
        self._take_peak = peak_bytes
        self._peaks: list[int] = []
        self._starts: list[int] = []
        self._device = device
        self._on_gradient = guard(self._see_gradient)
        self._optimizer = optimizer
        self._kept = kept
        self._accesses: list[dict[int, Access]] = []
        self._label = ""
        self._storages = Storages(lambda: len(self._accesses))
        self._names = dict(known.names)
        self._owner = dict(known.owner)
        self._block_tensors = dict(known.held)
        self._gradients: set[int] = set()
        # What a checkpoint made again, by the label of the backward pass that uses it.
        self._recomputed: dict[str, list[int]] = {}
        self._is_recomputing = ""
        self._versions: dict[torch.Tensor, int] = {}
        self._undo: list[Callable[[], None]] = []
        self._tag_known(known)

    # ------------------------------------------------------------------ what is there

    def _tag_known(self, known: Parameters) -> None:
        for buffer, name in known.buffers.items():
            self._tag(buffer, name, TensorClass.OTHER)
            self._versions[buffer] = buffer._version
        for parameter, tensor_class in weight_classes(known.names):
            name = known.names[parameter]
            self._tag(parameter, name, tensor_class)
            if parameter.is_leaf and parameter.grad is not None:
                self._tag(parameter.grad, f"{name}.grad", TensorClass.GRADIENTS)
            if parameter.is_leaf and parameter.requires_grad:
                handle = parameter.register_post_accumulate_grad_hook(self._on_gradient)
                self._undo.append(handle.remove)

    def _tag(self, tensor: torch.Tensor, name: str, tensor_class: TensorClass) -> None:
        for number, part_name in self._add(tensor, name, tensor_class, BEFORE):
            record = self._storages.records[number]
            record.name, record.tensor_class = part_name, tensor_class

    def _add(
        self, tensor: torch.Tensor, name: str, tensor_class: TensorClass, born: int
    ) -> list[tuple[int, str]]:
        """Numbers of the storages behind a tensor, on the device, and what they are called."""
        found = []
        for part_name, part in named_parts(name, tensor):
            if part.device == self._device:
                number = self._storages.add(part, part_name, tensor_class, born)
                if number is not None:
                    found.append((number, part_name))
        return found

    # ------------------------------------------------------------------ phases

    @property
    def _current(self) -> int:
        return len(self._accesses) - 1

    def begin_phase(self, label: str) -> None:
        """What follows belongs to a new phase."""
        if self._take_peak is not None:
            self._peaks.append(self._take_peak())
            self._starts.append(self._take_peak())  # nothing since: what is allocated now
        self._accesses.append({})
        self._label = label
        for number in self._recomputed.get(label, ()):
            if self._storages.records[number].died is None:
                self._use(number, Access.READ)

    def _use(self, number: int, access: Access) -> None:
        note_access(self._accesses[-1], number, access)
        record = self._storages.records[number]
        record.first_access = record.first_access or access

    def _see(self, tensor: torch.Tensor, what: str) -> None:
        """The phase uses a tensor, or has made it if it is not known."""
        for part in plain_tensors(tensor):
            if part.device != self._device:
                continue
            number = self._storages.find(part)
            if number is None:
                name = f"{self._label}: {what} {_shape_text(part)}"
                number = self._storages.add(part, name, TensorClass.ACTIVATIONS, self._current)
                if number is not None:
                    self._use(number, Access.WRITE)
            else:
                self._use(number, Access.READ)

    def call_inputs(self, args: object, kwargs: object) -> None:
        """The model is called with these."""
        for given in (args, kwargs):
            for name, tensor in named_tensors(given):
                for part in plain_tensors(tensor):
                    is_kept = part.untyped_storage()._cdata in self._kept
                    born = BEFORE if is_kept else self._current
                    for number, _ in self._add(part, f"input {name}", TensorClass.OTHER, born):
                        self._use(number, Access.READ)

    def see_made(self, value: object, what: str) -> None:
        """What the phase so far has handed on: results, or arguments of the next one."""
        for _, tensor in named_tensors(value):
            for part in plain_tensors(tensor):
                if part.device == self._device and self._storages.find(part) is None:
                    self._see(part, what)

    def see_used(self, value: object) -> None:
        """What the phase was given."""
        for _, tensor in named_tensors(value):
            self._see(tensor, "input")

    def enter_block(self, name: str) -> None:
        """A pass through a block begins; :data:`OUTSIDE` for the model itself."""
        for tensor in self._block_tensors[name]:
            self._see(tensor, "")

    def leave_block(self, name: str) -> None:
        """It ends: running statistics may have changed."""
        for tensor in self._block_tensors[name]:
            if self._versions.get(tensor, tensor._version) != tensor._version:
                self._versions[tensor] = tensor._version
                for number in self._numbers(tensor):
                    self._use(number, Access.READ | Access.WRITE)

    # ------------------------------------------------------------------ autograd

    def on_save(self, tensor: torch.Tensor) -> None:
        """Autograd keeps a tensor for the backward pass."""
        self._see(tensor, "saved")
        numbers = self._numbers(tensor)
        self.saves.note(numbers if may_leave(tensor) else [])
        if self._is_recomputing:
            self._recomputed.setdefault(self._is_recomputing, []).extend(numbers)

    def on_use(self, tensor: torch.Tensor) -> None:
        """The backward pass takes it."""
        self._see(tensor, "saved")

    def set_recomputing(self, label: str) -> None:
        """What is saved from now on is for that phase; "" for nothing."""
        self._is_recomputing = label

    def _see_gradient(self, parameter: torch.Tensor) -> None:
        if parameter.grad is None or not self._accesses:
            return
        name = f"{self._names[parameter]}.grad"
        for number, part_name in self._add(
            parameter.grad, name, TensorClass.GRADIENTS, self._current
        ):
            record = self._storages.records[number]
            record.name, record.tensor_class = part_name, TensorClass.GRADIENTS
            is_new = number not in self._gradients and record.born != BEFORE
            self._gradients.add(number)
            self._use(number, Access.WRITE if is_new else Access.READ | Access.WRITE)

    # ------------------------------------------------------------------ the optimizer

    def begin_optimizer(self) -> None:
        """The optimizer is about to step: look for gradients that autograd has not accumulated."""
        for parameter in self._names:
            if not parameter.is_leaf or parameter.grad is None:
                continue
            numbers = self._numbers(parameter.grad)
            is_new = [
                number not in self._gradients and self._storages.records[number].born != BEFORE
                for number in numbers
            ]
            if any(is_new) or not numbers:
                self._see_gradient(parameter)

    def end_step(self, labels: Iterable[str]) -> StepLook:
        """The optimizer has stepped: what was seen."""
        if self._take_peak is not None:
            self._peaks.append(self._take_peak())
        for name, tensor in optimizer_state(self._optimizer, self._names):
            self._tag(tensor, name, TensorClass.OPTIMIZER_STATE)
        return StepLook(
            labels=tuple(labels),
            # Copies: deaths after the step would be noted in the records.
            storages=tuple(replace(record) for record in self._storages.records),
            accesses=tuple(self._accesses),
            optimizer_parts=tuple(self._optimizer_parts()),
            saves=tuple(self.saves.saves),
            peak_bytes=tuple(self._peaks[1:]),  # the first one was before the step
            start_bytes=tuple(self._starts),
        )

    def _optimizer_parts(self) -> Iterable[OptimizerPart]:
        """By block, in the order in which the optimizer holds the parameters."""
        parts: dict[str, dict[int, Access]] = {}
        for group in self._optimizer.param_groups:
            for parameter in group["params"]:
                gradient = parameter.grad
                if gradient is None:
                    continue
                part = parts.setdefault(self._owner.get(parameter, OUTSIDE), {})
                for number in self._numbers(gradient):
                    part[number] = Access.READ
                state = self._optimizer.state.get(parameter, {})
                for tensor in (parameter, *(tensor for _, tensor in named_tensors(state))):
                    for number in self._numbers(tensor):
                        part[number] = Access.READ | Access.WRITE
        return (OptimizerPart(name, accesses) for name, accesses in parts.items())

    def _numbers(self, tensor: torch.Tensor) -> list[int]:
        found = (self._storages.find(part) for part in plain_tensors(tensor))
        return [number for number in found if number is not None]

    def close(self) -> None:
        """Take the gradients' hooks away and let go of everything."""
        for undo in self._undo:
            undo()
        self._undo.clear()
        # References to storages, whose callbacks would note deaths after the step.
        self._storages = Storages(lambda: 0)
        for held in (self._names, self._owner, self._block_tensors, self._versions):
            held.clear()
        self._accesses = []


def _shape_text(tensor: torch.Tensor) -> str:
    kind = str(tensor.dtype).removeprefix("torch.")
    return f"{'x'.join(map(str, tensor.shape))} {kind}".strip()


# Follows the memory of one step that is looked at.


class Look:
    """All that a follower does only in a step that is looked at.

    Parameters
    ----------
    memory
        Told of the tensors that are made, used and saved.
    blocks
        The modules inside of them are hooked too: a checkpoint within a block's own forward
        computes again without calling the block.
    guard
        Makes hooks.
    is_running
        Whether a call of the model or a block is under way.
    """

    def __init__(
        self,
        memory: StepMemory,
        blocks: Iterable[Block],
        guard: Guard,
        is_running: Callable[[], bool],
    ) -> None:
        self.memory = memory
        self._saved = SavedTensors(guard(memory.on_save), guard(memory.on_use))
        self._is_running = is_running
        # Modules inside a block that run while a checkpoint computes again.
        self._inner = 0
        self._hooks: list[Undo] = []
        for block in blocks:
            enter, leave = partial(self._enter_inner, block), self._leave_inner
            for module in block.module.modules():
                if module is not block.module:
                    self._hooks += hook_calls(module, enter, leave, guard.on_error)

    def close(self) -> None:
        """Take its hooks away, and forget the memory."""
        for undo in self._hooks:
            undo()
        self._hooks.clear()
        self._saved.close()
        self.memory.close()

    # ------------------------------------------------------------------ calls

    def call_begins(self, args: object, kwargs: object, *, is_outermost: bool) -> None:
        """The model or a block is called; its phase has not begun."""
        if is_outermost:
            self._saved.push()
        else:
            self.hand_on((args, kwargs), "result")

    def call_runs(
        self,
        name: str | None,
        args: object,
        kwargs: object,
        *,
        is_outermost: bool,
        recomputed_for: str,
    ) -> None:
        """Its phase has begun.

        Parameters
        ----------
        name
            Of the block; None for the model.
        args, kwargs
            Of the call.
        is_outermost
            Whether it is no part of another call.
        recomputed_for
            The backward phase for which a checkpoint calls it, or "".
        """
        if is_outermost:
            self.memory.call_inputs(args, kwargs)
            self.memory.enter_block(OUTSIDE)
        else:
            self.take((args, kwargs))
        if name is not None:
            self.memory.enter_block(name)
        if not recomputed_for:
            self.memory.saves.begin_call(OUTSIDE if name is None else name)
        if recomputed_for:
            self.memory.set_recomputing(recomputed_for)
            self._saved.push_before_others()

    def call_ends(
        self, name: str | None, output: object, *, is_recomputed: bool, is_abandoned: bool
    ) -> None:
        """It returns, or an exception has gone through it.

        Parameters
        ----------
        name
            Of the block; None for the model.
        output
            What it returns.
        is_recomputed
            Whether a checkpoint has called it.
        is_abandoned
            Whether an exception leaves the outermost call.
        """
        if not is_recomputed:
            self.memory.saves.end_call()
        self.hand_on(output, "result")
        self.memory.leave_block(OUTSIDE if name is None else name)
        if is_recomputed:
            self.memory.set_recomputing("")
        if is_recomputed or is_abandoned:
            self._saved.pop()

    def _enter_inner(self, block: Block, *_: object) -> None:
        """A module inside a block is called; outside of the block's call, by a checkpoint."""
        if self._is_running() or _C._current_graph_task_id() == -1:
            return
        self._inner += 1
        if self._inner == 1:
            self.memory.enter_block(block.name)
            self._saved.push_before_others()

    def _leave_inner(self, *_: object, **__: object) -> None:
        if self._inner == 0:
            return
        self._inner -= 1
        if self._inner == 0:
            self._saved.pop()

    # ------------------------------------------------------------------ phases

    def hand_on(self, value: object, what: str) -> None:
        """The phase that ends has made this, if it is not known."""
        self.memory.see_made(value, what)

    def take(self, value: object) -> None:
        """The phase that has begun uses this."""
        self.memory.see_used(value)

    def forward_ends(self, roots: object) -> None:
        """A backward pass is about to begin from these tensors."""
        self.hand_on(roots, "loss")
        self._saved.pop()
