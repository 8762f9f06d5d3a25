"""Several optimizers of one model, and several models, in one process: no bit changes."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from activation_chain import LazyMover
from lazy_lanes import CountedMemory, LazyLanes
from measured_models import (
    BASE,
    LAYER_STATE,
    LAYERS,
    SAVED,
    SLACK,
    Machine,
    RoomOfMachine,
    WallClockOf,
)
from measured_models import Net as TunedNet
from measured_models import batch as inputs
from pairs import pairs
from streamed_programs import bits
from torch import nn
from torch.nn.functional import softplus

from umem.hardware import load_hardware
from umem.offloading import ActivationStore
from umem.runtime.unguarded import Unguarded
from umem.streaming import StreamedTraining
from umem.streaming.stage import SharedBudget
from umem.streaming.tune import StreamTuner, TuningState, planning
from umem.streaming.weights import ModelWeights

# ------------------------------------------------------------------ the budget


@pytest.fixture(autouse=True)
def usual_slack(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of it would have room for these small models as a whole."""
    monkeypatch.setattr(planning, "_SLACK_SHARES", (1.0,))


MODEL_STATE = LAYERS * LAYER_STATE
MODEL_SAVED = LAYERS * SAVED


@dataclass
class Owner:
    """A model, its optimizers, and what streams their state."""

    model: Any
    optimizers: list[torch.optim.Optimizer]
    tuner: StreamTuner | None = None
    weights: ModelWeights | None = None
    trainings: list[StreamedTraining] = field(default_factory=list)


def frozen(_model: nn.Module) -> list[torch.optim.Optimizer]:
    return []


def halves(model: nn.Module) -> list[torch.optim.Optimizer]:
    """For the first layers, and for the others."""
    every = list(model.parameters())
    half = len(every) // 2
    return [
        torch.optim.AdamW(every[:half], lr=1e-2),
        torch.optim.Adam(every[half:], lr=2e-2, amsgrad=False),
    ]


class CountedDevice(CountedMemory):
    """Gradients are on the device, and weights but for those that were moved to host memory."""

    def __init__(self, *args: Any, parameters: list[Any]) -> None:
        super().__init__(*args, parameters=parameters)
        self._weights = parameters
        self._away: set[int] = set()
        """Addresses of weights at home."""

    def is_home(self, tensor: torch.Tensor) -> bool:
        if tensor.data_ptr() in self._away:
            return True
        is_weight = any(it.data_ptr() == tensor.data_ptr() for it in self._weights)
        return not is_weight and super().is_home(tensor)

    def new_home(self, tensor: torch.Tensor, tensor_class: Any) -> torch.Tensor | None:
        home = super().new_home(tensor, tensor_class)
        if home is not None:
            self._away.add(home.data_ptr())
        return home

    def weights_at_home(self) -> int:
        with Unguarded():
            return sum(it.nbytes for it in self._weights if it.data_ptr() in self._away)


