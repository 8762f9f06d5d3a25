"""Weights that are staged for each block's use: no bit changes, whatever a program does meanwhile.

Both runs of a program are on the CPU. Copies run late, or at random moments, and buffers begin as
NaN, so that a weight that is used too early, or from the wrong place, shows in the values.
"""

from __future__ import annotations

import copy
import ctypes
import gc
import itertools
import threading
import weakref
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from faults import let_out
from fresh_attributes import forget_guards
from lazy_lanes import HostStateMemory, LazyLanes
from pairs import pairs
from streamed_programs import (
    WIDTH,
    Adapters,
    Branches,
    Checkpointed,
    Net,
    Program,
    WeightProgram,
    bits,
    nothing,
    stream_weights,
)
from streamed_programs import compare as compare_programs
from streamed_uses import backward_twice, differentiate_twice, turn_weights
from torch import nn
from torch.utils.checkpoint import checkpoint

import umem
from umem.capture.live import find_blocks
from umem.offloading import ActivationStore
from umem.runtime.held_memory import note_export
from umem.runtime.model_parts import plain_tensors
from umem.runtime.torch_hooks.saved_tensors import innermost
from umem.runtime.unguarded import Unguarded
from umem.streaming.stage import Copy
from umem.streaming.weights import (
    StreamedBlock,
    StreamedWeights,
    WeightCounts,
    find_experts,
    staged_weights,
)


def halve(places: list[tuple[int, int]]) -> None:
    """Change floats past torch."""
    for address, count in places:
        memory = (ctypes.c_float * count).from_address(address)
        memory[:] = [0.5 * value for value in memory]


compare = partial(compare_programs, kind=WeightProgram)

address_of = torch.Tensor.data_ptr  # as it is while no guard waits at this attribute


def places_of(tensors: Iterable[torch.Tensor]) -> list[tuple[int, int]]:
    """Addresses, and numbers of floats, which is no use of the tensors."""
    with Unguarded():
        return [(address_of(it), it.numel()) for it in tensors]


class Both:
    """A stock model, and a streamed one of equal weights."""

    def __init__(
        self, eagerness: float, slots: int = 3, make_model: Callable[[], Any] = Net
    ) -> None:
        torch.manual_seed(0)
        self.models = [make_model(), make_model()]
        self.models[1].load_state_dict(self.models[0].state_dict())
        self.lanes = LazyLanes(self.models[1], eagerness)
        memory = HostStateMemory(lanes=self.lanes)
        self.weights = stream_weights(self.models[1], self.lanes, memory, slots)
        self.x = torch.randn(4, WIDTH)

    def compare(self, mode: Callable[[], Any] = torch.no_grad) -> None:
        """Call both."""
        with mode():
            stock, streamed = (model(self.x) for model in self.models)
        assert bits(streamed) == bits(stock)


@pytest.mark.parametrize("eagerness", [0.0, 1.0])
def test_weights_may_be_changed_past_torch_after_a_join(eagerness: float) -> None:
    """Between two calls, while copies for the next one wait for their use."""
    both = Both(eagerness)
    for _ in range(3):
        both.compare()
        umem.join()
        for model in both.models:
            halve(places_of(model.parameters()))
    assert both.weights.counts.fetched


@pytest.mark.parametrize("eagerness", [0.0, 1.0])
def test_held_weights_are_used_at_home_until_their_release(eagerness: float) -> None:
    """The program changes them between calls, and in their own blocks' calls."""
    both = Both(eagerness)
    models, weights, see = both.models, both.weights, both.compare
    see()
    held = [[it for layer in model.layers[:2] for it in layer.parameters()] for model in models]
    holds = umem.hold(held)
    places = [places_of(some) for some in held]
    handles = []
    for model, some in zip(models, places, strict=True):
        handles.append(model.layers[0].register_forward_pre_hook(lambda *_, some=some: halve(some)))
    for _ in range(3):
        see()
        for some in places:
            halve(some)
    assert places_of(held[1]) == places[1]
    before = weights.counts.fetched
    see()
    others = weights.counts.fetched - before
    holds.release()
    for handle in handles:
        handle.remove()
    see()
    before = weights.counts.fetched
    see()
    assert weights.counts.fetched - before == others + 2


def test_blocks_are_fetched_ahead_of_both_passes() -> None:
    program = compare(steps=8)
    blocks = 7
    steps = 8 + 1
    counts = program.counts
    assert counts.in_place == 0
    # The first one, and after each step of the optimizer, which drops what was fetched.
    assert counts.late <= steps + 1
    # Forward and backward, but for what is left in the buffers at the turn.
    assert counts.fetched <= steps * (2 * blocks - 2) + 1
    assert counts.reused >= steps * 2


