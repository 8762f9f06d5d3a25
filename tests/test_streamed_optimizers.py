"""Every optimizer either gives the bits of its plain step with streamed state, or is refused."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lazy_lanes import HostStateMemory
from streamed_programs import WIDTH, Net, Program, compare
from torch import nn
from torch.optim.optimizer import Optimizer

from umem.core.errors import PlanError
from umem.streaming import StreamedTraining
from umem.streaming.stage import HostLanes
from umem.streaming.step import PER_PARAMETER_OPTIMIZERS, replaces_state

TORCH_OPTIMIZERS = [
    kind
    for _, kind in inspect.getmembers(torch.optim, inspect.isclass)
    if issubclass(kind, Optimizer) and kind is not Optimizer
]


class Matrices(nn.Module):
    """A model with matrices only, as Muon takes them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Linear(WIDTH, width, bias=False) for width in (WIDTH, WIDTH, 4)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


class Tables(nn.Module):
    """A model with sparse gradients only."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Embedding(8, WIDTH, sparse=True) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, layer in enumerate(self.layers):
            x = torch.tanh(x + layer(x[:, number].abs().long() % 8))
        return x


class Looked(Net):
    """Its first weight gets sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(8, WIDTH, sparse=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x + self.table(torch.arange(8)))


def arguments_of(kind: Any) -> list[dict[str, Any]]:
    """Arguments under which an optimizer's step takes other ways."""
    known = inspect.signature(kind).parameters
    every: list[dict[str, Any]] = [
        {},
        {"weight_decay": 0.1, "maximize": True, "amsgrad": True, "centered": True, "lambd": 0.1},
        {"momentum": 0.9, "nesterov": True, "decoupled_weight_decay": True, "t0": 2.0},
        {"foreach": True, "weight_decay": 0.1, "momentum": 0.9, "dampening": 0.1},
        {"fused": True, "weight_decay": 0.1, "momentum": 0.9, "lr_decay": 0.1},
    ]
    found: list[dict[str, Any]] = []
    for some in every:
        here = {name: value for name, value in some.items() if name in known}
        ways = {"foreach", "fused"} & some.keys()
        if here not in found and ways <= known.keys():
            found.append(here)
    return found


def ways(kinds: Iterable[Any]) -> list[Any]:
    """Optimizers and their arguments."""
    return [
        pytest.param(kind, some, id="-".join((kind.__name__, *some)))
        for kind in kinds
        for some in arguments_of(kind)
    ]


def program_of(kind: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    """Options of a program with an optimizer of this kind."""
    make_model: Any = {"Muon": Matrices, "SparseAdam": Tables}.get(kind.__name__, Net)
    return {
        "make_model": make_model,
        "make_optimizer": lambda parameters: kind(parameters, lr=1e-2, **arguments),
        "clips": make_model is not Tables,
    }


@pytest.mark.parametrize(("kind", "arguments"), ways(TORCH_OPTIMIZERS))
def test_every_optimizer_of_torch(kind: Any, arguments: dict[str, Any]) -> None:
    if kind is torch.optim.LBFGS:
        model = Net()
        with pytest.raises(PlanError, match="LBFGS"):
            StreamedTraining(model, kind(model.parameters()), HostLanes(), HostStateMemory())
        return
    run = compare(eagerness=0.5, **program_of(kind, arguments))
    counts = run.training.counts
    has_state = any(run.optimizer.state.values())
    assert (counts.streamed, counts.resident) == ((4, 0) if has_state else (0, 4))
    assert counts.in_line == 0


@pytest.mark.slow
def test_a_hundred_steps_with_state_in_host_memory() -> None:
    """What BMTrain's AdamOffloadOptimizer is for, with no difference to torch's AdamW."""
    run = compare(steps=100, eagerness=0.5)
    assert (run.training.counts.streamed, run.training.counts.in_line) == (101, 0)


@pytest.mark.parametrize(("kind", "arguments"), ways(PER_PARAMETER_OPTIMIZERS))
def test_an_optimizer_keeps_the_objects_of_state_unless_it_is_known_to_replace_some(
    kind: Any, arguments: dict[str, Any]
) -> None:
    program = Program(None, **program_of(kind, arguments))
    program.step()
    program.step()
    before = [dict(values) for values in program.optimizer.state.values()]
    program.step()
    kept = all(
        values[name] is value
        for values, known in zip(program.optimizer.state.values(), before, strict=True)
        for name, value in known.items()
    )
    assert kept or replaces_state(program.optimizer)


def set_counts(program: Program) -> None:
    for values in program.optimizer.state.values():
        values["step"] = 0


def test_a_number_that_the_program_sets_counts() -> None:
    run = compare(set_counts, **program_of(torch.optim.SparseAdam, {}))
    assert run.training.counts.streamed > 0


def rename_momentum(program: Program) -> None:
    for values in program.optimizer.state.values():
        values["kept"] = values.pop("momentum_buffer")


def test_state_under_another_name_is_not_the_state_any_more() -> None:
    compare(
        rename_momentum,
        steps=1,
        make_optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1e-2, momentum=0.9),
    )


