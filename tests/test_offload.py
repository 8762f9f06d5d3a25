"""`umem.offloading.offload` and `offload_blocks`: copies and values of whole models."""

from __future__ import annotations

import copy
import pickle
import warnings
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from faults import Interrupt
from torch import nn
from torch.utils.checkpoint import checkpoint

from umem.capture.live import find_blocks
from umem.core.errors import OffloadError
from umem.offloading import ActivationStore, offload, offload_blocks
from umem.runtime.torch_hooks import saved_tensors
from umem.runtime.torch_hooks.hidden import hidden_in

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
        y: torch.Tensor = self.down(nn.functional.gelu(self.up(self.norm(x))))
        return y


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
    generator = torch.Generator().manual_seed(1)
    return torch.randn(BATCH, SEQ, WIDTH, generator=generator)


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
    @pytest.mark.parametrize("name", MAKERS)
    @pytest.mark.parametrize("autocast", [False, True])
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

    @pytest.mark.slow
    def test_compiled_layers(self) -> None:
        plain, layers = plain_results("layernorm+mlp"), make_layers("layernorm+mlp")
        context, sync = offload(3, min_bytes=MIN_BYTES)
        for layer in layers:
            layer.compile(backend="aot_eager")
        found = results(layers, context, sync)
        for one, other in zip(found, plain, strict=True):
            torch.testing.assert_close(one, other)
        assert context.statistics.tensors_out > 0

    @pytest.mark.parametrize(
        ("num_layers", "model_layers", "text"),
        [
            (0, None, "num_layers is 0: give 1 or more"),
            (-1, 3, "num_layers is -1: give 1 to model_layers, which is 3"),
            (4, 3, "num_layers is 4: give 1 to model_layers, which is 3"),
        ],
    )
    def test_wrong_numbers_of_layers(
        self, num_layers: int, model_layers: int | None, text: str
    ) -> None:
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


