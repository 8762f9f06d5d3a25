"""The program's own checkpoints, which are left out where a plan says so: no bit changes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest
import torch
from pairs import pairs
from repeated_blocks import (
    CHANGING_BUFFERS,
    LAYERS,
    NAMES,
    OTHERS,
    REPEATABLE,
    ROWS,
    Attending,
    Checkpointed,
    Dropping,
    Failing,
    InPlaceHead,
    Layer,
    Net,
    check_failing_steps,
    check_same_step,
    managed,
    run,
    step,
)
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from umem.streaming.activations import CopiedActivations, program_checkpoints
from umem.streaming.activations.copied_activations import _Pass

Call = Callable[..., torch.Tensor]


def around_the_block(layer: nn.Module, *args: Any, **options: Any) -> torch.Tensor:
    return checkpoint(layer, *args, use_reentrant=False, **options)


def around_its_call(layer: nn.Module, *args: Any, **options: Any) -> torch.Tensor:
    return checkpoint(partial(layer.__call__, **options), *args, use_reentrant=False)


def around_another_function(layer: nn.Module, *args: Any, **options: Any) -> torch.Tensor:
    return checkpoint(lambda *args: layer(*args, **options), *args, use_reentrant=False)


class Wrapped(Net):
    """A model that calls its layers in checkpoints."""

    def __init__(self, kind: type[Layer], call: Call) -> None:
        super().__init__(kind)
        self.call = call

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        options = {}
        if isinstance(self.layers[0], Attending):
            options["mask"] = torch.ones(ROWS, ROWS).tril().bool()
        for number in self.order:
            x = 0.9 * self.call(self.layers[number], x, **options)
        return self.head(x)


class Within(Layer):
    """A layer with the checkpoint in its call, as transformers has it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


class DroppingWithin(Layer):
    """Another one, whose checkpoint may not restore the random numbers."""

    restores = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def call(x: torch.Tensor) -> torch.Tensor:
            return nn.functional.dropout(super(DroppingWithin, self).forward(x), 0.3, self.training)

        return checkpoint(call, x, use_reentrant=False, preserve_rng_state=self.restores)


class Selective(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        contexts = partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default])
        return checkpoint(super().forward, x, use_reentrant=False, context_fn=contexts)


TALLY = threading.local()


class Counted(nn.Module):
    """Counts its calls where a proof does not look."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        TALLY.calls += 1
        return x * 1.0


def plan(activations: CopiedActivations) -> Callable[[int], None]:
    """Watch the first step; then leave the checkpoints of all proved blocks out."""

    def begin(number: int) -> None:
        if number < 2:
            proofs = activations.proofs if number else {}
            chosen = [name for name, it in proofs.items() if it.checkpointed_bytes]
            activations.set_plan({}, 1, is_measuring=number == 0, left_out=chosen)
        activations.begin_step()

    return begin


def left_out(activations: CopiedActivations) -> set[str]:
    return {name for name, it in activations.proofs.items() if it.checkpointed_bytes}


def check(make: Callable[[], nn.Module], without: Iterable[str] = (), **options: bool) -> None:
    """All bits are stock's, and the checkpoints of these blocks are left out."""
    stock = run(make(), lambda _: None, **options)
    model = make()
    activations = managed(model)
    assert run(model, plan(activations), **options) == stock
    assert left_out(activations) == set(without)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "call", "autocast"),
    pairs(
        # A checkpoint's input may not change in place.
        [*REPEATABLE, *(it for it in OTHERS if it is not InPlaceHead)],
        [around_the_block, around_its_call],
        [False, True],
    ),
)
def test_all_bits_are_stocks(kind: type[Layer], call: Call, autocast: bool) -> None:
    # A second call changes buffers once more, and a result that is saved without the checkpoint
    # alone may change in place.
    may = kind in REPEATABLE and kind not in (Checkpointed, *CHANGING_BUFFERS)
    check(lambda: Wrapped(kind, call), NAMES if may else (), autocast=autocast)


@pytest.mark.parametrize("kind", [Within, DroppingWithin, Checkpointed])
def test_checkpoints_within_a_block(kind: type[Layer]) -> None:
    check(lambda: Net(kind), NAMES)


def test_other_functions_may_do_more() -> None:
    check(lambda: Wrapped(Dropping, around_another_function))


