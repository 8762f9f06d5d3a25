"""Tracks which storages one training step makes and uses, as far as calls of modules show it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch.optim.optimizer import Optimizer

from umem.capture.live.blocks import NO_BLOCK, Block, Parameters
from umem.capture.live.saved_tensors import SavedTensorHooks, SaveLog, StorageSave
from umem.capture.storages import BEFORE, Storage, Storages
from umem.core.classes import TensorClass
from umem.runtime.model_parts import (
    named_parts,
    named_tensors,
    optimizer_parameters,
    optimizer_state,
    plain_tensors,
    tensors_in,
    weight_classes,
)
from umem.runtime.torch_hooks.modules import HookErrors, hook_calls
from umem.runtime.torch_hooks.passes import running_pass
from umem.runtime.torch_hooks.saved_tensors import may_leave
from umem.torch_compat import storage_key, version_counter
from umem.trace import Access

__all__ = ["MemoryTracker", "StepMemory", "note_access"]


@dataclass(frozen=True)
class StepMemory:
    """The phases and storages of one tracked step."""

    labels: tuple[str, ...]
    """Of the phases in order; the last one is the optimizer's."""
    storages: tuple[Storage, ...]
    accesses: tuple[Mapping[int, Access], ...]
    """Of each phase, by number of the storage."""
    optimizer_parts: Mapping[str, Mapping[int, Access]]
    """Accesses of the optimizer to the parameters of each block, their gradients and state."""
    saves: tuple[StorageSave, ...]
    peak_bytes: tuple[int, ...]
    """The most bytes allocated during each phase; empty where no allocator reports them."""
    start_bytes: tuple[int, ...]
    """The bytes allocated at the begin of each phase; empty likewise."""


def note_access(phase: dict[int, Access], number: int, access: Access) -> None:
    """Add an access to a phase's; what it reads after writing it counts as written only."""
    before = phase.get(number)
    if before is None:
        phase[number] = access
    elif before == Access.READ:
        phase[number] = before | access


