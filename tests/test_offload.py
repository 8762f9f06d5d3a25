"""`umem.offload`: copies and values of whole models."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from faults import Interrupt
from torch import nn
from torch.utils.checkpoint import checkpoint

from umem.core.errors import OffloadError
from umem.offloading import offload
from umem.runtime.torch_hooks import saved_tensors

BATCH, SEQ, WIDTH, LAYERS = 2, 32, 64, 5
HIDDEN_BYTES = BATCH * SEQ * WIDTH * 4
MIN_BYTES = HIDDEN_BYTES


class NormAndMlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(nn.functional.gelu(self.up(self.norm(x))))


class Checkpointed(NormAndMlp):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = checkpoint(super().forward, x, use_reentrant=False)
        return x + torch.tanh(y)


def transformer_layer() -> nn.Module:
    return nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, dropout=0.1, batch_first=True)


MAKERS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(WIDTH, WIDTH),
    "layernorm+linear": lambda: nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)),
    "layernorm+mlp": NormAndMlp,
    "transformer": transformer_layer,
    "checkpointed": Checkpointed,
}


def make_layers(name: str, layers: int = LAYERS) -> list[nn.Module]:
    torch.manual_seed(0)
    return [MAKERS[name]() for _ in range(layers)]


def make_input() -> torch.Tensor:
    return torch.randn(BATCH, SEQ, WIDTH, generator=torch.Generator().manual_seed(1))


def forward(
    layers: list[nn.Module], context: Any, sync: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    y = make_input()
    for layer in layers:
        with context:
            y = layer(y)
        y = sync(y)
    return y


def results(
    layers: list[nn.Module], context: Any, sync: Any, steps: int = 2, **options: Any
) -> list[torch.Tensor]:
    """Outputs of some steps and the sums of their gradients."""
    torch.manual_seed(2)
    outputs = []
    for _ in range(steps):
        with torch.autocast("cpu", torch.bfloat16, enabled=options.get("autocast", False)):
            y = forward(layers, context, sync)
        y.float().square().mean().backward()
        outputs.append(y.detach())
    gradients = [p.grad for layer in layers for p in layer.parameters() if p.grad is not None]
    assert gradients
    return outputs + gradients


def plain_results(name: str, **options: Any) -> list[torch.Tensor]:
    """Those of layers whose activations stay."""
    return results(make_layers(name), *offload(1, enabled=False), **options)


def assert_equal(left: list[torch.Tensor], right: list[torch.Tensor]) -> None:
    assert len(left) == len(right)
    for one, other in zip(left, right, strict=True):
        assert torch.equal(one, other)


@pytest.mark.slow
def test_an_interrupt_at_any_moment() -> None:
    """The next pass has the same values, at the latest behind one that is refused."""
    plain = plain_results("linear", steps=1)
    layers = make_layers("linear")
    context, sync = offload(3, LAYERS, min_bytes=MIN_BYTES)
    number, is_interrupted = 0, True
    while is_interrupted:
        try:
            with Interrupt(number):
                forward(layers, context, sync).square().mean().backward()
        except KeyboardInterrupt:
            number += 1
        else:
            is_interrupted = False
        for layer in layers:
            layer.zero_grad()
        try:
            found = results(layers, context, sync, steps=1)
        except OffloadError:
            found = results(layers, context, sync, steps=1)
        assert_equal(found, plain)
        assert saved_tensors.innermost() is None
    assert number > 100


class TestOffload:
    @pytest.mark.parametrize(
        ("name", "autocast"), [(name, number % 2 == 0) for number, name in enumerate(MAKERS)]
    )
    def test_values_equal_those_without_offload(self, name: str, autocast: bool) -> None:
        plain = plain_results(name, autocast=autocast)
        context, sync = offload(LAYERS - 1, LAYERS, min_bytes=HIDDEN_BYTES // 2)
        assert_equal(results(make_layers(name), context, sync, autocast=autocast), plain)
        counts = context.statistics
        assert counts.tensors_out == counts.tensors_in >= 2 * (LAYERS - 1)
        assert counts.late_fetches == 0

    def test_the_inputs_of_linear_layers_are_copied_once_a_step(self) -> None:
        for model_layers in (None, LAYERS):
            context, sync = offload(3, model_layers, min_bytes=MIN_BYTES)
            results(make_layers("linear"), context, sync, steps=3)
            counts = context.statistics
            # Each of three layers saves its input, in each of three steps.
            assert counts.tensors_out == counts.tensors_in == 9
            assert counts.bytes_out == counts.bytes_in == 9 * HIDDEN_BYTES
            # The buffers of one pass serve the next one too.
            assert counts.pinned_bytes == 3 * (2 << 20)

    def test_release_frees_the_memory_of_all_layers_but_the_last(self) -> None:
        found = []
        for count in (1, LAYERS):
            saved: list[weakref.ref[torch.UntypedStorage]] = []
            layers = make_layers("linear")[-count:]
            for layer in layers:  # each saves its input
                layer.register_forward_pre_hook(
                    lambda _, args, saved=saved: saved.append(
                        weakref.ref(args[0].untyped_storage())
                    )
                )
            context, sync = offload(LAYERS - 1, LAYERS, min_bytes=MIN_BYTES)
            y = forward(layers, context, sync)
            found.append([storage() is not None for storage in saved])
            assert y.requires_grad
        # A layer is released when the next one ends.
        assert found == [[True], [False] * (LAYERS - 1) + [True]]

    def test_the_last_layer_never_leaves(self) -> None:
        context, sync = offload(LAYERS, LAYERS, min_bytes=MIN_BYTES)
        results(make_layers("linear"), context, sync, steps=1)
        assert context.statistics.tensors_out == LAYERS - 1

    def test_activations_come_back_one_layer_ahead(self) -> None:
        context, sync = offload(3, LAYERS, min_bytes=MIN_BYTES)
        layers = make_layers("linear")
        y = forward(layers, context, sync)
        seen = []
        for layer in layers:
            layer.weight.register_hook(  # type: ignore[operator]
                lambda _gradient: seen.append(context.statistics.tensors_in)
            )
        y.sum().backward()
        # No copy has started at the gradient of layer 4; at that of layer 3, layer 2's has; ...
        assert seen == [0, 1, 2, 3, 3]

    def test_retained_graph_is_offloaded_again(self) -> None:
        context, sync = offload(3, LAYERS, min_bytes=MIN_BYTES)
        y = forward(make_layers("linear"), context, sync)
        for times in (1, 2, 3):
            y.sum().backward(retain_graph=True)
            counts = context.statistics
            assert (counts.tensors_out, counts.late_fetches) == (3, 0)
            assert counts.tensors_in == 3 + 2 * (times - 1)  # the first layer's stays

    def test_evaluation_between_steps(self) -> None:
        plain, layers = plain_results("linear"), make_layers("linear")
        context, sync = offload(2, min_bytes=MIN_BYTES)
        with torch.no_grad():
            forward(layers, context, sync)
        assert context.statistics.tensors_out == 0
        forward(layers, context, sync)  # with gradients, but without a backward pass
        assert context.statistics.tensors_out == 2
        assert_equal(results(layers, context, sync), plain)
        assert context.statistics.tensors_out == 6

    def test_micro_batches_before_the_backward_passes(self) -> None:
        layers = make_layers("linear")
        context, sync = offload(2, LAYERS, min_bytes=MIN_BYTES)
        outputs = [forward(layers, context, sync) for _ in range(3)]
        assert context.statistics.tensors_out == 6
        for y in outputs:
            y.sum().backward()
        assert context.statistics.late_fetches == 0

    def test_frozen_layers_first(self) -> None:
        contexts = offload(1, enabled=False), offload(3, min_bytes=MIN_BYTES)
        found = []
        for context in contexts:
            layers = make_layers("layernorm+mlp")
            for layer in layers[:2]:
                layer.requires_grad_(False)
            found.append(results(layers, *context))
        assert_equal(*found)
        assert contexts[1][0].statistics.tensors_out > 0

    def test_an_exception_in_a_layer(self) -> None:
        plain, layers = plain_results("linear"), make_layers("linear")
        context, sync = offload(3, min_bytes=MIN_BYTES)
        with pytest.raises(RuntimeError, match="shapes"):
            forward([*layers[:2], nn.Linear(3, 3)], context, sync)
        assert_equal(results(layers, context, sync), plain)
        assert context.statistics.tensors_out == 2 + 6

    def test_context_around_parts_of_a_layer(self) -> None:
        plain, layers = plain_results("linear", steps=1), make_layers("linear")
        context, sync = offload(2, min_bytes=MIN_BYTES)
        y = make_input()
        for pair in (layers[:2], layers[2:4], layers[4:]):
            for part in pair:
                with context:
                    y = part(y)
            y = sync(y)
        y.square().mean().backward()
        assert context.statistics.tensors_out == 4
        grads = [p.grad for layer in layers for p in layer.parameters() if p.grad is not None]
        assert_equal([y.detach(), *grads], plain)

    def test_outputs_that_are_not_one_tensor(self) -> None:
        context, sync = offload(1, 2, min_bytes=MIN_BYTES)
        layers = make_layers("linear", 2)
        with context:
            output = {"hidden": layers[0](make_input()), "other": (1, None)}
        assert sync(output) is output
        with context:
            y = layers[1](output["hidden"])
        sync(y).sum().backward()
        assert context.statistics.tensors_in == 1
        assert context.statistics.late_fetches == 0

    @pytest.mark.parametrize(
        ("num_layers", "model_layers", "text"),
        [
            (0, None, "num_layers is 0: give 1 or more"),
            (-1, 3, "num_layers is -1: give 1 to model_layers, which is 3"),
            (4, 3, "num_layers is 4: give 1 to model_layers, which is 3"),
        ],
    )
    def test_wrong_layer_counts(self, num_layers: int, model_layers: int | None, text: str) -> None:
        with pytest.raises(OffloadError, match=text):
            offload(num_layers, model_layers)

    def test_wrong_use(self) -> None:
        context, sync = offload(1)
        with pytest.raises(OffloadError, match=r"sync .* offload context"):
            sync(make_input())
        with pytest.raises(OffloadError, match="entered within itself"), context, context:
            pass
        with context, pytest.raises(OffloadError, match="call it once for each layer"):
            sync(make_input())
