"""Autocast's copies of weights are freed behind each block, where no gradient changes by it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
import torch
from activation_chain import LazyMover
from found_trainings import Room, Streams, streaming
from lazy_lanes import LazyLanes
from streamed_programs import Net, Program, bits, compare
from streamed_uses import USES
from torch import distributed, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.functional import embedding, linear
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from umem.core.errors import PlanError
from umem.executor import stream_tuning
from umem.executor.autocast_copies import _Context
from umem.executor.stream_tuning import StreamTuner
from umem.hardware import load_hardware
from umem.offloading import ActivationStore

WIDTH, TOKENS, LAYERS, STEPS = 16, 32, 4, 8

Use = Callable[[Any, torch.Tensor], torch.Tensor]
"""Something that a model does with its weights between its blocks and its head."""


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Model(nn.Module):
    """A decoder whose head has the embedding's weight, and a weight of its own."""

    def __init__(self, use: Use | None = None, kind: str = "checkpoint") -> None:
        super().__init__()
        self.table = nn.Embedding(64, WIDTH)
        self.layers: Any = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 64, bias=False)
        self.head.weight = self.table.weight
        self.mix = nn.Parameter(torch.randn(WIDTH, WIDTH) / 8)
        self.use, self.kind = use, kind
        self.calls = 0
        self.copies: list[StorageWeakRef] = []
        """Of weights, that autocast has made."""
        self.kept: list[int] = []
        """How many of them there were when each call came to the head."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        x = embedding(tokens, self.table.weight) if self.calls % 2 else self.table(tokens)
        x = x @ self.mix
        for layer in self.layers:
            if self.kind == "plain":
                x = layer(x)
            else:
                called: Any = checkpoint(layer, x, use_reentrant=self.kind == "reentrant")
                x = called
        if self.use is not None:
            x = self.use(self, x)
        self.kept.append(sum(not it.expired() for it in self.copies))
        y: torch.Tensor = self.head(self.norm(x))
        return y


class Copies(TorchDispatchMode):
    """Notes the copies of matrices in lower precision."""

    def __init__(self, model: Model) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found = model.copies

    def __torch_dispatch__(
        self, func: Any, _types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if (
            func is torch.ops.aten._to_copy.default
            and isinstance(args[0], nn.Parameter)
            and result.numel()
        ):
            reference: Any = StorageWeakRef
            self.found.append(reference(result.untyped_storage()))
        return result


def autocast() -> AbstractContextManager[None]:
    return torch.autocast("cpu", torch.bfloat16)


def backward_in_context(model: Model, tokens: torch.Tensor) -> torch.Tensor:
    """All is in the context."""
    with autocast():
        loss: torch.Tensor = model(tokens).float().square().mean()
        loss.backward()
    return loss


def step_in_context(model: Model, tokens: torch.Tensor) -> torch.Tensor:
    """The loss is in the context."""
    with autocast():
        loss: torch.Tensor = model(tokens).float().square().mean()
    loss.backward()
    return loss


def step_of_own_context(model: Model, tokens: torch.Tensor) -> torch.Tensor:
    """The context is the model's own, as accelerate has it."""
    with autocast():
        result = model(tokens)
    loss: torch.Tensor = result.float().square().mean()
    loss.backward()
    return loss


def two_calls_in_context(model: Model, tokens: torch.Tensor) -> torch.Tensor:
    """The second call finds the first one's copies."""
    with autocast():
        loss = (model(tokens).float() * model(tokens.flip(0)).float()).mean()
    loss.backward()
    return loss


CONTEXTS = [backward_in_context, step_in_context, step_of_own_context]


