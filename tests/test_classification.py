"""The classes that the classifier sets while real modules and optimizers run on the CPU.

The allocator is the real one, over host memory: `Witness.born` asks it for a block and reads the
class off, which is what a tensor would get at that moment. Tags need CUDA tensors, so they are
tested on a GPU (``tests/gpu/test_classification.py``).
"""

from __future__ import annotations

import copy
import ctypes
import gc
import threading
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from rank_processes import one_rank
from torch import nn
from torch.nn.modules import module as module_hooks
from torch.optim import optimizer as optimizer_hooks
from torch.testing._internal.two_tensor import TwoTensor

from umem.core.classes import TensorClass
from umem.runtime import classification
from umem.runtime.classification import Classifier, gradient_hook
from umem.runtime.native_library import native

WIDTH = 8
CLASSES = tuple(TensorClass)


class Witness:
    """An allocator over host memory, and a classifier that drives it."""

    def __init__(self) -> None:
        library = native()
        settings = [library.ClassSetting() for _ in CLASSES]
        self.allocator = library.Allocator.on_host(library.Config(settings))
        self.gradients: list[torch.Tensor] = []
        self._tag_gradient = gradient_hook(self.allocator)
        self.classifier = Classifier(self.allocator, self._on_gradient)

    def _on_gradient(self, parameter: torch.Tensor) -> None:
        self.gradients.append(parameter)
        self._tag_gradient(parameter)

    def class_at(self, address: int) -> TensorClass:
        [number] = [block[3] for block in self.allocator.live_blocks() if block[0] == address]
        return CLASSES[number]

    def override(self, tensor_class: TensorClass) -> Any:
        return self.allocator.class_override(tensor_class.number)

    def born(self) -> TensorClass:
        """The class of a block allocated now, in this thread."""
        address = self.allocator.malloc(512)
        try:
            return self.class_at(address)
        finally:
            self.allocator.free(address)

    def tensor(self, count: int) -> torch.Tensor:
        """A float32 tensor in the allocator's memory."""
        address = self.allocator.malloc(4 * count)
        buffer = (ctypes.c_char * (4 * count)).from_address(address)
        return torch.frombuffer(buffer, dtype=torch.float32).zero_()

    def watches_forward(self) -> bool:
        """Whether the classifier's hook is on every module call."""
        hooks = module_hooks._global_forward_pre_hooks.values()
        return any(getattr(hook, "__self__", None) is self.classifier for hook in hooks)


@pytest.fixture
def witness() -> Iterator[Witness]:
    """An installed classifier, whose hooks are removed when the test ends."""
    registries: list[dict[int, Any]] = [
        module_hooks._global_forward_pre_hooks,
        module_hooks._global_parameter_registration_hooks,
        optimizer_hooks._global_optimizer_pre_hooks,
        optimizer_hooks._global_optimizer_post_hooks,
    ]
    apply = nn.Module._apply
    witness = Witness()
    witness.classifier.install()
    yield witness
    setattr(nn.Module, "_apply", apply)  # noqa: B010 - its stub is an untyped callable
    for registry in registries:
        for key, hook in list(registry.items()):
            if getattr(hook, "__self__", None) is witness.classifier:
                del registry[key]


class Spy(nn.Module):
    """A layer that notes the class of allocations in its forward and backward pass."""

    def __init__(self, witness: Witness) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.witness = witness
        self.forward_classes: list[TensorClass] = []
        self.backward_classes: list[TensorClass] = []

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.forward_classes.append(self.witness.born())
        output: torch.Tensor = self.linear(inputs)
        if output.requires_grad:
            output.register_hook(lambda _: self.backward_classes.append(self.witness.born()))
        return output


class WatchedSGD(torch.optim.SGD):
    """SGD with momentum that notes the class of allocations in its step."""

    def __init__(self, parameters: Any, witness: Witness) -> None:
        super().__init__(parameters, lr=0.1, momentum=0.9, foreach=False)
        self.witness = witness
        self.fails = False
        self.classes: list[TensorClass] = []

    def step(self, closure: Any = None) -> Any:
        self.classes.append(self.witness.born())
        if self.fails:
            raise FloatingPointError("on purpose")
        return super().step(closure)


def backward(model: nn.Module) -> None:
    model(torch.ones(2, WIDTH)).square().sum().backward()


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 1) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        backward(model)
        optimizer.step()


def test_phases_of_training(witness: Witness) -> None:
    assert witness.born() is TensorClass.WEIGHTS
    model = Spy(witness)
    optimizer = WatchedSGD(model.parameters(), witness)
    assert witness.born() is TensorClass.WEIGHTS
    train(model, optimizer, steps=3)
    assert model.forward_classes == ["activations"] * 3
    assert model.backward_classes == ["activations"] * 3
    # What a later step allocates is gone when it ends.
    assert optimizer.classes == ["optimizer_state", "other", "other"]
    assert witness.born() is TensorClass.ACTIVATIONS


