"""Blocks whose calls run again in the backward pass: which may, and that no bit changes."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from measured_memory import SCALAR_BYTES, train_within
from repeated_blocks import (
    CHANGING_BUFFERS,
    NAMES,
    OTHERS,
    REPEATABLE,
    ROWS,
    WIDTH,
    Attending,
    Dropping,
    Failing,
    Layer,
    Net,
    check_failing_steps,
    check_same_step,
    managed,
    plan,
    run,
    step,
)
from torch import nn
from torch.nn.modules.module import register_module_forward_hook
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from umem.streaming.activations import repeatable
from umem.streaming.activations.recomputed import RecomputedCall, SecondRun
from umem.streaming.tune import planning
from umem.streaming.tune.remaking import Remaking


@pytest.mark.parametrize("autocast", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", [*REPEATABLE, *OTHERS])
def test_all_bits_are_stocks(kind: type[Layer], autocast: bool) -> None:
    stock = run(Net(kind), lambda _: None, autocast=autocast)
    model = Net(kind)
    activations = managed(model)
    assert run(model, plan(activations), autocast=autocast) == stock
    assert activations.proofs.keys() & set(NAMES) == (set(NAMES) if kind in REPEATABLE else set())


def test_nothing_is_proved_with_several_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("umem.streaming.activations.repeatable.is_distributed", lambda: True)
    model = Net(Layer)
    activations = managed(model)
    assert run(model, plan(activations)) == run(Net(Layer), lambda _: None)
    assert not activations.proofs


COUNTED = ("Linear", "aten.addmm.default", "linear")
"""What the three ways to count have counted."""


@contextmanager
def counting_modules(counts: Counter[str]) -> Iterator[None]:
    handle = register_module_forward_hook(lambda it, *_: counts.update([type(it).__name__]))
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def counting_operators(counts: Counter[str]) -> Iterator[None]:
    class Counting(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            counts.update([str(func)])
            return func(*args, **(kwargs or {}))

    with Counting():  # type: ignore[no-untyped-call]
        yield


@contextmanager
def counting_functions(counts: Counter[str]) -> Iterator[None]:
    class Counting(TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            counts.update([func.__name__])
            return func(*args, **(kwargs or {}))

    with Counting():
        yield


@pytest.mark.parametrize("counting", [counting_modules, counting_operators, counting_functions])
def test_nothing_runs_twice_where_the_program_sees_every_call(counting: Any) -> None:
    def counts_of(begin: Callable[[int], None], model: nn.Module) -> Counter[str]:
        counts: Counter[str] = Counter()
        with counting(counts):
            for number in range(3):
                begin(number)
                step(model, number)
        return counts

    model = Net(Layer)
    activations = managed(model)
    found, stock = counts_of(plan(activations), model), counts_of(lambda _: None, Net(Layer))
    assert not activations.proofs
    assert [found[it] for it in COUNTED] == [stock[it] for it in COUNTED]


@pytest.mark.parametrize("counting", [counting_modules, counting_operators, counting_functions])
def test_a_proved_block_runs_once_where_the_program_begins_to_see(counting: Any) -> None:
    model = Net(Layer)
    activations = managed(model)
    begin, counts = plan(activations), Counter[str]()
    for number in range(3):
        begin(number)
        with counting(counts) if number == 2 else nullcontext():
            step(model, number)
    assert activations.proofs
    stock = Counter[str]()
    with counting(stock):
        step(Net(Layer), 2)
    assert [counts[it] for it in COUNTED] == [stock[it] for it in COUNTED]


def test_the_mode_of_a_default_device_sees_nothing() -> None:
    model = Net(Layer)
    activations = managed(model)
    with torch.device("cpu"):
        assert run(model, plan(activations)) == run(Net(Layer), lambda _: None)
    assert set(NAMES) <= activations.proofs.keys()


def test_a_block_may_be_called_several_times() -> None:
    order = (0, 1, 0, 2, 1)
    stock = run(Net(Dropping, order), lambda _: None)
    model = Net(Dropping, order)
    assert run(model, plan(managed(model))) == stock


@pytest.mark.parametrize("options", [{"retain_graph": True}, {"create_graph": True}])
def test_graphs_that_are_used_again(options: dict[str, bool]) -> None:
    stock = run(Net(Dropping), lambda _: None, **options)
    model = Net(Dropping)
    assert run(model, plan(managed(model)), **options) == stock


def test_second_derivatives() -> None:
    def seen(model: nn.Module) -> list[bytes]:
        x = torch.ones(ROWS, WIDTH, requires_grad=True)
        (slope,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        slope.square().sum().backward()
        found = [it.grad for it in model.parameters() if it.grad is not None]
        model.zero_grad()
        return [it.numpy().tobytes() for it in found]

    stock = Net(Layer)
    model = Net(Layer)
    begin = plan(managed(model))
    for number in range(2):
        begin(number)
        assert step(model, number)
        assert step(stock, number)
    assert seen(model) == seen(stock)


def test_what_is_freed_leaves_out_arguments_results_and_weights() -> None:
    model = Net(Layer)
    activations = managed(model)
    plan(activations)(0)
    step(model, 0)
    hidden, wide, row = (4 * ROWS * it for it in (WIDTH, 2 * WIDTH, 1))
    # The norm's result, mean and deviation, and what goes into the activation function and out.
    assert {activations.proofs[it].freed_bytes for it in NAMES} == {hidden + 2 * row + 2 * wide}


def test_the_graph_alone_holds_what_is_saved() -> None:
    class Noting(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.stem(x)
            for layer in self.layers:
                x = layer(x)
                seen.append(weakref.ref(x.untyped_storage()))
            return self.head(x)

    seen: list[weakref.ref[torch.UntypedStorage]] = []
    model = Noting(Layer)
    begin = plan(managed(model))
    gc.collect()
    gc.disable()
    try:
        for number in range(3):
            begin(number)
            step(model, number)
            assert not any(it() for it in seen)
    finally:
        gc.enable()


def test_an_argument_that_changes_afterwards_is_an_error_of_autograd() -> None:
    class Changing(Net):
        changes = False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.stem(x)
            y = self.layers[0](x)
            if self.changes:
                x.add_(1.0)
            return self.head(self.layers[1](y))

    class Scaled(Layer):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x * 2.0)

    model = Changing(Scaled)
    begin = plan(managed(model))
    for number in range(2):
        begin(number)
        step(model, number)
    model.changes = True
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        step(model, 2)
    model.changes = False
    model.zero_grad()
    stock = Changing(Scaled)
    assert step(model, 3)[:-2] == step(stock, 3)[:-2]


def test_other_modes_and_hooks_are_copied_as_before() -> None:
    model, stock = Net(Dropping), Net(Dropping)
    begin = plan(activations := managed(model))

    for number in range(2):
        begin(number)
        check_same_step(model, stock, number)
    assert activations.statistics.tensors_out == 0
    heard: list[object] = []
    handle = model.layers[1].up.register_forward_hook(lambda *it: heard.append(it))  # type: ignore[union-attr]
    check_same_step(model, stock, 2)
    assert len(heard) == 1
    assert activations.statistics.tensors_out > 0
    handle.remove()
    model.layers[2].eval()
    stock.layers[2].eval()
    check_same_step(model, stock, 3)


def test_a_call_that_fails_leaves_nothing_behind() -> None:
    model = Net(Failing)
    check_failing_steps(model, plan(managed(model)))


@pytest.mark.parametrize("kind", [Layer, Dropping, Attending, *CHANGING_BUFFERS])
def test_arguments_leave_and_come_back(kind: type[Layer]) -> None:
    class Skipping(Net):
        """The first result is used again by the head, as in a U-Net."""

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            first = self.stem(x)
            return self.head(super().forward(x).sum() + first)

    stock = run(Skipping(kind), lambda _: None)
    model = Skipping(kind)
    activations = managed(model)
    begin = plan(activations)

    def begin_with_copies(number: int) -> None:
        begin(number)
        if number == 1:
            again = dict.fromkeys(NAMES)
            activations.set_plan(dict.fromkeys(NAMES[:2]), 1, is_measuring=False, recomputed=again)

    assert run(model, begin_with_copies) == stock
    # The argument of both blocks, in three steps.
    assert activations.statistics.tensors_out >= 2 * 3


def test_an_argument_that_has_left_is_held_by_nothing() -> None:
    class Noting(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.stem(x)
            for layer in self.layers:
                arguments.append(weakref.ref(x.untyped_storage()))
                x = 0.9 * layer(x)
            return self.head(x)

    arguments: list[weakref.ref[torch.UntypedStorage]] = []
    model = Noting(Layer)
    activations = managed(model)
    plan(activations)(0)
    step(model, 0)
    again = dict.fromkeys(NAMES)
    activations.set_plan(dict.fromkeys(NAMES[:2]), 1, is_measuring=False, recomputed=again)
    arguments.clear()
    loss = model(torch.ones(ROWS, WIDTH)).sum()
    assert [it() is None for it in arguments[:3]] == [True, True, False]
    loss.backward()


def test_what_several_passes_save_before_a_backward_pass_adds_up() -> None:
    model = Net(Layer)
    activations = managed(model)
    plan(activations)(0)
    step(model, 0)
    x = torch.ones(ROWS, WIDTH)
    found = []
    for passes in (1, 3, 1):
        activations.set_plan({}, 1, is_measuring=True)
        activations.begin_step()
        torch.stack([model(x).sum() for _ in range(passes)]).sum().backward()
        model.zero_grad()
        found.append(activations.saved_bytes)
    assert found[1] == {name: 3 * size_bytes for name, size_bytes in found[0].items()}
    assert found[2] == found[0]


def test_an_argument_that_comes_twice_does_so_again() -> None:
    class Asking(Layer):
        """As torch's attention does."""

        def forward(self, x: torch.Tensor, *, other: torch.Tensor | None = None) -> torch.Tensor:
            return super().forward(x) if other is x else torch.sin(x) * torch.cos(x)

    class Twice(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.stem(x)
            for layer in self.layers:
                x = 0.9 * layer(x, other=x)
            return self.head(x)

    stock = run(Twice(Asking), lambda _: None)
    model = Twice(Asking)
    activations = managed(model)
    assert run(model, plan(activations)) == stock
    assert set(NAMES) <= activations.proofs.keys()


def _translate(begin: Callable[[int], None], model: Any, *, twice: bool) -> list[bytes]:
    """Gradients, and the keys and values that blocks have put into caches, of three steps.

    With `twice`, each but the first goes on from the cache that the pass before has filled.
    """
    found: list[torch.Tensor] = []
    for number in range(3):
        begin(number)
        torch.manual_seed(number)
        source, target = torch.randint(2, 32, (2, 2, 6)).unbind()
        model.zero_grad()
        output = model(input_ids=source, decoder_input_ids=target)
        if twice and number:
            past = output.past_key_values
            output = model(input_ids=source, decoder_input_ids=target, past_key_values=past)
        output.logits.square().mean().backward()
        caches = output.past_key_values.self_attention_cache, output.past_key_values
        layers = (*caches[0].layers, *caches[1].cross_attention_cache.layers)
        found += [it for layer in layers for it in (layer.keys, layer.values)]
        found += [it.grad for it in model.parameters() if it.grad is not None]
    return [it.detach().numpy().tobytes() for it in found]


@pytest.mark.parametrize("twice", [False, True], ids=["filled", "filled already"])
def test_blocks_that_fill_a_cache_run_twice(twice: bool) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.T5Config(
        **dict.fromkeys(("d_model", "d_ff", "vocab_size"), 32),
        **dict.fromkeys(("num_layers", "num_heads"), 2),
        d_kv=16,
    )

    def made() -> Any:
        torch.manual_seed(0)
        return transformers.T5ForConditionalGeneration(config).train()

    model = made()
    activations = managed(model)
    found = _translate(plan(activations), model, twice=twice)
    assert found == _translate(lambda _: None, made(), twice=twice)
    names = {f"{side}.block.{number}" for side in ("encoder", "decoder") for number in range(2)}
    assert names <= activations.proofs.keys()


def test_a_block_that_reads_what_others_have_put_into_a_cache_does_not_run_twice() -> None:
    transformers = pytest.importorskip("transformers")

    class Reading(Layer):
        def forward(self, x: torch.Tensor, cache: Any = None) -> torch.Tensor:
            if len(cache.layers) > 1:
                x = x + cache.layers[0].keys.view_as(x)
            y = super().forward(x)
            cache.update(y[None, None], y[None, None], len(cache.layers))
            return y

    class Cached(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            cache, x = transformers.DynamicCache(), self.stem(x)
            for layer in self.layers:
                x = layer(x, cache)
            return self.head(x)

    model = Cached(Reading)
    activations = managed(model)
    assert run(model, plan(activations)) == run(Cached(Reading), lambda _: None)
    assert activations.proofs.keys() & set(NAMES) == set(NAMES[:2])


@pytest.mark.parametrize("percent", [45, 60, 75])
def test_blocks_that_run_twice_take_as_much_memory_as_planned(
    percent: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The meter is a mode that sees each operator; otherwise nothing would run twice under one.
    monkeypatch.setattr(repeatable, "every_call_is_seen", lambda: False)
    monkeypatch.setattr(planning, "_SLACK_SHARES", (1.0,))
    monkeypatch.setattr(Remaking, "begins", lambda *_: False)

    def batch(number: int) -> torch.Tensor:
        return torch.randn(512, WIDTH, generator=torch.Generator().manual_seed(number))

    def make() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), *(Layer() for _ in range(8)))

    stock_bytes, expected, _ = train_within(make(), None, batch, 16)
    limit_bytes = percent * stock_bytes // 100
    most_bytes, weights, status = train_within(make(), limit_bytes, batch, 16, may_recompute=True)
    assert weights == expected
    assert status is not None
    assert status.plan is not None
    assert status.recomputed_blocks > 0
    assert most_bytes <= status.plan.peak_bytes <= limit_bytes
    assert status.plan.peak_bytes - most_bytes < SCALAR_BYTES


@pytest.mark.parametrize(("rows", "reason"), [((4, 2), "in place of"), ((2, 0), "fewer tensors")])
def test_a_second_run_that_saves_something_else_is_an_error(
    rows: tuple[int, int], reason: str
) -> None:
    """No proof sees what a program first changes behind it."""
    left = list(rows)

    class Changing(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            count = left.pop(0)
            return super().forward(x[:count]) if count else x

    module, x = Changing(WIDTH, WIDTH), torch.ones(ROWS, WIDTH, requires_grad=True)
    call = RecomputedCall(SecondRun(module, (x,), {}, (), lambda: None))
    call.begin()
    loss = module(x).sum()
    call.end()
    with pytest.raises(RuntimeError, match=rf"Changing.*{reason}.*recompute: never"):
        loss.backward()