class MemoryTracker:
    """Tracks the storages of one step from the first call of the model to the optimizer's end.

    Memory is held by weak references, of tensors on `device` alone. An input is kept from step to
    step if its storage's address is in `kept`, those of the step before. `peak_bytes` returns the
    most bytes allocated since its last call.
    """

    def __init__(
        self,
        known: Parameters,
        optimizer: Optimizer,
        device: torch.device,
        kept: Collection[int],
        guard: HookErrors,
        peak_bytes: Callable[[], int] | None = None,
    ) -> None:
        self._known = known
        self._optimizer = optimizer
        self._device = device
        self._kept = kept
        self._guard = guard
        self._take_peak = peak_bytes
        self._peaks: list[int] = []
        self._starts: list[int] = []
        self._accesses: list[dict[int, Access]] = []
        self._label = ""
        self._storages = Storages(lambda: len(self._accesses))
        self._gradients: set[int] = set()
        # Versions of the buffers: blocks may change running statistics.
        self._versions: dict[torch.Tensor, int] = {}
        self._save_log = SaveLog()
        on_use = partial(self._see, what="saved")
        self._saved = SavedTensorHooks(guard(self._on_save), guard(on_use))
        # Storages that a checkpoint saves when it recomputes, by label of the phase that uses them.
        self._recomputed: dict[str, list[int]] = {}
        self._recomputing_for = ""
        # Modules inside of blocks that run while a checkpoint recomputes.
        self._inner_calls = 0
        self._is_running: Callable[[], bool] = bool
        self._hooks = ExitStack()

    def start(self, blocks: Iterable[Block], is_running: Callable[[], bool]) -> None:
        """Set hooks on gradients, and on the modules inside of blocks.

        A checkpoint within a block's forward calls these without the block: then `is_running`,
        which is true during a call of the model or a block, is false.
        """
        self._is_running = is_running
        with ExitStack() as hooks:
            hooks.callback(self.close)  # where a hook cannot be set
            self._tag_known()
            for block in blocks:
                enter, leave = partial(self._enter_inner, block), self._leave_inner
                for module in list(block.module.modules())[1:]:  # the first one is the block
                    for undo in hook_calls(module, enter, leave, self._guard.on_error):
                        self._hooks.callback(undo)
            hooks.pop_all()

    def close(self) -> None:
        """Remove all hooks and let go of everything."""
        with self._hooks:
            self._saved.close()
        # The callbacks of its weak references would note deaths after the step.
        self._storages = Storages(lambda: 0)
        self._known = Parameters({}, {}, {}, {})
        self._versions.clear()
        self._accesses = []

    def _tag_known(self) -> None:
        known = self._known
        for buffer, name in known.buffers.items():
            self._tag(buffer, name, TensorClass.OTHER)
            self._versions[buffer] = version_counter(buffer)
        on_gradient = self._guard(self._on_gradient)
        for parameter, tensor_class in weight_classes(known.names):
            name = known.names[parameter]
            self._tag(parameter, name, tensor_class)
            if not parameter.is_leaf:
                continue
            if parameter.grad is not None:
                self._tag(parameter.grad, f"{name}.grad", TensorClass.GRADIENTS)
            if parameter.requires_grad:
                handle = parameter.register_post_accumulate_grad_hook(on_gradient)
                self._hooks.callback(handle.remove)

    def _tag(self, tensor: torch.Tensor, name: str, tensor_class: TensorClass) -> None:
        for number, part_name in self._add(tensor, name, tensor_class, BEFORE):
            record = self._storages.records[number]
            record.name, record.tensor_class = part_name, tensor_class

    def _add(
        self, tensor: torch.Tensor, name: str, tensor_class: TensorClass, born: int
    ) -> list[tuple[int, str]]:
        """Number and name of each storage behind a tensor that is on the device."""
        found = []
        for part_name, part in named_parts(name, tensor):
            if part.device == self._device:
                number = self._storages.add(part, part_name, tensor_class, born)
                if number is not None:
                    found.append((number, part_name))
        return found

    def _numbers(self, tensor: torch.Tensor) -> list[int]:
        found = (self._storages.find(part) for part in plain_tensors(tensor))
        return [number for number in found if number is not None]

    @property
    def _current(self) -> int:
        return len(self._accesses) - 1

    def _use(self, number: int, access: Access) -> None:
        note_access(self._accesses[-1], number, access)
        self._storages.note_first_access(number, access)

    def _see(self, tensor: torch.Tensor, what: str) -> None:
        """The phase reads a tensor, or has made it if it is not known."""
        for part in plain_tensors(tensor):
            if part.device != self._device:
                continue
            number = self._storages.find(part)
            if number is not None:
                self._use(number, Access.READ)
                continue
            dtype = str(part.dtype).removeprefix("torch.")
            shape = f"{'x'.join(map(str, part.shape))} {dtype}".strip()
            name = f"{self._label}: {what} {shape}"
            number = self._storages.add(part, name, TensorClass.ACTIVATIONS, self._current)
            if number is not None:
                self._use(number, Access.WRITE)

    def begin_phase(self, label: str) -> None:
        """All that follows belongs to a new phase."""
        if self._take_peak is not None:
            self._peaks.append(self._take_peak())
            self._starts.append(self._take_peak())  # nothing since: the bytes allocated now
        self._accesses.append({})
        self._label = label
        for number in self._recomputed.get(label, ()):
            if self._storages.records[number].died is None:
                self._use(number, Access.READ)

    def see_made(self, value: object, what: str) -> None:
        """The phase that ends has made these tensors, if they are not known."""
        for tensor in tensors_in(value):
            for part in plain_tensors(tensor):
                if part.device == self._device and self._storages.find(part) is None:
                    self._see(part, what)

    def see_used(self, value: object) -> None:
        """The phase that has begun uses these tensors."""
        for tensor in tensors_in(value):
            self._see(tensor, "input")

    def before_call(self, args: object, kwargs: object, *, is_outermost: bool) -> None:
        """The model or a block is called; its phase has not begun."""
        if is_outermost:
            self._saved.push()
        else:
            self.see_made((args, kwargs), "result")

    def begin_call(
        self, block: str, args: object, kwargs: object, *, is_outermost: bool, recomputed_for: str
    ) -> None:
        """The phase of a block's call has begun; :data:`NO_BLOCK` stands for the model.

        Where a checkpoint calls it, `recomputed_for` is the backward phase for which.
        """
        if is_outermost:
            self._see_inputs(args, kwargs)
            self._see_held(NO_BLOCK)
        else:
            self.see_used((args, kwargs))
        if block != NO_BLOCK:
            self._see_held(block)
        if recomputed_for:
            self._recomputing_for = recomputed_for
            self._saved.push_before_others()
        else:
            self._save_log.begin_call(block)

    def _see_inputs(self, *given: object) -> None:
        for value in given:
            for name, tensor in named_tensors(value):
                for part in plain_tensors(tensor):
                    is_kept = storage_key(part.untyped_storage()) in self._kept
                    born = BEFORE if is_kept else self._current
                    for number, _ in self._add(part, f"input {name}", TensorClass.OTHER, born):
                        self._use(number, Access.READ)

    def _see_held(self, block: str) -> None:
        """A forward pass through a block reads its parameters and buffers."""
        for tensor in self._known.held[block]:
            self._see(tensor, "")

    def end_call(
        self, block: str, output: object, *, is_recomputed: bool, is_abandoned: bool
    ) -> None:
        """A block's call returns, or an exception has ended it.

        It is recomputed where a checkpoint has called it, and abandoned where the exception has
        ended the outermost call.
        """
        if not is_recomputed:
            self._save_log.end_call()
        self.see_made(output, "result")
        for tensor in self._known.held[block]:
            if self._versions.get(tensor, version_counter(tensor)) != version_counter(tensor):
                self._versions[tensor] = version_counter(tensor)
                for number in self._numbers(tensor):
                    self._use(number, Access.READ | Access.WRITE)
        if is_recomputed:
            self._recomputing_for = ""
        if is_recomputed or is_abandoned:
            self._saved.pop()

    def end_forward(self, roots: object) -> None:
        """A backward pass is about to begin from these tensors."""
        self.see_made(roots, "loss")
        self._saved.pop()

    def _enter_inner(self, block: Block, *_: object) -> None:
        """A module inside a block is called; by a checkpoint, where no call of the block runs."""
        if self._is_running() or not running_pass().is_second:
            return
        self._inner_calls += 1
        if self._inner_calls == 1:
            self._see_held(block.name)
            self._saved.push_before_others()

    def _leave_inner(self, *_: object, **__: object) -> None:
        if self._inner_calls == 0:
            return
        self._inner_calls -= 1
        if self._inner_calls == 0:
            self._saved.pop()

    def _on_save(self, tensor: torch.Tensor) -> None:
        self._see(tensor, "saved")
        numbers = self._numbers(tensor)
        self._save_log.note(numbers if may_leave(tensor) else [])
        if self._recomputing_for:
            self._recomputed.setdefault(self._recomputing_for, []).extend(numbers)

    def _on_gradient(self, parameter: torch.Tensor) -> None:
        """A gradient has been accumulated."""
        if parameter.grad is None or not self._accesses:
            return
        name = f"{self._known.names[parameter]}.grad"
        for number, part_name in self._add(
            parameter.grad, name, TensorClass.GRADIENTS, self._current
        ):
            record = self._storages.records[number]
            record.name, record.tensor_class = part_name, TensorClass.GRADIENTS
            is_new = self._is_new_gradient(number)
            self._gradients.add(number)
            self._use(number, Access.WRITE if is_new else Access.READ | Access.WRITE)

    def _is_new_gradient(self, number: int) -> bool:
        return number not in self._gradients and self._storages.records[number].born != BEFORE

    def begin_optimizer(self) -> None:
        """The optimizer is about to step: find the gradients that autograd has not accumulated."""
        for parameter in self._known.names:
            if not parameter.is_leaf or parameter.grad is None:
                continue
            numbers = self._numbers(parameter.grad)
            if not numbers or any(map(self._is_new_gradient, numbers)):
                self._on_gradient(parameter)

    def end_step(self, labels: Iterable[str]) -> StepMemory:
        """The optimizer has stepped, and the phases have these labels."""
        if self._take_peak is not None:
            self._peaks.append(self._take_peak())
        for name, tensor in optimizer_state(self._optimizer, self._known.names):
            self._tag(tensor, name, TensorClass.OPTIMIZER_STATE)
        return StepMemory(
            labels=tuple(labels),
            # Copies, as deaths after the step are noted in the records.
            storages=tuple(replace(record) for record in self._storages.records),
            accesses=tuple(self._accesses),
            optimizer_parts=self._optimizer_parts(),
            saves=tuple(self._save_log.saves),
            peak_bytes=tuple(self._peaks[1:]),  # the first one was before the step
            start_bytes=tuple(self._starts),
        )

    def _optimizer_parts(self) -> dict[str, dict[int, Access]]:
        """By block, in the order in which the optimizer holds the parameters."""
        parts: dict[str, dict[int, Access]] = {}
        for parameter in optimizer_parameters(self._optimizer):
            gradient = parameter.grad
            if gradient is None:
                continue
            part = parts.setdefault(self._known.owner.get(parameter, NO_BLOCK), {})
            for number in self._numbers(gradient):
                part[number] = Access.READ
            state = self._optimizer.state.get(parameter, {})
            for tensor in (parameter, *tensors_in(state)):
                for number in self._numbers(tensor):
                    part[number] = Access.READ | Access.WRITE
        return parts