class Process:
    """A process that trains models on one device, in turn."""

    def __init__(
        self,
        more_bytes: int | None,
        parts: list[Any],
        *,
        streams_weights: bool = False,
        in_backward: bool = False,
    ) -> None:
        torch.manual_seed(0)
        self.streams_weights, self.in_backward = streams_weights, in_backward
        self.is_stock = more_bytes is None
        self.machine = Machine(more_bytes or 0)
        self.owners = []
        for make_optimizers in parts:
            # What a model without optimizers computes leaves nothing behind.
            model = TunedNet(self.machine if make_optimizers is not frozen else Machine())
            self.owners.append(Owner(model, make_optimizers(model)))
        self.shared = SharedBudget()
        every = [p for it in self.owners for p in it.model.parameters()]
        self.lanes = LazyLanes(self.owners[0].model, 0.5, 1, also=every)
        self.memory = CountedDevice(1024, parameters=every)
        self.machine.placed = lambda: self.memory.bytes + self.weight_bytes()
        self.machine.at_home = self.memory.weights_at_home
        self.machine.away = lambda: sum(
            it.tuner.away_bytes() for it in self.owners if it.tuner is not None
        )
        self.seen: list[Any] = []
        self.kept: dict[str, Any] = {}
        """Whatever a program keeps from step to step."""
        self.steps = 0

    def stream_all(self) -> None:
        """Stream the state of all models' optimizers, behind the first step."""
        self.run(1)
        for owner in self.owners:
            self.stream(owner)

    def stream(self, owner: Owner) -> None:
        """Stream the state of a model's optimizers."""
        if self.is_stock:
            return
        if self.streams_weights:
            owner.weights = ModelWeights(
                owner.model,
                self.lanes,
                self.memory,
                RoomOfMachine(self.machine),
                ActivationStore("cpu"),
                min_bytes=1024,
                shared=self.shared,
            )
            owner.weights.begin_call()
        if not owner.optimizers:
            return
        owner.tuner = StreamTuner(
            owner.model,
            load_hardware("h200"),
            WallClockOf(self.machine),
            RoomOfMachine(self.machine),
            ActivationStore("cpu", LazyMover(), min_bytes=1024),
            weights=owner.weights,
            shared=self.shared,
        )
        for optimizer in owner.optimizers:
            self.add(owner, optimizer)

    def add(self, owner: Owner, optimizer: torch.optim.Optimizer) -> None:
        """Stream the state of one more optimizer of a model."""
        ring = owner.trainings[0].step.units.ring if owner.trainings else None
        training = StreamedTraining(
            owner.model,
            optimizer,
            self.lanes,
            self.memory,
            owner.tuner,
            step_in_backward=self.in_backward,
            weights=owner.weights,
            ring=ring,
        )
        owner.trainings.append(training)

    def step(self, owner: Owner) -> None:
        self.steps += 1
        owner.model.zero_grad()
        loss = owner.model(inputs(self.steps)).square().mean()
        loss.backward()
        self.seen.append(float(loss.detach()))
        if not self.in_backward:
            nn.utils.clip_grad_norm_(owner.model.parameters(), 0.5)
        for optimizer in owner.optimizers:
            optimizer.step()

    def step_all(self) -> None:
        for owner in self.owners:
            if owner.optimizers:
                self.step(owner)

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.step_all()

    def found(self) -> list[Any]:
        return [
            self.seen,
            [bits(list(it.model.parameters())) for it in self.owners],
            [bits(of.state_dict()) for it in self.owners for of in it.optimizers],
        ]

    def weight_bytes(self) -> int:
        """Of models whose weights can be moved; others are a part of the base."""
        streamed = [it.model for it in self.owners if it.weights is not None]
        with Unguarded():
            return sum(p.nbytes for model in streamed for p in model.parameters())

    @property
    def highest_bytes(self) -> int:
        return max(self.machine.highest_in_all, BASE + self.memory.peak_bytes)

    def forget_highest(self) -> None:
        self.machine.highest_in_all = self.memory.peak_bytes = 0

    @property
    def limit_bytes(self) -> int:
        return self.machine.budget_bytes - SLACK

    def states(self) -> set[TuningState]:
        return {it.tuner.status().state for it in self.owners if it.tuner is not None}

    def resident_bytes(self) -> list[int]:
        return [sum(of.step.units.resident_bytes for of in it.trainings) for it in self.owners]


def both(
    more_bytes: int,
    parts: list[Any],
    train: Callable[[Process], None],
    *,
    streams_weights: bool = False,
    in_backward: bool = False,
    keeps_budget: bool = True,
) -> Process:
    """A streamed process after a training, which has the bits of stock and kept its budget."""
    run = Process(more_bytes, parts, streams_weights=streams_weights, in_backward=in_backward)
    stock = Process(None, parts, in_backward=in_backward)
    for process in (run, stock):
        train(process)
    assert run.found() == stock.found()
    assert not keeps_budget or run.highest_bytes <= run.limit_bytes
    return run


def steps(before: int, after: int, step: Callable[[Process], None] | None = None) -> Any:
    """Trains on, and counts memory from some step on: before plans the allocator keeps it."""

    def train(process: Process) -> None:
        process.stream_all()
        for number in range(before + after):
            if number == before:
                process.forget_highest()
            (step or Process.step_all)(process)

    return train


def one(model: nn.Module) -> list[torch.optim.Optimizer]:
    return [torch.optim.AdamW(model.parameters(), lr=1e-2)]


@pytest.mark.slow
@pytest.mark.parametrize("parts", [[halves], [one, one], [one, halves, one]])
@pytest.mark.parametrize("share", [0.1, 0.5, 1.0])
def test_trainings_keep_one_budget(parts: list[Any], share: float) -> None:
    least_bytes = 2 * LAYER_STATE * len(parts)
    more_bytes = MODEL_SAVED + least_bytes + int(share * MODEL_STATE * len(parts))
    run = both(more_bytes, parts, steps(4, 10))
    assert run.states() == {TuningState.PLANNED}
    # What there is is used: but for what would not hold another layer's state.
    unused_bytes = MODEL_STATE * len(parts) - sum(run.resident_bytes())
    if share < 1.0:
        assert unused_bytes <= (1 - share) * MODEL_STATE * len(parts) + 3 * LAYER_STATE * len(parts)
        assert min(run.resident_bytes()) > 0 or share < 0.2
        # Each model has about the same part.
        assert max(run.resident_bytes()) - min(run.resident_bytes()) <= LAYER_STATE
    else:
        assert unused_bytes == 0


