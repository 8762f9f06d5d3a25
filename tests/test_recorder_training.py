"""Recording does not change a training: its results, hooks, memory, errors and evaluation."""

from __future__ import annotations

import copy
import functools
import gc
import io
import pickle
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from fingerprints import trace_fingerprint
from torch import nn
from torch.nn.modules import module as global_hooks
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.checkpoint import checkpoint

import umem
from umem.capture.live import Clock, StepRecording
from umem.core.classes import TensorClass
from umem.core.errors import TraceError
from umem.runtime.torch_hooks.hidden import hidden_in
from umem.trace import check_trace

WIDTH = 16
WATCHING = 3
"""Hooks until a recording's block ends: on the model's calls, and both ends of optimizer steps."""
_autograd: Any = torch._C._autograd


class Net(nn.Module):
    layers: Any  # a list of chains, which its stub does not say

    def __init__(self, layers: int = 3, reentrant: bool | None = None) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(
            nn.Sequential(
                nn.Linear(WIDTH, 4 * WIDTH), nn.Tanh(), nn.Dropout(0.2), nn.Linear(4 * WIDTH, WIDTH)
            )
            for _ in range(layers)
        )
        self.reentrant = reentrant

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.first(inputs)
        for layer in self.layers:
            if self.reentrant is None:
                hidden = hidden + layer(hidden)
            else:
                hidden = hidden + checkpoint(layer, hidden, use_reentrant=self.reentrant)
        return hidden


class Ticks(Clock):
    """A clock without noise: every phase takes a second."""

    def seconds(self, first: int, second: int) -> float:
        return 1.0


