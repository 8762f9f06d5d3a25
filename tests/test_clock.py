"""The clock of a model's passes: who hears what, in which order, and by how many hooks."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from faults import let_out
from lazy_lanes import HostStateMemory, LazyLanes
from torch import nn
from torch.utils.checkpoint import checkpoint

from umem.capture.live import find_blocks
from umem.offloading import ActivationStore
from umem.runtime.torch_hooks.clock import Hearing, Listener, Order
from umem.runtime.torch_hooks.hidden import hidden_in
from umem.runtime.torch_hooks.passes import Pass, is_forward_pass, running_pass
from umem.streaming import StreamedTraining
from umem.streaming.activations import CopiedActivations
from umem.streaming.step import TemporaryPlan

Moment = tuple[str, str, str]
"""Who hears it, what, and of which block."""


class Log(Listener):
    """Notes what it hears."""

    def __init__(self, name: str, heard: list[Moment]) -> None:
        self.name = name
        self.heard = heard
        self.passes: list[Pass] = []

    def pass_begins(self, now: Pass, *_: object) -> None:
        self.heard.append((self.name, "begins", ""))
        self.passes.append(now)

    def block_begins(self, name: str, now: Pass, *_: object) -> None:
        self.heard.append((self.name, "begins", name))
        self.passes.append(now)

    def block_ends(self, name: str, _now: Pass, _output: Any, *, failed: bool) -> None:
        self.heard.append((self.name, "fails" if failed else "ends", name))

    def block_reached(self, name: str) -> None:
        self.heard.append((self.name, "reached", name))

    def pass_ends(self, _now: Pass, _output: Any, *, failed: bool) -> None:
        self.heard.append((self.name, "fails" if failed else "ends", ""))


class Model(nn.Module):
    """Two blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.fails = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
            if self.fails:
                raise ValueError("stop")
        return x


def blocks_of(model: Model) -> dict[str, nn.Module]:
    return {f"layer {number}": it for number, it in enumerate(model.layers)}


def run(model: nn.Module) -> None:
    model(torch.ones(1, 4)).sum().backward()


@pytest.mark.parametrize("orders", [list(Order), list(Order)[::-1]])
def test_listeners_hear_in_the_order_of_the_table(orders: list[Order]) -> None:
    model, heard = Model(), list[Moment]()
    for order in orders:
        Hearing(Log(order.name, heard), order, let_out, model, blocks_of(model))
    run(model)
    moments = [("begins", "")]
    for name in ("layer 0", "layer 1"):
        moments += [("begins", name), ("ends", name)]
    moments += [("ends", ""), ("reached", "layer 1"), ("reached", "layer 0")]
    assert heard == [(it.name, *moment) for moment in moments for it in Order]


def test_listeners_of_one_place_hear_in_the_order_in_which_they_came() -> None:
    model, heard = Model(), list[Moment]()
    for name in ("b", "a", "c"):
        Hearing(Log(name, heard), Order.STATE, let_out, model)
    model(torch.ones(1, 4))
    assert [it[0] for it in heard] == ["b", "a", "c"] * 2


def test_a_module_has_one_hook_at_each_end() -> None:
    model = Model()
    hearings = [
        Hearing(Log(order.name, []), order, let_out, model, blocks_of(model)) for order in Order
    ]
    for module in (model, *model.layers):
        assert hidden_in(module._forward_pre_hooks) == 1
        assert hidden_in(module._forward_hooks) == 1
    for hearing in hearings:
        hearing.close()
    for module in (model, *model.layers):
        assert not hidden_in(module._forward_pre_hooks)
        assert not hidden_in(module._forward_hooks)


def test_a_managed_model_has_one_hook_at_each_end() -> None:
    """With state, activations and temporary slots at work."""
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 8)).sum().backward()
    optimizer.step()
    training = StreamedTraining(model, optimizer, LazyLanes(model), HostStateMemory())
    blocks = find_blocks(model)
    activations = CopiedActivations(model, blocks, ActivationStore("cpu", min_bytes=0), let_out)
    activations.set_plan({blocks[0].name: None}, 1, is_measuring=False)
    training.temporary.set_plan(TemporaryPlan((blocks[0].name,), (None,)))
    for module in (model, *(it.module for it in blocks)):
        assert hidden_in(module._forward_pre_hooks) == 1
        assert hidden_in(module._forward_hooks) == 1
    activations.close()
    training.close()