@pytest.mark.slow
def test_a_training_that_ends_leaves_its_share() -> None:
    before: dict[bool, list[int]] = {}

    def train(process: Process) -> None:
        steps(8, 0)(process)
        process.forget_highest()
        before[process.is_stock] = process.resident_bytes()
        gone = process.owners.pop()
        for training in gone.trainings:
            training.close()
        del gone
        process.run(8)

    run = both(MODEL_SAVED + 4 * LAYER_STATE + MODEL_STATE // 2, [one, one], train)
    assert run.resident_bytes()[0] > before[False][0]


@pytest.mark.slow
def test_a_training_that_begins_later_gets_its_share() -> None:
    before: dict[bool, list[int]] = {}

    def train(process: Process) -> None:
        process.run(1)
        process.stream(process.owners[0])
        process.run(8)
        before[process.is_stock] = process.resident_bytes()
        process.stream(process.owners[1])
        process.run(8)
        process.forget_highest()
        process.run(4)

    run = both(MODEL_SAVED + 4 * LAYER_STATE + MODEL_STATE, [one, one], train)
    assert before[False][0] == MODEL_STATE
    assert 0 < run.resident_bytes()[1] <= run.resident_bytes()[0] < MODEL_STATE


@pytest.mark.slow
def test_an_optimizer_that_begins_later_and_one_that_ends() -> None:
    before: dict[bool, list[int]] = {}

    def train(process: Process) -> None:
        (owner,) = process.owners
        first, second = owner.optimizers
        process.run(1)
        owner.optimizers = [first]
        process.stream(owner)
        process.run(6)
        owner.optimizers.append(second)
        if not process.is_stock:
            process.add(owner, second)
        process.run(8)
        process.forget_highest()
        before[process.is_stock] = process.resident_bytes()
        owner.optimizers.remove(first)
        if not process.is_stock:
            owner.trainings.pop(0).close()
        process.run(8)

    run = both(MODEL_SAVED + 2 * LAYER_STATE + MODEL_STATE // 2, [halves], train)
    assert before[False][0] >= MODEL_STATE // 2 - LAYER_STATE
    assert run.resident_bytes()[0] == MODEL_STATE // 2
    assert run.states() == {TuningState.PLANNED}


@pytest.mark.slow
@pytest.mark.parametrize("parts", [[halves], [halves, one]])
@pytest.mark.parametrize("share", [0.3, 1.0])
def test_updates_in_the_backward_pass_keep_the_same_budget(parts: list[Any], share: float) -> None:
    least_bytes = 2 * LAYER_STATE * len(parts)
    more_bytes = MODEL_SAVED + least_bytes + int(share * MODEL_STATE * len(parts))
    run = both(more_bytes, parts, steps(8, 6), in_backward=True)
    trainings = [of for it in run.owners for of in it.trainings]
    assert all(it.status().step_in_backward and it.counts.ahead > 0 for it in trainings)


@dataclass
class Member:
    """Of a budget, with the bytes that a test sets."""

    least_bytes: int
    most_bytes: int
    need_bytes: int
    device_bytes: int = 0
    placed_bytes: int = 0


@pytest.mark.parametrize("seed", range(50))
def test_shares_are_within_the_budget_and_in_proportion(seed: int) -> None:
    chance = random.Random(seed)
    shared, budget_bytes = SharedBudget(), 10_000
    members = []
    for _ in range(chance.randint(2, 5)):
        least_bytes = chance.randint(0, 500)
        most_bytes = least_bytes + chance.randint(0, 4000)
        members.append(Member(least_bytes, most_bytes, chance.randint(0, 9000)))
        shared.join(members[-1])
    parts = [shared.part_of(it, budget_bytes) for it in members]
    shares = [it.most_bytes or 0 for it in parts]
    left_bytes = budget_bytes - max(it.need_bytes for it in members)
    least_bytes = sum(it.least_bytes for it in members)
    assert sum(shares) <= max(left_bytes, least_bytes)
    for share_bytes, member, part in zip(shares, members, parts, strict=True):
        assert member.least_bytes <= share_bytes <= member.most_bytes
        assert part.others_bytes == sum(shares) - share_bytes
    if sum(it.most_bytes for it in members) <= left_bytes:
        assert shares == [it.most_bytes for it in members]
    elif least_bytes < left_bytes:
        assert sum(shares) > left_bytes - len(members)
    # What one holds beyond its share is not there for others yet.
    members[0].device_bytes = shares[0] + 100
    assert shared.part_of(members[1], budget_bytes).others_bytes == parts[1].others_bytes + 100


MODEL_WEIGHTS = MODEL_STATE // 2


@pytest.mark.slow
@pytest.mark.parametrize("parts", [[one, one], [halves, one], [frozen, one], [one, frozen]])
@pytest.mark.parametrize("share", [0.3, 1.0])
def test_weights_that_are_streamed_keep_the_same_budget(parts: list[Any], share: float) -> None:
    """A model without optimizers is as a teacher: it is called in each step of the other one."""

    def train(process: Process) -> None:
        process.steps += 1
        x = inputs(process.steps)
        for owner in process.owners:
            if not owner.optimizers:
                with torch.no_grad():
                    x = x + owner.model(x)
                continue
            owner.model.zero_grad()
            loss = owner.model(x).square().mean()
            loss.backward()
            process.seen.append(float(loss.detach()))
            for optimizer in owner.optimizers:
                optimizer.step()

    trained = sum(it is not frozen for it in parts)
    all_bytes = trained * MODEL_STATE + len(parts) * MODEL_WEIGHTS
    least_bytes = 2 * LAYER_STATE * trained + MODEL_WEIGHTS // 2 * len(parts)
    more_bytes = MODEL_SAVED + least_bytes + int(share * all_bytes)
    run = both(more_bytes, parts, steps(10, 6, train), streams_weights=True)
    assert run.states() == {TuningState.PLANNED}
    on_device = [
        of.weights.status().resident_bytes + state_bytes
        for of, state_bytes in zip(run.owners, run.resident_bytes(), strict=True)
        if of.weights is not None
    ]
    # Before its first calls a model alone leaves room for what they may need.
    assert (sum(on_device) == all_bytes) == (share == 1.0 and frozen not in parts)


# ------------------------------------------------------------------ programs


def step_of_each(process: Process) -> None:
    """One after the other, with schedulers."""
    for owner in process.owners:
        process.step(owner)
        for optimizer in owner.optimizers:
            schedulers = process.kept.setdefault("schedulers", {})
            if optimizer not in schedulers:
                schedulers[optimizer] = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
            schedulers[optimizer].step()


def adversaries(process: Process) -> None:
    """A maker and a judge, which step in turn; the maker's graph is used twice."""
    maker, judge = process.owners[0], process.owners[-1]
    process.steps += 1
    x = inputs(process.steps)
    made = maker.model(x)
    judge.model.zero_grad()
    right = softplus(-judge.model(inputs(-process.steps))) + softplus(judge.model(made.detach()))
    right.mean().backward()
    for optimizer in judge.optimizers:
        optimizer.step()
    maker.model.zero_grad()
    softplus(-judge.model(made)).mean().backward(retain_graph=True)
    made.square().mean().backward()
    for optimizer in maker.optimizers:
        optimizer.step()
    process.seen.append(float(right.mean().detach()))


def with_scaler(process: Process) -> None:
    """One scaler for all optimizers, some of which skip their steps."""
    scaler = process.kept.setdefault("scaler", torch.amp.GradScaler("cpu", init_scale=8.0))
    process.steps += 1
    for owner in process.owners:
        owner.model.zero_grad()
        loss = owner.model(inputs(process.steps)).square().mean()
        scaler.scale(loss).backward()
        if process.steps % 3 == 0:
            owner.model.layers[0].up.weight.grad[0] = torch.inf
        for optimizer in owner.optimizers:
            scaler.unscale_(optimizer)
            groups = [it for group in optimizer.param_groups for it in group["params"]]
            nn.utils.clip_grad_norm_(groups, 0.5)
            scaler.step(optimizer)
        process.seen.append(float(loss.detach()))
    scaler.update()


def with_closures(process: Process) -> None:
    """The first optimizer of a model computes its gradients itself."""
    process.steps += 1
    for owner in process.owners:
        first: Any
        first, *others = owner.optimizers

        def closure(owner: Owner = owner) -> torch.Tensor:
            owner.model.zero_grad()
            loss = owner.model(inputs(process.steps)).square().mean()
            loss.backward()
            return loss

        process.seen.append(float(first.step(closure)))
        for optimizer in others:
            optimizer.step()


def loaded(process: Process) -> None:
    """In some steps the state of all is loaded that was saved two steps before."""
    step_of_each(process)
    number = len(process.kept.setdefault("saved", []))
    every = [part for owner in process.owners for part in (owner.model, *owner.optimizers)]
    process.kept["saved"].append([copy.deepcopy(part.state_dict()) for part in every])
    if number % 5 == 4:
        for part, state in zip(every, process.kept["saved"][number - 2], strict=True):
            part.load_state_dict(state)


def in_turns(process: Process) -> None:
    """Only one model, or one optimizer of it, steps in each iteration."""
    process.steps += 1
    owner = process.owners[process.steps % len(process.owners)]
    owner.model.zero_grad()
    owner.model(inputs(process.steps)).square().mean().backward()
    owner.optimizers[process.steps // 2 % len(owner.optimizers)].step()


PROGRAMS = [step_of_each, adversaries, with_scaler, with_closures, loaded, in_turns]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "parts", "share"),
    pairs(
        PROGRAMS,
        [[halves], [one, one], [halves, one]],
        [0.3, 1.0],
        allowed=lambda program, parts, _: program is not adversaries or len(parts) == 2,
    ),
)
def test_no_bit_changes(program: Callable[[Process], None], parts: list[Any], share: float) -> None:
    least_bytes = 2 * LAYER_STATE * len(parts)
    graphs = 3 if program is adversaries else 1
    more_bytes = graphs * MODEL_SAVED + least_bytes + int(share * MODEL_STATE * len(parts))
    # In turns, each model has a part of the iterations only.
    iterations = 14 * (len(parts) if program is in_turns else 1)
    # State that is loaded is on the device beside the old one.
    is_kept = program is not loaded
    run = both(more_bytes, parts, steps(iterations - 1, 1, program), keeps_budget=is_kept)
    assert run.states() == {TuningState.PLANNED}
    assert sum(of.counts.streamed for it in run.owners for of in it.trainings) > 0
    are_all_resident = sum(run.resident_bytes()) == MODEL_STATE * len(parts)
    # A model that is alone copies activations to have all state on the device, and so does one
    # whose activations are idle while the other one runs.
    may_copy = len(parts) == 1 or program is adversaries
    assert are_all_resident == (share == 1.0) or may_copy


@pytest.mark.slow
@pytest.mark.parametrize("parts", [[one, one], [halves, one]])
@pytest.mark.parametrize("graphs", [1.4, 1.7])
def test_what_a_model_saves_leaves_while_another_one_runs(parts: list[Any], graphs: float) -> None:
    """The judge alone fits, and the maker alone."""
    more_bytes = int(graphs * MODEL_SAVED) + 4 * LAYER_STATE
    run = both(more_bytes, parts, steps(29, 3, adversaries))
    assert run.states() == {TuningState.PLANNED}
    maker, judge = (it.tuner.status() for it in run.owners if it.tuner is not None)
    assert maker.copied_blocks > 0
    assert judge.copied_blocks == 0
    assert maker.overflow_bytes == judge.overflow_bytes == 0


def one_for_each_parameter(model: nn.Module) -> list[torch.optim.Optimizer]:
    """Each steps in the backward pass, when its gradient is complete."""
    made: list[torch.optim.Optimizer] = []
    for parameter in model.parameters():
        optimizer = torch.optim.AdamW([parameter], lr=1e-2)

        def update(of: torch.Tensor, optimizer: torch.optim.Optimizer = optimizer) -> None:
            optimizer.step()
            optimizer.zero_grad()

        parameter.register_post_accumulate_grad_hook(update)
        made.append(optimizer)
    return made


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.3, 1.0])
def test_optimizers_that_step_in_the_backward_pass(share: float) -> None:
    def train(process: Process) -> None:
        (owner,) = process.owners
        for number in range(12):
            process.steps += 1
            loss = owner.model(inputs(process.steps)).square().mean()
            loss.backward()
            process.seen.append(float(loss.detach()))
            if number == 0:
                process.stream(owner)
            elif number == 5:
                process.forget_highest()

    more_bytes = MODEL_SAVED + 2 * LAYER_STATE + int(share * MODEL_STATE)
    run = both(more_bytes, [one_for_each_parameter], train)
    assert run.states() == {TuningState.PLANNED}
    assert (sum(run.resident_bytes()) == MODEL_STATE) == (share == 1.0)
    assert sum(run.resident_bytes()) > 0
