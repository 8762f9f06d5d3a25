"""Steps of FSDP2 return before their updates, on the CPU with two ranks, and all bits are stock's.

Updates run as late as they may. Programs use weights, gradients and state behind a step in many
ways, and wrap their models in many ways.
"""

from __future__ import annotations

import copy
import ctypes
import dataclasses
import gc
import io
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from found_trainings import Streams, streaming
from lazy_lanes import LazyLanes
from rank_processes import Runs, meeting, ranks_of
from torch import distributed, nn
from torch.utils.checkpoint import checkpoint

import umem
from umem.adapters import find_gathering
from umem.runtime.guard import guard_of
from umem.runtime.model_parts import plain_tensors
from umem.runtime.unguarded import Unguarded
from umem.streaming import StreamedTraining

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

RANKS, WIDTH, LAYERS, MEASURED = 2, 15, 3, 6
"""A width of which the ranks have uneven parts."""

UNITS = LAYERS + 2

address_of = torch.Tensor.data_ptr  # as it is while no guard waits at this attribute


class Block(nn.Module):
    """A block of two modules, which may be wrapped by themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Net(nn.Module):
    """Blocks between a stem and a head, which the root has."""

    def __init__(self, *, checkpoints: bool = False) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, 4)
        self.checkpoints = checkpoints

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.checkpoints else layer(x)
        y: torch.Tensor = self.head(x)
        return y.float()


def mesh(*sizes: int) -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    names = ("replicate", "shard")[-len(sizes) :]
    return init_device_mesh("cpu", sizes, mesh_dim_names=names)


def wrapped(model: Any, **options: Any) -> Any:
    """Blocks and the model."""
    from torch.distributed.fsdp import fully_shard

    options.setdefault("mesh", mesh(RANKS))
    for layer in model.layers:
        fully_shard(layer, **options)
    return fully_shard(model, **options)


def in_bf16() -> Any:
    from torch.distributed.fsdp import MixedPrecisionPolicy

    policy = MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32)
    return wrapped(Net(), mp_policy=policy)


def prefetched() -> Any:
    """Each block gathers the one behind it, and in the backward pass the one before."""
    model = wrapped(Net())
    for layer, following in zip(model.layers, model.layers[1:], strict=False):
        layer.set_modules_to_forward_prefetch([following])
        following.set_modules_to_backward_prefetch([layer])
    return model


def partly_wrapped() -> Any:
    """The root is not wrapped, and of a block one module is: units have both kinds."""
    from torch.distributed.fsdp import fully_shard

    model: Any = Net()
    for layer in model.layers:
        fully_shard(layer.up, mesh=mesh(RANKS))
    return model


def grouped() -> Any:
    """Two blocks are gathered together: their gradients are in one buffer."""
    from torch.distributed.fsdp import fully_shard

    model: Any = Net()
    for first in range(0, LAYERS, 2):
        fully_shard(list(model.layers[first : first + 2]), mesh=mesh(RANKS))
    return fully_shard(model, mesh=mesh(RANKS))


MODELS: dict[str, Callable[[], Any]] = {
    "plain": lambda: wrapped(Net()),
    "in bf16": in_bf16,
    "not resharded": lambda: wrapped(Net(), reshard_after_forward=False),
    "replicated": lambda: wrapped(Net(), mesh=mesh(RANKS, 1)),
    "one rank each": lambda: wrapped(Net(), mesh=mesh(RANKS, 1)["shard"]),
    "prefetched": prefetched,
    "checkpointed": lambda: wrapped(Net(checkpoints=True)),
    "partly wrapped": partly_wrapped,
    "grouped": grouped,
}


def of_one_kind(weights: list[Any]) -> list[list[Any]]:
    """DTensors, and others: torch's functions for lists take no list of both."""
    return [[it for it in weights if hasattr(it, "full_tensor") == kind] for kind in (True, False)]


