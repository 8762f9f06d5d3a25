"""Training programs that run twice: as they are, and streamed on lazy lanes.

streamed_uses.py has what they do between their steps, and test_streamed_programs.py runs all of
that under every way to stream.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from functools import lru_cache
from typing import Any

import torch
from activation_chain import LazyMover
from faults import Interrupt, came_in_update, let_out
from host_updates import StockHost
from lazy_lanes import HostStateMemory, LazyLanes, NoRoom
from torch import nn
from torch.utils.checkpoint import checkpoint

from umem.capture.live import find_blocks
from umem.offloading import ActivationStore
from umem.runtime.model_parts import plain_tensors
from umem.streaming import StreamedTraining
from umem.streaming.activations import CopiedActivations
from umem.streaming.step import TemporaryPlan
from umem.streaming.tune import StreamTuner
from umem.streaming.weights import (
    ModelWeights,
    StreamedBlock,
    StreamedWeights,
    WeightCounts,
    find_experts,
    is_movable_weight,
)

WIDTH = 16

EAGERNESS = (0.0, 0.8)
"""Of lanes: as late as the waits allow, and at random moments."""

UNITS = frozenset(["", "stem", *(f"layers.{number}" for number in range(4)), "norm", "head"])
"""All units of a net."""

STAGED_BYTES = 1024
"""The state of a layer's bias is staged by itself."""


BACK = {"head": "layers.1", "norm": "layers.1", "layers.3": "layers.0", "layers.2": "stem"}
"""Units whose gradients come back, by the unit in whose backward pass they do."""

TEMPORARY = TemporaryPlan(
    made_in=("layers.3", "layers.2", "layers.2"), freed_before=("layers.1", "layers.3", None)
)
"""Behind the two pieces of the other slots, the state of three more."""

WATCHED = 3
"""Plain steps after which units are updated in the backward pass."""


class Net(nn.Module):
    """Blocks, a norm and a head, and a parameter of the model itself."""

    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(layers))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x) * self.scale
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.head(self.norm(x))


class NetWithFlat(Net):
    """A large flat parameter beside the blocks, whose state is staged in four pieces."""

    def __init__(self, layers: int = 4) -> None:
        super().__init__(layers)
        self.flat = nn.Parameter(torch.randn(200 * WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x + self.flat.view(-1, WIDTH).square().mean(0))


class Tied(Net):
    """The stem's weight is used again at the end, and a block is called twice."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layers[1](super().forward(x) @ self.head.weight)
        return nn.functional.linear(self.layers[1](x), self.stem.weight)


class Branches(Net):
    """Another choice of blocks, in another order, in every step."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        x = self.stem(x) * self.scale
        for number in ((0, 1), (3, 1, 2), (2,), (1, 0, 3))[self.calls % 4]:
            x = x + self.layers[number](x)
        return self.head(x)


class Checkpointed(Net):
    """Blocks that are computed again in the backward pass."""

    use_reentrant = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x) * self.scale
        for layer in self.layers:
            called: Any = checkpoint(layer, x, use_reentrant=self.use_reentrant)
            x = x + torch.tanh(called)
        return self.head(self.norm(x))


class Gated(nn.Linear):
    """A layer that saves more than its input."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        return y * torch.sigmoid(y)


class CheckpointedGates(Checkpointed):
    """Checkpoints that free something."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Gated(WIDTH, WIDTH) for _ in self.layers)


class Reentrant(Checkpointed):
    """The same by backward passes within the backward pass."""

    use_reentrant = True


class Adapters(Net):
    """Adapters over frozen layers."""

    def __init__(self) -> None:
        super().__init__()
        for layer in self.layers:
            layer.requires_grad_(False)
        self.adapters = nn.ParameterList(torch.zeros(WIDTH, WIDTH) for _ in self.layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x) * self.scale
        for layer, adapter in zip(self.layers, self.adapters, strict=True):
            x = x + torch.tanh(layer(x) + x @ adapter)
        return self.head(self.norm(x))


def _adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


