"""Saved tensors by call, temporaries of operators, and memory outside of the recorded step."""

from __future__ import annotations

import itertools
import threading
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint
from traced_memory import live_sizes

import umem
from umem.capture.live import (
    Block,
    PhaseTracker,
    SavedTensor,
    SavedTensorHooks,
    StepListener,
    find_blocks,
)
from umem.capture.live.memory_tracker import StepMemory
from umem.capture.live.trace_builder import outside_bytes
from umem.capture.storages import BEFORE, Storage
from umem.core.block_sizes import block_bytes
from umem.core.classes import TensorClass
from umem.runtime.torch_hooks import saved_tensors as saved_tensor_hooks
from umem.runtime.torch_hooks.modules import HookErrors
from umem.trace import Trace

native = pytest.importorskip("umem.runtime._native")

WIDTH, ROWS = 256, 512


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.down(functional.gelu(self.up(self.norm(hidden))))


class Net(nn.Module):
    def __init__(self, is_checkpointed: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.is_checkpointed = is_checkpointed

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.first(inputs)
        for layer in self.layers:
            if self.is_checkpointed:
                again: Any = checkpoint(layer, hidden, use_reentrant=False)
                hidden = again
            else:
                hidden = layer(hidden)
        return hidden


def training(
    is_checkpointed: bool = False, accumulate: int = 1
) -> tuple[Net, torch.optim.Optimizer, Callable[[], None]]:
    torch.manual_seed(0)
    model = Net(is_checkpointed)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)

    def step() -> None:
        for _ in range(accumulate):
            model(torch.randn(ROWS, WIDTH)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return model, optimizer, step


def recorded(
    model: nn.Module, optimizer: torch.optim.Optimizer, step: Callable[[], None], **options: Any
) -> tuple[Trace, tuple[SavedTensor, ...]]:
    with umem.record(model, optimizer, **options) as recording:
        for _ in range(12):
            step()
    return recording.trace, recording.saved_tensors


# ---------------------------------------------------------------------------------- saved tensors


class Packer(StepListener):
    """Counts saved tensors with torch's own hooks, as the offload of activations does."""

    def __init__(self) -> None:
        self.seen: dict[tuple[str, int, int], torch.Tensor] = {}
        self._calls: Counter[str] = Counter()
        self._hooks: list[Any] = []

    def block_begins(self, block: Block, is_recomputed: bool) -> None:
        if is_recomputed:
            return
        name = "" if block.name == "Net" else block.name  # the model itself
        call, ordinals = self._calls[name], itertools.count()
        self._calls[name] += 1

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            self.seen[name, call, next(ordinals)] = tensor
            return tensor

        self._hooks.append(torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor))
        self._hooks[-1].__enter__()

    def block_ends(self, block: Block) -> None:
        if self._hooks:
            self._hooks.pop().__exit__(None, None, None)


@pytest.mark.slow
@pytest.mark.parametrize("accumulate", [1, 2])
def test_saved_tensors_are_found_again_by_call_and_ordinal(accumulate: int) -> None:
    model, optimizer, step = training(accumulate=accumulate)
    trace, saved = recorded(model, optimizer, step)
    packer, errors = Packer(), list[Exception]()
    root = Block("Net", model)
    tracker = PhaseTracker(root, find_blocks(model), HookErrors(errors.append), packer)
    tracker.start()
    step()
    tracker.stop()
    assert not errors
    assert {entry.call for entry in saved} == set(range(accumulate))
    expected = {(entry.block, entry.call, entry.ordinal): entry for entry in saved}
    assert len(expected) == len(saved)
    names: dict[int, set[int]] = {}
    for key, tensor in packer.seen.items():
        storage = tensor.untyped_storage()
        entry = expected.pop(key, None)
        if entry is None:  # only weights and the model's input are no activations
            is_weight = isinstance(tensor, nn.Parameter) or tensor._base is not None
            assert is_weight or key[0] == "first", key
            continue
        assert entry.nbytes == storage.nbytes() == trace.tensor_bytes[entry.tensor]
        assert trace.tensor_class[entry.tensor] == TensorClass.ACTIVATIONS.number
        names.setdefault(entry.tensor, set()).add(storage.data_ptr())
    assert not expected
    # One tensor of the trace is one storage, in the order of the step.
    assert all(len(addresses) == 1 for addresses in names.values())
    assert len({address for found in names.values() for address in found}) == len(names)
    # A layer keeps its input, the norm's result and statistics, and both sides of the activation.
    layer = {entry.tensor for entry in saved if (entry.block, entry.call) == ("layers.1", 0)}
    assert len(layer) == 6
    assert sum(int(trace.tensor_bytes[tensor]) for tensor in layer) == 4 * ROWS * (10 * WIDTH + 2)


