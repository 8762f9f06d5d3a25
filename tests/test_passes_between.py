"""Passes of other models between a model's forward and backward pass are a unit of its plan."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from faults import let_out
from measured_models import BASE, LAYERS, SAVED, Machine, Net, batch

from umem.capture.live import NO_BLOCK, Block, PhaseTracker, find_blocks
from umem.runtime.torch_hooks.modules import HookErrors
from umem.streaming.plan import TemporarySlot
from umem.streaming.stage import SharedBudget
from umem.streaming.tune import StepMeter
from umem.streaming.tune.measured_steps import BETWEEN, MeasuredStep
from umem.streaming.tune.named_plan import NamedPlan

FORWARD_S = sum(1.0 + number for number in range(LAYERS))
BACKWARD_S = sum(10.0 + number for number in range(LAYERS))


class Adversaries:
    """A maker whose steps are measured, and a judge of what it makes."""

    def __init__(self) -> None:
        self.machine = Machine()
        self.maker, self.judge = Net(self.machine), Net(self.machine)
        self.calls = 0
        self.judge.register_forward_pre_hook(self._count)
        root = Block(NO_BLOCK, self.maker)
        blocks = find_blocks(self.maker)
        self.meter = StepMeter(
            self.machine, self.machine, root, blocks, int, int, calls=lambda: self.calls
        )
        self.tracker = PhaseTracker(root, blocks, HookErrors(let_out), self.meter)
        self.tracker.start()

    def _count(self, *_: object) -> None:
        self.calls += 1

    def end_step(self) -> MeasuredStep:
        self.tracker.optimizer_begins()
        self.tracker.optimizer_ends()
        found = self.meter.take()
        assert found is not None
        return found


def test_a_step_with_another_models_passes_in_it() -> None:
    both = Adversaries()
    made = both.maker(batch(0))
    both.judge(made.detach()).sum().backward()
    both.judge(made).sum().backward()
    found = both.end_step()
    layers = [f"layers.{number}" for number in range(LAYERS)]
    assert list(found.blocks) == [NO_BLOCK, *layers, BETWEEN]
    # The other's own backward pass is no batch of this one.
    assert found.batches == 1
    assert found.other_s == 0.0
    between = found.blocks[BETWEEN]
    assert between.forward_s == pytest.approx(2 * FORWARD_S + BACKWARD_S)
    assert between.backward_s == pytest.approx(BACKWARD_S)
    assert between.forward_peak_bytes == BASE + 2 * LAYERS * SAVED
    assert between.backward_peak_bytes == BASE + 2 * LAYERS * SAVED
    last = found.blocks[layers[-1]]
    assert last.forward_s == pytest.approx(LAYERS)
    assert last.backward_s == pytest.approx(10.0 + LAYERS - 1)
    assert last.forward_peak_bytes == BASE + LAYERS * SAVED


def test_passes_of_another_model_before_and_behind_are_none_between() -> None:
    both = Adversaries()
    both.judge(batch(1)).sum().backward()
    both.maker(batch(0)).sum().backward()
    with torch.no_grad():
        both.judge(batch(1))
    found = both.end_step()
    assert BETWEEN not in found.blocks
    assert found.batches == 1


def test_nothing_waits_for_a_block_that_stands_for_others() -> None:
    order = ["", "a", "b", BETWEEN]
    slots = [TemporarySlot(3, 2), TemporarySlot(None, 3), TemporarySlot(None, 5)]
    plan = SimpleNamespace(
        temporary=slots,
        left_before={1: 2, 2: 3},
        returning_gradients={},
        resident={3},
        **dict.fromkeys(("copied_gradients", "final_gradients", "hosts"), ()),
        **dict.fromkeys(("fetch_ahead", "slots"), 2),
        **dict.fromkeys(("stages_operands", "adds_at_home"), False),
    )
    units = [SimpleNamespace(name=name) for name in order]
    whole: Any = SimpleNamespace(
        stream=plan, units=units, recomputed={"b"}, left_out=frozenset[str]()
    )
    named = NamedPlan.of(whole, 1)
    assert named.copied == {"a": "b", "b": None}
    assert named.recomputed == {"b": None}
    assert named.temporary.made_in == ("b", None, None)
    assert named.temporary.freed_before == ("b", None)
    assert named.temporary.freed_in_backward == ("b",)


def test_those_around_others_are_planned_first() -> None:
    shared = SharedBudget()
    members: list[Any] = [Member(), Member(), Member()]
    for member in members:
        shared.join(member)
        shared.unplanned.add(member)
    assert not any(map(shared.waits, members))
    shared.surrounding.update(members[1:])
    assert [shared.waits(it) for it in members] == [True, False, True]
    shared.unplanned.discard(members[1])
    assert [shared.waits(it) for it in members] == [True, False, False]
    shared.leave(members[2])
    assert not any(map(shared.waits, members[:2]))


class Member:
    """A member of a budget whose bytes nobody asks for."""