class Program:
    """A training, and what it has seen."""

    def __init__(self, name: str) -> None:
        torch.manual_seed(0)
        self.model: Any = MODELS[name]()
        self.weights: list[Any] = list(self.model.parameters())
        self.optimizer: Any = torch.optim.AdamW(
            [{"params": some} for some in of_one_kind(self.weights) if some], lr=1e-2
        )
        self.seen: list[str] = []
        self.kept: Any = None
        self.batches = 0

    def see(self, *values: torch.Tensor) -> None:
        for value in values:
            whole = value.full_tensor() if hasattr(value, "full_tensor") else value
            self.seen.append(float(whole.detach().double().square().sum()).hex())

    def loss(self) -> torch.Tensor:
        self.batches += 1
        seed = RANKS * self.batches + distributed.get_rank()
        x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(seed))
        return self.model(x).square().mean()

    def backward(self) -> None:
        loss = self.loss()
        loss.backward()
        self.see(loss)

    def step(self) -> None:
        self.backward()
        self.optimizer.step()

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.step()
            self.optimizer.zero_grad()

    @property
    def weight(self) -> Any:
        """A parameter of the second block."""
        return self.model.layers[1].up.weight


def nothing(_: Program) -> None:
    pass


def whole_weights(program: Program) -> None:
    program.see(*program.weights)


@torch.no_grad()
def write(program: Program) -> None:
    program.weight.mul_(0.5)


@torch.no_grad()
def write_part(program: Program) -> None:
    program.weight.to_local().mul_(0.5)


@torch.no_grad()
def write_another(program: Program) -> None:
    """Not wrapped in some models."""
    program.see(program.model.layers[1].down.weight.mul_(0.5))


def keep(choose: Callable[[Program], Any], *, sees: bool = True) -> Callable[[Program], None]:
    """Use an object from the step before, and keep one."""

    @torch.no_grad()
    def use(program: Program) -> None:
        if program.kept is not None:
            program.see(*([program.kept] if sees else []))
            program.kept.mul_(0.5)
        program.kept = choose(program)

    return use


def inside(dtensor: Any) -> Any:
    """The very object, if it has one."""
    return getattr(dtensor, "_local_tensor", dtensor)


keep_a_part = keep(lambda it: it.weight.to_local())
keep_a_view = keep(lambda it: it.weight.to_local().view(-1)[3:], sees=False)
keep_a_view_of_another = keep(
    lambda it: inside(it.model.layers[1].down.weight).view(-1)[3:], sees=False
)
keep_what_is_inside = keep(lambda it: inside(it.weight))
"""The object that the DTensor has, as ``to_local()`` gives it in some versions of torch."""


def gradients_on_one_memory(program: Program) -> None:
    """Two blocks have the same gradient, which the program changes behind the step."""
    from torch.distributed.tensor import DTensor

    first, second = program.model.layers[0].up.weight, program.weight
    memory = first.to_local().detach() * 0.1
    for it in (first, second):
        it.grad = DTensor.from_local(memory, it.device_mesh, it.placements, run_check=False)
    program.optimizer.step()
    first.grad.mul_(2)
    program.see(second)


def gradients(program: Program) -> None:
    program.see(*(it.grad for it in program.weights))


def norm(program: Program) -> None:
    for some in of_one_kind(program.weights):
        program.see(nn.utils.clip_grad_norm_(some, 1e-3))


def change(choose: Callable[[Program], torch.Tensor]) -> Callable[[Program], None]:
    """The program has memory of a gradient, which it changes when the step has begun."""

    def use(program: Program) -> None:
        program.optimizer.zero_grad()
        program.backward()
        memory = choose(program)
        program.optimizer.step()
        with torch.no_grad():
            memory.mul_(0.5)
        program.see(memory)

    return use


def buffer_of(gradient: Any) -> torch.Tensor:
    """All gradients of a block are in it, and in the root's those of the stem and the head."""
    tensor: torch.Tensor = inside(gradient)
    return tensor if tensor._base is None else tensor._base


def accumulated(program: Program) -> None:
    """The next gradients are added to these."""
    program.backward()