def make(
    layers: int = 3, reentrant: bool | None = None, seed: int = 0
) -> tuple[Net, torch.optim.AdamW]:
    torch.manual_seed(seed)
    model = Net(layers, reentrant)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 13, batch: int = 4
) -> list[float]:
    losses = []
    for step in range(steps):
        inputs = torch.randn(batch, WIDTH, generator=torch.Generator().manual_seed(step))
        loss = model(inputs).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def recorded(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Fingerprint of the trace of a plain run."""
    with umem.record(model, optimizer, clock=Ticks()) as recording:
        train(model, optimizer)
    return trace_fingerprint(recording.trace)


def hook_count(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    owners: list[Any] = [optimizer, *model.modules()]
    every = [
        getattr(owner, name)
        for owner in owners
        for name in (
            *("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks", "_forward_pre_hooks"),
            *("_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called"),
        )
        if hasattr(owner, name)
    ]
    count = sum(len(hooks) + hidden_in(hooks) for hooks in every)
    for parameter in model.parameters():
        count += len(parameter._post_accumulate_grad_hooks or ())
    return count


def check_no_trace_left(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    assert hook_count(model, optimizer) == 0
    assert not hasattr(torch.autograd.backward, "__wrapped__")
    assert _autograd._top_saved_tensors_default_hooks(True) is None
    assert not global_hooks._global_forward_pre_hooks
    assert not global_hooks._global_forward_hooks


@pytest.fixture(autouse=True)
def nothing_stays() -> Iterator[None]:
    backward = torch.autograd.backward
    yield
    assert torch.autograd.backward is backward
    assert _autograd._top_saved_tensors_default_hooks(True) is None


# ---------------------------------------------------------------------------------- results


@pytest.mark.parametrize("reentrant", [None, False, True])
def test_recording_changes_no_bit(reentrant: bool | None) -> None:
    results = []
    for is_recorded in (False, True):
        model, optimizer = make(reentrant=reentrant)
        recording = umem.record(model, optimizer) if is_recorded else nullcontext()
        with recording:
            torch.manual_seed(1)  # of the dropout
            losses = train(model, optimizer, 14)
        results.append((losses, [parameter.detach().clone() for parameter in model.parameters()]))
        check_no_trace_left(model, optimizer)
    assert results[0][0] == results[1][0]
    assert all(
        torch.equal(first, second)
        for first, second in zip(results[0][1], results[1][1], strict=True)
    )


def test_hooks_are_removed_when_the_recording_is_done() -> None:
    model, optimizer = make()
    counts = []
    with umem.record(model, optimizer, steps=2, warmup=1) as recording:
        for _ in range(6):
            train(model, optimizer, 1)
            counts.append((hook_count(model, optimizer), recording.done))
    watching = counts[-1][0]
    assert watching == WATCHING
    assert [done for _, done in counts] == [False, False, False, True, True, True]
    assert counts[0][0] > 10  # after the warm-up
    assert [count for count, _ in counts[3:]] == [watching] * 3
    check_no_trace_left(model, optimizer)


@pytest.mark.slow
def test_a_recording_keeps_no_memory_alive() -> None:
    model, optimizer = make()
    with umem.record(model, optimizer) as recording:
        train(model, optimizer)
    kept_graph = model(torch.randn(2, WIDTH)).sum()
    parameter = weakref.ref(model.layers[0][0].weight.untyped_storage())
    module = weakref.ref(model.layers[0])
    del model, optimizer, kept_graph
    gc.collect()
    assert parameter() is None
    assert module() is None
    check_trace(recording.trace, "test")


@pytest.mark.slow
def test_a_kept_graph_does_not_hold_the_model() -> None:
    model, optimizer = make()
    with umem.record(model, optimizer):
        train(model, optimizer, 3)
        loss = model(torch.randn(2, WIDTH)).sum()
        loss.backward(retain_graph=True)  # ends in the middle of a step
    weight, module = model.first.weight, weakref.ref(model)
    del model, optimizer
    gc.collect()
    assert module() is None
    assert weight.grad is not None
    before = weight.grad.clone()
    loss.backward()  # the hooks in it have nobody to tell
    torch.testing.assert_close(weight.grad, 2 * before)


@pytest.mark.slow
def test_copies_made_while_recording_are_not_recorded() -> None:
    model, optimizer = make()
    with umem.record(model, optimizer, clock=Ticks()) as recording:
        train(model, optimizer, 2)
        averaged = copy.deepcopy(model)
        file = io.BytesIO()
        torch.save(model, file)
        assert hook_count(model, optimizer) > 0
        for step in range(11):
            averaged(torch.randn(3, WIDTH)).sum().backward()
            train(model, optimizer, 1)
            assert recording.done == (step >= 9)
    expected = recorded(*make())
    assert trace_fingerprint(recording.trace) == expected
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    inputs = torch.randn(3, WIDTH)
    torch.testing.assert_close(loaded.eval()(inputs), pickle.loads(pickle.dumps(loaded))(inputs))


# ---------------------------------------------------------------------------------- between


@pytest.mark.slow
def test_evaluation_is_not_recorded() -> None:
    def fingerprint(evaluate: Callable[[nn.Module], object]) -> str:
        model, optimizer = make()
        with umem.record(model, optimizer, clock=Ticks()) as recording:
            for _ in range(13):
                evaluate(model)
                loss = model(torch.randn(4, WIDTH)).square().mean()
                evaluate(model)
                loss.backward()
                evaluate(model.layers[1])
                optimizer.step()
                optimizer.zero_grad()
        return trace_fingerprint(recording.trace)

    @torch.no_grad()
    def without_gradients(module: nn.Module) -> None:
        module(torch.randn(9, WIDTH))

    @torch.inference_mode()
    def by_inference(module: nn.Module) -> None:
        module(torch.randn(9, WIDTH))

    expected = fingerprint(lambda _: None)
    assert fingerprint(without_gradients) == expected
    assert fingerprint(by_inference) == expected


@pytest.mark.slow
def test_two_models_are_recorded_side_by_side() -> None:
    expected = [recorded(*make(layers)) for layers in (2, 4)]
    first, second = make(2), make(4)
    with umem.record(*first, clock=Ticks()) as one, umem.record(*second, clock=Ticks()) as other:
        for _ in range(13):
            train(*first, 1)
            train(*second, 1)
    assert [trace_fingerprint(recording.trace) for recording in (one, other)] == expected
    for pair in (first, second):
        check_no_trace_left(*pair)


def test_recordings_may_end_in_any_order() -> None:
    pairs = make(2), make(3)
    recordings = [umem.record(*pair) for pair in pairs]
    for recording in recordings:
        recording.__enter__()
    for pair in pairs:
        train(*pair, 3)
    for recording in recordings:  # the first one first
        recording.__exit__(None, None, None)
    for pair in pairs:
        check_no_trace_left(*pair)


@pytest.mark.parametrize("is_polite", [False, True])
def test_another_wrapper_of_backward_stays(is_polite: bool) -> None:
    model, optimizer = make()
    original = torch.autograd.backward
    calls = []
    with umem.record(model, optimizer):
        train(model, optimizer, 2)
        replaced = torch.autograd.backward

        def counting(*args: Any, **kwargs: Any) -> Any:
            calls.append(args)
            return replaced(*args, **kwargs)

        if is_polite:  # it has all attributes of what it is around
            functools.update_wrapper(counting, replaced)
        torch.autograd.backward = counting
        train(model, optimizer, 12)
    assert torch.autograd.backward is counting
    train(model, optimizer, 1)
    assert len(calls) == 13
    torch.autograd.backward = replaced
    with umem.record(model, optimizer) as recording:  # the one that stayed serves again
        train(model, optimizer, 12)
    assert recording.done
    assert torch.autograd.backward is original


def test_another_wrapper_of_backward_may_remove_umems() -> None:
    model, optimizer = make()
    original = torch.autograd.backward
    with umem.record(model, optimizer):
        train(model, optimizer, 3)
        torch.autograd.backward = lambda *args, **kwargs: original(*args, **kwargs)
        theirs = torch.autograd.backward
    with umem.record(model, optimizer) as recording:
        train(model, optimizer, 12)
    assert "backward loss" in recording.trace.phase_names
    assert torch.autograd.backward is theirs
    torch.autograd.backward = original


# ---------------------------------------------------------------------------------- errors


class FaultError(RuntimeError):
    pass


@pytest.mark.parametrize("place", ["forward", "backward", "loop", "optimizer"])
@pytest.mark.parametrize(
    "step_of_fault", [2, 4]
)  # the one whose memory is tracked, and a timed one
def test_an_exception_ends_the_recording_and_nothing_else(place: str, step_of_fault: int) -> None:
    model, optimizer = make()
    raised = FaultError("out of memory, say")
    recording = umem.record(model, optimizer)

    def run() -> None:
        with recording:
            train(model, optimizer, step_of_fault)
            faulty_step(model, optimizer, place, raised)

    with pytest.raises(FaultError) as caught:
        run()
    assert caught.value is raised
    assert raised.__cause__ is None
    assert raised.__context__ is None
    check_no_trace_left(model, optimizer)
    assert not recording.done
    timed = max(step_of_fault - 3, 0)
    with pytest.raises(TraceError, match=f"Net: {timed} of 9 steps are recorded after"):
        _ = recording.trace
    train(model, optimizer, 1)


@pytest.mark.parametrize("place", ["forward", "backward", "loop", "optimizer"])
@pytest.mark.parametrize("step_of_fault", [2, 4])
def test_a_failed_step_is_left_out(place: str, step_of_fault: int) -> None:
    expected = recorded(*make())
    model, optimizer = make()
    with umem.record(model, optimizer, clock=Ticks()) as recording:
        train(model, optimizer, step_of_fault)
        with pytest.raises(FaultError):
            faulty_step(model, optimizer, place, FaultError())
        optimizer.zero_grad()
        train(model, optimizer, 14)
        assert recording.done
    assert trace_fingerprint(recording.trace) == expected


def faulty_step(model: Net, optimizer: torch.optim.Optimizer, place: str, error: Exception) -> None:
    def fail(*_: object) -> None:
        raise error

    undo: Callable[[], None] = lambda: None  # noqa: E731
    try:
        if place == "forward":
            undo = model.layers[1][1].register_forward_hook(fail).remove
        loss = model(torch.randn(4, WIDTH)).sum()
        if place == "backward":
            undo = model.layers[1][0].weight.register_hook(fail).remove
        loss.backward()
        if place == "loop":
            raise error
        undo = optimizer.register_step_pre_hook(fail).remove
        optimizer.step()
    finally:
        undo()


@pytest.mark.parametrize("steps", [1, 2, 4])
def test_an_in_place_error_is_raised_as_without_a_recording(steps: int) -> None:
    model, optimizer = make()

    def run() -> None:
        with umem.record(model, optimizer):
            train(model, optimizer, steps)
            loss = model(torch.randn(4, WIDTH)).exp()
            loss.add_(1)
            loss.sum().backward()

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        run()
    check_no_trace_left(model, optimizer)


def test_an_error_of_the_recorder_does_not_reach_the_training() -> None:
    class Broken(Clock):
        marks = 0

        def mark(self) -> int:
            self.marks += 1
            if self.marks > 40:
                raise OSError("no clock any more")
            return 0

    plain, (model, optimizer) = train(*make(), 13), make()
    with umem.record(model, optimizer, clock=Broken()) as recording:
        torch.manual_seed(0)
        make()  # the same random numbers as before the plain run
        losses = train(model, optimizer, 13)
        assert hook_count(model, optimizer) == WATCHING
    assert losses == plain
    with pytest.raises(TraceError, match="recording ended with OSError: no clock any more"):
        _ = recording.trace


def test_an_error_in_an_optimizer_hook_leaves_the_hooks_of_others() -> None:
    """torch iterates over an optimizer's hooks without a copy: none may be removed meanwhile."""

    class Broken(Clock):
        def mark(self) -> int:
            if len(begun) > len(ended):
                raise OSError("no clock any more")
            return 0

    model, optimizer = make()
    begun, ended = [], []
    hooks = [register_optimizer_step_pre_hook(lambda *_: begun.append("first"))]
    with umem.record(model, optimizer, clock=Broken()) as recording:
        hooks.append(optimizer.register_step_pre_hook(lambda *_: begun.append("second")))
        hooks.append(optimizer.register_step_post_hook(lambda *_: ended.extend(begun[-2:])))
        failed = []
        for steps in (3, 2):  # then time is taken
            train(model, optimizer, steps)
            failed.append(recording.failed)
    assert failed == [False, True]
    assert begun == ["first", "second"] * 5
    for handle in hooks:
        handle.remove()
    check_no_trace_left(model, optimizer)


def test_a_run_is_recorded_again_among_other_hooks() -> None:
    """Such as after the batches have changed, while a first plan is carried out."""
    model, optimizer = make()
    expected = recorded(model, optimizer)
    packed = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        packed.append(tensor.shape)
        return tensor

    handle = model.layers[1].register_forward_hook(lambda *_: None)
    with umem.record(model, optimizer, clock=Ticks()) as recording:
        for step in range(14):
            train(model, optimizer, 1)
            with torch.no_grad():
                model(torch.randn(9, WIDTH))  # an evaluation in between
            if step == 0:
                train(*make(2), 1)  # another model
    handle.remove()
    assert trace_fingerprint(recording.trace) == expected
    with (
        umem.record(model, optimizer, clock=Ticks()) as again,
        torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
    ):
        train(model, optimizer, 13)
    # Hooks of others take what autograd saves, so that all the rest is as before.
    assert packed
    assert again.saved_tensors == ()
    assert recording.saved_tensors != ()
    assert [p.label for p in again.phases] == [p.label for p in recording.phases]
    check_no_trace_left(model, optimizer)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": 0}, "steps is 0: give a whole number from 1 on"),
        ({"warmup": True}, "warmup is True: give a whole number"),
        ({"model": 3}, "model is a int: give a torch.nn.Module"),
        ({"optimizer": 3}, "optimizer is a int: give a torch.optim.Optimizer"),
        ({"optimizer": make()[1]}, "the optimizer trains no parameter of Net"),
    ],
)
def test_bad_arguments_are_explained(options: dict[str, Any], message: str) -> None:
    model, optimizer = make()
    with pytest.raises(TraceError, match=message):
        umem.record(**{"model": model, "optimizer": optimizer, **options})