def test_a_second_inference_begins_with_fetched_weights() -> None:
    model = Net().requires_grad_(False)
    x = torch.randn(4, WIDTH)
    expected = model(x)
    weights = stream_weights(model, LazyLanes(model), HostStateMemory())
    for _ in range(4):
        with torch.inference_mode():
            assert torch.equal(model(x), expected)
    assert weights.counts.late == 1
    assert weights.counts.fetched >= 4 * 7


EXTRA = {
    name: (max(0, 4 - place), 3)
    for place, name in enumerate(["stem", *(f"layers.{n}" for n in range(4)), "norm", "head"])
}
"""Three further buffers, but for the turn from the forward to the backward pass."""


@pytest.mark.parametrize("make_model", [Net, Checkpointed, Adapters, Branches])
@pytest.mark.parametrize("most_buffers", [None, 3])
def test_no_bit_changes_with_further_buffers(
    make_model: Callable[[], nn.Module], most_buffers: int | None
) -> None:
    compare(make_model=make_model, extra=EXTRA, most_buffers=most_buffers, eagerness=0.5, batches=2)


def test_further_buffers_keep_weights_from_the_backward_pass() -> None:
    def frozen() -> nn.Module:
        model = Net()
        for name, it in model.named_parameters():
            it.requires_grad_(name == "scale")
        return model

    few, more = (compare(make_model=frozen, extra=it, steps=8).counts for it in (None, EXTRA))
    # In each step, the first blocks are there already.
    assert more.fetched <= few.fetched - 8 * 3
    assert (few.most_buffers, more.most_buffers) == (2, 6)
    assert more.late <= 2


class Reaching(Net):
    """Its layers do something to their weight in their own forward pass."""

    class Layer(nn.Linear):
        do: Callable[[Any], None]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            Reaching.Layer.do(self)
            return super().forward(x)

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Reaching.Layer(WIDTH, WIDTH) for _ in range(4))


@torch.no_grad()
def by_an_operator(layer: Any) -> None:
    layer.weight.mul_(1.01)


@pytest.mark.parametrize("slots", [1, 2, 8])
def test_what_a_block_writes_to_weights_stays(slots: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Reaching.Layer, "do", staticmethod(by_an_operator), raising=False)
    compare(make_model=Reaching, slots=slots, eagerness=0.5)


def by_data(layer: Any) -> None:
    layer.weight.data.clamp_(-0.1, 0.1)


def by_data_of_views(layer: Any) -> None:
    layer.weight[1].data.mul_(0.5)
    layer.weight.t().data[2:].mul_(0.5)
    layer.weight.data.data.view(torch.int32)[3].zero_()


def by_data_in_a_list(layer: Any) -> None:
    torch._foreach_mul_([layer.weight.data, layer.bias.data], 0.99)


def by_storage(layer: Any) -> None:
    weight = layer.weight
    whole: Any = torch.empty(0)
    whole.set_(weight.untyped_storage(), 0, weight.shape, weight.stride()).mul_(0.99)


def by_storage_of_a_view(layer: Any) -> None:
    weight = layer.weight
    view = weight.t()[1:]
    whole: Any = torch.empty(0)
    with torch.no_grad():
        whole.set_(view.untyped_storage(), 0, weight.shape, weight.stride()).mul_(0.99)
        layer.bias.add_(view.sum())


def by_array(layer: Any) -> None:
    weight, view = layer.weight, layer.weight.detach()[1:]
    note_export(view)
    array = view.numpy()
    array *= 0.99
    weight.data.mul_(0.99)


def by_data_that_is_kept(layer: Any) -> None:
    if not hasattr(layer, "kept"):
        layer.kept = layer.weight.data, layer.weight.t().data
        layer.kept[0].mul_(0.9)
    for kept in layer.kept:
        kept.mul_(0.99)


def turn(layer: Any) -> None:
    layer.weight.data = layer.weight.detach().mT
    layer.weight.data[1].mul_(0.5)


def turn_data(layer: Any) -> None:
    layer.weight.data.mul_(0.9)
    layer.weight.data = layer.weight.data.mT


@torch.no_grad()
def turn_by_operators(layer: Any) -> None:
    layer.weight.t_()
    layer.weight.as_strided_((WIDTH, WIDTH), (1, WIDTH))


WRITES = [
    *(turn, turn_data, turn_by_operators),
    *(by_data, by_data_of_views, by_data_in_a_list, by_data_that_is_kept),
    *(by_storage, by_storage_of_a_view, by_array),
]
MODES = [torch.no_grad, torch.inference_mode, torch.enable_grad]