def test_an_error_is_its_listeners_alone() -> None:
    class Faulty(Listener):
        def pass_begins(self, *_: object) -> None:
            raise ValueError("pass")

        def block_begins(self, *_: object) -> None:
            raise ValueError("begins")

        def block_ends(self, *_: object, **_named: object) -> None:
            raise ValueError("ends")

        def block_reached(self, *_: object) -> None:
            raise ValueError("reached")

        def pass_ends(self, *_: object, **_named: object) -> None:
            raise ValueError("pass ends")

    model, heard, errors = Model(), list[Moment](), list[str]()
    Hearing(Faulty(), Order.STATE, lambda it: errors.append(str(it)), model, blocks_of(model))
    Hearing(Log("log", heard), Order.METER, let_out, model, blocks_of(model))
    run(model)
    assert errors == ["pass", *["begins", "ends"] * 2, "pass ends", "reached", "reached"]
    assert len(heard) == 8


def test_what_a_listener_raises_in_the_end_reaches_the_program() -> None:
    class Strict(Listener):
        def pass_begins(self, *_: object) -> None:
            raise ValueError("asked for")

    model = Model()
    Hearing(Strict(), Order.STATE, let_out, model)
    with pytest.raises(ValueError, match="asked for"):
        model(torch.ones(1, 4))


def test_the_end_of_a_call_that_fails_is_told() -> None:
    model, heard = Model(), list[Moment]()
    Hearing(Log("log", heard), Order.STATE, let_out, model, blocks_of(model))
    model.fails = True
    with pytest.raises(ValueError, match="stop"):
        model(torch.ones(1, 4))
    assert heard[-1] == ("log", "fails", "")


def test_one_that_is_closed_in_a_moment_hears_it_no_more() -> None:
    model, heard = Model(), list[Moment]()

    class Closing(Listener):
        def pass_begins(self, *_: object) -> None:
            later.close()

    Hearing(Closing(), Order.STATE, let_out, model)
    later = Hearing(Log("log", heard), Order.METER, let_out, model, blocks_of(model))
    run(model)
    assert heard == []


def test_blocks_can_be_others() -> None:
    model, heard = Model(), list[Moment]()
    named = blocks_of(model)
    hearing = Hearing(Log("log", heard), Order.STATE, let_out, model, {"first": model.layers[0]})
    hearing.set_blocks({"last": named["layer 1"]})
    model(torch.ones(1, 4))
    assert [it[2] for it in heard] == ["", "last", "last", ""]


def test_blocks_that_are_compiled_in_place_are_hooked_around() -> None:
    model, heard = Model(), list[Moment]()
    hearing = Hearing(Log("log", heard), Order.STATE, let_out, model, blocks_of(model))
    model.layers[0].compile(backend="eager")
    model(torch.ones(1, 4))
    assert ("log", "begins", "layer 0") not in heard
    hearing.hook_compiled()
    model(torch.ones(1, 4))
    assert ("log", "begins", "layer 0") in heard


def test_a_model_takes_its_listeners_along() -> None:
    model = Model()
    log = Log("log", [])
    hearing = Hearing(log, Order.STATE, let_out, model, blocks_of(model))
    gone = weakref.ref(log)
    gc.collect()
    gc.disable()
    try:
        del log, model
        assert gone() is None
    finally:
        gc.enable()
    hearing.close()


def test_the_kinds_of_passes() -> None:
    class Checkpointed(Model):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(self.layers[0], x, use_reentrant=False)

    model, log = Checkpointed(), Log("log", [])
    Hearing(log, Order.STATE, let_out, model, {"layer": model.layers[0]})
    run(model)
    with torch.no_grad():
        model(torch.ones(1, 4))
    torch.func.grad(lambda x: model.layers[0](x).sum())(torch.ones(1, 4))
    seen = [(it.is_training, it.has_gradients, it.is_second, it.is_transform) for it in log.passes]
    assert seen == [
        (True, True, False, False),  # the model
        (True, True, False, False),
        (False, True, True, False),  # the checkpoint's second pass
        (False, False, False, False),  # an evaluation
        (False, False, False, False),
        (False, True, False, True),
    ]
    assert running_pass().is_training
    assert is_forward_pass()