def test_one_that_does_not_restore_random_numbers_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DroppingWithin, "restores", False)
    check(lambda: Net(DroppingWithin))


class Rectified(Layer):
    """Autograd saves the result."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).relu()


def test_results_may_change_in_place() -> None:
    check(lambda: Wrapped(Rectified, lambda *given: around_the_block(*given).mul_(1.5)))


def test_selective_ones_stay() -> None:
    check(lambda: Net(Selective))


@pytest.mark.parametrize("call", [around_the_block, None])
def test_nothing_is_computed_again(call: Call | None) -> None:
    model = Net(Within) if call is None else Wrapped(Layer, call)
    for layer in model.layers:
        layer.norm = Counted()
    begin = plan(managed(model))
    counts = []
    for number in range(3):
        begin(number)
        TALLY.calls = 0
        step(model, number)
        counts.append(TALLY.calls)
    assert counts[1:] == [LAYERS, LAYERS]


def test_bytes_are_those_that_the_checkpoint_frees() -> None:
    plain, around, within = Net(Layer), Wrapped(Layer, around_the_block), Net(Within)
    found = []
    for model in (plain, around, within):
        activations = managed(model)
        plan(activations)(0)
        step(model, 0)
        found.append({name: activations.proofs[name] for name in NAMES})
    for name in NAMES:
        freed_bytes = found[0][name].freed_bytes
        assert freed_bytes > 0
        assert found[1][name].freed_bytes == 0
        assert found[1][name].checkpointed_bytes == freed_bytes
        assert found[2][name].freed_bytes + found[2][name].checkpointed_bytes == freed_bytes


def test_another_call_than_the_proved_one_keeps_its_checkpoint() -> None:
    model, stock = Wrapped(Dropping, around_the_block), Wrapped(Dropping, around_the_block)
    begin = plan(managed(model))

    for number in range(2):
        begin(number)
        check_same_step(model, stock, number)
    calls: list[object] = []
    handles = []
    for net in (model, stock):
        layer: Any = net.layers[1]
        handles.append(layer.up.register_forward_hook(lambda *seen: calls.append(seen)))
    check_same_step(model, stock, 2)
    assert len(calls) == 4  # twice each
    for handle in handles:
        handle.remove()
    model.layers[2].eval()
    stock.layers[2].eval()
    check_same_step(model, stock, 3)


def test_a_call_that_fails_leaves_nothing_behind() -> None:
    model = Wrapped(Failing, around_the_block)
    check_failing_steps(model, plan(managed(model)))


def test_copies_of_what_is_saved_without_a_checkpoint() -> None:
    model, stock = Wrapped(Dropping, around_the_block), Wrapped(Dropping, around_the_block)
    activations = managed(model)
    begin = plan(activations)

    def begin_and_copy(number: int) -> None:
        begin(number)
        if number == 1:
            activations.set_plan(dict.fromkeys(NAMES[:2]), 1, is_measuring=False, left_out=NAMES)

    assert run(model, begin_and_copy) == run(stock, lambda _: None)
    assert activations.statistics.tensors_out > 2 * 2 * 3


def test_an_error_of_the_choice_does_not_reach_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> bool:
        raise LookupError("choice")

    model, stock = Wrapped(Dropping, around_the_block), Wrapped(Dropping, around_the_block)
    activations = managed(model)
    errors: list[Exception] = []
    activations._errors.on_error = errors.append
    begin = plan(activations)
    for number in range(2):
        begin(number)
        check_same_step(model, stock, number)
    asked = program_checkpoints.ProgramCheckpoint(model.layers[0], True, False, ())
    activations._running.forward = _Pass(activations._store, 1)
    monkeypatch.setattr(activations, "_may_run_again", fail)
    assert not activations.leaves_out(asked)
    assert [str(it) for it in errors] == ["choice"]


def test_checkpoints_stay_where_a_model_has_recurrent_layers_that_drop() -> None:
    # Each backward pass through a checkpoint has the dropout of cuDNN begin anew.
    class Ending(Wrapped):
        def __init__(self) -> None:
            super().__init__(Dropping, around_the_block)
            self.cells = nn.LSTM(4, 4, 2, dropout=0.3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.cells(super().forward(x))[0]

    check(Ending)
