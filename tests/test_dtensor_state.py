"""State of DTensors is fetched ahead of the step: each use waits, and all bits are stock's."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from lazy_lanes import LazyLanes
from pairs import pairs
from rank_processes import one_rank
from streamed_programs import WIDTH, Net, Program
from torch import distributed, nn

from umem.runtime.guard import guard_of
from umem.streaming.stage import BundleState
from umem.streaming.step import TemporaryPlan

pytestmark = pytest.mark.skipif(
    not distributed.is_available(), reason="this torch is built without torch.distributed"
)

TEMPORARY = TemporaryPlan(made_in=("layers.3", "layers.2"), freed_before=("layers.2", None))


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    """``torch.distributed`` with this process alone."""
    with one_rank():
        yield


class Sharded(Net):
    """A net whose parameters are DTensors, which its rank has all of."""

    def __init__(self) -> None:
        super().__init__()
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Shard, distribute_tensor

        self.mesh = init_device_mesh("cpu", (1,))
        for module in list(self.modules()):
            for name, parameter in list(module.named_parameters(recurse=False)):
                sharded = distribute_tensor(parameter.detach(), self.mesh, [Shard(0)])
                setattr(module, name, nn.Parameter(sharded))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        from torch.distributed.tensor import DTensor, Replicate

        whole: Any = super().forward(DTensor.from_local(x, self.mesh, [Replicate()]))
        return whole.full_tensor()


def first(program: Program) -> Any:
    """A DTensor of the state."""
    return program.optimizer.state[program.model.layers[1].weight]["exp_avg"]


def lists(program: Program) -> None:
    moments = [values["exp_avg_sq"] for values in program.optimizer.state.values()]
    roots: Any = torch._foreach_sqrt(moments)
    program.seen += [it.full_tensor() for it in roots]


def copies(program: Program) -> None:
    state = copy.deepcopy(program.optimizer.state_dict())
    program.seen += [it["exp_avg"].full_tensor() for it in state["state"].values()]


def save(program: Program) -> None:
    file = io.BytesIO()
    torch.save(program.optimizer.state_dict(), file)
    file.seek(0)
    state = torch.load(file, weights_only=False)["state"]
    program.seen += [it["exp_avg"].full_tensor() for it in state.values()]


def load(program: Program) -> None:
    program.optimizer.load_state_dict(copy.deepcopy(program.optimizer.state_dict()))


def keep_a_part(program: Program) -> None:
    """An object that the program has from before, and uses now."""
    if program.kept is not None:
        program.seen.append(program.kept.sum().item())
        program.kept.mul_(0.5)
    program.kept = first(program).to_local()


def keep_a_view(program: Program) -> None:
    if program.kept is not None:
        program.kept.mul_(0.5)
    program.kept = first(program).to_local()[:4]


def replace(program: Program) -> None:
    values = program.optimizer.state[program.model.layers[1].weight]
    values["exp_avg"] = values["exp_avg"] * 0.5


USES: dict[str, Callable[[Program], Any]] = {
    "nothing": lambda _: None,
    "local": lambda it: it.seen.append(first(it).to_local().clone()),
    "whole": lambda it: it.seen.append(first(it).full_tensor().clone()),
    "write": lambda it: first(it).mul_(0.5),
    "write a part": lambda it: first(it).to_local().mul_(0.5),
    "norm": lambda it: it.seen.append(first(it).norm().full_tensor()),
    **{it.__name__: it for it in (lists, copies, save, load, keep_a_part, keep_a_view, replace)},
}


def values(program: Program) -> list[bytes]:
    state = [it for values in program.optimizer.state.values() for it in values.values()]
    every = [*program.seen, *program.model.parameters(), *state]
    plain = [it.full_tensor() if hasattr(it, "full_tensor") else it for it in every]
    return [torch.as_tensor(it).detach().numpy().tobytes() for it in plain]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("use", "eagerness", "temporary"), pairs([*USES], [0.0, 0.8], [TemporaryPlan(), TEMPORARY])
)
def test_all_bits_are_stocks(use: str, eagerness: float, temporary: TemporaryPlan) -> None:
    counts = compare(USES[use], eagerness, temporary=temporary).training.counts
    assert counts.streamed > 0
    assert counts.in_line == 0


def compare(use: Callable[[Program], Any], eagerness: float = 0.0, **options: Any) -> Program:
    """A streamed run, whose bits are stock's."""
    ways = (lambda model: LazyLanes(model, eagerness), None)
    streamed, stock = (Program(it, make_model=Sharded, **options) for it in ways)
    for run in (streamed, stock):
        run.run(use, steps=4)
    assert values(streamed) == values(stock)
    return streamed


def replicate_gradients(program: Program) -> None:
    """Every second gradient of a layer is whole on each rank, as other libraries make them."""
    from torch.distributed.tensor import Replicate

    def replicate(parameter: Any) -> None:
        if program.steps % 2:
            parameter.grad = parameter.grad.redistribute(placements=[Replicate()])

    program.model.layers[1].weight.register_post_accumulate_grad_hook(replicate)


@pytest.mark.slow
@pytest.mark.parametrize("foreach", [None, True])
def test_gradients_that_are_divided_in_another_way(foreach: bool | None) -> None:
    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=1e-2, foreach=foreach)

    wrapped: list[int] = []

    def look(program: Program) -> None:
        if program.training is not None:
            pieces = [piece for unit in program.training.step.units for piece in unit.pieces]
            wrapped.append(sum(it.state.sharded.is_wrapped for it in pieces))

    compare(look, make_optimizer=optimizer, prepare=replicate_gradients)
    # In every second step, one more piece has DTensors around it.
    assert [it - wrapped[0] for it in wrapped] == [0, 1, 0, 1]


def test_state_is_fetched_ahead_and_leaves_behind_the_step() -> None:
    run = Program(LazyLanes, make_model=Sharded)
    run.step()
    run.stream()
    run.step()
    run.backward()
    pieces = [piece for unit in run.training.step.units for piece in unit.pieces]
    staged = [it for it in pieces if it.state.homes]
    assert [it.where for it in staged[:3]] == [BundleState.COMING] * 2 + [BundleState.LEAVING]
    run.optimizer.step()
    assert list(run.training.step.units.ring.here) == staged[-2:]
    assert guard_of(first(run)) is not None
    assert first(run).shape == (WIDTH, WIDTH)
    assert not any(it.is_touched for it in staged)  # a question that needs no value
    first(run).to_local()
    assert any(it.is_touched for it in staged)
    assert all(it.returned.is_done for it in staged[:3] if it.returned is not None)
