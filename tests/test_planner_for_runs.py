"""Plans for running trainings, where nobody but the hints keeps the budget."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from umem.core.classes import TensorClass
from umem.core.schedule import HintOp, ResidencyMode, Schedule
from umem.hardware import Hardware
from umem.pages.plan import page_out, plan
from umem.pages.simulate import simulate
from umem.policy import ResolvedPolicy, load_policy, resolve
from umem.trace import Trace, first_and_last_use

BLOCK = 2**21
TENSORS = 8

MakeTrace = Callable[..., Trace]


@pytest.fixture
def trace(make_trace: MakeTrace) -> Trace:
    """Weights read one after the other, each phase with its neighbour's, over and over."""
    names = [f"w{number}" for number in range(TENSORS)]
    return make_trace(
        dict.fromkeys(names, (4 * BLOCK, TensorClass.WEIGHTS)),
        [(1e-3, [one, names[(n + 1) % TENSORS]], []) for n, one in enumerate(names)],
    )


def policy_of(machine: Hardware, blocks: int) -> ResolvedPolicy:
    policy = load_policy({"name": "test", "device_budget": blocks * BLOCK})
    return resolve(policy, machine, environ={})


def peak_blocks(trace: Trace, schedule: Schedule) -> int:
    """Most blocks on the device in the second step, by hints and uses alone."""
    resident = set(np.flatnonzero(schedule.residency != ResidencyMode.MAP).tolist())
    peak = 0
    for step in range(2):
        for phase in range(trace.phase_count):
            now = schedule.hint_phase == phase
            for op, tensor in zip(
                schedule.hint_op[now].tolist(), schedule.hint_tensor[now].tolist(), strict=True
            ):
                if op == HintOp.EVICT:
                    resident.discard(tensor)
                elif op == HintOp.PREFETCH:
                    resident.add(tensor)
            used = trace.access_tensor[trace.access_start[phase] : trace.access_start[phase + 1]]
            resident |= {
                tensor
                for tensor in used.tolist()
                if schedule.residency[tensor] != ResidencyMode.MAP
            }
            if step == 1:
                size = trace.tensor_bytes[sorted(resident)].sum()
                peak = max(peak, int(size) // BLOCK)
    return peak


@pytest.mark.parametrize("blocks", [8, 12, 16, 24])
def test_evictions_alone_keep_the_budget(machine: Hardware, trace: Trace, blocks: int) -> None:
    schedule = page_out(trace, machine, policy_of(machine, blocks))
    assert set(schedule.hint_op.tolist()) == {HintOp.EVICT}
    assert peak_blocks(trace, schedule) <= blocks


@pytest.mark.parametrize("blocks", [8, 12, 16, 24])
def test_a_window_that_wants_more_than_fits_keeps_it_too(
    machine: Hardware, trace: Trace, blocks: int
) -> None:
    schedule = plan(trace, machine, policy_of(machine, blocks), "lookahead", may_fault=False)
    assert schedule.hint_count > 0
    assert peak_blocks(trace, schedule) <= blocks


def test_what_fits_is_left_alone(machine: Hardware, trace: Trace) -> None:
    policy = policy_of(machine, 4 * TENSORS)
    assert page_out(trace, machine, policy).hint_count == 0
    for planner in ("lookahead", "planned"):
        assert plan(trace, machine, policy, planner, may_fault=False).hint_count == 0


def test_a_budget_is_not_left_to_the_driver(machine: Hardware, trace: Trace) -> None:
    policy = policy_of(machine, 12)
    schedule = plan(trace, machine, policy, "planned", may_fault=False)
    assert schedule.hint_count > 0
    assert schedule.waits
    assert simulate(trace, schedule, machine, policy).moved_bytes("to_device", "fault") == 0


def test_fixed_homes_win_over_the_policy(machine: Hardware, trace: Trace) -> None:
    fixed = np.full(trace.tensor_count, -1, np.int8)
    fixed[:2] = ResidencyMode.MAP
    fixed[2] = ResidencyMode.KEEP
    for schedule in (
        plan(trace, machine, policy_of(machine, 16), "planned", fixed=fixed),
        page_out(trace, machine, policy_of(machine, 16), fixed=fixed),
    ):
        assert schedule.residency[:3].tolist() == [
            ResidencyMode.MAP,
            ResidencyMode.MAP,
            ResidencyMode.KEEP,
        ]
        assert not set(schedule.hint_tensor.tolist()) & {0, 1, 2}
    first, _ = first_and_last_use(trace)
    assert first[:3].tolist() == [0, 0, 1]
