"""The phases that a listener receives while steps run, and those of the recorded trace."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Thread
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import umem
from umem.capture.live import Block, PhaseTracker, StepListener, StepRecording, find_blocks
from umem.capture.live.blocks import find_parameters
from umem.capture.live.memory_tracker import MemoryTracker
from umem.core.errors import TraceError
from umem.runtime.torch_hooks import saved_tensors as saved_tensor_hooks
from umem.runtime.torch_hooks.modules import HookErrors

WIDTH = 8


class Net(nn.Module):
    layers: Any  # a list of chains, which its stub does not say

    def __init__(self, reentrant: bool | None = None) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(2)
        )
        self.reentrant = reentrant

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.first(inputs)
        for layer in self.layers:
            if self.reentrant is None:
                hidden = layer(hidden).exp()
            else:
                hidden = checkpoint(layer, hidden, use_reentrant=self.reentrant)
        return hidden


class Log(StepListener):
    """Writes down the reports."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def step_begins(self) -> None:
        self.lines.append("step")

    def phase_begins(self, label: str) -> None:
        self.lines.append(label)

    def block_begins(self, block: Block, is_recomputed: bool) -> None:
        self.lines.append(f"{'again' if is_recomputed else 'begin'} {block.name}")

    def block_ends(self, block: Block) -> None:
        self.lines.append(f"end {block.name}")

    def step_ends(self, is_broken: bool) -> None:
        self.lines.append("broken" if is_broken else "whole")

    def take(self) -> list[str]:
        lines, self.lines = self.lines, []
        return lines

    @property
    def phases(self) -> list[str]:
        return [line for line in self.lines if line.split()[0] in PHASES]


PHASES = {"forward", "backward", "recompute", "after", "optimizer"}


class Training:
    def __init__(self, reentrant: bool | None = None) -> None:
        torch.manual_seed(0)
        self.model = Net(reentrant)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.errors: list[Exception] = []

    def step(self) -> None:
        self.model(torch.ones(2, WIDTH)).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    @contextmanager
    def tracked(self, log: Log) -> Iterator[PhaseTracker]:
        root = Block(type(self.model).__name__, self.model)
        guard = HookErrors(self.errors.append)
        tracker = PhaseTracker(root, find_blocks(self.model), guard, log)
        undo = [
            self.optimizer.register_step_pre_hook(guard(lambda *_: tracker.optimizer_begins())),
            self.optimizer.register_step_post_hook(guard(lambda *_: tracker.optimizer_ends())),
        ]
        tracker.start()
        yield tracker
        tracker.stop()
        for handle in undo:
            handle.remove()


def test_a_plain_step_is_reported_in_order() -> None:
    training, log = Training(), Log()
    with training.tracked(log):
        training.step()
    assert log.lines == [
        "step",
        *("forward Net", "begin Net"),
        *("forward first", "begin first", "end first", "forward Net"),
        *("forward layers.0", "begin layers.0", "end layers.0", "forward Net"),
        *("forward layers.1", "begin layers.1", "end layers.1", "forward Net"),
        *("end Net", "forward loss"),
        "backward loss",
        *("backward layers.1", "backward Net", "backward layers.0", "backward first"),
        "after backward",
        "optimizer",
        "whole",
    ]
    assert not training.errors
    log.take()
    training.step()
    assert log.lines == []


@pytest.mark.parametrize("reentrant", [False, True])
def test_calls_of_blocks_by_a_checkpoint_are_reported_as_recomputed(reentrant: bool) -> None:
    training, log = Training(reentrant), Log()
    with training.tracked(log):
        training.step()
    again = log.lines.index("again layers.1")
    assert log.lines[again - 1 : again + 3] == [
        "recompute layers.1",
        "again layers.1",
        "end layers.1",
        "backward layers.1",
    ]
    assert log.lines[-1] == "whole"


