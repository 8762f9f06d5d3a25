"""Trainings of random schedules, streamed and stock side by side."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import streamed_uses as uses
import torch
from lazy_lanes import LazyLanes
from streamed_programs import WIDTH, Net, NetWithFlat, Program, Tied, bits
from torch import nn

from umem.streaming.step import TemporaryPlan

UNITS = ("", "stem", *(f"layers.{number}" for number in range(4)), "norm", "head")

BETWEEN_STEPS: tuple[Callable[[Program], None], ...] = (
    *(uses.ema, uses.foreach_ema, uses.logged_norms, uses.save, uses.save_and_load),
    *(uses.copy_model, uses.evaluate, uses.call_one_layer, uses.use_a_weight_elsewhere),
    *(uses.zero_in_place, uses.step_again, uses.change_weights_in_place, uses.replace_data),
    *(uses.change_state_in_place, uses.clear_state, uses.convert, uses.freeze_by_turns),
    *(uses.read_in_a_thread, uses.accumulate_into_old_gradients, uses.exception_in_forward),
    *(uses.skip_a_step, uses.step_with_a_closure, uses.view_of_weights, uses.view_of_gradients),
    *(uses.view_of_state, uses.hook_before_step, uses.old_graph, uses.own_gradient),
    *(uses.keep_state_dict, uses.copy_optimizer, uses.share_state, uses.functional),
    *(uses.averaged_model, uses.norms_of_state, uses.replace_values_of_state),
    *(uses.replace_state, uses.read_counts, uses.view_of_counts, uses.delete_gradients),
    uses.scale_one_gradient,
)
"""What may be done thousands of times: the others leave more parameters, groups or hooks."""

MODELS: tuple[Callable[[], nn.Module], ...] = (Net, NetWithFlat, Tied)


def _adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def _adamw_one_by_one(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, foreach=False)


def _amsgrad(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=1e-2, amsgrad=True, foreach=True)


def _nadam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.NAdam(parameters, lr=1e-2)


OPTIMIZERS = (_adamw, _adamw_one_by_one, _amsgrad, _nadam)


@dataclass(frozen=True)
class Step:
    """What a program does in a step, and behind it."""

    rows: tuple[int, ...] = (8,)
    """Sizes of the batches, whose gradients add up."""
    clips: str = ""
    """By "norm" or "value"; empty to leave gradients as they are."""
    zeroes_first: bool = True
    """Whether gradients are dropped before the batches, and not behind the step."""
    to_none: bool = True
    by_closure: bool = False
    learning_rate: float | None = None
    evaluates: bool = False
    use: Callable[[Program], None] | None = None
    """What else is done with the model, behind the step."""
    resident: frozenset[str] | None = None
    """Units whose state is on the device from now on, in a streamed run; None to change none."""
    slots: int = 2
    temporary: TemporaryPlan = field(default_factory=TemporaryPlan)
    copied_gradients: frozenset[str] = frozenset()
    final_gradients: frozenset[str] = frozenset()
    """Units whose gradients leave in the last batch only."""
    returning: Mapping[str, str] = field(default_factory=dict)
    """Units whose gradients are on the device for the step, with where they come back."""


def random_step(chance: random.Random) -> Step:
    """A step, and in every fourth one anything that a program may do beside."""
    changes_plan = chance.random() < 0.1
    return Step(
        rows=tuple(chance.randint(1, 8) for _ in range(chance.choice((1, 1, 1, 2, 3)))),
        clips=chance.choice(("norm", "norm", "value", "")),
        zeroes_first=chance.random() < 0.7,
        to_none=chance.random() < 0.7,
        by_closure=chance.random() < 0.1,
        learning_rate=chance.choice((1e-4, 1e-3, 1e-2)) if chance.random() < 0.2 else None,
        evaluates=chance.random() < 0.1,
        use=chance.choice(BETWEEN_STEPS) if chance.random() < 0.25 else None,
        resident=frozenset(it for it in UNITS if chance.random() < 0.3) if changes_plan else None,
        slots=chance.randint(1, 3),
        temporary=_temporary_slots(chance),
        copied_gradients=frozenset(it for it in UNITS if chance.random() < 0.5),
        final_gradients=frozenset(it for it in UNITS if chance.random() < 0.3),
        returning={
            it: it if chance.random() < 0.5 else "stem" for it in UNITS if chance.random() < 0.3
        },
    )


def _temporary_slots(chance: random.Random) -> TemporaryPlan:
    """Up to five, in half of the plans, made and freed anywhere."""
    count = chance.randint(0, 5) if chance.random() < 0.5 else 0
    made_in = sorted(chance.choices(range(4), k=count), reverse=True)
    batches = chance.randint(1, 2)
    in_backward = chance.randint(0, count) if batches > 1 else 0
    ends = sorted(chance.choices(range(-1, 5), k=count - in_backward))
    later = sorted(chance.choices(range(-1, 4), k=in_backward), reverse=True)
    names = {-1: "", 4: None} | {number: f"layers.{number}" for number in range(4)}
    return TemporaryPlan(
        tuple(f"layers.{number}" for number in made_in),
        tuple(names[number] for number in ends),
        tuple(names[number] or "" for number in later),
        batches,
    )


@dataclass
class RandomProgram(Program):
    """A program that does as its present step says."""

    plan: Step = field(default_factory=Step)
    rows: int = 8
    """Of the next batch."""
    phase: str = ""
    """What the program does now."""

    def batch(self) -> torch.Tensor:
        """As many rows as the step asks for."""
        return super().batch()[: self.rows]

    def step(self) -> None:
        """One step of the schedule, without what is done behind it."""
        plan, (group, *_) = self.plan, self.optimizer.param_groups
        if plan.learning_rate is not None:
            group["lr"] = plan.learning_rate
        if plan.resident is not None and self.training is not None:
            self.training.temporary.set_plan(plan.temporary)
            self.training.step.units.set_plan(
                plan.resident, plan.slots, temporary=len(plan.temporary.made_in)
            )
            self.training.gradients.set_plan(
                plan.copied_gradients,
                plan.returning,
                plan.temporary.batches,
                plan.final_gradients,
            )
        self.phase = "zero_grad"
        if plan.by_closure:
            self.phase = "step"
            self.seen.append(self.optimizer.step(self._passes).detach())
        else:
            self._passes()
            self.phase = "step"
            self.optimizer.step()
        if not plan.zeroes_first:
            self.optimizer.zero_grad(set_to_none=plan.to_none)

    def _passes(self) -> torch.Tensor:
        if self.plan.zeroes_first:
            self.optimizer.zero_grad(set_to_none=self.plan.to_none)
        loss = torch.zeros(())
        for rows in self.plan.rows:
            self.rows, self.phase = rows, "forward"
            loss = self.model(self.batch()).square().mean()
            self.seen.append(loss.detach().clone())
            self.phase = "backward"
            loss.backward()
        self.phase = "clip"
        if self.plan.clips == "norm":
            nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
        elif self.plan.clips == "value":
            nn.utils.clip_grad_value_(self.model.parameters(), 0.1)
        return loss

    def behind(self) -> None:
        """What the schedule does behind the step."""
        self.phase = "behind"
        self.rows = 8
        if self.plan.evaluates:
            self.model.eval()
            with torch.no_grad():
                self.seen.append(self.model(torch.ones(2, WIDTH)))
            self.model.train()
        if self.plan.use is not None:
            self.plan.use(self)


def clear(program: RandomProgram) -> None:
    """Drop what a program has seen and kept."""
    program.seen.clear()
    program.kept = program.extra = None


class Pair:
    """A stock program and a streamed one, whose kind the seed chooses.

    Parameters
    ----------
    seed
        Chooses model, optimizer and how work is late, and the schedule.
    eagerness
        How soon queued work runs; None for a random one.
    lanes
        What runs the streamed one's work; None for lanes of that eagerness.
    program
        Further settings of both programs.
    """

    def __init__(
        self,
        seed: int,
        eagerness: float | None = None,
        lanes: Callable[[nn.Module], Any] | None = None,
        **program: Any,
    ) -> None:
        self.chance = random.Random(seed)
        made = {
            "make_model": self.chance.choice(MODELS),
            "make_optimizer": self.chance.choice(OPTIMIZERS),
            "streams_weights": self.chance.random() < 0.5,
            "slots": self.chance.randint(1, 3),
            "most_buffers": self.chance.choice((None, 2, 4)),
            **program,
        }
        late = self.chance.choice((0.0, 0.3, 0.8, 1.0)) if eagerness is None else eagerness
        self.stock = RandomProgram(None, **made)
        self.streamed = RandomProgram(lanes or (lambda it: LazyLanes(it, late, seed)), **made)
        for it in self.programs:
            it.step()
            it.stream()

    @property
    def programs(self) -> tuple[RandomProgram, RandomProgram]:
        """Both."""
        return self.stock, self.streamed

    def train(self, steps: int) -> None:
        """Train both by the same random schedule."""
        for _ in range(steps):
            plan = self.next_step()
            for it in self.programs:
                it.plan = plan
                it.step()
                it.behind()

    def next_step(self) -> Step:
        """A random step. Updates in the backward pass need one batch, and gradients as they are."""
        step = random_step(self.chance)
        return Step(rows=step.rows[:1]) if self.stock.in_backward else step

    def check(self) -> None:
        """Compare all bits of both, and forget what they have seen."""
        found, expected = (values(it) for it in (self.streamed, self.stock))
        for name, value in expected.items():
            assert found[name] == value, f"{name} differs from stock's"
        weights = list(self.stock.model.parameters())
        assert all(bool(it.isfinite().all()) for it in weights), "the training itself has diverged"
        for it in self.programs:
            clear(it)


def values(program: RandomProgram) -> dict[str, Any]:
    """Bits of all that a program has, by what they are."""
    found = {
        "what the program saw": bits(program.seen),
        "a weight": bits(list(program.model.parameters())),
        "optimizer state": bits(program.optimizer.state_dict()),
    }
    if not program.in_backward:  # which frees gradients
        found["a gradient"] = bits([it.grad for it in program.model.parameters()])
    return found
