"""Parameters that no module holds are streamed too, in units that are no larger than a block."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from lazy_lanes import LazyLanes
from streamed_models import FusedAdam, one_in_a_group
from streamed_programs import WIDTH, Net, Program, compare
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from umem.capture.live import NO_BLOCK
from umem.core.classes import TensorClass
from umem.runtime.model_parts import tensors_in
from umem.streaming.stage import Lane, find_spans
from umem.streaming.step import refusal

FLAT = WIDTH * WIDTH + WIDTH
"""Numbers in a layer's flat partition."""

LAYERS = 5

STATE = 2 * 4 * FLAT
"""Bytes of a partition's state."""


class Flat(nn.Module):
    """Layers whose weights are views of flat partitions, which it does not register."""

    sizes: tuple[int, ...] = (FLAT,) * LAYERS
    head = FLAT // 2
    """Inputs of the head, which is of the size of two partitions."""

    def __init__(self) -> None:
        super().__init__()
        self.flats = tuple(nn.Parameter(torch.randn(it) / WIDTH) for it in self.sizes)
        self.last = nn.Linear(self.head, 4, bias=False)

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """For the program: its optimizer has them."""
        return itertools.chain(self.flats, super().parameters(recurse))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in (it for flat in self.flats for it in flat.split(FLAT)):
            weight, bias = layer[:-WIDTH].view(WIDTH, WIDTH), layer[-WIDTH:]
            x = x + torch.tanh(nn.functional.linear(x, weight, bias))
        return self.last(x.repeat(1, FLAT)[:, : self.head])


@pytest.mark.parametrize("eagerness", [0.0, 0.8])
def test_flat_partitions_are_streamed_in_units_until_the_next_call(eagerness: float) -> None:
    run = compare(make_model=Flat, eagerness=eagerness)
    counts = run.training.counts
    units = run.training.step.units.sizes()
    assert sorted(map(sum, units.values())) == [STATE, 2 * STATE, 2 * STATE, 2 * STATE]
    # Nothing but the comparison of the last weights came before an update.
    assert (counts.streamed, counts.waited, counts.early) == (4, 0, len(units))


def master_weights(parameters: Any) -> torch.optim.Optimizer:
    """An optimizer of flat copies: it takes gradients before its step, and gives weights behind."""
    weights = list(parameters)
    flats = [
        nn.Parameter(torch.cat([it.detach().flatten() for it in pair])) for pair in _pairs(weights)
    ]
    optimizer = torch.optim.AdamW(flats, lr=1e-2)

    def take(*_: object) -> None:
        for flat, pair in zip(flats, _pairs(weights), strict=True):
            flat.grad = torch.cat([it.grad.flatten() for it in pair])

    @torch.no_grad()
    def give(*_: object) -> None:
        for flat, pair in zip(flats, _pairs(weights), strict=True):
            for it, part in zip(pair, flat.split([it.numel() for it in pair]), strict=True):
                it.copy_(part.view_as(it))
                it.grad = None

    optimizer.register_step_pre_hook(take)
    optimizer.register_step_post_hook(give)
    return optimizer


def views_of_one_buffer(parameters: Any) -> torch.optim.Optimizer:
    """The same, with gradients that are views of one buffer, as Megatron-core has them."""
    optimizer = master_weights(parameters)
    flats = [it for group in optimizer.param_groups for it in group["params"]]
    buffer = torch.empty(sum(it.numel() for it in flats))

    def take(*_: object) -> None:
        torch.cat([it.grad for it in flats], out=buffer)
        for flat, view in zip(flats, buffer.split([it.numel() for it in flats]), strict=True):
            flat.grad = view

    optimizer.register_step_pre_hook(take)
    return optimizer


def test_weights_at_home_are_staged_where_gradients_have_aliases() -> None:
    run = compare(make_optimizer=views_of_one_buffer, eagerness=0.5)
    flats = [it for group in run.optimizer.param_groups for it in group["params"]]
    weight_bytes = sum(it.nbytes for it in flats if run.memory.may_stage(it))
    counts = run.training.counts
    assert run.lazy.copied[Lane.COPY_OUT, TensorClass.WEIGHTS] == counts.streamed * weight_bytes