def other_gradients(program: Program) -> None:
    """The program makes its own, and steps again."""
    for it in program.weights:
        it.grad = it.detach() * 0.1
    program.optimizer.step()


def not_exchanged(program: Program) -> None:
    program.optimizer.zero_grad()
    if hasattr(program.model, "set_requires_gradient_sync"):
        program.model.set_requires_gradient_sync(False)
        program.backward()
        program.model.set_requires_gradient_sync(True)
    program.step()


def graph_from_before(program: Program) -> None:
    """A backward pass whose forward pass was before the step, which has other weights."""
    if not hasattr(program.model, "unshard"):
        return  # a graph must not have a plain weight that has changed
    program.optimizer.zero_grad()
    first, second = program.loss(), program.loss()
    first.backward()
    program.optimizer.step()
    second.backward()
    gradients(program)


def unshard(program: Program) -> None:
    """A block is gathered without a forward pass."""
    for module in program.model.layers[1].modules():
        if hasattr(module, "unshard"):
            module.unshard()
            program.see(*module.parameters())
            module.reshard()


@torch.no_grad()
def evaluate(program: Program) -> None:
    program.model.eval()
    program.see(program.loss())
    program.model.train()


@torch.no_grad()
def call_a_block(program: Program) -> None:
    program.see(program.model.layers[1](torch.ones(2, WIDTH)))


@torch.no_grad()
def average(program: Program) -> None:
    weight = program.weight
    distributed.all_reduce(weight.to_local() if hasattr(weight, "to_local") else weight)


def checkpointed_state(program: Program) -> None:
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

    options = StateDictOptions(full_state_dict=True)
    states: Any = get_state_dict(program.model, program.optimizer, options=options)
    program.see(*states[0].values(), *(it["exp_avg"] for it in states[1]["state"].values()))


def load(program: Program) -> None:
    program.model.load_state_dict(copy.deepcopy(program.model.state_dict()))
    program.optimizer.load_state_dict(copy.deepcopy(program.optimizer.state_dict()))


def load_a_block(program: Program) -> None:
    layer = program.model.layers[1]
    layer.load_state_dict({name: it * 0.5 for name, it in layer.state_dict().items()})


def save(program: Program) -> None:
    file = io.BytesIO()
    torch.save(program.weight, file)
    file.seek(0)
    program.see(torch.load(file, weights_only=False))


def copied(program: Program) -> None:
    program.optimizer.zero_grad()  # torch cannot copy gradients that are DTensors
    program.see(copy.deepcopy(program.weight))


def redistributed(program: Program) -> None:
    if hasattr(program.weight, "redistribute"):
        from torch.distributed.tensor import Replicate

        placements = [Replicate()] * program.weight.device_mesh.ndim
        program.see(program.weight.redistribute(placements=placements).to_local())


def regularised(program: Program) -> None:
    """The program's own graph has the weights, whose gradients autograd makes."""
    program.optimizer.zero_grad()
    penalty = program.weight.square().sum()
    program.see(penalty)
    penalty.backward()
    program.see(program.weight.grad)


def added_later(program: Program) -> None:
    """A graph from before the step adds a gradient that autograd makes."""
    program.optimizer.zero_grad()
    program.backward()
    penalty = (program.weight * 0.1).sum()
    program.optimizer.step()
    penalty.backward()
    program.see(program.weight.grad)
    program.optimizer.step()


@torch.no_grad()
def lists(program: Program) -> None:
    torch._foreach_mul_([it.up.weight for it in program.model.layers], 0.9)


def other_learning_rate(program: Program) -> None:
    program.optimizer.param_groups[0]["lr"] *= 0.5


