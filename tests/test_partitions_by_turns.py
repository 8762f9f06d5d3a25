"""Optimizers whose parameters come by turns, as DeepSpeed's ZeRO puts its partitions into them.

`Zero3` does what DeepSpeed 0.19 does with one process (``runtime/zero/stage3.py``). The model's
parameters have memory only while a layer uses them. A float32 partition of each sub-group, which no
module holds, is alone in the optimizer's groups for one call of ``step()``, and is copied to the
model's weights right behind it. tests/test_deepspeed.py runs DeepSpeed itself where it is
installed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from found_trainings import Streams, streaming
from lazy_lanes import HostStateMemory, LazyLanes
from streamed_programs import bits
from torch import nn

from umem.capture.live import find_blocks
from umem.runtime.model_parts import main_chain
from umem.streaming import StreamedTraining
from umem.streaming.stage import BundleState
from umem.streaming.step import UnitNames, unit_names
from umem.streaming.tune import TuningState

WIDTH, LAYERS, STEPS = 64, 4, 9

LAYER = 4 * (WIDTH * WIDTH + WIDTH)
"""Bytes of a layer in float32."""

STATE = 2 * LAYERS * LAYER
"""Two moments of all."""

ROOM_FOR_SOME, ROOM_FOR_ALL = 125_000, 10**6


class Net(nn.Module):
    """A stack of layers in bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Linear(WIDTH, WIDTH, dtype=torch.bfloat16) for _ in range(LAYERS)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x


def in_a_group(optimizer: Any, number: int, flat: nn.Parameter) -> None:
    """The third stage."""
    optimizer.param_groups[number]["params"] = [flat]
    optimizer.step()
    optimizer.param_groups[number]["params"] = []


def in_a_group_of_its_own(optimizer: Any, number: int, flat: nn.Parameter) -> None:
    """The first and second stage."""
    groups = optimizer.param_groups
    optimizer.param_groups = [{**groups[number], "params": [flat]}]
    optimizer.step()
    optimizer.param_groups = groups


class Zero3:
    """One run of a training.

    Parameters
    ----------
    sub_groups
        Numbers of layers; each sub-group is of the optimizer's group of the same place, or of the
        last.
    groups
        Number of the optimizer's groups.
    step
        Has the optimizer update one partition.
    """

    def __init__(
        self,
        sub_groups: list[list[int]],
        groups: int = 1,
        step: Callable[[Any, int, nn.Parameter], None] = in_a_group,
    ) -> None:
        torch.manual_seed(0)
        self.model = Net()
        self._step = step
        self._parts: list[list[nn.Parameter]] = [
            [it for number in some for it in self.model.layers[number].parameters()]
            for some in sub_groups
        ]
        self.weights = [torch.cat([it.detach().flatten() for it in some]) for some in self._parts]
        self.masters = [nn.Parameter(weights.float()) for weights in self.weights]
        self._views: dict[nn.Parameter, torch.Tensor] = {}
        self._gradients: dict[nn.Parameter, torch.Tensor] = {}
        for weights, some in zip(self.weights, self._parts, strict=True):
            pieces = weights.split([it.numel() for it in some])
            self._views |= {it: piece.view_as(it) for it, piece in zip(some, pieces, strict=True)}
        self._numbers = [min(place, groups - 1) for place in range(len(self.masters))]
        members: list[dict[str, Any]] = [
            {"params": [], "weight_decay": decay} for decay in (0.1, 0.0)[:groups]
        ]
        for flat, number in zip(self.masters, self._numbers, strict=True):
            members[number]["params"].append(flat)
        self.optimizer = torch.optim.AdamW(members, lr=1e-2)
        if step is in_a_group:
            for group in self.optimizer.param_groups:
                group["params"] = []
        for layer in self.model.layers:
            layer.register_forward_pre_hook(lambda module, _: self._gather(module))
            layer.register_forward_hook(lambda module, *_: self._free(module))
            layer.register_full_backward_pre_hook(lambda module, _: self._gather(module))
            for it in layer.parameters():
                it.register_post_accumulate_grad_hook(self._take_gradient)
            self._free(layer)
        self.losses: list[torch.Tensor] = []
        self.steps = 0
        self.fragments: list[torch.Tensor] | None = None
        """Views of the state, as DeepSpeed has one of each parameter's part; None without."""
        self.uses_fragments_every = 1
        """Steps from one use of them to the next."""

    def _gather(self, layer: nn.Module) -> None:
        for it in layer.parameters():
            it.data = self._views[it].clone()

    def _free(self, layer: nn.Module) -> None:
        for it in layer.parameters():
            it.data = torch.empty(0, dtype=it.dtype)

    def _take_gradient(self, it: torch.Tensor) -> None:
        assert isinstance(it, nn.Parameter)
        assert it.grad is not None
        self._gradients[it] = it.grad
        it.grad, it.data = None, torch.empty(0, dtype=it.dtype)

    def train(self, steps: int = STEPS) -> None:
        """Some steps."""
        for _ in range(steps):
            self.steps += 1
            seed = torch.Generator().manual_seed(len(self.losses))
            batch = torch.randn(8, WIDTH, generator=seed).bfloat16().requires_grad_()
            loss = self.model(batch).float().square().mean()
            self.losses.append(loss.detach().clone())
            loss.backward()
            for number, flat, weights, some in zip(
                self._numbers, self.masters, self.weights, self._parts, strict=True
            ):
                flat.grad = torch.cat([self._gradients.pop(it).flatten() for it in some]).float()
                flat.grad.mul_(0.5)
                self._step(self.optimizer, number, flat)
                weights.copy_(flat.data)
                flat.grad = None
            self._use_fragments()

    def _use_fragments(self) -> None:
        if self.fragments is None:
            return
        if not self.fragments:
            moments = [self.optimizer.state[it]["exp_avg"] for it in self.masters]
            self.fragments = [it[:WIDTH] for it in moments] + [it[WIDTH:] for it in moments]
        if self.steps % self.uses_fragments_every == 0:
            self.losses += [it.sum() for it in self.fragments]
            if len(self.losses) % 4 == 0:
                self.fragments[0].mul_(0.5)

    def found(self) -> Any:
        """All that can be compared with another run."""
        state = [dict(self.optimizer.state[it]) for it in self.masters]
        return bits([self.losses, self.weights, [it.detach() for it in self.masters], state])