def test_a_step_with_an_exception_is_broken() -> None:
    training, log = Training(), Log()

    def fail(*_: object) -> None:
        raise ValueError("no")

    with training.tracked(log):
        handle = training.model.layers[0][1].register_forward_hook(fail)
        with pytest.raises(ValueError, match="no"):
            training.step()
        handle.remove()
        assert log.take()[-4:] == ["end layers.0", "forward Net", "end Net", "forward loss"]
        training.step()
        assert log.take()[-1] == "broken"
        training.step()
        assert log.take()[-1] == "whole"


def test_interrupted_blocks_end_when_the_next_step_begins() -> None:
    training, log = Training(), Log()

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with training.tracked(log):
        handle = training.model.layers[0][1].register_forward_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            training.step()
        handle.remove()
        assert log.take()[-1] == "begin layers.0"
        training.step()
        lines = log.take()
        assert lines[0] == "end layers.0"
        assert lines[-1] == "broken"
        training.step()
        assert log.lines[0] == "step"
        assert log.lines[-1] == "whole"


def test_an_error_of_a_listener_does_not_reach_the_training() -> None:
    class Faulty(Log):
        def phase_begins(self, label: str) -> None:
            raise OSError(label)

    training = Training()
    with training.tracked(Faulty()):
        training.step()
    assert "forward Net" in {str(error) for error in training.errors}
    assert all(isinstance(error, OSError) for error in training.errors)


def test_an_error_in_another_thread_leaves_no_hooks_on_saved_tensors() -> None:
    """As autograd's own threads run the backward pass of a GPU."""
    training = Training()
    blocks = find_blocks(training.model)

    class Faulty(Log):
        def step_begins(self) -> Any:
            known = find_parameters(training.model, blocks, training.optimizer)
            return MemoryTracker(known, training.optimizer, torch.device("cpu"), (), guard)

        def phase_begins(self, label: str) -> None:
            if label == "backward layers.1":
                raise OSError(label)

    def on_error(error: Exception) -> None:
        training.errors.append(error)
        tracker.stop()

    guard = HookErrors(on_error)
    tracker = PhaseTracker(Block("Net", training.model), blocks, guard, Faulty())
    tracker.start()
    loss = training.model(torch.ones(2, WIDTH)).sum()
    backward = Thread(target=torch.autograd.grad, args=(loss, list(training.model.parameters())))
    backward.start()
    backward.join()
    assert [str(error) for error in training.errors] == ["backward layers.1"]
    training.step()
    assert saved_tensor_hooks.innermost() is None


def test_an_error_leaves_no_hooks_of_the_memory_tracker() -> None:
    """It pushes hooks on saved tensors in one hook of a module and pops them in another."""
    training = Training()
    blocks = find_blocks(training.model)

    class Faulty(Log):
        def step_begins(self) -> Any:
            known = find_parameters(training.model, blocks, training.optimizer)
            return MemoryTracker(
                known, training.optimizer, torch.device("cpu"), (), HookErrors(fail)
            )

        def block_ends(self, block: Block) -> None:
            raise OSError(block.name)

    def fail(error: Exception) -> None:
        training.errors.append(error)

    with training.tracked(Faulty()):
        training.model(torch.ones(2, WIDTH))
        assert str(training.errors[0]) == "first"
        assert saved_tensor_hooks.innermost() is None
        assert not training.model.layers[0][0]._forward_pre_hooks
        assert all(not it._post_accumulate_grad_hooks for it in training.model.parameters())


def test_a_start_that_fails_leaves_no_hooks() -> None:
    training, backward = Training(), torch.autograd.backward
    gone = Block("gone", nn.Linear(1, 1))
    guard = HookErrors(training.errors.append)
    tracker = PhaseTracker(Block("Net", training.model), [gone], guard, Log())
    with pytest.raises(TraceError, match="gone"):
        tracker.start()
    assert not training.model._forward_pre_hooks
    assert torch.autograd.backward is backward