def run(
    make_model: Callable[[], Model],
    step: Callable[[Model, torch.Tensor], torch.Tensor] = step_in_context,
    before_step: Callable[[Model, int], None] = lambda *_: None,
) -> tuple[Any, Model]:
    torch.manual_seed(0)
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    seen: list[Any] = []
    for number in range(STEPS):
        before_step(model, number)
        generator = torch.Generator().manual_seed(number)
        loss = step(model, torch.randint(64, (4, TOKENS), generator=generator))
        seen += [loss.detach(), nn.utils.clip_grad_norm_(model.parameters(), 0.5)]
        optimizer.step()
        optimizer.zero_grad()
    return bits([*seen, model.state_dict()]), model


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs a program under umem, with less memory than it needs."""
    monkeypatch.setattr(stream_tuning, "_LEAST_GAIN", 1 << 30)  # the copies are small
    monkeypatch.setattr(stream_tuning, "_SLACK_SHARES", (1.0,))  # half of it would do for all

    @contextmanager
    def enter(more_bytes: int = -1, *, streams_weights: bool = False) -> Any:
        streams = Streams(more_bytes, streams_weights=streams_weights)
        with streaming(streams, monkeypatch):
            yield streams

    return enter


ALL = 4 * LAYERS + 1
"""Copies of the layers, and of `mix`, which autograd has saved."""


def watched(step: Any) -> Any:
    """The step, which notes the copies."""

    def watched_step(model: Model, tokens: torch.Tensor) -> torch.Tensor:
        with Copies(model):
            loss: torch.Tensor = step(model, tokens)
        return loss

    return watched_step


@pytest.mark.parametrize("kind", ["checkpoint", "reentrant"])
@pytest.mark.parametrize("step", CONTEXTS)
def test_at_the_loss_no_copies_are_left(streams: Any, kind: str, step: Any) -> None:
    stock, stock_model = run(lambda: Model(kind=kind), watched(step))
    with streams() as found:
        assert run(lambda: Model(kind=kind), step)[0] == stock
        streamed, model = run(lambda: Model(kind=kind), watched(step))
    assert streamed == stock
    assert found.trainings[0].counts.streamed
    assert stock_model.kept == STEPS * [ALL]
    assert model.kept[:2] == 2 * [ALL]  # before, and while it is watched
    assert model.kept[2:] == (STEPS - 2) * [1]


def test_copies_of_streamed_weights_are_freed(streams: Any) -> None:
    stock, _ = run(Model, watched(step_in_context))
    with streams(-(10**5), streams_weights=True) as found:
        streamed, model = run(Model, watched(step_in_context))
    assert streamed == stock
    assert found.weights.streamed.counts.fetched
    assert model.kept[-1] == 0  # the one that autograd has saved is copied


@pytest.mark.parametrize("number", range(LAYERS))
def test_uses_of_streamed_weights_are_seen(streams: Any, number: int) -> None:
    def use(model: Any, x: torch.Tensor) -> torch.Tensor:
        return linear(x, model.layers[number].up.weight)[..., :WIDTH]

    with streams(-(10**5), streams_weights=True), pytest.raises(PlanError, match="is used again"):
        run(Model, step_in_context, later(use))


def test_nothing_is_freed_that_has_room(streams: Any) -> None:
    stock, _ = run(Model, watched(step_in_context))
    with streams(10**9):
        streamed, model = run(Model, watched(step_in_context))
    assert streamed == stock
    assert model.kept == STEPS * [ALL]


@pytest.mark.parametrize("step", CONTEXTS)
def test_evaluations_between_steps_change_nothing(streams: Any, step: Any) -> None:
    def evaluate(model: Model, number: int) -> None:
        with torch.no_grad(), autocast():
            model(torch.full((2, TOKENS), number))

    stock, _ = run(Model, step, evaluate)
    with streams():
        streamed, model = run(Model, watched(step), evaluate)
    assert streamed == stock
    assert model.kept[-1] == 1


def test_what_autograd_has_saved_stays(streams: Any) -> None:
    stock, stock_model = run(lambda: Model(kind="plain"), watched(step_in_context))
    with streams():
        streamed, model = run(lambda: Model(kind="plain"), watched(step_in_context))
    assert streamed == stock
    assert model.kept[-1] > 1 < stock_model.kept[-1]


def calls_a_layer_again(model: Any, x: torch.Tensor) -> torch.Tensor:
    called: torch.Tensor = model.layers[1](x)
    return called


def uses_a_weight_past_its_layer(model: Any, x: torch.Tensor) -> torch.Tensor:
    return linear(x, model.layers[2].up.weight)[..., :WIDTH]


def uses_a_weight_that_no_layer_has(model: Any, x: torch.Tensor) -> torch.Tensor:
    return x @ model.mix


AGAIN = [calls_a_layer_again, uses_a_weight_past_its_layer, uses_a_weight_that_no_layer_has]


@pytest.mark.parametrize(("use", "freed"), [*zip(AGAIN, (4, 8, 0), strict=True)])
def test_copies_stay_until_a_weight_is_used_again(streams: Any, use: Use, freed: int) -> None:
    stock, stock_model = run(lambda: Model(use), watched(step_in_context))
    with streams() as found:
        streamed, model = run(lambda: Model(use), watched(step_in_context))
    assert streamed == stock
    assert found.trainings[0].counts.streamed
    assert model.kept[-1] == stock_model.kept[-1] - freed


def uses_the_head_twice(model: Any, x: torch.Tensor) -> torch.Tensor:
    return x + model.head(x)[..., :WIDTH]


def test_a_head_that_is_called_for_each_chunk_keeps_its_copy(streams: Any) -> None:
    stock, stock_model = run(lambda: Model(uses_the_head_twice), watched(step_in_context))
    with streams():
        streamed, model = run(lambda: Model(uses_the_head_twice), watched(step_in_context))
    assert streamed == stock
    assert model.kept[-1] == stock_model.kept[-1] - 4 * LAYERS


def test_copies_stay_where_a_context_has_several_calls(streams: Any) -> None:
    stock, _ = run(Model, watched(two_calls_in_context))
    with streams():
        streamed, model = run(Model, watched(two_calls_in_context))
    assert streamed == stock
    assert min(model.kept) >= ALL


def later(use: Use) -> Callable[[Model, int], None]:
    def before_step(model: Model, number: int) -> None:
        model.use = use if number == STEPS - 1 else None

    return before_step


@pytest.mark.parametrize("use", AGAIN)
def test_a_use_that_would_round_gradients_otherwise_is_refused(streams: Any, use: Use) -> None:
    with streams(), pytest.raises(PlanError, match="is used again"):
        run(Model, step_in_context, later(use))


def test_a_second_call_in_a_context_is_refused(streams: Any) -> None:
    calls = 0

    def step(model: Model, tokens: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return (two_calls_in_context if calls == STEPS else step_in_context)(model, tokens)

    with streams(), pytest.raises(PlanError, match="is used again"):
        run(Model, step)


def looks_at_a_weight(model: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return x + 0 * model.layers[1].up.weight.norm()


def uses_a_weight_in_float32(model: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", enabled=False):
        return linear(x.float(), model.layers[1].up.weight)[..., :WIDTH]


@pytest.mark.parametrize("use", [looks_at_a_weight, uses_a_weight_in_float32])
def test_uses_without_a_copy_of_autocast_do_not_count(streams: Any, use: Use) -> None:
    stock, _ = run(Model, step_in_context, later(use))
    with streams():
        streamed, model = run(Model, watched(step_in_context), later(use))
    assert streamed == stock
    assert model.kept[-1] == 1


def test_a_weight_that_is_used_before_its_layer_keeps_its_copy(streams: Any) -> None:
    """The first layer that begins to use the third one's weight."""

    def before_step(model: Model, number: int) -> None:
        if number == STEPS - 1:
            of_third: Any = model.layers[2]
            first: Any = model.layers[0]
            first.register_forward_hook(
                lambda _, __, x: x + linear(x, of_third.up.weight)[..., :WIDTH]
            )

    stock, _ = run(Model, step_in_context, before_step)
    with streams():
        streamed, model = run(Model, watched(step_in_context), before_step)
    assert streamed == stock
    assert model.kept[-2:] == [1, ALL - 4]  # all but the first layer's own


