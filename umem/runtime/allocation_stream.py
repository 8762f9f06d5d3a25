"""Record which memory a real training step on the CPU asks for, block by block.

The recording is what an allocator sees: blocks are born and die, in order, each with its bytes
and tensor class. It needs no GPU, so the allocator can be tried under real traffic anywhere.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from umem.core.classes import TensorClass

__all__ = ["AllocationStream", "record_training"]


@dataclass(frozen=True)
class AllocationStream:
    """Births and deaths of blocks in the order in which they happened.

    Parameters
    ----------
    events : ndarray of int32, shape (events,)
        ``block + 1`` where a block is born, ``-(block + 1)`` where it dies.
    block_bytes : ndarray of int64, shape (blocks,)
        Bytes asked for.
    block_class : ndarray of int8, shape (blocks,)
        :attr:`umem.TensorClass.number` of what the block came to hold.
    step_starts : tuple of int
        The event at which each training step begins; those before build the model.
    """

    events: NDArray[np.int32]
    block_bytes: NDArray[np.int64]
    block_class: NDArray[np.int8]
    step_starts: tuple[int, ...]

    def live_blocks(self, event: int | None = None) -> NDArray[np.int64]:
        """Blocks alive just before `event` (default: at the end), in order of birth."""
        past = self.events[:event]
        born = past[past > 0] - 1
        dead = -past[past < 0] - 1
        return np.setdiff1d(born, dead).astype(np.int64)

    def class_bytes(self, event: int | None = None) -> dict[TensorClass, int]:
        """Bytes alive just before `event` (default: at the end), by class."""
        live = self.live_blocks(event)
        totals = np.bincount(
            self.block_class[live], weights=self.block_bytes[live], minlength=len(TensorClass)
        )
        return {member: int(totals[member.number]) for member in TensorClass}


def record_training(
    build: Callable[[], tuple[torch.nn.Module, torch.optim.Optimizer]],
    step: Callable[[torch.nn.Module, torch.optim.Optimizer], object],
    *,
    steps: int = 2,
) -> AllocationStream:
    """Run a training loop on the CPU and record its allocations.

    Parameters
    ----------
    build : callable
        Makes the model and its optimizer. Parameters count as weights, or as frozen weights
        where they need no gradient; buffers count as other.
    step : callable
        One training step, forward to optimizer, on what `build` returned.
    steps : int
        How many to record. The first one makes the optimizer's state; later ones are alike.

    Returns
    -------
    AllocationStream
        Every storage that an operator returned. Scratch memory inside a CPU kernel is not
        there, and neither are storages without bytes.

    Raises
    ------
    ValueError
        `steps` is less than 1.
    """
    if steps < 1:
        raise ValueError(f"steps must be 1 or more to record a training step, not {steps}")
    recorder = _Recorder()
    with recorder:
        model, optimizer = build()
        # Cycles that the build left behind would die at some later event, run by run another.
        gc.collect()
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(recorder.tag_gradient)
            else:
                recorder.tag(parameter, TensorClass.FROZEN_WEIGHTS)
        for buffer in model.buffers():
            recorder.tag(buffer, TensorClass.OTHER)
        optimizer.register_step_pre_hook(recorder.enter_optimizer)
        optimizer.register_step_post_hook(recorder.leave_optimizer)
        recorder.phase = TensorClass.ACTIVATIONS
        step_starts = []
        for _ in range(steps):
            step_starts.append(len(recorder.events))
            step(model, optimizer)
        return AllocationStream(
            events=np.array(recorder.events, dtype=np.int32),
            block_bytes=np.array(recorder.block_bytes, dtype=np.int64),
            block_class=np.array(recorder.block_class, dtype=np.int8),
            step_starts=tuple(step_starts),
        )


class _Recorder(TorchDispatchMode):
    """Sees the storages that operators return, and their deaths."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.phase = TensorClass.WEIGHTS
        self.events: list[int] = []
        self.block_bytes: list[int] = []
        self.block_class: list[int] = []
        # By address of the C++ storage: its block, and the reference that tells of its death.
        self._live: dict[int, tuple[int, weakref.ref[torch.UntypedStorage]]] = {}

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self._note_birth(leaf.untyped_storage())
        return result

    def _note_birth(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._live or storage.nbytes() == 0:
            return
        block = len(self.block_bytes)
        self.block_bytes.append(storage.nbytes())
        self.block_class.append(self.phase.number)
        self.events.append(block + 1)

        def note_death(_: weakref.ref[torch.UntypedStorage]) -> None:
            del self._live[key]
            self.events.append(-(block + 1))

        self._live[key] = (block, weakref.ref(storage, note_death))

    def tag(self, tensor: torch.Tensor, tensor_class: TensorClass) -> None:
        block, _ = self._live[tensor.untyped_storage()._cdata]
        self.block_class[block] = tensor_class.number

    def tag_gradient(self, parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        self.tag(parameter.grad, TensorClass.GRADIENTS)

    def enter_optimizer(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        # State is made in the first step; what later ones allocate is gone when they end.
        self.phase = TensorClass.OTHER if optimizer.state else TensorClass.OPTIMIZER_STATE

    def leave_optimizer(self, *_: object) -> None:
        self.phase = TensorClass.ACTIVATIONS