PROGRAMS: dict[str, Callable[[], Zero3]] = {
    "one sub-group": lambda: Zero3([[0, 1, 2, 3]]),
    "sub-groups": lambda: Zero3([[0], [1, 2], [3]]),
    "sub-groups of two groups": lambda: Zero3([[0], [1, 2], [3]], groups=2),
    "groups of their own": lambda: Zero3([[0, 1], [2, 3]], 2, in_a_group_of_its_own),
}


@contextmanager
def beside_stock(
    name: str,
    more_bytes: int,
    patch: pytest.MonkeyPatch,
    *,
    uses_every: int = 0,
    steps: int = STEPS,
) -> Iterator[tuple[Zero3, Streams]]:
    """A run that is streamed in the context, and has stock's bits after some steps."""
    stock, run = PROGRAMS[name](), PROGRAMS[name]()
    for it in (stock, run) if uses_every else ():
        it.fragments, it.uses_fragments_every = [], uses_every
    stock.train(steps)
    # Several units, and partitions of several pieces.
    patch.setattr(unit_names, "_PART_BYTES", LAYER)
    streams = Streams(more_bytes, also=run.masters)
    with streaming(streams, patch):
        yield run, streams
    assert run.found() == stock.found()


@pytest.mark.parametrize("more_bytes", [-1, ROOM_FOR_SOME, ROOM_FOR_ALL])
@pytest.mark.parametrize("name", PROGRAMS)
def test_state_is_streamed_beside_a_model_without_memory(
    name: str, more_bytes: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "umem")
    with beside_stock(name, more_bytes, monkeypatch) as (run, streams):
        run.train(STEPS - 2)
        (training,) = streams.trainings
        layouts = training.step.units.layouts
        run.train(2)
        assert training.step.units.layouts == layouts
        status, units = training.status(), training.step.units.sizes()
    assert training.model is run.model
    assert not any("is not managed" in it.getMessage() for it in caplog.records)
    counts, tuning = status.counts, status.tuning
    assert tuning is not None
    # The second one, as each partition is read right after its step.
    plans = 1 if more_bytes == ROOM_FOR_ALL else 2
    assert (tuning.plans, counts.in_line, counts.ahead) == (plans, 0, 0)
    assert (tuning.state == TuningState.NO_PLAN_FITS) == (more_bytes < 0)
    assert status.state_bytes == STATE
    assert len(units) == len(run.masters)
    if more_bytes == ROOM_FOR_ALL:
        assert tuning.resident_bytes == STATE
        assert counts.resident > 0
    else:
        assert tuning.resident_bytes < STATE
        assert 0 < status.slots_bytes < STATE
        assert counts.streamed >= len(run.masters) * (STEPS - 1) - 2
        assert counts.early > 0  # by the copy to the model's weights
    if more_bytes < 0:
        assert tuning.activations.tensors_out > 0


