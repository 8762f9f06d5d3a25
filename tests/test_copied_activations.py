"""Activations of chosen blocks that are copied: when they move, and that no bit changes."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any

import pytest
import torch
from activation_chain import LazyMover
from faults import let_out
from lazy_lanes import HostStateMemory, LazyLanes, NoRoom
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from umem.capture.live import find_blocks
from umem.offloading import ActivationStore, Mover
from umem.runtime.torch_hooks.saved_tensors import innermost, is_lent
from umem.streaming.activations import CopiedActivations
from umem.streaming.weights import ModelWeights

WIDTH, ROWS, LAYERS = 32, 16, 5
ALL_COPIED = {f"layers.{it}": f"layers.{it + 1}" for it in range(LAYERS - 1)}


class Layer(nn.Module):
    """With `enables_grad`, a part of it makes a graph also where a checkpoint wants none.

    Megatron-core's layers do.
    """

    def __init__(self, *, enables_grad: bool = False) -> None:
        super().__init__()
        self.enables_grad = enables_grad
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        more = self.down(nn.functional.gelu(self.up(self.norm(x))))
        with torch.set_grad_enabled(self.enables_grad or torch.is_grad_enabled()):
            y: torch.Tensor = x + more
        return y


class Net(nn.Module):
    """Layers, which may be called by checkpoints, and operators between them."""

    def __init__(
        self,
        reentrant: bool | None = None,
        order: Iterable[int] = range(LAYERS),
        *,
        enables_grad: bool = False,
    ) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        layers = (Layer(enables_grad=enables_grad) for _ in range(LAYERS))
        self.layers: Any = nn.ModuleList(layers)
        self.head = nn.Linear(WIDTH, 4)
        self.reentrant = reentrant
        self.order = list(order)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for number in self.order:
            layer = self.layers[number]
            if self.reentrant is None:
                x = torch.tanh(layer(x))
            else:
                called: Any = checkpoint(layer, x * 1.5, use_reentrant=self.reentrant)
                x = called
        return self.head(x)


class LoggedStore(ActivationStore):
    """Notes which groups move, by the order in which they were opened."""

    def __init__(self, mover: Any) -> None:
        super().__init__("cpu", mover, min_bytes=64)
        self.groups: dict[Any, int] = {}
        self.log: list[tuple[str, int]] = []

    def open_group(self, key: Any, *arguments: Any, **options: Any) -> bool:
        self.groups[key] = len(self.groups)
        return super().open_group(key, *arguments, **options)

    def split_group(self, key: Any, new_key: Any, **options: Any) -> None:
        self.groups[new_key] = len(self.groups)
        super().split_group(key, new_key, **options)

    def send(self, key: Any, ordinals: Any = None, stays: Any = ()) -> int:
        return self._noted("send", key, super().send(key, ordinals, stays))

    def release(self, key: Any, ordinals: Any = None) -> int:
        return self._noted("release", key, super().release(key, ordinals))

    def fetch(self, key: Any, ordinals: Any = None) -> int:
        return self._noted("fetch", key, super().fetch(key, ordinals))

    def _noted(self, verb: str, key: Any, moved_bytes: int) -> int:
        if moved_bytes:
            self.log.append((verb, self.groups[key]))
        return moved_bytes


class Copied:
    """A model whose activations are copied, after a pass that is measured or without."""

    def __init__(
        self,
        model: nn.Module,
        copied: Mapping[str, str | None],
        fetch_ahead: int = 1,
        mover: Any = None,
        on_error: Callable[[Exception], None] = let_out,
        *,
        is_measured: bool = False,
    ) -> None:
        self.store = LoggedStore(mover or LazyMover())
        self.activations = CopiedActivations(model, find_blocks(model), self.store, on_error)
        if is_measured:
            self.activations.set_plan({}, fetch_ahead, is_measuring=True)
            model(batch())
            self.store.groups.clear()
        self.activations.set_plan(copied, fetch_ahead, is_measuring=False)

    @property
    def late(self) -> int:
        return self.store.statistics.late_fetches


def make(**options: Any) -> Net:
    torch.manual_seed(0)
    return Net(**options)


def batch(number: int = 0) -> torch.Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(number))


def gradients(model: nn.Module) -> list[bytes]:
    found = [it.grad for it in model.parameters() if it.grad is not None]
    return [it.numpy().tobytes() for it in found]


def train(model: nn.Module, *numbers: int) -> list[bytes]:
    """The gradients of some batches, summed."""
    for number in numbers or (0,):
        model(batch(number)).square().mean().backward()
    return gradients(model)


MODELS: dict[str, dict[str, Any]] = {
    "plain": {},
    "checkpoint": {"reentrant": False},
    "reentrant": {"reentrant": True},
    "reentrant, with a graph inside": {"reentrant": True, "enables_grad": True},
    "called twice": {"order": [0, 1, 2, 1, 2, 3, 4]},
    "another order": {"order": [3, 1, 4, 0]},
}


@pytest.mark.parametrize("mover", [Mover, LazyMover])
@pytest.mark.parametrize("fetch_ahead", [1, 3])
@pytest.mark.parametrize("options", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("is_measured", [True, False])
def test_no_bit_changes(
    is_measured: bool, options: dict[str, Any], fetch_ahead: int, mover: Any
) -> None:
    model = make(**options)
    copied = Copied(model, ALL_COPIED, fetch_ahead, mover(), is_measured=is_measured)
    assert train(model, 0, 1, 2) == train(make(**options), 0, 1, 2)
    counts = copied.store.statistics
    # A pass that is cut has other units than the plan, whose last one stays.
    assert counts.tensors_out == counts.tensors_in > 0 or copied.activations.has_cut
    assert copied.late == 0


def test_passes_of_several_orders_are_known() -> None:
    """As much is copied as where all blocks are heard of, as they are before any was measured."""
    orders = [0, 1, 2, 3, 4], [3, 1, 4, 0, 2]
    counts = []
    for is_measured in (True, False):
        model, expected = make(), make()
        copied = Copied(model, {})
        copied.activations.set_plan({}, 1, is_measuring=is_measured)
        for model.order in orders:
            model(batch())
        copied.activations.set_plan({"layers.0": None, "layers.1": None}, 1, is_measuring=False)
        for number, model.order in enumerate(orders):
            expected.order = model.order
            assert train(model, number) == train(expected, number)
        assert copied.late == 0
        counts.append((copied.store.statistics.tensors_out, copied.store.statistics.tensors_in))
    assert counts[0] == counts[1] > (0, 0)


@pytest.mark.parametrize("order", [[1, 3, 0, 4, 2], [0, 4, 1, 2, 3], [2, 0, 1, 3]])
@pytest.mark.parametrize("name", ["layers.0", "layers.2"])
def test_lent_weights_are_never_saved_as_they_are(name: str, order: list[int]) -> None:
    """Also where a pass has another order than the plan knows, in which others have hooks."""
    model, expected = make(), make()
    lanes = LazyLanes(model, 0.0, 1)
    memory = HostStateMemory(parameters=model.parameters(), lanes=lanes)
    store = ActivationStore("cpu")
    ModelWeights(model, lanes, memory, NoRoom(), store, min_bytes=64).begin_call()
    Copied(model, {name: None}, is_measured=True)
    seen: list[bool] = []
    for layer in model.layers:
        layer.up.register_forward_hook(
            lambda module, *_: seen.append(is_lent(module.weight) and innermost() is not None)
        )
    model.order = expected.order = order
    assert train(model, 0, 1) == train(expected, 0, 1)
    assert seen == [True] * 2 * len(order)


def test_copies_start_and_end_where_the_plan_says() -> None:
    model = make()
    plan = {"layers.0": "layers.2", "layers.2": "layers.4"}
    copied = Copied(model, plan, fetch_ahead=2, is_measured=True)
    log = copied.store.log
    y = model(batch())
    # What tanh saves before a block leaves with it: here the block saves it too. Group 0 is the
    # model before the first block, and group 2 before the second.
    assert log == [
        *(("send", 1), ("release", 1)),  # layers.0
        *(("send", 2), ("send", 3), ("release", 3)),  # layers.2
    ]
    log.clear()
    y.square().mean().backward()
    assert log == [("fetch", 3), ("fetch", 1)]
    assert copied.late == 0


def test_fetch_ahead_bounds_what_is_back() -> None:
    """When the backward pass reaches a block, the blocks behind that number are still away."""
    for fetch_ahead in (1, 2, 3):
        model = make()
        copied = Copied(model, ALL_COPIED, fetch_ahead)
        log = copied.store.log
        first: dict[int, int] = {}

        def reached(number: int, log: Any = log, first: dict[int, int] = first) -> None:
            first[number] = len({group for verb, group in log if verb == "fetch"} - {0})

        for number, layer in enumerate(model.layers):
            layer.down.register_full_backward_pre_hook(lambda *_, n=number: reached(n))
        train(model)
        # All but the last of five layers are copied; layer n is reached with n - ahead.. fetched.
        expected = {n: LAYERS - 1 - max(0, n - fetch_ahead) for n in range(LAYERS)}
        assert first == expected


@pytest.mark.parametrize("fetch_ahead", [1, 2, 3])
def test_blocks_without_hooks_count_for_what_is_fetched_ahead(fetch_ahead: int) -> None:
    model = make()
    copied = Copied(model, {"layers.0": None}, fetch_ahead, is_measured=True)
    fetched: dict[int, bool] = {}

    def reached(number: int) -> None:
        fetched[number] = any(verb == "fetch" for verb, _ in copied.store.log)

    for number, layer in enumerate(model.layers):
        layer.down.register_full_backward_pre_hook(lambda *_, n=number: reached(n))
    train(model)
    assert fetched == {number: number <= fetch_ahead for number in range(LAYERS)}
    assert copied.late == 0


def test_what_is_copied_frees_memory() -> None:
    model = make()
    copied = Copied(model, ALL_COPIED)
    held: list[weakref.ref[Any]] = []
    model.layers[0].up.register_forward_hook(
        lambda _module, _args, output: held.append(weakref.ref(output.untyped_storage()))
    )
    y = model(batch())
    assert held[0]() is None
    away_bytes = copied.activations.away_bytes()
    assert away_bytes > 0
    y.sum().backward()
    assert copied.activations.away_bytes() == 0


def test_evaluation_copies_nothing() -> None:
    model = make()
    copied = Copied(model, ALL_COPIED)
    with torch.no_grad():
        model(batch())
    assert copied.store.log == []
    y = model(batch())
    with torch.no_grad():  # between a forward pass and its backward pass
        model(batch(1))
    y.square().mean().backward()
    assert gradients(model) == train(make())
    assert copied.late == 0


def check_same(run: Callable[[Net], list[bytes]], **options: Any) -> None:
    """What a program gets with all activations copied, each in time, is what it gets without."""
    model = make(**options)
    copied = Copied(model, ALL_COPIED)
    assert run(model) == run(make(**options))
    assert copied.late == 0


@pytest.mark.parametrize("is_first_first", [True, False])
def test_two_graphs_at_once(is_first_first: bool) -> None:
    def run(model: Net) -> list[bytes]:
        losses = [model(batch(number)).square().mean() for number in range(2)]
        for loss in losses if is_first_first else reversed(losses):
            loss.backward()
        return gradients(model)

    check_same(run)


def test_a_retained_graph_goes_backward_twice() -> None:
    def run(model: Net) -> list[bytes]:
        loss = model(batch()).square().mean()
        loss.backward(retain_graph=True)
        loss.backward()
        return gradients(model)

    check_same(run)


@pytest.mark.parametrize("error", [KeyError, KeyboardInterrupt])
@pytest.mark.parametrize("reentrant", [None, False])
def test_exceptions_leave_nothing(reentrant: bool | None, error: type[BaseException]) -> None:
    def fail(*_: object) -> None:
        raise error("on purpose")

    def run(model: Net) -> list[bytes]:
        handle = model.layers[2].up.register_forward_hook(fail)
        with pytest.raises(error, match="on purpose"):
            model(batch(7))
        handle.remove()
        loss = model(batch(8)).square().mean()
        hooked = loss.register_hook(fail)
        with pytest.raises(error, match="on purpose"):
            loss.backward()
        hooked.remove()
        del loss
        return train(model, 0, 1)

    check_same(run, reentrant=reentrant)


@pytest.mark.parametrize("leaves", ["no hooks", "its hooks", "an error"])
def test_blocks_that_keep_what_they_save_pay_for_no_hooks(leaves: str) -> None:
    """Nor do they lose those of the program."""
    seen: dict[str, bool] = {}
    own = saved_tensors_hooks(torch.clone, torch.clone)
    is_measuring = True

    class Looking(Layer):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen[str(self.name)] = innermost() is not None
            if self.name == "1" and leaves == "its hooks":
                own.__enter__()
            if self.name == "2" and leaves == "its hooks":
                own.__exit__()
            if self.name == "2" and leaves == "an error" and not is_measuring:
                raise KeyError
            return super().forward(x)

    def run(layer_class: type[Layer]) -> list[bytes]:
        nonlocal is_measuring
        torch.manual_seed(0)
        model = Net()
        for number, layer in enumerate(model.layers):
            layer.__class__, layer.name = layer_class, str(number)
        if layer_class is Looking:
            Copied(model, {"layers.0": "layers.1"}, is_measured=True)
            seen.clear()
            is_measuring = False
        with suppress(KeyError):
            return train(model)
        return []

    assert run(Looking) == (run(Layer) if leaves != "an error" else [])
    assert seen.pop("0")
    assert any(seen.values()) == (leaves == "its hooks")
    assert innermost() is None


def test_changes_in_place_are_refused_as_ever() -> None:
    class InPlace(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.layers[0](self.stem(x))
            y = self.layers[1](x.exp_())
            y.exp().mul_(2)
            z = self.layers[2](y)
            y.add_(1)  # which layers.2 has saved
            return self.layers[3](z)

    for is_copied in (False, True):
        torch.manual_seed(0)
        model = InPlace()
        if is_copied:
            Copied(model, ALL_COPIED)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            train(model)


@pytest.mark.slow
def test_compiled_blocks_keep_what_they_save() -> None:
    torch._dynamo.reset()
    model, expected = make(), make()
    for net in (model, expected):
        net.layers[1].compile(backend="eager")
    copied = Copied(model, ALL_COPIED)
    assert "layers.1" not in copied.activations.names
    assert train(model) == train(expected)
    assert len({group for _, group in copied.store.log}) > 2


def test_measuring_counts_each_storage_once() -> None:
    model = make()
    copied = Copied(model, {})
    copied.activations.set_plan({}, 1, is_measuring=True)
    train(model)
    found = copied.activations.saved_bytes
    row_bytes = 4 * ROWS * WIDTH
    # tanh's output between two layers, the norm's output, its means and deviations, and gelu's
    # input and output. Statistics of 64 bytes are as large as the least that is copied.
    assert found["layers.2"] == (1 + 1 + 2 + 2) * row_bytes + 2 * 4 * ROWS
    assert found["layers.1"] == found["layers.3"] == found["layers.2"]
    assert copied.store.log == []
    copied.activations.set_plan(ALL_COPIED, 1, is_measuring=True)
    train(model)
    assert copied.activations.saved_bytes == found


@pytest.mark.parametrize("reentrant", [False, True])
def test_of_checkpointed_blocks_the_inputs_are_copied(reentrant: bool) -> None:
    model = make(reentrant=reentrant)
    copied = Copied(model, {})
    copied.activations.set_plan({}, 1, is_measuring=True)
    train(model)
    found = copied.activations.saved_bytes
    assert {found[f"layers.{it}"] for it in range(1, LAYERS)} == {4 * ROWS * WIDTH}


def test_a_failing_copy_ends_the_copies_only() -> None:
    class Broken(LazyMover):
        def copy_out(self, pairs: Any, stream: Any) -> Any:
            raise RuntimeError("no more copies")

    errors: list[Exception] = []
    model = make()
    copied = Copied(model, ALL_COPIED, mover=Broken(), on_error=errors.append)
    assert train(model) == train(make())
    assert "no more copies" in str(errors[0])
    assert copied.store.statistics.tensors_out == 0


@pytest.mark.slow
def test_a_model_goes_when_it_is_dropped() -> None:
    model = make()
    copied = Copied(model, ALL_COPIED)
    train(model)
    reference = weakref.ref(model)
    del model
    gc.collect()
    assert reference() is None
    copied.activations.close()


class Scaled(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.full((ROWS, WIDTH), 0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale: Any = self.scale
        return super().forward(x) * scale


class NotedMover(LazyMover):
    """Notes the addresses of what leaves."""

    def __init__(self) -> None:
        super().__init__()
        self.left: set[int] = set()

    def copy_out(self, pairs: Any, stream: Any) -> Any:
        self.left |= {storage.data_ptr() for storage, _ in pairs}
        return super().copy_out(pairs, stream)


def test_buffers_stay_also_those_that_a_module_gets_between_passes() -> None:
    model, mover = Net(), NotedMover()
    model.layers = nn.ModuleList(Scaled() for _ in range(LAYERS))
    copied = Copied(model, ALL_COPIED, mover=mover)
    for _ in range(2):
        mover.left.clear()
        scales = {it.scale.data_ptr() for it in model.layers}
        model(torch.randn(ROWS, WIDTH)).sum().backward()
        assert mover.left
        assert not mover.left & scales
        for layer in model.layers:
            layer.scale = layer.scale.clone()
    copied.activations.close()


class Rectified(nn.Module):
    """Layers whose last operator saves its result, which the first one of the next saves, too."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        ups = (
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.ReLU())
            for _ in range(LAYERS)
        )
        self.layers = nn.ModuleList(ups)
        self.results: list[weakref.ref[torch.UntypedStorage]] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.results.clear()
        for layer in self.layers:
            x = layer(x)
            self.results.append(weakref.ref(x.untyped_storage()))
        return x