def _pairs(weights: list[Any]) -> list[list[Any]]:
    return [weights[begin : begin + 2] for begin in range(0, len(weights), 2)]


def test_master_weights_in_flat_partitions() -> None:
    run = compare(make_optimizer=master_weights, eagerness=0.5)
    assert run.training.counts.streamed == 4
    assert len(run.training.step.units.sizes()) > 4


class Grown(Flat):
    """Gets a parameter that has no gradient, and so no state."""

    more: tuple[nn.Parameter, ...] = ()

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        return itertools.chain(super().parameters(recurse), self.more)


def test_state_is_streamed_on_when_parameters_are_added() -> None:
    def add(program: Program) -> None:
        if program.is_first("group"):
            program.model.more = (nn.Parameter(torch.ones(FLAT)),)
            program.optimizer.add_param_group({"params": program.model.more, "lr": 1e-3})

    run = compare(add, make_model=Grown)
    assert run.training.counts.streamed == 4
    assert max(map(sum, run.training.step.units.sizes().values())) == 2 * STATE


# ------------------------------------------------------------------ one flat parameter

ELEMENTS = 12 * FLAT
"""Pieces begin at multiples of 1,024 elements: there are four of them."""


class OneFlat(Flat):
    """Layers whose weights are views of one parameter; the head is a quarter of it."""

    sizes = (ELEMENTS,)
    head = ELEMENTS // 16


PIECES = [8 * 1024] * 3 + [8 * 192]
"""Bytes of two moments."""


def flat_run(eagerness: float = 0.0, **options: Any) -> Program:
    return compare(make_model=OneFlat, eagerness=eagerness, **options)


def pieces(run: Program) -> list[int]:
    """Those of the unit that has several; other units are single parameters, or two."""
    sizes = run.training.step.units.sizes().values()
    return [size for pieces in sizes if len(pieces) > 2 for size in pieces]


NAMES = (
    *("Adadelta", "Adagrad", "Adam", "Adamax", "AdamW", "ASGD", "NAdam", "RAdam", "RMSprop"),
    "Rprop",
)

OPTIMIZERS: list[tuple[Any, dict[str, Any]]] = [
    *((getattr(torch.optim, name), {}) for name in NAMES),
    (torch.optim.SGD, {"momentum": 0.9}),
    (torch.optim.SGD, {"momentum": 0.9, "fused": True}),
    (torch.optim.AdamW, {"fused": True}),
    (torch.optim.AdamW, {"foreach": True, "amsgrad": True}),
    (torch.optim.NAdam, {"foreach": True}),
    (torch.optim.ASGD, {"foreach": True, "t0": 1.0}),
    (one_in_a_group, {}),
]


@pytest.mark.parametrize(("kind", "arguments"), OPTIMIZERS)
def test_a_flat_parameter_is_updated_piece_by_piece(kind: Any, arguments: dict[str, Any]) -> None:
    run = flat_run(0.5, make_optimizer=lambda ps: kind(ps, lr=1e-2, **arguments))
    found = pieces(run)
    assert len(found) == 4
    assert run.training.status().slots_bytes <= 2 * max(found)
    counts = run.training.counts
    assert (counts.streamed, counts.waited, counts.early) == (4, 0, 2)


def test_an_optimizer_that_looks_at_a_whole_parameter_gets_it_whole() -> None:
    run = flat_run(make_optimizer=lambda ps: torch.optim.Adafactor(ps, lr=1e-2))
    assert pieces(run) == []


def test_pieces_of_state_with_a_number_are_not_found_anew() -> None:
    def count_layouts(program: Program) -> None:
        if program.training is not None:
            layouts.append(program.training.step.units.layouts)

    layouts: list[int] = []
    compare(count_layouts, make_model=OneFlat, make_optimizer=lambda ps: one_in_a_group(ps, 1e-2))
    assert len(set(layouts)) == 1