USES: list[Callable[[Program], None]] = [
    *(nothing, whole_weights, lambda it: it.see(it.weight.to_local()), write, write_part),
    *(write_another, keep_a_part, keep_a_view, keep_a_view_of_another, keep_a_view_of_another),
    *(keep_what_is_inside, keep_what_is_inside, gradients_on_one_memory, gradients, norm),
    change(lambda it: inside(it.weight.grad)),
    change(lambda it: buffer_of(it.weight.grad)),
    change(lambda it: buffer_of(it.model.head.weight.grad)),
    lambda it: it.optimizer.zero_grad(set_to_none=False),
    change(lambda it: inside(it.weight.grad).view(-1)[1:]),
    *(nothing, accumulated, other_gradients, not_exchanged, graph_from_before, unshard, evaluate),
    *(call_a_block, average, lambda it: it.see(*it.model.state_dict().values())),
    *(checkpointed_state, load, load_a_block, save, copied, redistributed, regularised),
    *(added_later, lists, other_learning_rate),
    lambda it: it.optimizer.state[it.weight]["exp_avg"].zero_(),
    nothing,
]

KEEPING = (keep_a_part, keep_a_view, keep_a_view_of_another, keep_what_is_inside)
"""Uses behind which the program has a tensor still."""


class Gathers:
    """Notes for which moments FSDP2's streams wait: the one that reads, and the other."""

    def __init__(self, model: Any, patch: pytest.MonkeyPatch) -> None:
        self.moments: list[set[Any]] = [set(), set()]
        self.left_out: list[Any] = []
        from torch.distributed.fsdp import FSDPModule

        contexts: list[Any] = [
            it._get_fsdp_state()._comm_ctx for it in model.modules() if isinstance(it, FSDPModule)
        ]
        self.every: list[set[Any]] = [
            {it.all_gather_copy_in_stream for it in contexts},
            {it.all_gather_stream for it in contexts},
        ]
        wait = LazyLanes.wait

        def note(lanes: LazyLanes, moment: Any) -> None:
            for streams, moments in zip(self.every, self.moments, strict=True):
                if torch.cpu.current_stream() in streams:
                    moments.add(moment)
            wait(lanes, moment)

        patch.setattr(LazyLanes, "wait", note)
        patch.setattr(LazyLanes, "leave_out", lambda _, stream: self.left_out.append(stream))


def train(name: str, streams: Streams | None) -> dict[str, Any]:
    """Steps with a use behind each, as soon as steps are deferred."""
    with pytest.MonkeyPatch.context() as patch, streaming(streams, patch):
        program = Program(name)
        waits: list[bool] = []
        for _ in range(MEASURED):
            program.step()
            program.optimizer.zero_grad()
            waits += [] if streams is None else [it.step.waits for it in streams.trainings]
        deferred = []
        for use in USES:
            program.step()
            if streams is not None:
                deferred.append(streams.trainings[0].step.is_under_way)
            use(program)
            if use not in KEEPING:
                program.kept = None
            if use is not accumulated:
                program.optimizer.zero_grad()
        whole_weights(program)
        found: dict[str, Any] = {"seen": list(program.seen)}
        if streams is not None:
            (training,) = streams.trainings
            found |= dataclasses.asdict(training.counts)
            found |= {"deferred": deferred, "waits": waits}
            if name == "plain":
                found |= look_at_a_step(program, training, patch)
    return found


def look_at_a_step(
    program: Program, training: StreamedTraining, patch: pytest.MonkeyPatch
) -> dict[str, Any]:
    """What is under way behind a step, and what waits for it."""
    gathers, step = Gathers(program.model, patch), training.step
    program.step()
    open_before = [not step.update_of(it.name).is_done for it in step.units]
    program.optimizer.zero_grad()
    has_gradients = any(it.grad is not None for it in program.weights)
    shapes = [it.shape.numel() for it in program.weights]
    flats = list(find_gathering(program.model)().flats.values())
    are_guarded = [any(map(is_guarded, flats))]  # state of biases is small, and not streamed
    open_behind = [not step.update_of(it.name).is_done for it in step.units]
    for it in gathers.moments:
        it.clear()
    early = training.counts.early
    moments = {it.name: step.update_of(it.name) for it in step.units}
    done_at_blocks: list[int] = []
    for layer in program.model.layers:
        layer.register_forward_pre_hook(
            lambda *_: done_at_blocks.append(
                sum(moments[f"layers.{it}"].is_done for it in range(LAYERS))
            )
        )
    program.model.register_forward_hook(lambda *_: are_guarded.append(any(map(is_guarded, flats))))
    program.backward()
    return {
        "flats_are_guarded": are_guarded,
        "order": list(moments),
        "early_uses": training.counts.early - early,
        "are_left_out": set(gathers.left_out) == set.union(*gathers.every),
        "open_before": open_before,
        "open_behind": open_behind,
        "has_gradients": has_gradients,
        "elements": sum(shapes),
        "done_at_blocks": done_at_blocks,
        "gathered_behind": [
            all(it in behind for behind in gathers.moments) for it in moments.values()
        ],
    }