@pytest.mark.parametrize("recomputed", [(), ("layers.2",), ("layers.1", "layers.2")])
def test_what_a_later_layer_saves_too_leaves_with_that_and_nothing_else(
    recomputed: tuple[str, ...],
) -> None:
    """And not at all for one that only runs twice."""
    expected = train(Rectified(), 0, 1)
    model = Rectified()
    store = LoggedStore(LazyMover())
    activations = CopiedActivations(model, find_blocks(model), store, let_out, may_recompute=True)
    activations.set_plan({}, 1, is_measuring=True)
    for _ in range(2):  # the first one proves that layers may run twice
        model.zero_grad()
        activations.begin_step()
        train(model, 0)
    tensor_bytes = ROWS * WIDTH * 4
    # The argument of the layer, which the one before has saved as its result, and one within it.
    saved_bytes = activations.saved_bytes["layers.3"]
    assert saved_bytes == 2 * tensor_bytes
    activations.set_plan(
        {"layers.3": None}, 1, is_measuring=False, recomputed=dict.fromkeys(recomputed)
    )
    before = store.statistics.bytes_out
    loss = model(batch(1)).square().mean()
    assert model.results[2]() is None
    assert store.statistics.bytes_out - before == saved_bytes
    loss.backward()
    assert store.statistics.late_fetches == 0
    assert gradients(model) == expected