@dataclass(eq=False)
class Program:
    """One run of a training program.

    Parameters
    ----------
    lanes
        None for a stock run.
    """

    lanes: Callable[[nn.Module], LazyLanes] | None
    make_model: Callable[[], nn.Module] = Net
    make_optimizer: Callable[[Any], torch.optim.Optimizer] = _adamw
    slots: int = 2
    most_buffers: int | None = None
    """That the device has room for; None for any number."""
    resident: frozenset[str] = frozenset()
    temporary: TemporaryPlan = field(default_factory=TemporaryPlan)
    """Temporary slots."""
    copied_gradients: frozenset[str] = frozenset()
    """Units whose gradients are copied to the host."""
    final_gradients: frozenset[str] = frozenset()
    """Those of them whose gradients are in the last batch only."""
    returning: Mapping[str, str] = field(default_factory=dict)
    """Those that come back, by the unit in whose backward pass they do."""
    batches: int = 1
    """Backward passes in a step."""
    adds_at_home: bool = False
    """Whether later ones are added to gradients that are on the host."""
    streams_weights: bool = False
    """Whether weights are streamed too, all that can be."""
    hosts: frozenset[str] = frozenset()
    """Units that the host updates, in a run that streams."""
    watched: int = 0
    """The batch in which blocks are proved to be repeatable."""
    weights: Any = None
    """The `ModelWeights` of a run that streams them."""
    recomputes: bool = False
    """Whether blocks run forward again in the backward pass, all that can."""
    activations: Any = None
    """What has them do so, in a run that streams."""
    tuner: StreamTuner | None = None
    in_backward: bool = False
    """Whether parameters are updated in the backward pass, in a run that streams."""
    clips: bool = True
    seen: list[Any] = field(default_factory=list)
    """What the program has looked at, to compare with the other run."""
    training: Any = None
    """The `StreamedTraining` of a run that streams."""
    memory: Any = None
    lazy: Any = None
    """The lanes of a run that streams."""
    model: Any = field(init=False)
    optimizer: Any = field(init=False)
    kept: Any = None
    """Whatever the program keeps from step to step."""
    extra: Any = None
    averages: dict[str, Any] = field(default_factory=dict)
    """Averages of weights: models, or lists of tensors."""
    wrapped: Any = None
    second: Any = None
    steps: int = 0
    plain: int = 0
    """Steps that are streamed before the program does anything else."""
    prepare: Callable[[Program], None] = lambda _: None
    """Called before anything is streamed."""
    done: set[Any] = field(default_factory=set)

    def __post_init__(self) -> None:
        torch.default_generator.manual_seed(0)  # takes a thousandth of torch.manual_seed
        self.model = self.make_model()
        self.optimizer = self.make_optimizer(self.model.parameters())
        self.prepare(self)

    @property
    def is_stock(self) -> bool:
        """Whether nothing is streamed."""
        return self.lanes is None

    def stream(self) -> None:
        """Begin streaming, in a run that does."""
        if self.lanes is None:
            return
        self.begin_lanes(self.lanes)
        self.training = StreamedTraining(
            self.model,
            self.optimizer,
            self.lazy,
            self.memory,
            self.tuner,
            step_in_backward=self.in_backward,
            weights=self.weights,
        )
        self.training.temporary.set_plan(self.temporary)
        self.training.step.units.set_plan(
            self.resident, self.slots, temporary=len(self.temporary.made_in), hosts=self.hosts
        )
        if self.hosts:
            self.training.step.hosts.updater = StockHost(self.optimizer)
        self.training.gradients.set_plan(
            *(self.copied_gradients, self.returning, self.batches, self.final_gradients),
            adds_at_home=self.adds_at_home,
        )
        if self.recomputes:
            self.activations = CopiedActivations(
                self.model,
                find_blocks(self.model),
                ActivationStore("cpu", LazyMover(), min_bytes=64),
                let_out,
                may_recompute=True,
            )
            self.activations.set_plan({}, 1, is_measuring=True)
            self.watched = self.steps + 1

    def begin_lanes(self, lanes: Callable[[nn.Module], LazyLanes]) -> None:
        """Make the lanes, the memory, and what streams the weights."""
        self.lazy = lanes(self.model)
        self.memory = HostStateMemory(
            staged_bytes=STAGED_BYTES,
            most_buffers=self.most_buffers,
            parameters=self.model.parameters(),
            lanes=self.lazy,
            has_weights=bool(self.hosts),
        )
        if self.streams_weights:
            self.weights = ModelWeights(
                self.model,
                self.lazy,
                self.memory,
                NoRoom(),
                ActivationStore("cpu"),
                min_bytes=WIDTH * WIDTH,
            )
            self.weights.begin_call()

    def is_first(self, what: object) -> bool:
        """Whether this is the first call with this argument."""
        known = what in self.done
        self.done.add(what)
        return not known

    def batch(self) -> torch.Tensor:
        """The next batch, the same in both runs."""
        self.steps += 1
        if self.activations is not None and self.steps == self.watched + 1:
            proofs = self.activations.proofs
            left_out = {name for name, it in proofs.items() if it.checkpointed_bytes}
            again = dict.fromkeys(proofs.keys() - left_out)
            self.activations.set_plan(
                {}, 1, is_measuring=False, recomputed=again, left_out=left_out
            )
        return torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(self.steps))

    def backward(self) -> None:
        """A forward and a backward pass."""
        loss = self.model(self.batch()).square().mean()
        self.seen.append(loss.detach().clone())
        loss.backward()

    def backward_with_scaler(self) -> None:
        """The same with a gradient scaler, which is to skip each third step."""
        if self.kept is None:
            self.kept = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
        self.optimizer.zero_grad()
        loss = self.model(self.batch()).square().mean()
        if self.steps % 3 == 0:
            loss = loss * float("inf")
        self.kept.scale(loss).backward()

    def step(self) -> None:
        """A whole training step."""
        self.optimizer.zero_grad()
        for _ in range(self.batches):
            self.backward()
        if self.clips:
            nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
        self.optimizer.step()

    def run(self, change: Callable[[Program], None], steps: int = 3) -> list[Any]:
        """Some steps with a change after each, beginning with the second.

        Returns
        -------
        list
            Everything seen, the weights and the optimizer's state.
        """
        self.step()
        self.stream()
        for _ in range(self.plain):
            self.step()
        for _ in range(steps):
            self.step()
            change(self)
        self.step()
        weights = [parameter.detach().clone() for parameter in self.model.parameters()]
        averages = [self.values_of(kind) for kind in self.averages]
        return [*self.seen, *weights, averages, self.optimizer.state_dict()]

    def values_of(self, kind: str) -> list[torch.Tensor]:
        """Values of an average."""
        average = self.averages[kind]
        tensors = average.parameters() if isinstance(average, nn.Module) else average
        return [it.detach().clone() for it in tensors]


