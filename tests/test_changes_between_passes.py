"""What a program changes between a forward pass and its backward pass, or from step to step: blocks
that run twice do in the second call what they did in the first."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from repeated_blocks import NAMES, ROWS, WIDTH, Averaging, Layer, Net, managed, plan
from torch import nn
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel

from umem.streaming.activations import CopiedActivations

Program = Callable[[Any, int], torch.Tensor]
"""Goes forward through a model in a step, and returns the loss; changes what it likes."""


def batch(number: int) -> torch.Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(number))


def loss_of(model: nn.Module, number: int) -> torch.Tensor:
    return model(batch(number)).square().mean()


def bits_of(model: nn.Module) -> list[bytes]:
    gradients = (it.grad for it in model.parameters() if it.grad is not None)
    found = [it.numpy().tobytes() for it in (*gradients, *model.buffers())]
    model.zero_grad()
    return [*found, torch.rand(1).numpy().tobytes()]


def train(model: nn.Module, program: Program, begin: Callable[[int], None]) -> list[list[bytes]]:
    torch.manual_seed(5)
    found = []
    for number in range(4):
        begin(number)
        program(model, number).backward()
        found.append(bits_of(model))
    return found


def check(kind: type[Layer], program: Program, *, runs_twice: bool = True) -> None:
    model = Net(kind)
    activations = managed(model)
    found = train(model, program, plan(activations))
    assert found == train(Net(kind), program, lambda _: None)
    assert (set(NAMES) <= activations.proofs.keys()) is runs_twice


# ------------------------------------------------------------------ attributes and settings


class Scaled(Layer):
    """With what programs set: a number, a tensor, and a rate of dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.context = 1.0, torch.zeros(WIDTH)
        self.drop = nn.Dropout(0.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.drop(x * self.scale + self.context))


def another_number(model: Any, number: int) -> torch.Tensor:
    losses = []
    for scale in (1.0, 1.5):
        for layer in model.layers:
            layer.scale = scale
        losses.append(loss_of(model, number))
    return torch.stack(losses).sum()


def a_context_for_a_pass(model: Any, number: int) -> torch.Tensor:
    for layer in model.layers:
        layer.context = batch(number + 100)
    loss = loss_of(model, number)
    for layer in model.layers:
        layer.context = None
    return loss


def a_rate_of_dropout(model: Any, number: int) -> torch.Tensor:
    for layer in model.layers:
        layer.drop.p = 0.0 if number < 2 else 0.3
    return loss_of(model, number)


def other_parameters(model: Any, number: int) -> torch.Tensor:
    others = {name: it * (1.0 + 0.1 * number) for name, it in model.named_parameters()}
    return torch.func.functional_call(model, others, (batch(number),)).square().mean()


def another_type(model: Any, number: int) -> torch.Tensor:
    x = batch(number)
    torch.set_default_dtype(torch.float64)
    try:
        loss: torch.Tensor = model(x).square().mean()
    finally:
        torch.set_default_dtype(torch.float32)
    return loss


@pytest.mark.parametrize(
    "program",
    [another_number, a_context_for_a_pass, a_rate_of_dropout, other_parameters, another_type],
)
def test_attributes(program: Program) -> None:
    class Typed(Scaled):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x * torch.full((), 0.1).pow(7).float())

    check(Typed, program)


CONFIGURATION = SimpleNamespace(scale=1.0)
SCALES = [1.0]


class ScaledFromBeside(Layer):
    """With numbers that no attribute of a module is: a second call would have others."""

    shared = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.configuration, self.options = CONFIGURATION, {"scale": 1.0}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = SCALES[0] * type(self).shared * self.options["scale"]
        return super().forward(x * scale * self.configuration.scale)


def of_a_class(_layer: Any, factor: float) -> None:
    ScaledFromBeside.shared *= factor


def of_a_configuration(_layer: Any, factor: float) -> None:
    CONFIGURATION.scale *= factor


def of_a_module_of_python(_layer: Any, factor: float) -> None:
    SCALES[0] *= factor


def in_an_attribute(layer: Any, factor: float) -> None:
    layer.options["scale"] *= factor


@pytest.mark.parametrize(
    "scale", [of_a_class, of_a_configuration, of_a_module_of_python, in_an_attribute]
)
def test_what_else_a_call_reads(scale: Callable[[Any, float], None]) -> None:
    """It is set for each forward pass, as a context for a batch is."""

    def program(model: Any, number: int) -> torch.Tensor:
        for layer in model.layers:
            scale(layer, 1.25)
        loss = loss_of(model, number)
        for layer in model.layers:
            scale(layer, 0.8)
        return loss

    check(ScaledFromBeside, program, runs_twice=False)


def test_kernels_of_attention() -> None:
    class Attending(Layer):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q = super().forward(x).view(1, ROWS, 4, -1).transpose(1, 2)
            y = nn.functional.scaled_dot_product_attention(q, q, q)
            return x + y.transpose(1, 2).reshape(ROWS, WIDTH)

    def program(model: Any, number: int) -> torch.Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            return loss_of(model, number)

    check(Attending, program)


