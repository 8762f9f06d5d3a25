"""A small training whose tensors are large enough to move, and managers for it on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from umem.hardware import load_hardware
from umem.managing import manage_on
from umem.pages import Manager
from umem.pages.run.machine import Machine
from umem.pages.run.program import PhaseWork, Program
from umem.pages.run.runner import Runner
from umem.policy import load_policy, resolve
from umem.runtime.hints import HintEngine
from umem.runtime.torch_hooks.hidden import hidden_in

BEFORE_PLANNED = 7
"""Steps that warm up, are recorded and are planned; the next one is the first by plan."""

MIB = 1 << 20
WIDTH = 1 << 19
"""Numbers in 2 MiB, the smallest tensor that moves."""

TIGHT = 40 * MIB
"""Less than `Net`'s step needs at once, more than any of its phases."""


class Scale(nn.Module):
    """Large tensors and little arithmetic: a sigmoid takes a sixth of a hyperbolic tangent."""

    def __init__(self, numbers: int = WIDTH) -> None:
        super().__init__()
        self.weight = nn.Parameter(1 + torch.randn(numbers) / 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.sigmoid(x * self.weight)


class Net(nn.Module):
    """Blocks of one weight each, and a head."""

    def __init__(self, layers: int = 4, numbers: int = WIDTH) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Scale(numbers) for _ in range(layers))
        self.head = Scale(numbers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def host_machine(budget_bytes: int | str, policy: Any = "managed", **hints: Any) -> Machine:
    """The CPU with a hint engine over host memory; further keywords are the engine's.

    The policy is what :func:`umem.load_policy` takes.
    """
    hardware = load_hardware("h200")
    rules = resolve(load_policy(policy), hardware, {"UMEM_DEVICE_BUDGET": str(budget_bytes)})
    return Machine(
        device=torch.device("cpu"),
        engine=HintEngine.on_host(**hints),
        hardware=hardware,
        policy=rules,
        allocator=None,
        mover=None,
        stream=lambda: 0,
        is_capturing=lambda: False,
        background=_at_once,
    )


def _at_once(work: Callable[[], Any]) -> Future[Any]:
    """Run a search in the training's thread, so that plans come after the same step each time."""
    future: Future[Any] = Future()
    future.set_result(work())
    return future


class Checkpointed(Net):
    """Computes its layers again in the backward pass."""

    use_reentrant = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=self.use_reentrant)
        return self.head(x)


@cache
def _columns(width: int) -> torch.Tensor:
    return torch.linspace(-2, 2, width)


def _adamw(parameters: Any) -> torch.optim.Optimizer:
    # In one pass over each tensor, where the others take ten.
    return torch.optim.AdamW(parameters, lr=1e-3, fused=True)


@dataclass
class Training:
    """A model and its optimizer, the same ones for equal arguments."""

    make_model: Callable[[], nn.Module] = Net
    make_optimizer: Callable[[Any], torch.optim.Optimizer] = _adamw
    width: int = WIDTH
    model: nn.Module = field(init=False)
    optimizer: torch.optim.Optimizer = field(init=False)
    losses: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        torch.manual_seed(1)
        self.model = self.make_model()
        self.optimizer = self.make_optimizer(
            [p for p in self.model.parameters() if p.requires_grad]
        )

    def manage(
        self, planner: Any = "planned", budget_bytes: int | str = TIGHT, **machine: Any
    ) -> Manager:
        """Put it under a manager on the CPU."""
        return manage_on(
            self.model, self.optimizer, lambda: host_machine(budget_bytes, **machine), planner
        )

    def batch(self, rows: int = 2) -> torch.Tensor:
        """The next step's input: another one in each step, the same ones in each run."""
        # Of the CPU alone: `torch.manual_seed` puts the stack into words, for CUDA's start.
        torch.default_generator.manual_seed(100 + len(self.losses))
        return torch.randn(rows, 1) + _columns(self.width)

    def forward(self, rows: int = 2) -> torch.Tensor:
        """The loss of the next batch."""
        return self.model(self.batch(rows)).square().mean()

    def step(self, rows: int = 2, *, gradients_stay: bool = False) -> None:
        """Train on the next batch."""
        loss = self.forward(rows)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=not gradients_stay)
        self.losses.append(loss.item())

    def steps(self, count: int, rows: int = 2, *, gradients_stay: bool = False) -> None:
        """Train on some batches; gradients that stay are set to zero, the others dropped."""
        for _ in range(count):
            self.step(rows, gradients_stay=gradients_stay)

    def state(self) -> list[torch.Tensor]:
        """Copies of all that persists from step to step."""
        states = (self.optimizer.state[p] for p in self.model.parameters() if p.requires_grad)
        found = [p.detach() for p in self.model.parameters()]
        for of_one in states:
            found += [value for value in of_one.values() if torch.is_tensor(value)]
        return [tensor.clone() for tensor in found]

    def equals(self, other: Training) -> bool:
        """Whether all losses, parameters and optimizer state are bit-equal."""
        mine, its = self.state(), other.state()
        return (
            self.losses == other.losses
            and len(mine) == len(its)
            and all(map(torch.equal, mine, its))
        )


def both(
    train: Callable[[Training], None],
    planner: str = "planned",
    budget_bytes: int = TIGHT,
    *,
    policy: Any = "managed",
    **made: Any,
) -> tuple[Training, Manager]:
    """A managed run, once it is known to be bit-equal to the stock one."""
    stock, managed = Training(**made), Training(**made)
    manager = managed.manage(planner, budget_bytes, policy=policy)
    train(stock)
    train(managed)
    assert managed.equals(stock)
    return managed, manager


def program_of(manager: Manager) -> Program:
    """The program that a manager runs."""
    program = manager._runner.program
    assert program is not None, manager.status()
    return program


def current_phase(manager: Manager) -> int:
    """Number of the phase in which the managed training is."""
    return manager._runner._phase


def replan(manager: Manager) -> None:
    """Bind a manager's plan to its addresses again, as after tensors have moved."""
    manager._plans.find_again()
    (shapes,) = manager._plans.shapes
    program = manager._plans.program(shapes)
    assert program is not None
    manager._load(program)


def run_phases(runner: Runner, *work: PhaseWork) -> None:
    """Let a runner do the work of a step's phases."""
    phases = [SimpleNamespace(label=str(number), phase=number) for number in range(len(work))]
    addresses = SimpleNamespace(fixed={})
    program: Any = SimpleNamespace(
        plan=SimpleNamespace(followed=phases, away_at_start=frozenset()),
        work=work,
        addresses=addresses,
        present={},
        blocks=lambda _: (),
        away_bytes=lambda tensors: tensors,
    )
    runner.load(program)
    runner.step_begins()
    for phase in phases:
        runner.phase_begins(phase.label)


def hook_count(training: Training) -> int:
    """Hooks on all modules and the optimizer."""
    modules = sum(
        len(getattr(module, name)) + hidden_in(getattr(module, name))
        for module in training.model.modules()
        for name in (
            "_forward_pre_hooks",
            "_forward_hooks",
            "_backward_hooks",
            "_backward_pre_hooks",
        )
    )
    optimizer: Any = training.optimizer
    every = (optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks)
    return modules + sum(len(hooks) + hidden_in(hooks) for hooks in every)