def test_forward_hook_is_removed_after_an_iteration(witness: Witness) -> None:
    model = nn.Sequential(Spy(witness), Spy(witness))
    assert witness.watches_forward()
    model(torch.ones(2, WIDTH))
    assert witness.watches_forward()
    model(torch.ones(2, WIDTH))
    assert not witness.watches_forward()


def test_all_models_called_in_turn_are_classified(witness: Witness) -> None:
    models = [Spy(witness), Spy(witness)]
    for _ in range(2):
        for model in models:
            backward(model)
    assert not witness.watches_forward()
    parameters = [p for model in models for p in model.parameters()]
    assert {id(p) for p in witness.gradients} == {id(p) for p in parameters}


@pytest.mark.parametrize("change", ["a new layer", "moved", "converted"])
def test_forward_hook_is_installed_again(change: str, witness: Witness) -> None:
    model = nn.Sequential(Spy(witness))
    for _ in range(2):
        model(torch.ones(2, WIDTH))
    assert not witness.watches_forward()
    if change == "a new layer":
        model.append(Spy(witness))
    elif change == "moved":
        model.to("cpu")
    else:
        model.double().float()
    assert witness.watches_forward()
    backward(model)
    assert len(witness.gradients) == len(list(model.parameters()))


def test_parameters_are_hooked_once(witness: Witness) -> None:
    """Also if modules are called again, moved, shared or trained."""
    first, second = Spy(witness), Spy(witness)
    second.linear.weight = first.linear.weight
    model = nn.Sequential(first, second)
    optimizer = WatchedSGD(model.parameters(), witness)
    for _ in range(3):
        train(model, optimizer)
        model.to("cpu")
    witness.gradients.clear()
    backward(model)
    assert len(witness.gradients) == 3  # one weight for both layers, and two biases


def test_hooks_stay_with_parameters_whose_contents_are_swapped(witness: Witness) -> None:
    """The program's later hooks are called, as if umem had none."""
    model, heard = Spy(witness), []
    backward(model)
    model.zero_grad()
    for parameter in model.parameters():
        torch.utils.swap_tensors(parameter, nn.Parameter(parameter.detach().clone()))
        parameter.register_post_accumulate_grad_hook(lambda it: heard.append(id(it)))
    witness.gradients.clear()
    backward(model)
    every = {id(it) for it in model.parameters()}
    assert {id(it) for it in witness.gradients} == every == set(heard)


def test_frozen_parameters_are_not_hooked(witness: Witness) -> None:
    model = nn.Sequential(Spy(witness), Spy(witness))
    model[0].requires_grad_(False)
    backward(model)
    trained = {id(p) for p in model[1].parameters()}
    assert {id(p) for p in witness.gradients} == trained


def test_moving_a_module_allocates_weights(witness: Witness) -> None:
    backward(Spy(witness))
    assert witness.born() is TensorClass.ACTIVATIONS
    born = []

    def convert(tensor: torch.Tensor) -> torch.Tensor:
        born.append(witness.born())
        return tensor

    nn.Sequential(Spy(witness), Spy(witness))._apply(convert)
    assert born == ["weights"] * 4
    assert witness.born() is TensorClass.ACTIVATIONS


def test_a_move_that_fails_leaves_no_override(witness: Witness) -> None:
    backward(Spy(witness))

    def fail(_: torch.Tensor) -> torch.Tensor:
        raise FloatingPointError("on purpose")

    with pytest.raises(FloatingPointError):
        nn.Sequential(Spy(witness))._apply(fail)
    assert witness.born() is TensorClass.ACTIVATIONS
    test_moving_a_module_allocates_weights(witness)


def test_an_exception_in_forward(witness: Witness) -> None:
    model = Spy(witness)
    with pytest.raises(RuntimeError):
        model(torch.ones(2, WIDTH + 1))
    optimizer = WatchedSGD(model.parameters(), witness)
    train(model, optimizer, steps=2)
    assert model.forward_classes == ["activations"] * 3
    assert optimizer.classes == ["optimizer_state", "other"]
    assert not witness.watches_forward()


@pytest.mark.parametrize("steps_before", [0, 2])
def test_an_exception_in_a_step(steps_before: int, witness: Witness) -> None:
    """torch runs no hook after it; the next gradient corrects the phase."""
    model = Spy(witness)
    optimizer = WatchedSGD(model.parameters(), witness)
    train(model, optimizer, steps_before)
    optimizer.fails = True
    with pytest.raises(FloatingPointError):
        train(model, optimizer)
    backward(model)
    assert witness.born() is TensorClass.ACTIVATIONS
    optimizer.fails = False
    train(model, optimizer, steps=2)
    assert optimizer.classes[-1] is TensorClass.OTHER
    assert model.forward_classes[-2:] == ["activations"] * 2