def test_hooks() -> None:
    heard: list[object] = []

    def program(model: Any, number: int) -> torch.Tensor:
        loss = loss_of(model, number)
        layer = model.layers[1]
        hooks = [it.register_forward_hook(lambda *it: heard.append(it)) for it in (layer, layer.up)]
        loss.backward(retain_graph=True)
        for hook in hooks:
            hook.remove()
        return loss

    check(Layer, program)
    assert not heard


def test_backward_passes_in_inference_mode() -> None:
    def program(model: Any, number: int) -> torch.Tensor:
        loss = loss_of(model, number)
        with torch.inference_mode():
            loss.backward()
        return torch.ones((), requires_grad=True)

    check(Averaging, program)


# ------------------------------------------------------------------ values


class Shifted(Layer):
    """A buffer that no backward pass needs, and an average that begins late."""

    shift: torch.Tensor
    calls: torch.Tensor
    average: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("shift", torch.zeros(WIDTH))
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("average", torch.zeros(WIDTH))
        self.register_buffer("numbers", torch.zeros(()).expand(ROWS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1.0
        if self.calls > 2.0:
            self.average.mul_(0.9).add_(0.1 * x.detach().mean(0))
        return super().forward(x + self.shift)


def test_buffers() -> None:
    def program(model: Any, number: int) -> torch.Tensor:
        losses = []
        for shift in (0.0, 0.5):
            for layer in model.layers:
                layer.shift.fill_(shift)
            losses.append(loss_of(model, number))
        return torch.stack(losses).sum()

    check(Shifted, loss_of)
    check(Shifted, program)


def _descend_by_hand(model: Any) -> None:
    with torch.no_grad():
        for layer in model.layers:
            layer.up.bias -= 0.1 * layer.up.bias.grad


def test_weights_that_the_program_changes_by_hand() -> None:
    def program(model: Any, number: int) -> torch.Tensor:
        first, second = loss_of(model, number), loss_of(model, number + 50)
        first.backward()
        _descend_by_hand(model)
        return second

    check(Layer, program, runs_twice=False)


def test_weights_that_change_by_hand_for_the_first_time_are_an_error_of_autograd() -> None:
    model = Net(Layer)
    begin = plan(managed(model))
    for number in range(3):
        begin(number)
        loss = loss_of(model, number)
        if number < 2:
            loss.backward()
    _descend_by_hand(model)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def by_data_in_place(parameter: Any) -> None:
    parameter.data.mul_(1.5)


def by_other_data(parameter: Any) -> None:
    parameter.data = parameter.detach() * 1.5


@pytest.mark.parametrize("first", [0, 2], ids=["always", "at last"])
@pytest.mark.parametrize("change", [by_data_in_place, by_other_data])
def test_weights_that_change_without_a_count(change: Callable[[Any], None], first: int) -> None:
    """Stock's backward pass has results of the old weights, and multiplies by the new ones."""

    def program(model: Any, number: int) -> torch.Tensor:
        loss = loss_of(model, number)
        for layer in model.layers if number >= first else ():
            change(layer.up.weight)
            change(layer.norm.weight)
        return loss

    check(Layer, program, runs_twice=first > 0)


def test_weights_that_hooks_change_by_data_have_been_used_already(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As a step in the backward pass does: no block runs before its turn, or once more."""
    model, plain = Net(Layer), Net(Layer)
    begin = plan(managed(model))
    turns: list[str] = []

    def descend(name: str, parameter: Any) -> None:
        turns.append(name)
        parameter.data.add_(parameter.grad, alpha=-0.1)

    def forward(layer: Layer, x: torch.Tensor, of: Any = Layer.forward) -> torch.Tensor:
        turns.append("forward")
        result: torch.Tensor = of(layer, x)
        return result

    for it in (model, plain):
        for name, parameter in it.named_parameters():
            parameter.register_post_accumulate_grad_hook(partial(descend, name))
    found = [train(model, loss_of, begin), train(plain, loss_of, lambda _: None)]
    assert found[0] == found[1]
    monkeypatch.setattr(Layer, "forward", forward)
    turns.clear()
    loss_of(model, 5).backward()
    between = [it for it in turns[len(model.layers) :] if it == "forward" or "layers" in it]
    assert turns.count("forward") == 2 * len(model.layers)
    places = [place for place, it in enumerate(between) if it == "forward"]
    assert all(after - before > 1 for before, after in pairwise(places))


# ------------------------------------------------------------------ forward mode


def by_tangents(model: Any, number: int) -> torch.Tensor:
    x = batch(number)
    with forward_ad.dual_level():
        y, slope = forward_ad.unpack_dual(model(forward_ad.make_dual(x, torch.ones_like(x))))
    assert slope is not None
    return y.square().mean() + slope.square().mean()


def copying(activations: CopiedActivations) -> Callable[[int], None]:
    def begin(number: int) -> None:
        activations.set_plan(dict.fromkeys(NAMES if number else ()), 1, is_measuring=not number)
        activations.begin_step()

    return begin


@pytest.mark.parametrize("planned", [plan, copying])
@pytest.mark.parametrize("first", [0, 1], ids=["later", "at first"])
def test_forward_mode_in_every_other_step(first: int, planned: Any) -> None:
    def program(model: Any, number: int) -> torch.Tensor:
        return (by_tangents if (number + first) % 2 else loss_of)(model, number)

    model = Net(Layer)
    found = train(model, program, planned(managed(model)))
    assert found == train(Net(Layer), program, lambda _: None)