@pytest.mark.parametrize("each", [1, 2])
@pytest.mark.parametrize(
    ("do", "mode", "slots", "eagerness"), pairs(WRITES, MODES, [1, 2, 8], [0.0, 0.5])
)
def test_what_a_block_writes_past_its_weights_stays(
    do: Callable[[Any], None],
    mode: Callable[[], Any],
    slots: int,
    eagerness: float,
    each: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In each call of the block, or in the first one of two."""

    def write(layer: Any) -> None:
        layer.calls = getattr(layer, "calls", -1) + 1
        if layer.calls % each == 0:
            do(layer)

    monkeypatch.setattr(Reaching.Layer, "do", staticmethod(write), raising=False)
    both = Both(eagerness, slots, Reaching)
    for _ in range(4):
        for model in both.models:
            for layer in model.layers if do is by_data_that_is_kept else ():
                for kept in getattr(layer, "kept", ()):
                    kept.mul_(0.99)
        both.compare(mode)
    for stock, streamed in zip(*(model.parameters() for model in both.models), strict=True):
        assert bits(streamed) == bits(stock)
    assert both.weights.counts.fetched


def test_an_address_is_no_reason_to_write_weights_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels ask for addresses of what they only read."""
    monkeypatch.setattr(
        Reaching.Layer, "do", staticmethod(lambda it: it.weight.data_ptr()), raising=False
    )
    model = Reaching()
    lanes = LazyLanes(model, 1.0)
    weights = stream_weights(model, lanes, HostStateMemory(lanes=lanes), slots=3)
    copies: list[torch.Tensor] = []
    copy_into = torch.Tensor.copy_

    def counting(tensor: torch.Tensor, *args: Any) -> torch.Tensor:
        copies.append(tensor)
        return copy_into(tensor, *args)

    monkeypatch.setattr(torch.Tensor, "copy_", counting)
    with torch.no_grad():
        for _ in range(2):
            model(torch.randn(4, WIDTH))
    assert weights.counts.fetched
    assert copies == []


@pytest.mark.parametrize("eagerness", [0.0, 1.0])
def test_weights_may_be_swapped_while_copies_wait(eagerness: float) -> None:
    """torch refuses tensors with weak references, which a guard has."""
    both = Both(eagerness, make_model=lambda: Net().requires_grad_(False))
    for _ in range(3):
        both.compare(nullcontext)
        assert any(it.guard.is_on for it in both.weights._staged)
        for model in both.models:
            for layer in (model.stem, *model.layers):
                other = torch.full((WIDTH, WIDTH), 0.1)
                torch.utils.swap_tensors(layer.weight, nn.Parameter(other, requires_grad=False))


def test_attributes_are_torchs_again_without_streamed_weights(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    forget_guards(monkeypatch)
    own = [vars(torch.Tensor).get(name) for name in ("data", "data_ptr", "untyped_storage")]
    model = Net()
    lanes = LazyLanes(model, 1.0)
    weights = stream_weights(model, lanes, HostStateMemory(lanes=lanes))
    assert vars(torch.Tensor)["data"] is not own[0]
    weights.close()
    assert [vars(torch.Tensor).get(name) for name in ("data", "data_ptr", "untyped_storage")] == own


class Pairs(nn.Module):
    """Blocks of two weights, next to each other in memory or apart."""

    class Block(nn.Module):
        def __init__(self, gap_bytes: int) -> None:
            super().__init__()
            self.memory = bytearray(2 * PAIRED_BYTES + gap_bytes)
            self.first, self.second = (
                nn.Parameter(torch.frombuffer(self.memory, offset=begin, **PAIRED).view(16, 16))
                for begin in (0, PAIRED_BYTES + gap_bytes)
            )
            for weight in (self.first, self.second):
                nn.init.normal_(weight)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.tanh(x @ self.first) @ self.second

    def __init__(self, gap_bytes: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Pairs.Block(gap_bytes) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class CountingLanes(LazyLanes):
    """Notes how many copies a block's weights take."""

    def __init__(self, model: nn.Module, eagerness: float) -> None:
        super().__init__(model, eagerness)
        self.copies: list[int] = []

    def copy(self, lane: Any, copies: Any, tensor_class: Any) -> None:
        self.copies.append(len(copies))
        super().copy(lane, copies, tensor_class)


PAIRED: dict[str, Any] = {"dtype": torch.float32, "count": 256}
PAIRED_BYTES = 1024


@pytest.mark.parametrize(("gap_bytes", "copies"), [(0, 1), (64, 2)])
def test_homes_next_to_each_other_are_copied_together(gap_bytes: int, copies: int) -> None:
    model = Pairs(gap_bytes)
    x = torch.randn(3, 16)
    with torch.no_grad():
        expected = model(x)
    lanes = CountingLanes(model, 0.5)
    streamed = stream_weights(model, lanes, HostStateMemory(lanes=lanes))
    with torch.no_grad():
        for _ in range(3):
            assert torch.equal(model(x), expected)
    assert set(lanes.copies) == {copies}
    assert streamed.counts.fetched >= len(lanes.copies) > 8


@pytest.mark.parametrize("number", range(6))
def test_ctrl_c_amid_first_copies_loses_none(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Pairs(64)
    x = torch.randn(3, 16)
    with torch.no_grad():
        expected = model(x)
    streamed = stream_weights(model, LazyLanes(model, 0.5), HostStateMemory())
    made = itertools.count()

    def make(to: int, source: int, size_bytes: int) -> Copy:
        if next(made) == number:
            raise KeyboardInterrupt
        return Copy(to, source, size_bytes)

    monkeypatch.setattr(staged_weights, "Copy", make)
    with torch.no_grad():
        with pytest.raises(KeyboardInterrupt):
            model(x)
        for _ in range(3):
            assert torch.equal(model(x), expected)
    assert streamed.counts.fetched


class Observed(nn.Linear):
    """Leaves hooks on saved tensors behind, which its caller takes away later."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.hooks: Any = torch.autograd.graph.saved_tensors_hooks(lambda it: it, lambda it: it)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if torch.is_grad_enabled():
            self.hooks.__enter__()
        return super().forward(x)


def test_hooks_below_a_programs_are_taken_away_by_the_next_call() -> None:
    observed = Observed()
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(3)], observed)
    lanes = LazyLanes(model, 0.5)
    streamed = stream_weights(model, lanes, HostStateMemory(lanes=lanes))
    model(torch.ones(2, WIDTH))
    assert streamed.streamed_bytes
    observed.hooks.__exit__(None, None, None)
    assert innermost() is not None
    with torch.no_grad():
        model(torch.ones(2, WIDTH))
    assert innermost() is None


class SavingProduct(torch.autograd.Function):
    """Saves a weight itself, as a convolution does."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.T

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return gradients[0] @ weight, gradients[0].T @ x


class SavesWeights(Net):
    """Its layers save their weights, and no views of these."""

    class Layer(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: Any = SavingProduct.apply(x, self.weight)  # type: ignore[no-untyped-call]
            return y + self.bias

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(SavesWeights.Layer(WIDTH, WIDTH) for _ in range(4))


def write_past_versions(program: Program) -> None:
    """`data` has no version, and the next blocks are fetched already."""
    program.model.stem.weight.data.mul_(0.5)
    program.model.layers[0].weight.data.mul_(0.5)


def write_by_an_old_alias(program: Program) -> None:
    if program.kept is None:
        program.kept = [it.data for it in program.model.parameters()]
    for it in program.kept:
        it.mul_(0.99)


def replace_data(program: Program) -> None:
    for layer in program.model.layers:
        layer.weight.data = layer.weight.data * 0.5


def replace_data_amid_a_pass(program: Program) -> None:
    """Views of weights that autograd has saved keep the memory, and weights that it has saved do
    not."""
    program.optimizer.zero_grad()
    x = program.batch().requires_grad_()
    loss = program.model(x).square().mean()
    for layer in program.model.layers:
        layer.weight.data = layer.weight.data.mT * 0.5
    loss.backward()
    program.seen.append(x.grad)


def keep_views(program: Program) -> None:
    """A view that is made in the forward pass lives on while buffers get other contents."""
    kept: list[torch.Tensor] = []
    hooks = [
        layer.register_forward_pre_hook(lambda it, _: kept.append(it.weight.detach()[:2]))
        for layer in program.model.layers
    ]
    program.model(program.batch())
    with torch.no_grad():
        program.model(program.batch())
    program.seen.append([it.clone() for it in kept])
    for hook in hooks:
        hook.remove()


def two_graphs(program: Program) -> None:
    """Two forward passes, then their backward passes, the first one's first."""
    program.optimizer.zero_grad()
    losses = [program.model(program.batch()).square().mean() for _ in range(2)]
    with torch.no_grad():
        program.seen.append(program.model(program.batch()))
    for loss in losses:
        loss.backward()


def gradient_of_inputs(program: Program) -> None:
    x = program.batch().requires_grad_()
    program.seen.append(torch.autograd.grad(program.model(x).sum(), x))


def fail_in_a_layer(program: Program) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    for layer in (program.model.layers[1], program.model.head):
        hook = layer.register_forward_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            program.model(program.batch())
        hook.remove()


def fail_in_the_backward_pass(program: Program) -> None:
    def interrupt(_gradient: object) -> None:
        raise RuntimeError("interrupted")

    for layer in (program.model.norm, program.model.stem):
        hook = layer.weight.register_hook(interrupt)
        with pytest.raises(RuntimeError, match="interrupted"):
            program.model(program.batch()).sum().backward()
        hook.remove()
        program.optimizer.zero_grad()


def modify_behind_the_forward_pass(program: Program) -> None:
    """Autograd refuses where a stock run does: not what a checkpoint computes anew."""
    loss = program.model(program.batch()).square().mean()
    with torch.no_grad():
        program.model.layers[1].weight.mul_(1.0)
    try:
        loss.backward()
    except RuntimeError as error:
        program.seen.append(str(error).partition(":")[0])
    program.optimizer.zero_grad()


def hooks_of_another(program: Program) -> None:
    """The program has hooks of its own on what autograd saves."""
    program.optimizer.zero_grad()
    with torch.autograd.graph.saved_tensors_hooks(lambda it: it.clone(), lambda it: it):
        program.backward()


def to_other_types(program: Program) -> None:
    program.model.double()
    with torch.no_grad():
        program.seen.append(program.model(program.batch().double()))
    program.model.float()
    program.step()


def functional_call(program: Program) -> None:
    other = {name: it.detach() * 2 for name, it in program.model.named_parameters()}
    program.seen.append(torch.func.functional_call(program.model, other, program.batch()))


def per_sample(program: Program) -> None:
    weights = {name: it.detach() for name, it in program.model.named_parameters()}

    def loss(weights: Any, x: torch.Tensor) -> Any:
        return torch.func.functional_call(program.model, weights, x).sum()

    program.seen.append(torch.func.vmap(torch.func.grad(loss), (None, 0))(weights, program.batch()))


CHANGES = [
    *(write_past_versions, write_by_an_old_alias, replace_data, replace_data_amid_a_pass),
    *(turn_weights, keep_views, backward_twice, differentiate_twice, two_graphs),
    *(gradient_of_inputs, fail_in_a_layer, fail_in_the_backward_pass),
    *(modify_behind_the_forward_pass, hooks_of_another, to_other_types),
    *(functional_call, per_sample),
]


@dataclass(frozen=True)
class AmidInferences:
    """The change, between calls of few and of many tokens."""

    change: Callable[[Program], None]

    def __call__(self, program: Program) -> None:
        infer(program)
        self.change(program)
        infer(program)


def is_possible(change: object, make_model: object, _slots: int) -> bool:
    """torch.func takes no checkpoints, and a function without `vmap`."""
    return not (make_model in (Checkpointed, SavesWeights) and change is per_sample)


@pytest.mark.filterwarnings("ignore:Using backward")
@pytest.mark.parametrize(
    ("change", "make_model", "slots"),
    pairs(CHANGES, [Net, Checkpointed, Adapters, SavesWeights], [2, 8], allowed=is_possible),
)
def test_no_bit_changes_where_weights_are_used_otherwise(
    change: Callable[[Program], None], slots: int, make_model: Callable[[], nn.Module]
) -> None:
    compare(change, slots=slots, make_model=make_model, eagerness=0.5)


EXPERTS = WIDTH


class Experts(nn.Module):
    """All experts of a layer in one parameter, of which each row chooses one."""

    top_k = 1

    def __init__(self) -> None:
        super().__init__()
        self.num_experts = EXPERTS
        self.weight = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH) / WIDTH)

    def forward(self, x: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        tables = self.weight[chosen.reshape(-1)]
        return (tables @ x.reshape(-1, WIDTH, 1)).reshape(x.shape)


class ExpertsBesideDense(nn.Linear):
    """A layer with other weights beside its experts."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.experts = Experts()

    def forward(self, x: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward(x) + self.experts(x, chosen)


class Mixture(Net):
    """Each layer's experts, chosen by the layer's inputs."""

    layer: type[nn.Module] = Experts

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(self.layer() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x) * self.scale
        for layer in self.layers:
            x = x + torch.tanh(layer(x, x.argmax(-1)))
        return self.head(self.norm(x))


class MixtureBesideDense(Mixture):
    layer = ExpertsBesideDense


class ListedExperts(nn.Module):
    """A module for each expert, of which the chosen ones are called."""

    top_k = 1

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(EXPERTS))

    def forward(self, x: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        y = torch.zeros_like(x)
        for number in chosen.unique().tolist():
            y[chosen == number] = self.experts[number](x[chosen == number])
        return y


class MixtureOfModules(Mixture):
    layer = ListedExperts


def write_experts(program: Program) -> None:
    for layer in program.model.layers:
        for expert in layer.experts[:3]:
            expert.weight.data.mul_(0.5)
            infer(program)
            with torch.no_grad():
                expert.bias.add_(0.25)


def infer(program: Program) -> None:
    """Calls without gradients, of few tokens and of many in turn."""
    for rows in (EXPERTS, 1, 1, EXPERTS - 1, 2 * EXPERTS, 2):
        x = torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(rows))
        with torch.no_grad():
            program.seen.append(program.model(x))


def write_tables(program: Program) -> None:
    """Between calls of few tokens, in all ways that a program has."""
    few = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(7))
    tables = [it for it in program.model.parameters() if it.ndim == 3]

    @torch.no_grad()
    def call() -> None:
        program.seen.append(program.model(few))
        program.seen.append(program.model(few))

    call()
    with torch.no_grad():
        program.seen.append(program.model(torch.randn(EXPERTS, WIDTH).fill_(0.5)))
    for table in tables:
        table.data.mul_(0.5)  # behind a call of many tokens
    call()
    views = [it.detach()[1] for it in tables]
    call()
    for table, view in zip(tables, views, strict=True):
        view.data.mul_(1.5)  # of before the first call
        call()
        with torch.no_grad():
            table.add_(0.25)
        call()
        table.data.mul_(0.5)  # changes no version
        call()
        table.data = table.data.flip(0)
        call()
        with torch.no_grad():
            table[torch.arange(len(table))] = table.flip(0)
        call()
    view = tables[0].detach()[0]
    for _ in range(2):
        view.data.mul_(0.5)
        call()
    del view, views
    program.model.load_state_dict({k: v * 2 for k, v in program.model.state_dict().items()})
    call()
    layer: Any = program.model.layers[1]
    experts = getattr(layer, "experts", layer)

    def write(experts: Any, _: object) -> None:
        experts.weight.data.mul_(0.5)

    hook = experts.register_forward_pre_hook(write)
    call()
    hook.remove()
    call()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Using backward")
@pytest.mark.parametrize(
    ("change", "slots", "make_model", "cached_share"),
    pairs([nothing, write_tables, *CHANGES], [2, 8], [Mixture, MixtureBesideDense], [0.0, 0.2]),
)
def test_no_bit_changes_where_few_experts_are_used(
    change: Callable[[Program], None],
    slots: int,
    make_model: Callable[[], nn.Module],
    cached_share: float,
) -> None:
    program = compare(
        AmidInferences(change),
        slots=slots,
        make_model=make_model,
        eagerness=0.5,
        cached_share=cached_share,
    )
    # With a buffer for each block, copies from a training's passes are still there.
    assert slots == 8 or program.counts.experts_in_place > 0
    use = program.streamed.expert_use()
    assert cached_share or use == (0, 0)
    assert not cached_share or slots == 8 or min(use) > 0


@pytest.mark.slow
@pytest.mark.parametrize("slots", [2, 8])
@pytest.mark.parametrize(
    "change", [write_experts, two_graphs, gradient_of_inputs, to_other_types, functional_call]
)
def test_no_bit_changes_where_few_modules_of_experts_are_called(
    change: Callable[[Program], None], slots: int
) -> None:
    program = compare(
        AmidInferences(change),
        slots=slots,
        make_model=MixtureOfModules,
        eagerness=0.5,
        cached_share=0.2,
    )
    assert slots == 8 or program.counts.experts_in_place > 0
    assert program.streamed.expert_use() == (0, 0)


@pytest.mark.slow
@pytest.mark.parametrize("make_model", [Mixture, MixtureBesideDense, MixtureOfModules])
@pytest.mark.parametrize("most_buffers", [0, 1, 3])
def test_no_bit_changes_where_few_experts_are_used_without_room(
    make_model: Callable[[], nn.Module], most_buffers: int
) -> None:
    compare(infer, make_model=make_model, most_buffers=most_buffers, extra=EXTRA, eagerness=0.5)


def test_experts_alone_need_no_buffer() -> None:
    model = Mixture().requires_grad_(False)
    blocks = [
        StreamedBlock(it.name, it.module, [it.module.weight], find_experts(it.module))
        for it in find_blocks(model)
        if isinstance(it.module, Experts)
    ]
    memory = HostStateMemory(most_buffers=0)
    weights = StreamedWeights(LazyLanes(model), memory, ActivationStore("cpu"), let_out)
    weights.set_blocks(blocks, 2)
    with torch.no_grad():
        for _ in range(3):
            model(torch.randn(EXPERTS - 1, WIDTH))
        assert weights.counts == WeightCounts(experts_in_place=3 * 4)
        model(torch.randn(EXPERTS, WIDTH))
    assert weights.counts == WeightCounts(experts_in_place=3 * 4, in_place=4)
    assert not weights.is_in_use


def test_experts_in_use_at_home_stay_there() -> None:
    """A call of many tokens within one of few, as another thread may make it."""
    model = Mixture().requires_grad_(False)
    weights = stream_weights(model, LazyLanes(model), HostStateMemory())
    addresses: list[int] = []

    def call_again(layer: Any, _: object) -> None:
        assert weights.is_in_use
        addresses.append(layer.weight.data_ptr())
        if len(addresses) == 1:
            layer(torch.randn(EXPERTS, WIDTH), torch.arange(EXPERTS))
            addresses.append(layer.weight.data_ptr())

    first: Any = model.layers[0]
    home = first.weight.data_ptr()
    first.register_forward_pre_hook(call_again)
    with torch.no_grad():
        model(torch.randn(1, WIDTH))
    assert addresses == [home] * 3
    assert not weights.is_in_use


def test_layers_that_are_compiled_later_are_still_fetched() -> None:
    model = Net().requires_grad_(False)
    x = torch.randn(2, WIDTH)
    with torch.no_grad():
        expected = model(x)
        weights = stream_weights(model, LazyLanes(model), HostStateMemory())
        fetched = []
        for call in range(8):
            if call == 2:
                for layer in model.layers:
                    layer.compile(backend="eager")
            weights.begin_call()  # as the model's hook does
            assert torch.equal(model(x), expected)
            fetched.append(weights.counts.fetched)
    first, *others = (after - before for before, after in itertools.pairwise(fetched))
    assert first > len(model.layers), "all of them, and what is around them"
    assert set(others) == {first}
    weights.close()
    assert torch.equal(model(x), expected)


def test_calls_of_many_tokens_leave_the_cache() -> None:
    model = Mixture().requires_grad_(False)
    weights = stream_weights(model, LazyLanes(model), HostStateMemory(), cached_share=0.2)
    few, many = torch.randn(3, WIDTH), torch.randn(EXPERTS, WIDTH)
    assert weights.cache_bytes == 4 * 3 * 4 * WIDTH * WIDTH
    with torch.no_grad():
        for _ in range(2):
            model(few)
        hits, misses = weights.expert_use()
        assert hits >= 4 * 3
        model(many)
        assert weights.expert_use() == (hits, misses)
        model(few)
        assert weights.expert_use().misses == misses
    assert weights.few_and_many == (3, 1)
    weights.close()
    assert weights.cache_bytes == 0
    assert {type(it.weight) for it in model.layers} == {nn.Parameter}


def test_a_whole_copy_serves_few_tokens_and_one_without_experts_not_many() -> None:
    model = MixtureBesideDense().requires_grad_(False)
    weights = stream_weights(model, LazyLanes(model), HostStateMemory(), slots=8)
    few, many = torch.randn(1, WIDTH), torch.randn(EXPERTS, WIDTH)
    with torch.no_grad():
        model(few)
        assert (weights.counts.fetched, weights.counts.experts_in_place) == (7, 4)
        model(many)  # fetches the layers again
        assert weights.counts.fetched == 7 + 4
        model(few)
        model(many)
    assert (weights.counts.fetched, weights.counts.experts_in_place) == (7 + 4, 4)


@pytest.mark.parametrize("most_buffers", [0, 1])
def test_without_room_for_buffers_weights_are_used_at_home(most_buffers: int) -> None:
    assert (compare(most_buffers=most_buffers).counts.in_place > 0) == (most_buffers == 0)


def test_saved_weights_keep_no_buffer() -> None:
    """Between the passes, the buffers serve other blocks: nothing new is allocated."""
    assert len(compare(steps=6, slots=2).memory.buffers) == 2


@pytest.mark.parametrize("make_model", [Net, Mixture, MixtureBesideDense])
def test_two_threads_share_the_buffers(make_model: Callable[[], nn.Module]) -> None:
    model = make_model().requires_grad_(False)
    batches = [torch.randn(2 + 20 * (n % 2), WIDTH) for n in range(8)]
    expected = [model(it) for it in batches]
    weights = stream_weights(model, LazyLanes(model), HostStateMemory(), slots=3)
    found: dict[int, torch.Tensor] = {}

    def run(numbers: range) -> None:
        with torch.no_grad():
            for _ in range(10):
                for number in numbers:
                    found[number] = model(batches[number])

    threads = [threading.Thread(target=run, args=(range(n, 8, 2),)) for n in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(found[n], it) for n, it in enumerate(expected))
    assert not weights.is_in_use


def test_a_copy_of_the_model_is_an_ordinary_one() -> None:
    model = Net()
    weights = stream_weights(model, LazyLanes(model), HostStateMemory())
    with torch.no_grad():
        expected = model(torch.ones(1, WIDTH))
    other = copy.deepcopy(model)
    weights.close()
    assert {type(it) for it in (*other.parameters(), *model.parameters())} == {nn.Parameter}
    with torch.no_grad():
        assert torch.equal(other(torch.ones(1, WIDTH)), expected)
        assert torch.equal(model(torch.ones(1, WIDTH)), expected)


def test_a_model_that_is_gone_leaves_nothing() -> None:
    gc.collect()
    before = torch.autograd.backward
    model = Net()
    stream_weights(model, LazyLanes(model), HostStateMemory())
    model(torch.ones(1, WIDTH)).sum().backward()
    gone = [weakref.ref(it) for it in (model, *model.parameters())]
    del model
    gc.collect()
    assert all(it() is None for it in gone)
    assert torch.autograd.backward is before


def test_a_model_that_is_gone_leaves_buffers_behind_copies_under_way() -> None:
    model = Net()
    lanes = LazyLanes(model)
    stream_weights(model, lanes, HostStateMemory())
    with torch.no_grad():
        for _ in range(2):
            model(torch.ones(1, WIDTH))
    assert lanes.open_tasks > 0  # weights for the next forward pass
    del model
    gc.collect()
    assert lanes.open_tasks == 0


class Packed(nn.Parameter):
    """A parameter of another class, as a library for quantised weights makes one."""


class Scaled(torch.Tensor):
    """A weight of small numbers and their scales, multiplied for each use."""

    numbers: torch.Tensor
    scales: torch.Tensor

    @staticmethod
    def __new__(cls, numbers: torch.Tensor, scales: torch.Tensor) -> Any:
        made = torch.Tensor._make_wrapper_subclass(cls, numbers.shape, dtype=scales.dtype)
        made.numbers, made.scales = numbers, scales
        return made

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["numbers", "scales"], None

    @staticmethod
    def __tensor_unflatten__(parts: Any, *_: object) -> Any:
        return Scaled(parts["numbers"], parts["scales"])

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, _types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function is torch.ops.aten.detach.default:
            return Scaled(args[0].numbers.detach(), args[0].scales.detach())
        plain = [it.numbers * it.scales if isinstance(it, Scaled) else it for it in args]
        return function(*plain, **(kwargs or {}))


class Quantised(Net):
    """The layers' weights are of classes that wrap other tensors, or are no plain parameters."""

    def __init__(self) -> None:
        super().__init__()
        for number, layer in enumerate(self.layers):
            weight: Any = layer.weight
            if number % 2:
                numbers = (100 * weight.detach()).round().to(torch.int8)
                scales = torch.rand(WIDTH, WIDTH) / 100
                layer.weight = nn.Parameter(Scaled(numbers, scales), requires_grad=False)
            else:
                layer.weight = Packed(weight.detach(), requires_grad=False)


@pytest.mark.parametrize("eagerness", [0.0, 0.5, 1.0])
def test_weights_that_wrap_others_are_streamed(eagerness: float) -> None:
    def run(streams: bool) -> tuple[list[torch.Tensor], StreamedWeights | None]:
        torch.manual_seed(0)
        model = Quantised()
        weights = None
        if streams:
            memory = HostStateMemory()
            lanes = LazyLanes(model, eagerness)
            weights = StreamedWeights(lanes, memory, ActivationStore("cpu"), let_out)
            blocks = [
                StreamedBlock(it.name, it.module, list(plain_tensors(weight)))
                for it in find_blocks(model)
                if isinstance(weight := getattr(it.module, "weight", None), torch.Tensor)
            ]
            weights.set_blocks(blocks, 3)
        seen = []
        for step in range(4):
            x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step))
            with torch.no_grad():
                seen.append(model(x))
            model(x).square().mean().backward()
            for layer in model.layers:  # past torch's count of changes, ahead of the next pass
                changed: Any = layer.weight
                getattr(changed, "numbers", changed).data.mul_(2)
        seen += [it.grad for it in model.parameters() if it.grad is not None]
        return seen, weights

    (stock, _), (streamed, weights) = run(False), run(True)
    assert all(map(torch.equal, stock, streamed))
    assert weights is not None
    assert weights.counts.fetched > 4 * 6


class Product(torch.autograd.Function):
    """Keeps its weight past autograd's hooks, as bitsandbytes' product does."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.tensors = (None, weight.view(-1, 1))
        ctx.others = [weight.t()[1:], x.shape]
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        _, weight = ctx.tensors
        assert len(ctx.others) == 2
        assert torch.equal(ctx.others[0], weight.view(WIDTH, WIDTH).t()[1:])
        return gradients[0] @ weight.view(WIDTH, WIDTH), None


class PackedLayer(nn.Module):
    """A frozen weight of a class of its own, and a trained bias."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = Packed(torch.randn(WIDTH, WIDTH) / WIDTH, requires_grad=False)
        self.bias = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = Product.apply(x, self.weight)  # type: ignore[no-untyped-call]
        return y + self.bias


class KeptByFunctions(Net):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(PackedLayer() for _ in range(6))


class CheckpointedKeptByFunctions(KeptByFunctions):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x) * self.scale
        for layer in self.layers:
            x = x + torch.tanh(checkpoint(layer, x, use_reentrant=False))
        return self.head(self.norm(x))


def change_packed(program: Program) -> None:
    """Between the passes, too: autograd does not see it, and the backward pass has it."""
    program.optimizer.zero_grad()
    loss = program.model(program.batch()).square().mean()
    program.model.layers[2].weight.data.mul_(0.5)
    loss.backward()
    with torch.no_grad():
        program.model.layers[3].weight.mul_(0.5)


@pytest.mark.parametrize("make_model", [KeptByFunctions, CheckpointedKeptByFunctions])
@pytest.mark.parametrize(
    "change", [change_packed, backward_twice, two_graphs, fail_in_the_backward_pass]
)
def test_weights_that_functions_keep_leave_their_buffers(
    change: Callable[[Program], None], make_model: Callable[[], nn.Module]
) -> None:
    program = compare(change, make_model=make_model, most_buffers=2, eagerness=0.5)
    assert program.counts.in_place == 0
    assert program.counts.fetched > 40