def stream_weights(
    model: nn.Module,
    lanes: Any,
    memory: HostStateMemory,
    slots: int = 2,
    extra: Mapping[str, tuple[int, int]] | None = None,
    cached_share: float = 0.0,
) -> StreamedWeights:
    """Stage all weights of a model that can be."""
    weights = StreamedWeights(lanes, memory, ActivationStore("cpu"), let_out)
    owners = [it for block in find_blocks(model) for it in set(block.module.parameters())]
    blocks = []
    for block in find_blocks(model):
        parts = [
            it
            for it in block.module.parameters()
            if is_movable_weight(it) and sum(it is other for other in owners) == 1
        ]
        if parts:
            experts = find_experts(block.module)
            blocks.append(StreamedBlock(block.name, block.module, parts, experts, cached_share))
    weights.set_blocks(blocks, slots, extra=extra)
    return weights


@dataclass(eq=False)
class WeightProgram(Program):
    """A program whose weights are streamed, and whose optimizer runs its steps itself."""

    streamed: StreamedWeights | None = None
    extra: Any = None
    """Further buffers in the passes of each block."""
    cached_share: float = 0.0
    """Of experts."""

    def stream(self) -> None:
        if self.lanes is not None:
            self.lazy = lanes = self.lanes(self.model)
            self.memory = HostStateMemory(most_buffers=self.most_buffers, lanes=lanes)
            self.streamed = stream_weights(
                self.model, lanes, self.memory, self.slots, self.extra or {}, self.cached_share
            )

    @property
    def counts(self) -> WeightCounts:
        """Of a run that streams."""
        assert self.streamed is not None
        return self.streamed.counts