@pytest.mark.parametrize("steps_before", [0, 2])
def test_an_exception_in_a_closure(steps_before: int, witness: Witness) -> None:
    """Such as out of memory in the forward pass under Lightning: the step is over."""
    model = Spy(witness)
    optimizer = WatchedSGD(model.parameters(), witness)
    train(model, optimizer, steps_before)
    with pytest.raises(RuntimeError):
        optimizer.step(lambda: model(torch.ones(2, WIDTH + 1)))
    assert witness.born() is TensorClass.ACTIVATIONS


def test_a_closure_in_the_step_allocates_activations(witness: Witness) -> None:
    """Lightning runs forward and backward in a closure, in every step."""
    model = Spy(witness)
    optimizer = WatchedSGD(model.parameters(), witness)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = model(torch.ones(2, WIDTH)).square().sum()
        loss.backward()
        return loss

    for _ in range(3):
        optimizer.step(closure)
    assert model.forward_classes == ["activations"] * 3
    assert model.backward_classes == ["activations"] * 3


class TestOptimizerState:
    """State is tagged when it is created, grows, or is loaded."""

    def test_a_second_optimizer(self, witness: Witness) -> None:
        model = Spy(witness)
        first = WatchedSGD(model.parameters(), witness)
        train(model, first, steps=2)
        second = WatchedSGD(model.parameters(), witness)
        train(model, second)
        train(model, first)
        assert first.classes == ["optimizer_state", "other", "other"]
        assert second.classes == ["optimizer_state"]

    def test_loaded_again_and_again(self, witness: Witness) -> None:
        """A new state may have the addresses of an old one."""
        model = Spy(witness)
        optimizer = WatchedSGD(model.parameters(), witness)
        train(model, optimizer, steps=2)
        saved = copy.deepcopy(optimizer.state_dict())
        for _ in range(10):
            for _ in range(2):  # torch keeps the tensors of what it is given
                optimizer.load_state_dict(copy.deepcopy(saved))
            optimizer.classes.clear()
            train(model, optimizer, steps=2)
            assert optimizer.classes == ["optimizer_state", "other"]

    def test_loaded_into_an_optimizer_with_the_id_of_another(
        self, witness: Witness, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Python gives the id of what is gone to something new, sooner or later."""

        def same(it: Any) -> int:
            return 0 if isinstance(it, WatchedSGD) else id(it)

        monkeypatch.setattr(classification, "id", same, raising=False)
        model = Spy(witness)
        first = WatchedSGD(model.parameters(), witness)
        train(model, first, steps=2)
        saved = copy.deepcopy(first.state_dict())
        ended = weakref.ref(first)
        del first
        gc.collect()
        assert ended() is None
        second = WatchedSGD(model.parameters(), witness)
        second.load_state_dict(saved)
        train(model, second, steps=2)
        assert second.classes == ["optimizer_state", "other"]

    def test_grown(self, witness: Witness) -> None:
        """Parameters added later: their state is new, and their gradients are tagged."""
        model, late = Spy(witness), Spy(witness)
        optimizer = WatchedSGD(model.parameters(), witness)
        train(model, optimizer, steps=2)
        optimizer.add_param_group({"params": late.parameters()})
        train(nn.Sequential(model, late), optimizer, steps=2)
        assert optimizer.classes == ["optimizer_state", "other"] * 2
        assert {id(p) for p in late.parameters()} <= {id(p) for p in witness.gradients}


class TestOverride:
    def test_holds_in_every_phase(self, witness: Witness) -> None:
        model = Spy(witness)
        optimizer = WatchedSGD(model.parameters(), witness)
        with witness.override(TensorClass.FROZEN_WEIGHTS):
            train(model, optimizer, steps=2)
        seen = model.forward_classes + model.backward_classes + optimizer.classes
        assert set(seen) == {TensorClass.FROZEN_WEIGHTS}
        assert witness.born() is TensorClass.ACTIVATIONS

    def test_nests_and_ends_with_exceptions(self, witness: Witness) -> None:
        override, found = witness.override, []

        def fail() -> None:
            with override(TensorClass.GRADIENTS):
                found.append(witness.born())
                raise FloatingPointError("on purpose")

        with override(TensorClass.OTHER):
            with pytest.raises(FloatingPointError):
                fail()
            found.append(witness.born())
        assert found == ["gradients", "other"]
        assert witness.born() is TensorClass.WEIGHTS

    def test_threads(self, witness: Witness) -> None:
        """It holds in other threads, unless they have an override."""
        override, found = witness.override, []

        def work() -> None:
            found.append(witness.born())
            with override(TensorClass.ACTIVATIONS):
                found.append(witness.born())
            found.append(witness.born())

        with override(TensorClass.OTHER):
            thread = threading.Thread(target=work)
            thread.start()
            thread.join()
            assert witness.born() is TensorClass.OTHER
        assert found == ["other", "activations", "other"]


class TestGradientHook:
    """The native hook, on gradients in the allocator's own memory."""

    def test_tags_the_block(self, witness: Witness) -> None:
        layer = nn.Linear(WIDTH, 1, bias=False)
        layer.weight.grad = gradient = witness.tensor(WIDTH).view(1, WIDTH)
        assert witness.class_at(gradient.data_ptr()) is TensorClass.WEIGHTS
        layer(torch.ones(WIDTH)).backward()
        assert layer.weight.grad is gradient
        assert gradient.tolist() == [[1.0] * WIDTH]
        assert witness.class_at(gradient.data_ptr()) is TensorClass.GRADIENTS

    def test_tags_the_buffer_behind_a_view(self, witness: Witness) -> None:
        """DDP's gradients are views into buckets."""
        bucket = witness.tensor(4 * WIDTH)
        layer = nn.Linear(WIDTH, 1, bias=False)
        layer.weight.grad = bucket[WIDTH : 2 * WIDTH].view(1, WIDTH)
        layer(torch.ones(WIDTH)).backward()
        assert bucket.sum().item() == WIDTH
        assert witness.class_at(bucket.data_ptr()) is TensorClass.GRADIENTS

    def test_tags_the_tensors_inside_a_wrapper(self, witness: Witness) -> None:
        """A wrapper has no address of its own."""
        parts = [witness.tensor(WIDTH) for _ in range(2)]
        gradient_hook(witness.allocator)(cast(Any, SimpleNamespace(grad=TwoTensor(*parts))))
        assert [witness.class_at(part.data_ptr()) for part in parts] == [TensorClass.GRADIENTS] * 2

    def test_tags_the_buffer_behind_the_part_of_a_dtensor(self, witness: Witness) -> None:
        """FSDP2's gradients are views into one buffer for each block."""
        from torch.distributed.device_mesh import DeviceMesh
        from torch.distributed.tensor import DTensor, Replicate

        buffer = witness.tensor(4 * WIDTH)
        with one_rank():
            part, mesh = buffer[WIDTH : 2 * WIDTH], DeviceMesh("cpu", [0])
            gradient = DTensor.from_local(part, mesh, [Replicate()])
            gradient_hook(witness.allocator)(cast(Any, SimpleNamespace(grad=gradient)))
        assert witness.class_at(buffer.data_ptr()) is TensorClass.GRADIENTS

    def test_other_errors_end_no_backward_pass(
        self, witness: Witness, caplog: pytest.LogCaptureFixture
    ) -> None:
        class Broken:
            is_sparse = False

            def data_ptr(self) -> int:
                raise KeyError("no")

        for _ in range(2):
            gradient_hook(witness.allocator)(cast(Any, SimpleNamespace(grad=Broken())))
        assert len(caplog.records) == 1

    def test_sparse_gradients_have_no_block(self, witness: Witness) -> None:
        table = nn.Embedding(4, WIDTH, sparse=True)
        table(torch.tensor([1])).sum().backward()
        assert table.weight.grad is not None
        assert table.weight.grad.is_sparse
        assert [id(p) for p in witness.gradients] == [id(table.weight)]


def test_a_model_whose_forward_the_program_runs_is_one_root(witness: Witness) -> None:
    class Chain(nn.Sequential):
        """Its forward is wrapped, that of other chains is not."""

    model: Any = Chain(Spy(witness), Spy(witness))
    roots: list[nn.Module] = []
    witness.classifier.on_root = roots.append
    for _ in range(2):
        model.forward(torch.ones(2, WIDTH))
    assert roots == [model]
    assert witness.classifier.roots() == [model]
    assert not witness.watches_forward()


def test_a_model_with_a_list_named_buffers_is_classified(witness: Witness) -> None:
    model = nn.Sequential(Spy(witness))
    model.buffers = []  # type: ignore[assignment]
    backward(model)
    assert witness.classifier.roots() == [model]


@pytest.mark.parametrize("part", ["_see_call", "_see_parameter", "_begin_step", "_end_step"])
def test_no_error_of_a_hook_ends_the_program(
    part: str, witness: Witness, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise KeyError(part)

    monkeypatch.setattr(witness.classifier, part, fail)
    layer = nn.Linear(WIDTH, WIDTH)
    optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
    for _ in range(2):
        layer(torch.ones(WIDTH)).sum().backward()
        before = layer.bias.detach().clone()
        optimizer.step()
        assert not layer.bias.equal(before)
    (record,) = caplog.records
    assert part in record.getMessage()