def test_another_stream_may_use_copies(streams: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for a stream of the program: a CPU has none."""
    listeners: list[Callable[[int], None]] = []

    def on_wait(_: LazyLanes, function: Callable[[int], None]) -> Callable[[], None]:
        listeners.append(function)
        return lambda: None

    def before_step(model: Model, number: int) -> None:
        if number == STEPS - 1:
            model.layers[2].register_forward_pre_hook(lambda *_: listeners[-1](1))
            model.layers[2].register_forward_pre_hook(lambda *_: listeners[-1](0))

    monkeypatch.setattr(LazyLanes, "on_wait", on_wait)
    stock, _ = run(Model, step_in_context)
    with streams():
        streamed, model = run(Model, watched(step_in_context), before_step)
    assert streamed == stock
    assert model.kept[-2:] == [1, ALL - 8]  # all but the first two layers'


def test_a_new_context_is_told_from_one_that_goes_on(streams: Any) -> None:
    """The same uses are exact in a context of their own."""

    def step(model: Model, tokens: torch.Tensor) -> torch.Tensor:
        with autocast():
            loss = model(tokens).float().square().mean()
        with autocast():
            again = linear(torch.ones(2, WIDTH), model.layers[0].up.weight)
        loss = loss + again.float().square().mean()
        loss.backward()
        return loss

    stock, _ = run(Model, step)
    with streams():
        streamed, model = run(Model, watched(step))
    assert streamed == stock
    assert model.kept[-1] == 1


def evaluated_in_context(model: Model, tokens: torch.Tensor) -> torch.Tensor:
    with autocast():
        loss: torch.Tensor = model(tokens).float().square().mean()
        with torch.no_grad():
            model(tokens)
        if model.use is not None:
            again = linear(torch.ones(2, WIDTH), model.layers[0].up.weight)
            loss = loss + again.float().square().mean()
    loss.backward()
    return loss


def test_an_evaluation_in_the_context_hides_no_use(streams: Any) -> None:
    stock, _ = run(Model, evaluated_in_context)
    with streams():
        streamed, model = run(Model, watched(evaluated_in_context))
        assert streamed == stock
        assert model.kept[-2] == 1  # before the evaluation
        with pytest.raises(PlanError, match="is used again"):
            run(Model, evaluated_in_context, later(lambda _, x: x))


@pytest.fixture
def group() -> Iterator[None]:
    """A process group of one rank."""
    store: Any = distributed
    distributed.init_process_group("gloo", store=store.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("step", CONTEXTS)
def test_copies_of_a_model_in_ddp_are_freed(streams: Any, step: Any) -> None:
    def wrapped_step() -> Any:
        wrapped: list[Any] = []

        def call(model: Model, tokens: torch.Tensor) -> torch.Tensor:
            if not wrapped:
                wrapped.append(DistributedDataParallel(model))
            with Copies(model):
                loss: torch.Tensor = step(wrapped[0], tokens)
            return loss

        return call

    stock, _ = run(Model, wrapped_step())
    with streams():
        streamed, model = run(Model, wrapped_step())
    assert streamed == stock
    assert model.kept[-1] == 1


@pytest.mark.parametrize("step_number", [1, STEPS - 2])
def test_an_error_does_not_end_the_training(
    streams: Any,
    step_number: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def before_step(_: Model, number: int) -> None:
        if number == step_number:
            monkeypatch.setattr(_Context, "_copy", fail)

    def fail(_: _Context) -> None:
        raise KeyError("on purpose")

    stock, _ = run(Model)
    with streams():
        streamed, model = run(Model, watched(step_in_context), before_step)
    assert streamed == stock
    assert model.kept[-1] == ALL
    assert caplog.text.count("not freed any more: KeyError: 'on purpose'") == 1
    assert {type(it) for it in model.parameters()} == {nn.Parameter}


def test_without_a_cache_there_is_nothing_to_free(streams: Any) -> None:
    def step(model: Model, tokens: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
            loss: torch.Tensor = model(tokens).float().square().mean()
        loss.backward()
        return loss

    stock, _ = run(Model, step)
    with streams():
        streamed, _ = run(Model, step, later(calls_a_layer_again))
        assert streamed != stock
        streamed, _ = run(Model, step)
    assert streamed == stock


class Casting(Net):
    """Layers under checkpoints, in a context that is the model's own."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with autocast():
            x = self.stem(x) * self.scale
            for layer in self.layers:
                again: Any = checkpoint(layer, x, use_reentrant=False)
                x = x + torch.tanh(again)
            y: torch.Tensor = self.head(self.norm(x))
        return y.float()


@pytest.mark.parametrize("streams_weights", [False, True])
@pytest.mark.parametrize("use", USES)
def test_no_use_sees_another_value(
    streams: Any,
    use: Callable[[Program], None],
    streams_weights: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    del streams  # its settings only
    room = Room(-(10**5))
    store = ActivationStore("cpu", LazyMover(), min_bytes=256)
    tuner = StreamTuner(load_hardware("h200-pcie"), room, room, store)
    caplog.set_level(logging.INFO, "umem")
    compare(use, 0.5, make_model=Casting, plain=2, tuner=tuner, streams_weights=streams_weights)
    assert "copies of weights are freed" in caplog.text