@pytest.mark.slow
def test_tensors_that_a_checkpoint_packs_are_not_listed() -> None:
    saved = recorded(*training(is_checkpointed=True))[1]
    assert [entry for entry in saved if entry.block.startswith("layers")] == []


@pytest.mark.slow
def test_a_leaf_that_requires_a_gradient_is_not_listed() -> None:
    """As PEFT makes of the embedding's result. The program may hold it, so it stays in place."""
    model, optimizer, step = training(is_checkpointed=True)
    first = "forward first: result"
    assert first in saved_names(model, optimizer, step)
    model.first.requires_grad_(False)
    model.first.register_forward_hook(lambda _module, _args, result: result.requires_grad_())
    others = saved_names(model, optimizer, step)
    assert first not in others
    assert "forward layers.0: result" in others


def saved_names(
    model: nn.Module, optimizer: torch.optim.Optimizer, step: Callable[[], None]
) -> set[str]:
    trace, saved = recorded(model, optimizer, step)
    return {trace.tensor_names[entry.tensor].partition(" 512x")[0] for entry in saved}


def test_a_saved_tensor_that_was_modified_in_place_raises() -> None:
    used: list[torch.Tensor] = []
    hooks = SavedTensorHooks(lambda tensor: None, used.append)
    inputs = torch.ones(3, requires_grad=True)
    hooks.push()
    result = inputs.exp()
    hooks.pop()
    result.mul_(2)
    message = r"FloatTensor \[3\]\] is at version 1; expected version 0 instead"
    with pytest.raises(RuntimeError, match=message):
        result.sum().backward()
    assert not used


def test_hooks_closed_in_another_thread_are_popped_with_the_next_saved_tensor() -> None:
    seen: list[torch.Tensor] = []
    hooks = SavedTensorHooks(seen.append, seen.append)
    inputs = torch.ones(3, requires_grad=True)
    hooks.push()
    result = inputs.exp()
    assert len(seen) == 1
    thread = threading.Thread(target=hooks.close)  # as a fault in autograd's thread does
    thread.start()
    thread.join()
    assert saved_tensor_hooks.innermost() is not None
    other = inputs.sin()
    assert saved_tensor_hooks.innermost() is None
    (result.sum() + other.sum()).backward()
    assert len(seen) == 1
    assert inputs.grad is not None
    assert torch.equal(inputs.grad, result + inputs.detach().cos())


def test_a_thread_pops_only_its_own_hooks() -> None:
    hooks = SavedTensorHooks(lambda tensor: None, lambda tensor: None)
    hooks.push()

    def checkpoint_again() -> None:
        hooks.push_before_others()
        hooks.pop()
        hooks.pop()

    thread = threading.Thread(target=checkpoint_again)
    thread.start()
    thread.join()
    hooks.pop()
    assert saved_tensor_hooks.innermost() is None


# ---------------------------------------------------------------------------------- temporaries