def some_steps(
    streams: Streams | None, change: Callable[[Any, pytest.MonkeyPatch], None] = lambda *_: None
) -> dict[str, Any]:
    """Steps of a program that something is changed for."""
    with pytest.MonkeyPatch.context() as patch, streaming(streams, patch):
        program = Program("plain")
        change(program, patch)
        program.steps(MEASURED + 2)
        counts = {} if streams is None else dataclasses.asdict(streams.trainings[0].counts)
        return {"seen": program.seen, **counts}


def end_while_updates_run(streams: Streams | None) -> dict[str, Any]:
    """A training is given up with updates under way, and its model goes on without umem."""
    with pytest.MonkeyPatch.context() as patch, streaming(streams, patch):
        program = Program("plain")
        program.steps(MEASURED)
        program.step()
        found: dict[str, Any] = {}
        if streams is not None:
            (training,) = streams.trainings
            found["was_under_way"] = training.step.is_under_way
            training.close()
            found["guarded"] = sum(map(is_guarded, gc.get_objects()))
        program.optimizer.zero_grad()
        program.step()
        whole_weights(program)
        return {"seen": program.seen, **found}


def is_guarded(it: object) -> bool:
    # Not isinstance, which asks objects that are anything for their class.
    return issubclass(type(it), torch.Tensor) and guard_of(cast(torch.Tensor, it)) is not None


def held(streams: Streams | None, tensors_of: Callable[[Program], list[Any]]) -> list[str]:
    """Ranks' parts of tensors, read past torch at addresses that are held."""
    with pytest.MonkeyPatch.context() as patch, streaming(streams, patch):
        program = Program("plain")
        program.steps(MEASURED)
        tensors = tensors_of(program)
        umem.hold(tensors)
        with Unguarded():
            parts = [next(plain_tensors(it)) for it in tensors]
            places = [(address_of(it), it.nbytes) for it in parts]
        for _ in range(3):
            program.step()
            program.seen += [ctypes.string_at(*it).hex() for it in places]
            program.optimizer.zero_grad()
        return program.seen


def state_of(program: Program) -> list[Any]:
    return [it["exp_avg"] for it in program.optimizer.state.values()]


def two_models(streams: Streams | None) -> list[str]:
    """Models that take turns, and learn of each other."""
    with pytest.MonkeyPatch.context() as patch, streaming(streams, patch):
        programs = [Program("plain"), Program("in bf16")]
        for _ in range(MEASURED + 3):
            for it in programs:
                it.steps(1)
            with torch.no_grad():
                for mine, other in zip(*(it.weights for it in programs), strict=True):
                    mine.lerp_(other, 0.1)
        whole_weights(programs[0])
        return programs[0].seen + programs[1].seen


def lose_names(_: Program, patch: pytest.MonkeyPatch) -> None:
    """FSDP2 has other names for what it gathers from."""
    patch.setattr("umem.adapters.fsdp.fsdp_groups", lambda _: ())


def compile_blocks(program: Program, _: pytest.MonkeyPatch) -> None:
    for layer in program.model.layers:
        layer.compile(backend="eager")