def test_a_failed_hook_on_a_node_leaves_the_hooks_of_the_tensor() -> None:
    class Node:
        def _sequence_nr(self) -> int:
            return 1 << 40

        def _register_hook_dict(self, tensor: torch.Tensor) -> None:
            raise OSError("no hook")

    class Odd(torch.Tensor):
        grad_fn: Any = Node()

    training = Training()
    result = torch.ones(2, WIDTH).as_subclass(Odd)
    hooks = result._backward_hooks = {7: print}
    training.model.first.register_forward_hook(lambda *_: result)
    with training.tracked(Log()):
        training.model.layers = nn.ModuleList()
        training.model(torch.ones(2, WIDTH))
    assert [str(error) for error in training.errors] == ["no hook"]
    assert result._backward_hooks is hooks


def test_a_call_in_progress_at_the_start_is_not_tracked() -> None:
    training, log = Training(), Log()
    with training.tracked(log) as tracker:
        tracker.stop()
        handle = training.model.register_forward_pre_hook(lambda *_: tracker.start())
        training.step()
        assert log.lines == []
        handle.remove()
        training.step()
        assert log.lines[0] == "step"
        assert log.lines[-1] == "whole"


def test_a_stop_inside_a_call_takes_effect_at_once() -> None:
    training, log = Training(), Log()
    with training.tracked(log) as tracker:
        handle = training.model.layers[0].register_forward_pre_hook(lambda *_: tracker.stop())
        training.step()
        assert log.take()[-1] == "begin layers.0"
        training.step()
        assert log.lines == []
        handle.remove()


def test_a_block_called_alone_begins_no_step() -> None:
    training, log = Training(), Log()
    with training.tracked(log):
        training.model.layers[0](torch.ones(2, WIDTH)).sum().backward()
        training.optimizer.step()
        assert log.lines == []


def recording_of(training: Training, **options: Any) -> StepRecording:
    with umem.record(training.model, training.optimizer, **options) as recording:
        for _ in range(12):
            training.step()
    return recording


@pytest.mark.parametrize("reentrant", [None, False, True])
def test_a_recording_maps_reported_phases_to_those_of_the_trace(reentrant: bool | None) -> None:
    training, log = Training(reentrant), Log()
    recording = recording_of(training)
    with training.tracked(log):
        training.step()
    assert [phase.label for phase in recording.phases] == log.phases
    numbers = np.array([phase.phase for phase in recording.phases])
    assert set(np.diff(numbers).tolist()) <= {0, 1}
    assert numbers[0] == 0
    names = recording.trace.phase_names
    assert names[numbers[-1]].startswith("optimizer")
    assert all(name.startswith("optimizer") for name in names[numbers[-1] :])
    for number in range(numbers[-1]):
        labels = [phase.label for phase in recording.phases if phase.phase == number]
        assert names[number] in labels
    if reentrant is not None:
        # The backward phase up to the recomputation joins it.
        assert "backward layers.1" not in names[: names.index("recompute layers.1")]


def test_the_optimizer_can_stay_one_phase() -> None:
    training = Training()
    split, whole = (recording_of(training, optimizer_parts=parts).trace for parts in (True, False))
    assert split.phase_names[-3:] == tuple(
        f"optimizer {name}" for name in ("first", "layers.0", "layers.1")
    )
    first = split.phase_count - 3
    assert whole.phase_names == (*split.phase_names[:first], "optimizer")

    def accesses(trace: umem.Trace, start: int) -> set[tuple[str, int]]:
        span = slice(trace.access_start[start], None)
        names = [trace.tensor_names[tensor] for tensor in trace.access_tensor[span]]
        return set(zip(names, trace.access_mode[span].tolist(), strict=True))

    assert accesses(whole, first) == accesses(split, first)
    assert whole.memory_bytes[-1] == split.memory_bytes[first:].sum()
    assert whole.duration_s is not None
    assert len(whole.duration_s) == whole.phase_count