class Allocated(TorchDispatchMode):
    """Gives every storage that an operator makes a block of umem's allocator, over host memory."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        setting = native.ClassSetting()
        self.allocator = native.Allocator.on_host(native.Config([setting] * len(TensorClass)))
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self._track(tensor.untyped_storage())
        return result

    def _track(self, storage: torch.UntypedStorage) -> None:
        key, nbytes = storage._cdata, storage.nbytes()
        if nbytes and key not in self._known:
            self._known.add(key)
            weakref.finalize(storage, self._free, key, self.allocator.malloc(nbytes))

    def _free(self, key: int, address: int) -> None:
        self._known.discard(key)
        self.allocator.free(address)

    def take_peak_bytes(self) -> int:
        return int(self.allocator.take_peak_bytes(0))


def live_blocks(trace: Trace, *, with_temporaries: bool = True) -> Any:
    """Bytes of blocks that are allocated in each phase."""
    chosen = np.array(
        [with_temporaries or not name.startswith("temporary") for name in trace.tensor_names]
    )
    return live_sizes(trace, np.where(chosen, block_bytes(trace.tensor_bytes), 0))


@pytest.mark.slow
@pytest.mark.parametrize("is_checkpointed", [False, True])
def test_the_trace_has_the_allocators_peak(is_checkpointed: bool) -> None:
    with Allocated() as memory:
        others = torch.empty(5 << 20)  # no part of the training
        model, optimizer, step = training(is_checkpointed)
        trace, _ = recorded(model, optimizer, step, peak_bytes=memory.take_peak_bytes)
        memory.take_peak_bytes()
        step()
        peak = memory.take_peak_bytes() - int(block_bytes(np.array(others.nbytes)))
    # Less than 1 MiB is left out; memory that a phase makes after freeing other memory is more.
    assert peak - (1 << 20) <= live_blocks(trace).max() <= 1.05 * peak
    assert (live_blocks(trace, with_temporaries=False) < 0.9 * live_blocks(trace)).any()
    found = [name for name in trace.tensor_names if name.startswith("temporary of ")]
    assert found
    for name in found:
        tensor = trace.tensor_names.index(name)
        phase = trace.first_phase[tensor]
        span = slice(trace.access_start[phase], trace.access_start[phase + 1])
        assert (trace.access_tensor[span] == tensor).sum() == 1
        assert trace.tensor_bytes[tensor] > 1 << 20
        assert not trace.persistent[tensor]
        assert trace.tensor_class[tensor] == TensorClass.ACTIVATIONS.number
        label = name.removeprefix("temporary of ")
        assert trace.phase_names[phase].startswith(label)
        is_optimizer = label == "optimizer"
        assert trace.last_phase[tensor] == (trace.phase_count - 1 if is_optimizer else phase)


def test_small_temporaries_are_left_out() -> None:
    with Allocated() as memory:
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step() -> None:
            model(torch.randn(4, 8)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        trace, _ = recorded(model, optimizer, step, peak_bytes=memory.take_peak_bytes)
    assert not any(name.startswith("temporary") for name in trace.tensor_names)


def test_blocks_are_rounded_as_the_allocator_does() -> None:
    allocator = native.Allocator.on_host(native.Config([native.ClassSetting()] * len(TensorClass)))
    sizes = [1, 512, 513, (2 << 20) - 1, 2 << 20, (2 << 20) + 1, (2 << 20) + (64 << 10), 7 << 20]
    blocks = []
    for size in sizes:
        address = allocator.malloc(size)
        blocks += [block for _, asked, block, *_ in allocator.live_blocks() if asked == size]
        allocator.free(address)
    assert block_bytes(np.array(sizes)).tolist() == blocks


# ---------------------------------------------------------------------- outside of the step

MIB = 1 << 20


def step_memory(start_mib: list[int]) -> StepMemory:
    """Three phases with a weight of 4 MiB, and an activation of 2 MiB made in the first."""
    return StepMemory(
        labels=("forward", "backward", "optimizer"),
        storages=(
            Storage("weight", 4 * MIB, TensorClass.WEIGHTS, BEFORE),
            Storage("activation", 2 * MIB, TensorClass.ACTIVATIONS, 0, 2),
        ),
        accesses=({}, {}, {}),
        optimizer_parts={},
        saves=(),
        peak_bytes=tuple(20 * MIB for _ in start_mib),
        start_bytes=tuple(mib * MIB for mib in start_mib),
    )


def test_memory_of_all_phases_and_of_no_tensor_is_outside() -> None:
    assert outside_bytes(step_memory([4 + 6, 4 + 2 + 6, 4 + 6])) == 6 * MIB
    # Memory of some phases only is the step's own.
    assert outside_bytes(step_memory([4, 4 + 2 + 6, 4 + 6])) == 0


def test_without_an_allocator_no_memory_is_known_to_be_outside() -> None:
    assert outside_bytes(step_memory([])) == 0
