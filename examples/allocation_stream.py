"""Record the memory that a training step on the CPU asks for, and replay it on umem's allocator.

An allocation stream is what an allocator sees: blocks are allocated and freed, in order, each with
its bytes and tensor class. Recording needs no GPU, and the replay serves the blocks from host
memory, so the allocator can be tried under real traffic anywhere. `umem demo` does both.
"""

from __future__ import annotations

import gc
import statistics
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from umem.core.classes import TensorClass
from umem.runtime.native_library import native

if TYPE_CHECKING:
    from umem.runtime._native import Allocator, Config

__all__ = ["AllocationStream", "ClassUsage", "ReplayResult", "record_training", "replay"]


@dataclass(frozen=True)
class AllocationStream:
    """Allocations and frees of blocks, in order.

    Parameters
    ----------
    events : ndarray of int32, shape (events,)
        ``block + 1`` where a block is allocated, ``-(block + 1)`` where it is freed.
    block_bytes : ndarray of int64, shape (blocks,)
        Requested bytes.
    block_class : ndarray of int8, shape (blocks,)
        :attr:`umem.TensorClass.number` of the tensor that the block came to hold.
    step_starts : tuple of int
        The event at which each training step begins; those before build the model.
    """

    events: NDArray[np.int32]
    block_bytes: NDArray[np.int64]
    block_class: NDArray[np.int8]
    step_starts: tuple[int, ...]

    def live_blocks(self, event: int | None = None) -> NDArray[np.int64]:
        """Blocks live just before `event` (default: at the end), in order of allocation."""
        past = self.events[:event]
        allocated = past[past > 0] - 1
        freed = -past[past < 0] - 1
        return np.setdiff1d(allocated, freed).astype(np.int64)

    def class_bytes(self, event: int | None = None) -> dict[TensorClass, int]:
        """Bytes live just before `event` (default: at the end), by class."""
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
        Number of steps to record. The first one creates the optimizer's state; later ones are
        alike.

    Returns
    -------
    AllocationStream
        Every storage that an operator returned, but for empty ones. Scratch memory inside a CPU
        kernel is not seen.

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
        # Else reference cycles of the build would be freed at a later event, which varies by run.
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
    """Notes each storage that an operator returns, and when it is freed."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.phase = TensorClass.WEIGHTS
        self.events: list[int] = []
        self.block_bytes: list[int] = []
        self.block_class: list[int] = []
        # By address of the C++ storage: its block, and the reference whose callback notes the free.
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
                self._note_allocation(leaf.untyped_storage())
        return result

    def _note_allocation(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._live or storage.nbytes() == 0:
            return
        block = len(self.block_bytes)
        self.block_bytes.append(storage.nbytes())
        self.block_class.append(self.phase.number)
        self.events.append(block + 1)

        def note_free(_: weakref.ref[torch.UntypedStorage]) -> None:
            del self._live[key]
            self.events.append(-(block + 1))

        self._live[key] = (block, weakref.ref(storage, note_free))

    def tag(self, tensor: torch.Tensor, tensor_class: TensorClass) -> None:
        block, _ = self._live[tensor.untyped_storage()._cdata]
        self.block_class[block] = tensor_class.number

    def tag_gradient(self, parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        self.tag(parameter.grad, TensorClass.GRADIENTS)

    def enter_optimizer(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        # The first step creates the state; what later ones allocate is freed before they end.
        self.phase = TensorClass.OTHER if optimizer.state else TensorClass.OPTIMIZER_STATE

    def leave_optimizer(self, *_: object) -> None:
        self.phase = TensorClass.ACTIVATIONS


@dataclass(frozen=True)
class ClassUsage:
    """Allocations of one tensor class; bytes are those of the blocks handed out."""

    allocations: int
    allocated_bytes: int
    peak_bytes: int
    live_bytes: int


@dataclass(frozen=True)
class ReplayResult:
    """The allocator's statistics of one stream.

    Peaks are of requested bytes, of the blocks that hold them, and of the segments that hold
    the blocks. `pair_ns` is the median time of one allocation and its free, called from Python.
    """

    by_class: dict[TensorClass, ClassUsage]
    peak_requested_bytes: int
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    pair_ns: float


def replay(stream: AllocationStream, config: Config, *, passes: int = 25) -> ReplayResult:
    """Replay a recorded stream on the native allocator, over host memory.

    Parameters
    ----------
    stream : AllocationStream
        From :func:`record_training`.
    config : umem.runtime._native.Config
        The allocator's settings, as a policy gives them.
    passes : int
        Number of replays. The first one gives the usage by class; `pair_ns` is the median of the
        others, which find the allocator's cache filled, as a later step does.

    Raises
    ------
    ValueError
        `passes` is less than 2.
    MemoryError
        The stream needs more than the policy's limit.
    NativeLibraryError
        The native library cannot be loaded.
    """
    if passes < 2:
        raise ValueError(f"passes must be 2 or more to time a filled cache, not {passes}")
    allocator = native().Allocator.on_host(config)
    events = stream.events.tolist()
    # Index 0 is unused: an event is a block's number plus one.
    sizes = [0, *stream.block_bytes.tolist()]
    classes = [0, *stream.block_class.tolist()]

    leftover, _ = _replay_once(allocator, events, sizes, classes)
    stats = allocator.stats(0)
    usage = allocator.class_stats(0)
    _free_all(allocator, leftover)
    seconds = []
    for _ in range(passes - 1):
        leftover, pass_s = _replay_once(allocator, events, sizes, classes)
        seconds.append(pass_s + _free_all(allocator, leftover))

    return ReplayResult(
        by_class={
            member: ClassUsage(
                allocations=usage[member.number]["allocation"]["allocated"],
                allocated_bytes=usage[member.number]["allocated_bytes"]["allocated"],
                peak_bytes=usage[member.number]["allocated_bytes"]["peak"],
                live_bytes=usage[member.number]["allocated_bytes"]["current"],
            )
            for member in TensorClass
        },
        peak_requested_bytes=stats["requested_bytes"]["all"]["peak"],
        peak_allocated_bytes=stats["allocated_bytes"]["all"]["peak"],
        peak_reserved_bytes=stats["reserved_bytes"]["all"]["peak"],
        pair_ns=statistics.median(seconds) / len(stream.block_bytes) * 1e9,
    )


def _replay_once(
    allocator: Allocator, events: list[int], sizes: list[int], classes: list[int]
) -> tuple[list[int], float]:
    """Replay the events once; return the addresses still live at the end, and the seconds."""
    malloc, free, set_phase = allocator.malloc, allocator.free, allocator.set_phase
    addresses = [0] * len(sizes)
    phase = -1
    start = time.perf_counter()
    for event in events:
        if event > 0:
            if classes[event] != phase:
                phase = classes[event]
                set_phase(phase)
            addresses[event] = malloc(sizes[event])
        else:
            free(addresses[-event])
            addresses[-event] = 0
    elapsed_s = time.perf_counter() - start
    return [address for address in addresses if address], elapsed_s


def _free_all(allocator: Allocator, addresses: list[int]) -> float:
    start = time.perf_counter()
    for address in addresses:
        allocator.free(address)
    return time.perf_counter() - start