class Model(nn.Module):
    table: torch.Tensor

    def __init__(self, name: str = "layernorm+mlp") -> None:
        super().__init__()
        self.layers = nn.ModuleList(make_layers(name))
        self.head = nn.Linear(WIDTH, 8)
        self.register_buffer("table", torch.ones(BATCH, SEQ, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x * self.table)
        y: torch.Tensor = self.head(x)
        return y


def train(model: nn.Module, steps: int = 2) -> list[torch.Tensor]:
    outputs = []
    for _ in range(steps):
        y = model(make_input())
        y.square().mean().backward()
        outputs.append(y.detach())
    return outputs + [p.grad for p in model.parameters() if p.grad is not None]


class TestOffloadBlocks:
    @pytest.mark.parametrize("name", ["layernorm+mlp", "checkpointed"])
    def test_values_equal_those_without_offload(self, name: str) -> None:
        plain = train(Model(name))
        model = Model(name)
        handle = offload_blocks(model, 3, min_bytes=MIN_BYTES)
        assert_equal(train(model), plain)
        (counts,) = handle.statistics.values()
        assert counts.tensors_out == counts.tensors_in > 0
        assert counts.late_fetches == 0
        handle.remove()
        (counts,) = handle.statistics.values()
        assert counts.pinned_bytes == 0
        train(model)
        assert handle.statistics[torch.device("cpu")].tensors_out == counts.tensors_out

    def test_named_layers(self) -> None:
        model = Model("linear")
        handle = offload_blocks(model, 1, layers=list(model.layers)[2:4], min_bytes=MIN_BYTES)
        train(model)
        assert handle.statistics[torch.device("cpu")].tensors_out == 2
        handle.remove()

    def test_buffers_stay(self) -> None:
        class Scaled(nn.Module):
            scale: torch.Tensor

            def __init__(self) -> None:
                super().__init__()
                self.weight = nn.Parameter(torch.ones(()))
                self.register_buffer("scale", torch.ones(BATCH, SEQ, WIDTH))

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return self.weight * self.scale + x

        model = nn.Sequential(*[Scaled() for _ in range(3)])
        handle = offload_blocks(model, 2, min_bytes=MIN_BYTES)
        model(make_input()).sum().backward()
        assert handle.statistics[torch.device("cpu")].tensors_out == 0

    def test_an_exception_in_a_layer(self) -> None:
        plain = train(Model())
        model = Model()
        handle = offload_blocks(model, 3, min_bytes=MIN_BYTES)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with pytest.raises(RuntimeError, match="size"):
                model(torch.ones(1, 1, WIDTH + 1))
        assert_equal(train(model), plain)
        handle.remove()

    def test_an_interrupt_in_a_layer(self) -> None:
        def interrupt(*_: object) -> None:
            raise KeyboardInterrupt

        plain = train(Model())
        model = Model()
        handle = offload_blocks(model, 3, min_bytes=MIN_BYTES)
        hook = model.layers[1].up.register_forward_pre_hook(interrupt)  # type: ignore[union-attr]
        with pytest.raises(KeyboardInterrupt):
            model(make_input())
        hook.remove()
        assert_equal(train(model), plain)
        assert handle.statistics[torch.device("cpu")].late_fetches == 0
        handle.remove()
        assert saved_tensors.innermost() is None

    def test_copies_of_the_model_are_not_hooked(self) -> None:
        model = Model("linear")
        handle = offload_blocks(model, 3, min_bytes=MIN_BYTES)
        for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            train(twin)
        assert handle.statistics == {}
        train(model)
        assert handle.statistics[torch.device("cpu")].tensors_out > 0

    @pytest.mark.slow
    @pytest.mark.parametrize("is_warm", [False, True])
    def test_layers_compiled_in_place(self, is_warm: bool) -> None:
        plain = train(Model())
        model = Model()
        for layer in model.layers:
            layer.compile(backend="aot_eager")
        if is_warm:
            train(model)
            model.zero_grad()
        calls = [layer._compiled_call_impl for layer in model.layers]
        handle = offload_blocks(model, 3, min_bytes=MIN_BYTES)
        for one, other in zip(train(model), plain, strict=True):
            torch.testing.assert_close(one, other)
        (counts,) = handle.statistics.values()
        assert counts.tensors_out == counts.tensors_in > 0
        handle.remove()
        assert [layer._compiled_call_impl for layer in model.layers] == calls

    def test_the_layers_are_those_of_a_recording(self) -> None:
        body = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(6)])
        outer = nn.Sequential(nn.Linear(WIDTH, 8 * WIDTH), nn.ReLU(), nn.Linear(8 * WIDTH, WIDTH))
        for model in (outer, nn.Sequential(nn.Linear(WIDTH, WIDTH), body, nn.Linear(WIDTH, 2))):
            hooked = Counter[str]()
            handle = offload_blocks(model, 1)
            for name, module in model.named_modules():
                hooked[name] += hidden_in(module._forward_hooks)
            handle.remove()
            blocks = {block.name for block in find_blocks(model)}
            assert {name for name, count in hooked.items() if count} <= blocks
        assert sum(hooked.values()) == 6

    def test_parameters_are_looked_up_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        model = Model("linear")
        handle = offload_blocks(model, 3, min_bytes=MIN_BYTES)
        train(model, 1)
        calls = []
        keep = ActivationStore.keep

        def counting(store: ActivationStore, tensors: Any, **options: bool) -> None:
            kept = list(tensors)
            calls.append((len(kept), options))
            keep(store, kept, **options)

        monkeypatch.setattr(ActivationStore, "keep", counting)
        train(model, 2)
        assert calls == [(1, {})] * 2, "the buffer, once for each pass"
        handle.remove()

    def test_detached_parameters_stay(self) -> None:
        class Detached(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.weight = nn.Parameter(torch.ones(BATCH, SEQ, WIDTH))

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return x * self.weight.detach()

        model = nn.Sequential(*[Detached() for _ in range(3)])
        handle = offload_blocks(model, 2, min_bytes=MIN_BYTES)
        model(make_input().requires_grad_()).sum().backward()
        assert handle.statistics[torch.device("cpu")].tensors_out == 0
        handle.remove()

    @pytest.mark.slow
    def test_compiled_model(self) -> None:
        plain = train(Model())
        model = Model()
        offload_blocks(model, 3, min_bytes=MIN_BYTES)
        compiled: Any = torch.compile(model, backend="aot_eager", fullgraph=True)
        for one, other in zip(train(compiled), plain, strict=True):
            torch.testing.assert_close(one, other)

    def test_not_enabled(self) -> None:
        model = Model("linear")
        handle = offload_blocks(model, 3, enabled=False)
        train(model)
        assert handle.statistics == {}
        handle.remove()

    def test_wrong_use(self) -> None:
        model = Model("linear")
        with pytest.raises(OffloadError, match="give 1 to 5, the number of layers of this Model"):
            offload_blocks(model, 6)
        with pytest.raises(OffloadError, match="Linear has no ModuleList or Sequential of two"):
            offload_blocks(nn.Linear(2, 2), 1)
        with pytest.raises(OffloadError, match="a Linear cannot be offloaded as a layer of this"):
            offload_blocks(model, 1, layers=[nn.Linear(2, 2)])
        options: tuple[dict[str, Any], ...] = ({"min_bytes": -1}, {"host_limit_bytes": -1})
        for option in options:
            with pytest.raises(OffloadError, match=f"{next(iter(option))} is -1"):
                offload_blocks(nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1)), 1, **option)
        with pytest.raises(OffloadError, match="a Tanh cannot be offloaded"):
            offload_blocks(model, 1, layers=[model.layers[0], nn.Tanh()])
        message = "Sequential has no ModuleList or Sequential of two layers with parameters"
        with pytest.raises(OffloadError, match=message):
            offload_blocks(nn.Sequential(nn.Linear(2, 2), nn.Tanh()), 1)