def test_deepspeeds_adam_with_several_parameters_in_a_group_is_refused() -> None:
    assert "torch_adam" in refusal(FusedAdam(OneFlat().parameters(), {"lr": 1e-2}))


@pytest.mark.parametrize("resident", [set(), {NO_BLOCK}])
@pytest.mark.parametrize("slots", [1, 2, 3, 6])
def test_pieces_under_any_plan(slots: int, resident: set[str]) -> None:
    run = flat_run(0.7, slots=slots, resident=frozenset(resident), seed=slots)
    assert pieces(run) == PIECES


@pytest.mark.parametrize("eagerness", [0.0, 0.8])
def test_pieces_in_the_backward_pass(eagerness: float) -> None:
    run = flat_run(eagerness, in_backward=True, clips=False, plain=3)
    assert run.training.counts.ahead >= 4
    assert pieces(run) == PIECES


@pytest.mark.parametrize(("elements", "is_divided"), [(4096 + 4, True), (4096 + 1, False)])
def test_a_parameter_of_no_whole_vectors_stays_whole(elements: int, is_divided: bool) -> None:
    """torch's fused kernels compute other bits for it than for spans of whole vectors."""
    parameter = torch.zeros(elements)
    spans = find_spans(parameter, {"exp_avg": parameter}, [parameter], 4)
    assert bool(spans) == is_divided


class Wide(Net):
    """A block whose only weight has more state than is staged at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.layers.append(nn.Linear(WIDTH, WIDTH * WIDTH, bias=False))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers[:-1]:
            x = x + torch.tanh(layer(x))
        return self.layers[-1](x)


@pytest.mark.parametrize("in_backward", [False, True])
@pytest.mark.parametrize("fused", [False, True])
def test_a_large_matrix_is_updated_in_spans(fused: bool, in_backward: bool) -> None:
    run = compare(
        make_model=Wide,
        make_optimizer=lambda ps: torch.optim.AdamW(ps, lr=1e-2, fused=fused),
        eagerness=0.5,
        clips=not in_backward,
        in_backward=in_backward,
        plain=3,
    )
    assert pieces(run) == [8 * 1024] * 4
    assert run.training.status().slots_bytes <= 2 * 8 * 1024


class MadeMemory(TorchDispatchMode):
    """Notes each operator whose result has memory that none of its arguments has."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.by: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        result = func(*args, **(kwargs or {}))
        known = {it.untyped_storage().data_ptr() for it in tensors_in((args, kwargs))}
        if any(it.untyped_storage().data_ptr() not in known for it in tensors_in(result)):
            self.by.append(str(func))
        return result


class UpdatesSeen(LazyLanes):
    """Notes what updates make new memory for."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.made: list[list[str]] = []

    def run(self, lane: Lane, work: Callable[[], None], *arguments: Any) -> Any:
        seen = partial(self._see, work) if lane is Lane.UPDATE else work
        return super().run(lane, seen, *arguments)

    def _see(self, work: Callable[[], None]) -> None:
        with MadeMemory() as mode:
            work()
        self.made.append(mode.by)


def test_updates_of_spans_make_no_new_memory() -> None:
    run = Program(
        UpdatesSeen,
        make_model=Wide,
        make_optimizer=lambda ps: torch.optim.AdamW(ps, lr=1e-2, fused=True),
    )
    run.run(lambda _: None, 4)
    assert pieces(run) == [8 * 1024] * 4
    assert len(run.lazy.made) > 4 * run.training.counts.streamed > 0
    assert not any(run.lazy.made)


def test_a_matrix_that_is_not_contiguous_is_staged_as_a_whole() -> None:
    parameter = torch.zeros(64, 64).t()
    state = torch.zeros_like(parameter)
    assert find_spans(parameter, {"exp_avg": state}, [state], 4) == []
