"""Models whose blocks may run twice, or may not, and steps that give all their bits."""

from __future__ import annotations

import functools
import itertools
import random
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from activation_chain import LazyMover
from faults import let_out
from torch import nn
from torch.utils.checkpoint import checkpoint

from umem.capture.live import find_blocks
from umem.offloading import ActivationStore
from umem.streaming.activations import CopiedActivations

WIDTH, ROWS, LAYERS = 32, 16, 4
NAMES = [f"layers.{it}" for it in range(LAYERS)]


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Dropping(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(super().forward(x), 0.3, self.training)


class Catching(Layer):
    """Takes any error for one of a kernel, also what ends a second run."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        try:
            return super().forward(x)
        except Exception:
            return x


class Attending(Layer):
    """Scores of attention, a mask in a keyword, and a tuple of results."""

    def forward(self, x: torch.Tensor, *, mask: torch.Tensor | None = None) -> torch.Tensor:
        q = super().forward(x).view(1, ROWS, 4, -1).transpose(1, 2)
        y = nn.functional.scaled_dot_product_attention(q, q, q, attn_mask=mask)
        return x + y.transpose(1, 2).reshape(ROWS, WIDTH)


class Frozen(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.up.requires_grad_(False)


class InPlaceHead(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.relu_())


class Averaging(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.batches = nn.BatchNorm1d(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.batches(x))


class CountingInABuffer(Layer):
    """What a number that each call changes has an effect on."""

    calls: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1.0
        return super().forward(x) * (1.0 + 0.01 * self.calls)


class SavingItsBuffer(CountingInABuffer):
    """Another call would change what autograd has saved, and says is changed."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1.0
        return Layer.forward(self, x) * self.calls


class SaveUnset(torch.autograd.Function):
    """Saves memory as it is found, as attention without dropout does."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, torch.tensor([time.perf_counter_ns(), 0]))
        return 2.0 * x

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        _x, _unset = ctx.saved_tensors
        return 2.0 * gradients[0]


class WithUnsetMemory(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        apply: Any = SaveUnset.apply
        return apply(super().forward(x))


class DroppingWithUnsetMemory(WithUnsetMemory):
    """The numbers might be drawn."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(super().forward(x), 0.3, self.training)


class SaveUnused(SaveUnset):
    """Saves a number that is not used any more, as flash attention does with dropout too."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, torch.tensor(time.perf_counter_ns(), dtype=torch.uint64))
        return 2.0 * x


class DroppingWithUnusedMemory(Dropping):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        apply: Any = SaveUnused.apply
        return apply(super().forward(x))


class Recurrent(Layer):
    """cuDNN would draw its dropout from a state that nobody can put back."""

    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.GRU(WIDTH, WIDTH, 2, dropout=0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.cells(super().forward(x))[0]


class Counting(Layer):
    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(x) * (1.0 + 0.01 * self.calls)


class Listing(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(x.detach().sum())
        return super().forward(x) * len(self.seen)


class OwnGenerator(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.numbers = torch.Generator().manual_seed(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * torch.rand(1, generator=self.numbers)


class PythonsRandom(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * random.random()


class NumpysRandom(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * float(np.random.random())


class Drifting(Layer):
    """What a global object makes different each time."""

    drift: list[float] = [1.0]  # noqa: RUF012

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.drift[0] += 0.5
        return super().forward(x) * self.drift[0]


CALLS = {"all": 0}


class CountingInAGlobal(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        CALLS["all"] += 1
        return super().forward(x) * (1.0 + 0.01 * CALLS["all"])


SUMS = torch.zeros(1)


class SummingInAGlobal(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        SUMS.add_(1.0)
        return super().forward(x) * (1.0 + 0.01 * float(SUMS))


class Tally:
    calls = 0
    """Of all."""

    def __init__(self) -> None:
        self.own = 0

    def more(self) -> None:
        self.own += 1


class Place:
    __slots__ = ("x",)

    def __init__(self, x: float) -> None:
        self.x = x


class ReadingAnObject(Layer):
    """With all that may hold something: slots, a closure, a partial, a method, an array."""

    def __init__(self) -> None:
        super().__init__()
        self.tally, self.place, scale = Tally(), Place(1.5), np.ones(2)
        self.also = [functools.partial(max, 1), self.tally.more]
        self.scale: Callable[[], float] = lambda: float(scale[0])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * (self.place.x + self.tally.own + self.scale())


class CountingInAnObject(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.tally = {"own": [Tally()]}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tally = self.tally["own"][0]
        tally.more()
        return super().forward(x) * (1.0 + 0.01 * tally.own)


class CountingInASlot(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.places = (Place(0.0),)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.places[0].x += 1.0
        return super().forward(x) * (1.0 + 0.01 * self.places[0].x)


class CountingInAClass(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        Tally.calls += 1
        return super().forward(x) * (1.0 + 0.01 * Tally.calls)


def count() -> int:
    CALLS["by a function"] = CALLS.get("by a function", 0) + 1
    return CALLS["by a function"]


class CountingByAFunction(Layer):
    def scale(self) -> float:
        return 1.0 + 0.01 * count()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.scale()


class Iterating(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.numbers = itertools.count()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * (1.0 + 0.01 * next(self.numbers))


def _doubling(graph: Any, _inputs: Any) -> Callable[..., Any]:
    """Compiles to twice as much: a call that runs as it is written shows."""
    return lambda *args: tuple(2.0 * it for it in graph(*args))


@torch.compile(backend=_doubling)
def compiled(x: torch.Tensor) -> torch.Tensor:
    return torch.sin(x)


class WithACompiledFunction(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + compiled(x)


class Hooked(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.sums: list[float] = []
        self.up.register_forward_hook(lambda *it: self.sums.append(float(it[2].detach().sum())))


class Checkpointed(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = checkpoint(super().forward, x, use_reentrant=False)
        return torch.tanh(y)


CHANGING_BUFFERS = [Averaging, CountingInABuffer]
REPEATABLE = [
    *(Layer, Dropping, Attending, Frozen, Checkpointed, WithACompiledFunction, WithUnsetMemory),
    *(DroppingWithUnusedMemory, ReadingAnObject, Catching, *CHANGING_BUFFERS),
]
OTHERS = [
    *(SavingItsBuffer, InPlaceHead, Counting, Listing, OwnGenerator, PythonsRandom, NumpysRandom),
    *(DroppingWithUnsetMemory, Drifting, CountingInAGlobal, SummingInAGlobal, Hooked),
    *(
        *(CountingInAnObject, CountingInASlot, CountingInAClass, CountingByAFunction),
        *(Iterating, Recurrent),
    ),
]


class Net(nn.Module):
    def __init__(self, kind: type[Layer], order: tuple[int, ...] = tuple(range(LAYERS))) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(kind() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, 4)
        self.order = order

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        options = {}
        if isinstance(self.layers[0], Attending):
            options["mask"] = torch.ones(ROWS, ROWS).tril().bool()
        for number in self.order:
            x = 0.9 * self.layers[number](x, **options)
        return self.head(x)


def managed(model: nn.Module) -> CopiedActivations:
    store = ActivationStore("cpu", LazyMover(), min_bytes=64)
    return CopiedActivations(model, find_blocks(model), store, let_out, may_recompute=True)


def plan(activations: CopiedActivations) -> Callable[[int], None]:
    """Watch the first step; then run all blocks again that may."""

    def begin(number: int) -> None:
        if number < 2:
            again = activations.proofs if number else {}
            activations.set_plan({}, 1, is_measuring=number == 0, recomputed=dict.fromkeys(again))
        activations.begin_step()

    return begin


def step(model: nn.Module, number: int, *, autocast: bool = False, **options: Any) -> list[bytes]:
    """Bits of the loss, the gradients, the buffers and the random numbers behind a step."""
    x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(number))
    x.requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = model(x).float().square().mean()
    loss.backward(**options)
    if options.get("retain_graph"):
        loss.backward()
    tensors = [loss, x.grad, *(it.grad for it in model.parameters()), *model.buffers()]
    model.zero_grad()
    found = [it.detach().double().numpy().tobytes() for it in tensors if it is not None]
    return [*found, torch.rand(1).numpy().tobytes(), str(random.random()).encode()]


def run(model: nn.Module, begin: Callable[[int], None], **options: Any) -> list[list[bytes]]:
    """Four steps, each of which `begin` prepares."""
    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)
    Drifting.drift[0] = 1.0
    CALLS.clear()
    CALLS["all"] = Tally.calls = 0
    SUMS.zero_()
    seen = []
    for number in range(4):
        begin(number)
        seen.append(step(model, number, **options))
    return seen


class Failing(Layer):
    """Raises where it is told to."""

    fails = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        if self.fails:
            raise ValueError("no")
        return y


def check_failing_steps(model: Net, begin: Callable[[int], None]) -> None:
    """Fail in a step of a model of `Failing` layers and go on, three times."""
    layer: Any = model.layers[2]
    for number in range(3):
        begin(number)
        layer.fails = True
        with pytest.raises(ValueError, match="no"):
            step(model, number)
        layer.fails = False
        assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None
        step(model, number)


def check_same_step(model: nn.Module, stock: nn.Module, number: int) -> None:
    """Run a step of both, with the same random numbers, and compare all bits."""
    found = []
    for it in (model, stock):
        torch.manual_seed(number)
        random.seed(number)
        found.append(step(it, number))
    assert found[0] == found[1]