def test_a_recording_is_used_once_and_inside_a_block() -> None:
    model, optimizer = make()
    recording = umem.record(model, optimizer)
    with pytest.raises(TraceError, match="nothing is recorded yet: train inside"):
        _ = recording.trace
    with recording, pytest.raises(TraceError, match="used once"):
        recording.__enter__()


# ---------------------------------------------------------------------------------- times


def test_the_phases_add_up_to_the_step() -> None:
    class Work(Clock):
        """A clock that modules put forward by the work that they do."""

        def __init__(self) -> None:
            self.now = 0

        def mark(self) -> int:
            return self.now

        def add(self, seconds: int) -> None:
            self.now += seconds * 10**9

    class Working(nn.Module):
        def __init__(self, seconds: int) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)
            self.seconds = seconds

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            clock.add(self.seconds)
            result: torch.Tensor = self.linear(hidden)
            result.register_hook(lambda _: clock.add(2 * self.seconds))
            return result

    clock = Work()
    model = nn.Sequential(*(Working(number + 1) for number in range(9)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with umem.record(model, optimizer, clock=clock) as recording:
        for _ in range(12):
            model(torch.ones(2, WIDTH)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    trace = recording.trace
    assert trace.duration_s is not None
    assert trace.duration_s.sum() == pytest.approx(3 * sum(range(10)))
    assert trace.metadata["median_step_s"] == pytest.approx(trace.duration_s.sum())
    assert trace.duration_s[trace.phase_names.index("forward 4")] == pytest.approx(5)


def test_the_step_is_measured_from_begin_to_end() -> None:
    class Seconds(Clock):
        """Each mark is a second after the one before it."""

        def __init__(self) -> None:
            self.now = 0

        def mark(self) -> int:
            self.now += 1
            return self.now

        def seconds(self, first: int, second: int) -> float:
            return second - first

    model, optimizer = make()
    with umem.record(model, optimizer, clock=Seconds()) as recording:
        train(model, optimizer)
    assert recording.done
    found = recording._recorded
    assert found is not None
    assert found.totals == [float(len(found.joined.labels))] * 9
    assert found.seconds == [[1.0] * 9 for _ in found.joined.labels]


# ---------------------------------------------------------------------------------- signatures


def test_steps_of_two_lengths_have_two_signatures() -> None:
    expected = recorded(*make())
    model, optimizer = make()
    with umem.record(model, optimizer, clock=Ticks()) as recording:
        for step in range(20):
            train(model, optimizer, 1, batch=4 if step % 3 else 6)
    assert str(recording.signature) == "0 4x16 float32"
    assert trace_fingerprint(recording.trace) == expected


def test_a_run_without_equal_steps_is_not_recorded() -> None:
    model, optimizer = make()
    with umem.record(model, optimizer) as recording:
        for step in range(15):
            train(model, optimizer, 1, batch=step + 1)
        assert hook_count(model, optimizer) > WATCHING
    with pytest.raises(TraceError, match="8 steps unlike each other were seen; pad batches"):
        _ = recording.trace


def test_steps_that_cannot_be_kept_are_not_timed() -> None:
    class Counting(Ticks):
        count = 0

        def mark(self) -> int:
            self.count += 1
            return super().mark()

    model, optimizer = make()
    clock = Counting()
    with umem.record(model, optimizer, clock=clock) as recording:
        for step in range(10):
            train(model, optimizer, 1, batch=step + 1)
        count = clock.count
        for step in range(10, 15):
            train(model, optimizer, 1, batch=step + 1)
        assert clock.count == count
        train(model, optimizer, 9, batch=5)
    assert recording.done, "a tracked step comes again"


def test_a_signature_lists_every_call_of_a_step() -> None:
    model, optimizer = make()
    with umem.record(model, optimizer) as recording:
        for _ in range(12):
            for batch in (2, 3):
                model(torch.randn(batch, WIDTH)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert recording.signature is not None
    assert [call[0][1] for call in recording.signature.calls] == [(2, WIDTH), (3, WIDTH)]
    assert recording.trace.phase_names.count("forward layers.0") == 2


# ---------------------------------------------------------------------------------- neighbours


def test_hooks_of_others_are_called_as_before() -> None:
    model, optimizer = make()
    calls = []
    for layer in model.layers:
        layer.register_forward_pre_hook(lambda *_: calls.append("before"))
        layer.register_forward_hook(lambda *_: calls.append("after"))
        layer.register_full_backward_hook(lambda *_: calls.append("backward"))
    with umem.record(model, optimizer) as recording:
        train(model, optimizer, 12)
    assert calls == (["before", "after"] * 3 + ["backward"] * 3) * 12
    assert "backward layers.1" in recording.trace.phase_names


@pytest.mark.parametrize("around", ["loop", "forward", "loss"])
def test_offloaded_activations_stay_offloaded(around: str) -> None:
    """torch calls one pair of hooks on saved tensors only: the program's take precedence."""
    packed = []

    def offload() -> Any:
        def pack(tensor: torch.Tensor) -> torch.Tensor:
            packed.append(tensor.shape)
            return tensor.clone()

        return torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)

    def place(name: str) -> Any:
        return offload() if name == around else nullcontext()

    counts = []
    for is_recorded in (False, True):
        packed.clear()
        model, optimizer = make()
        recording = umem.record(model, optimizer) if is_recorded else nullcontext()
        with recording, place("loop"):
            for _ in range(12):
                with place("forward"):
                    output = model(torch.randn(4, WIDTH))
                with place("loss"):
                    output.square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        counts.append(len(packed))
        if isinstance(recording, StepRecording):
            check_trace(recording.trace, "test")
    assert counts[0] == counts[1] > 0


def test_a_closure_runs_the_model_inside_the_optimizer() -> None:
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    inputs = torch.randn(4, WIDTH)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = model(inputs).square().mean()
        loss.backward()
        return loss

    with umem.record(model, optimizer) as recording:
        for _ in range(12):
            optimizer.step(closure)
    trace = recording.trace
    check_trace(trace, "test")
    assert trace.phase_names[0] == "forward Net"
    assert "backward layers.0" in trace.phase_names
    assert trace.phase_names[-4:] == (
        "optimizer first",
        *(f"optimizer layers.{number}" for number in range(3)),
    )
    gradients = trace.tensor_class == TensorClass.GRADIENTS.number
    assert gradients.sum() == 14


@pytest.mark.slow
def test_a_compiled_model_is_recorded_as_a_whole() -> None:
    model, optimizer = make()
    compiled: Any = torch.compile(model, backend="eager")
    with umem.record(compiled, optimizer) as recording:
        train(compiled, optimizer, 13)
    check_trace(recording.trace, "test")
    assert "forward OptimizedModule" in recording.trace.phase_names


@pytest.mark.slow
def test_blocks_that_are_compiled_in_place_are_phases() -> None:
    found = []
    for is_compiled in (False, True):
        model, optimizer = make()
        compiled = [model.layers[number] for number in (0, 2)] if is_compiled else []
        for layer in compiled:
            layer.compile(backend="aot_eager")
        before = [layer._compiled_call_impl for layer in compiled]
        with umem.record(model, optimizer, clock=Ticks()) as recording:
            train(model, optimizer)
        found.append([name for name in recording.trace.phase_names if "layers" in name])
        assert [layer._compiled_call_impl for layer in compiled] == before
        check_no_trace_left(model, optimizer)
    assert found[0] == found[1]
    assert "backward layers.2" in found[1]


@pytest.mark.slow
def test_a_compiled_optimizer_ends_steps() -> None:
    model, optimizer = make()
    compiled = torch.compile(lambda: optimizer.step(), backend="eager")
    with umem.record(model, optimizer) as recording:
        for step in range(13):
            model(torch.full((4, WIDTH), float(step))).square().mean().backward()
            compiled()
            optimizer.zero_grad()
    assert recording.done
    assert recording.trace.phase_names[-1] == "optimizer layers.2"
    check_no_trace_left(model, optimizer)


@pytest.mark.slow
def test_a_graph_may_be_used_after_its_step() -> None:
    model, optimizer = make()
    head = nn.Linear(WIDTH, 1)
    with umem.record(model, optimizer) as recording:
        for _ in range(13):
            hidden = model(torch.ones(4, WIDTH))
            value = head(hidden.exp())
            hidden.square().sum().backward(retain_graph=True)
            optimizer.step()
            optimizer.zero_grad()
            value.sum().backward(inputs=list(head.parameters()))
    assert not recording.failed
    assert recording.done


def test_gradients_from_autograd_grad_are_tracked() -> None:
    model, optimizer = make()
    with umem.record(model, optimizer) as recording:
        for _ in range(12):
            loss = model(torch.randn(4, WIDTH)).square().mean()
            parameters = list(model.parameters())
            for parameter, gradient in zip(
                parameters, torch.autograd.grad(loss, parameters), strict=True
            ):
                parameter.grad = gradient
            optimizer.step()
            optimizer.zero_grad()
    trace = recording.trace
    check_trace(trace, "test")
    assert "backward layers.0" in trace.phase_names
    gradients = trace.tensor_class == TensorClass.GRADIENTS.number
    parameter_bytes = sum(parameter.nbytes for parameter in model.parameters())
    assert trace.tensor_bytes[gradients].sum() == parameter_bytes