@pytest.mark.slow
@pytest.mark.parametrize("more_bytes", [-1, ROOM_FOR_ALL])
@pytest.mark.parametrize("name", PROGRAMS)
def test_state_that_something_else_sees_is_streamed_where_it_is(
    name: str, more_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DeepSpeed links each parameter to its part of the partition's state, and reads it there."""
    with beside_stock(name, more_bytes, monkeypatch, uses_every=1) as (run, streams):
        run.train()
        (training,) = streams.trainings
        status, units = training.status(), training.step.units
        assert units.fixed_bytes == STATE  # a unit is in one place
    assert status.tuning is not None
    assert status.counts.streamed >= len(run.masters) * (STEPS - 3)
    assert status.counts.waited > 0
    assert status.slots_bytes > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_state_with_known_views_comes_ahead(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are guarded as the state itself: a use in some step finds what it would find there."""
    with beside_stock(name, -1, monkeypatch, uses_every=5, steps=12) as (run, streams):
        run.train(7)
        (training,) = streams.trainings
        units = training.step.units
        layouts = units.layouts
        run.train(2)
        assert units.layouts == layouts
        assert units.may_have_temporary
        run.model(torch.ones(1, WIDTH, dtype=torch.bfloat16).requires_grad_())
        assert any(piece.where is BundleState.COMING for piece in units.staged())
        run.train(3)


def streamed(model: nn.Module, optimizer: torch.optim.Optimizer, also: Any) -> StreamedTraining:
    return StreamedTraining(model, optimizer, LazyLanes(model, 0.5, 2, also), HostStateMemory())


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_training_may_be_managed_before_any_partition_is_there(name: str) -> None:
    stock, run = PROGRAMS[name](), PROGRAMS[name]()
    stock.train()
    training = streamed(run.model, run.optimizer, run.masters)
    run.train()
    assert training.counts.streamed >= STEPS - 2
    training.close()
    assert run.found() == stock.found()


@pytest.mark.parametrize("forgets", [False, True], ids=["state stays", "state goes"])
def test_parameters_that_leave_keep_their_values_and_may_come_back(forgets: bool) -> None:
    """Also those that have a gradient still, beside small state, which is not streamed."""

    def run(is_streamed: bool) -> Any:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 4), nn.Linear(4, 2))
        weights = list(model.parameters())
        optimizer = torch.optim.AdamW(weights, lr=1e-2)
        training = streamed(model, optimizer, weights) if is_streamed else None
        seen: list[Any] = []
        for chosen in (weights, weights[::2], weights[1::2], weights[:3], weights, weights):
            model(torch.ones(3, WIDTH)).square().mean().backward()
            optimizer.param_groups[0]["params"] = chosen
            if forgets:
                for it in set(optimizer.state) - set(chosen):
                    del optimizer.state[it]
            optimizer.step()
            seen += [it.detach().clone() for it in weights]
        if training is not None:
            assert training.counts.streamed > 0
            held = training.step.units.parameters().values()
            assert sum(map(len, held)) == len(weights)
            training.close()
        return bits([seen, list(map(dict, optimizer.state.values()))])

    assert run(is_streamed=True) == run(is_streamed=False)


def test_parameters_without_memory_tell_no_size() -> None:
    """Chains are found by their number of parameters, and partitions have units of a fixed size."""
    model = Net()
    whole = UnitNames([])
    for it in model.layers[1:].parameters():
        it.data = torch.empty(0, dtype=it.dtype)
    names = UnitNames(find_blocks(model))
    assert names.part_bytes == whole.part_bytes > 10**6
    wide = nn.ModuleDict({"first": nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1)), "main": model})
    for it in wide.parameters():
        it.data = torch.empty(0, dtype=it.dtype)
    assert main_chain(wide) is model.layers