def run_rank(rank: int, folder: Path) -> None:
    """The main function of a rank's process: all runs, one after the other."""
    with meeting(rank, folder, RANKS) as found:
        runs: dict[str, Callable[[Streams | None], Any]] = {
            **{name: partial(train, name) for name in MODELS},
            "end": end_while_updates_run,
            "held weights": lambda it: held(it, lambda program: program.weights),
            "held state": lambda it: held(it, state_of),
            "two models": two_models,
            "without names": lambda it: some_steps(it, lose_names),
            "compiled": lambda it: some_steps(it, compile_blocks),
        }
        for name, run in runs.items():
            found[name] = [run(it) for it in (None, Streams(eagerness=0.0))]


ranks = ranks_of(run_rank, RANKS)


@pytest.mark.parametrize("name", MODELS)
def test_all_bits_are_stocks(name: str, ranks: list[Runs]) -> None:
    for stock, streamed in (runs[name] for runs in ranks):
        assert streamed["seen"] == stock["seen"]
        assert len(set(stock["seen"])) > len(USES)
        assert streamed["in_line"] == 0
        assert streamed["early"] > len(USES)
        # The step after state was loaded may be measured: two, where times were too long before.
        assert streamed["deferred"].count(False) <= 2
    assert ranks[0][name][0]["seen"] != ranks[1][name][0]["seen"]


@pytest.mark.parametrize("name", MODELS)
def test_only_aliases_and_measured_steps_wait(name: str, ranks: list[Runs]) -> None:
    for _, streamed in (runs[name] for runs in ranks):
        # Measured steps do not count: they are planned as what they will be.
        assert streamed["waits"] == [False] * MEASURED
        # The program has a part, a view of one, a view of a gradient, and two on one memory. Two
        # steps are measured, in place of one, where times were too long before.
        assert 0 < streamed["waited"] <= 4 * UNITS + 8


def test_a_step_returns_before_its_updates(ranks: list[Runs]) -> None:
    for found in (runs["plain"][1] for runs in ranks):
        assert found["open_before"] == [True] * UNITS
        assert found["open_behind"] == [True] * UNITS, "zero_grad() and questions do not wait"
        assert not found["has_gradients"]
        assert found["elements"] == sum(it.numel() for it in Net().parameters())


def test_each_block_waits_for_its_own_update_on_its_gathering_stream(
    ranks: list[Runs],
) -> None:
    for found in (runs["plain"][1] for runs in ranks):
        # The root gathers its own parameters first, of which the head comes last in the pass.
        assert found["order"] == ["stem", "head", *(f"layers.{it}" for it in range(LAYERS))]
        assert found["done_at_blocks"] == [it + 1 for it in range(LAYERS)]
        assert found["gathered_behind"] == [True] * UNITS
        assert found["are_left_out"], "they would wait for all updates when the pass begins"
        assert found["early_uses"] == 0


def test_what_is_gathered_is_guarded_until_its_streams_have_waited(ranks: list[Runs]) -> None:
    for runs in ranks:
        # Each use by Python of a guarded tensor takes time, and FSDP2 has several of each.
        assert runs["plain"][1]["flats_are_guarded"] == [True, False]


def test_a_training_that_ends_gives_all_back(ranks: list[Runs]) -> None:
    for stock, streamed in (runs["end"] for runs in ranks):
        assert streamed["seen"] == stock["seen"]
        assert streamed["was_under_way"]
        assert streamed["guarded"] == 0


@pytest.mark.parametrize("name", ["held weights", "held state", "two models"])
def test_held_parts_and_models_in_each_other_have_stocks_values(
    name: str, ranks: list[Runs]
) -> None:
    for stock, streamed in (runs[name] for runs in ranks):
        assert streamed == stock


@pytest.mark.parametrize("name", ["without names", "compiled"])
def test_steps_wait_where_what_is_gathered_is_not_known(name: str, ranks: list[Runs]) -> None:
    for stock, streamed in (runs[name] for runs in ranks):
        assert streamed["seen"] == stock["seen"]
        assert streamed["waited"] == streamed["streamed"] * UNITS
