"""What one step does to memory, as far as modules show it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace

import torch
from torch.optim.optimizer import Optimizer

from umem.classes import TensorClass
from umem.recorder._guard import Guard
from umem.recorder._parameters import OUTSIDE, Parameters
from umem.recorder._saved_tensor import Save, SaveLog
from umem.recorder._tensors import named_tensors
from umem.saved_tensor_hooks import may_leave
from umem.tensor_memory import named_parts, plain_tensors
from umem.trace import Access
from umem.trace._storages import BEFORE, Storage, Storages

__all__ = ["OptimizerPart", "StepLook", "StepMemory", "note_access"]


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
        # Where a trained and a frozen parameter share a storage, it is trained.
        for parameter, name in sorted(known.names.items(), key=lambda item: item[0].requires_grad):
            is_trained = parameter.requires_grad
            tensor_class = TensorClass.WEIGHTS if is_trained else TensorClass.FROZEN_WEIGHTS
            self._tag(parameter, name, tensor_class)
            if parameter.is_leaf and parameter.grad is not None:
                self._tag(parameter.grad, f"{name}.grad", TensorClass.GRADIENTS)
            if parameter.is_leaf and is_trained:
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
        for parameter, state in self._optimizer.state.items():
            name = self._names.get(parameter, "optimizer")
            for key, tensor in named_tensors(state, name):
                self._tag(tensor, key, TensorClass.OPTIMIZER_STATE)
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