def bits(value: Any) -> Any:
    """A value that compares equal if all bits of all tensors do."""
    if isinstance(value, torch.Tensor):
        if value.is_sparse:
            return bits([value._indices(), value._values()])
        parts = list(plain_tensors(value))
        if len(parts) > 1:
            return bits(parts)
        flat = value.detach().reshape(-1).view(torch.uint8)
        return value.dtype, tuple(value.shape), flat.numpy().tobytes()
    if isinstance(value, dict):
        return {key: bits(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [bits(item) for item in value]
    return value


def nothing(_program: Program) -> None:
    """A plain loop."""


_OF_STOCK = (
    *("make_model", "make_optimizer", "make_optimizers"),
    *("batches", "clips", "plain", "prepare"),
)
"""The options that a stock run heeds."""

_OF_WEIGHTS = ("extra", "cached_share")
"""Those that only `WeightProgram` has."""

_OF_STREAMED = {it.name for it in fields(WeightProgram)} - {*_OF_STOCK}
"""Those that a stock run does not heed, unless a test's own change asks for them."""


@lru_cache(maxsize=64)
def _repeated(
    kind: type[Program], change: Callable[[Program], None], steps: int, *options: tuple[str, Any]
) -> Any:
    return bits(kind(None, **dict(options)).run(change, steps))


def stock_bits(
    change: Callable[[Program], None], steps: int = 3, kind: type[Program] = Program, **options: Any
) -> Any:
    """All bits of a stock run."""
    chosen: Any = Program if kind is WeightProgram else kind  # their stock runs are equal
    heeded = {name: it for name, it in options.items() if name not in _OF_STREAMED}
    if _is_local(change) or not heeded.keys() <= set(_OF_STOCK):
        known = {name: it for name, it in options.items() if name not in _OF_WEIGHTS}
        return bits(chosen(None, **known).run(change, steps))
    return _repeated(chosen, change, steps, *heeded.items())


def _is_local(change: object) -> bool:
    """Whether it was made within a function: the others are run several times."""
    return "<locals>" in getattr(change, "__qualname__", "")


def compare(
    change: Callable[[Program], None] = nothing,
    eagerness: float = 0.0,
    seed: int = 0,
    steps: int = 3,
    kind: type[Program] = Program,
    expected: Any = None,
    **options: Any,
) -> Any:
    """Run a program both ways, compare all bits, and return the streamed run.

    What it raises comes before the program has seen another value. `kind` streams otherwise, and
    `expected` are the bits of a stock run, if they are known.
    """
    expected = expected or stock_bits(change, steps, kind, **options)
    streamed = kind(lambda model: LazyLanes(model, eagerness, seed), **options)
    try:
        found = streamed.run(change, steps)
    except Exception:
        assert bits(streamed.seen) == expected[: len(streamed.seen)]
        raise
    assert bits(found) == expected
    return streamed


def begin(
    steps: int = 0, lanes: Callable[[nn.Module], LazyLanes] = LazyLanes, **options: Any
) -> Any:
    """A program that streams from its second step on, after some further steps."""
    program = Program(lanes, **options)
    program.step()
    program.stream()
    for _ in range(steps):
        program.step()
    return program


def values(program: Program) -> Any:
    """The bits of a program's weights and state."""
    return bits([program.model.state_dict(), program.optimizer.state_dict()])


def interrupt_steps(begin_both: Callable[[], tuple[Program, Program]], places: int) -> None:
    """Interrupt steps, so many places later each time, until one ends: none may be half done.

    `begin_both` begins a program under umem, and the same without.
    """
    program, stock = begin_both()
    number, is_interrupted, whole = 0, True, 0
    while is_interrupted:
        for it in (program, stock):
            it.optimizer.zero_grad()
            it.backward()
        try:
            with Interrupt(number):
                program.optimizer.step()
        except KeyboardInterrupt as error:
            number += places
            if came_in_update(error):  # half a step, as without umem
                program, stock = begin_both()
                continue
        else:
            is_interrupted = False
        found = values(program)
        if found != values(stock):
            stock.optimizer.step()
            assert found == values(stock), number
            whole += 1
    assert number > 500
    assert whole > 5