class OwnArguments(torch.optim.AdamW):
    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=1e-2, betas=(0.8, 0.9))


class OwnStep(torch.optim.AdamW):
    """Scales the learning rate by all parameters, and has the step of its base otherwise."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["lr"] = 1e-2 / sum(float(it.detach().norm()) for it in group["params"])
        return super().step(closure)


class OwnPart(torch.optim.AdamW):
    def _init_group(self, *arguments: Any) -> Any:
        return super()._init_group(*arguments)  # type: ignore[no-untyped-call]


class Mixin:
    def _init_group(self, *arguments: Any) -> Any:
        return super()._init_group(*arguments)  # type: ignore[misc]


class Mixed(Mixin, torch.optim.AdamW):
    pass


def test_a_subclass_with_the_same_step_is_streamed() -> None:
    assert compare(make_optimizer=OwnArguments).training.counts.streamed == 4


@pytest.mark.parametrize("kind", [OwnStep, OwnPart, Mixed])
def test_a_subclass_with_code_of_its_own_is_refused(kind: Any) -> None:
    model = Net()
    optimizer = kind(model.parameters())
    with pytest.raises(PlanError, match=kind.__name__):
        StreamedTraining(model, optimizer, HostLanes(), HostStateMemory())
    copies = StreamedTraining(model, optimizer, HostLanes(), HostStateMemory(), streams_state=False)
    with pytest.raises(PlanError, match=kind.__name__):
        copies.move_into_backward()
    copies.close()


def test_adafactor_with_several_dtypes_in_a_group_is_refused() -> None:
    """The machine epsilon of the first one counts for all."""
    model = Net()
    model.head.double()
    optimizer = torch.optim.Adafactor(model.parameters())
    with pytest.raises(PlanError, match=r"Adafactor.*dtype"):
        StreamedTraining(model, optimizer, HostLanes(), HostStateMemory())
    optimizer.param_groups[0]["eps"] = (1e-16, 1e-3)
    StreamedTraining(model, optimizer, HostLanes(), HostStateMemory()).close()


def in_line(**program: Any) -> int:
    """Steps of four that the optimizer runs itself in a streamed run with equal bits."""
    run = compare(**program)
    assert run.training.counts.in_line + run.training.counts.streamed == 4
    return run.training.counts.in_line


@pytest.mark.parametrize(("foreach", "expected"), [(True, 4), (False, 4)])
def test_sparse_gradients_change_the_way_of_a_whole_group(foreach: bool, expected: int) -> None:
    found = in_line(
        make_model=Looked,
        make_optimizer=lambda ps: torch.optim.Adagrad(ps, lr=1e-2, foreach=foreach),
        clips=False,
    )
    assert found == expected


def test_gradients_in_another_order_change_the_way_of_a_whole_group() -> None:
    def transpose(program: Program) -> None:
        program.model.stem.weight.register_post_accumulate_grad_hook(
            lambda it: setattr(it, "grad", it.grad.t().contiguous().t())
        )

    def make(parameters: Any) -> Any:
        return torch.optim.AdamW(parameters, lr=1e-2, foreach=True)

    assert in_line(make_optimizer=make, prepare=transpose) == 4


class Images(nn.Module):
    """Weights, gradients and state in the order of channels_last."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv2d(4, 4, 3, padding=1) for _ in range(2))
        self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.reshape(2, 4, 4, 4)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def test_channels_last_weights_are_streamed() -> None:
    assert not all(it.is_contiguous() for it in Images().parameters())
    assert in_line(make_model=Images) == 0


class OwnParameter(nn.Parameter):
    pass


def test_parameters_of_other_classes_change_the_way_of_a_whole_group() -> None:
    def make_model() -> nn.Module:
        model = Net()
        model.stem.weight = OwnParameter(model.stem.weight.detach())
        return model

    assert in_line(make_model=make_model) == 4


class Late(Net):
    """Its last layer is not used at first."""

    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        x = self.stem(x) * self.scale
        for layer in self.layers[: 3 if self.calls < 4 else 4]:
            x = x + torch.tanh(layer(x))
        return self.head(self.norm(x))


@pytest.mark.parametrize(("foreach", "expected"), [(None, 1), (False, 0)])
def test_momentum_that_begins_late_changes_the_way_of_a_whole_group(
    foreach: bool | None, expected: int
) -> None:
    def make(parameters: Any) -> Any:
        return torch.optim.SGD(parameters, lr=1e-2, momentum=0.9, foreach=foreach)

    assert in_line(make_model=Late, make_optimizer=make) == expected


# ------------------------------------------------------------------ bitsandbytes


class AdamW(Optimizer):
    """What bitsandbytes does with parameters, state and settings, in torch's operators."""

    def __init__(self, parameters: Any, optim_bits: int = 32, is_paged: bool = False) -> None:
        super().__init__(parameters, {"lr": 1e-2})
        self.is_paged = is_paged
        self.optim_bits = optim_bits
        self.mng = SimpleNamespace(index2config={})
        self.map = torch.linspace(-1, 1, 256)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for index, group in enumerate(self.param_groups):
            for place, it in enumerate(group["params"]):
                if it.grad is None:
                    continue
                state = self.state[it]
                if not state:
                    state.update(step=0, state1=torch.zeros_like(it), state2=torch.zeros_like(it))
                    if self.optim_bits == 8:
                        state.update(qmap1=self.map)
                it.data = it.data.contiguous()
                it.grad = it.grad.contiguous()
                state["step"] += 1
                lr = self.mng.index2config.get((index, place), group)["lr"] / state["step"]
                state["state1"].lerp_(it.grad, 0.1)
                state["state2"].lerp_(it.grad.square(), 0.1)
                it.addcdiv_(state["state1"], state["state2"].sqrt().add_(1e-8), value=-lr)


AdamW.__module__ = "bitsandbytes.optim.adamw"


def bitsandbytes_adamw() -> Any:
    return pytest.importorskip("bitsandbytes").optim.AdamW


@pytest.mark.parametrize("kind", [lambda: AdamW, bitsandbytes_adamw], ids=["stand-in", "real"])
def test_bitsandbytes_with_plain_state_is_streamed(kind: Callable[[], Any]) -> None:
    made = kind()
    assert in_line(make_optimizer=lambda ps: made(ps), eagerness=0.5) == 0


@pytest.mark.parametrize("kind", [lambda: AdamW, bitsandbytes_adamw], ids=["stand-in", "real"])
@pytest.mark.parametrize(
    ("arguments", "match"), [({"is_paged": True}, "paged|pages"), ({"optim_bits": 8}, "8-bit")]
)
def test_bitsandbytes_with_other_state_is_refused(
    arguments: dict[str, Any], match: str, kind: Callable[[], Any]
) -> None:
    model = nn.Sequential(nn.Linear(WIDTH, 512))
    optimizer = kind()(model.parameters(), **arguments)
    model(torch.ones(2, WIDTH)).sum().backward()
    optimizer.step()
    with pytest.raises(PlanError, match=f"AdamW.*{match}"):
        StreamedTraining(model, optimizer, HostLanes(), HostStateMemory())


def test_bitsandbytes_settings_by_place_run_the_step_as_a_whole() -> None:
    def change(program: Program) -> None:
        program.optimizer.mng.index2config[0, 3] = {"lr": 0.5}

    run = compare(change, make_optimizer=AdamW)
    assert (run.training.counts.streamed, run.training.counts.in_line) == (1, 3)


def test_torchao_is_refused_with_its_reason() -> None:
    kind = type("AdamW8bit", (torch.optim.Optimizer,), {"__module__": "torchao.optim.adam"})
    model = Net()
    optimizer = kind(model.parameters(), {"lr": 1e-2})
    with pytest.raises(PlanError, match=r"torchao.*AdamW8bit.*compiles"):
        StreamedTraining(model, optimizer, HostLanes(), HostStateMemory())
