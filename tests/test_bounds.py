"""Lower bounds: below every plan, and near the optimum that looking at all schedules finds."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_steps import BLOCK, problems, working_set
from umem_bench.fluid_bound import fluid_bound_s

from umem.core.schedule import HintOp, ResidencyMode, Schedule
from umem.hardware import Hardware
from umem.pages.plan import PLANNERS, plan
from umem.pages.simulate import lower_bound_s, run
from umem.pages.simulate.lower_bound import fastest_moves
from umem.policy import ResolvedPolicy, load_policy, resolve
from umem.trace import Trace

MS = 1e-3

MakeTrace = Callable[..., Trace]


def policy_of(machine: Hardware, budget_bytes: int) -> ResolvedPolicy:
    budget = None if budget_bytes is None else f"{budget_bytes} B"
    return resolve(load_policy({"name": "test", "device_budget": budget}), machine, environ={})


# ------------------------------------------------------------------------- a step by hand


BUDGET = 21 * BLOCK


@pytest.fixture(scope="module")
def plain(machine: Hardware) -> Hardware:
    """All ways are as fast as pages: 20 blocks come in a millisecond, and 10 leave."""
    names = ("copy_to_host_bytes_per_s", "mapped_write_bytes_per_s")
    slower: dict[str, Any] = dict.fromkeys(names, machine.to_host_bytes_per_s)
    return dataclasses.replace(machine, **slower)


@pytest.fixture(scope="module")
def updated_weights(make_trace: MakeTrace) -> Trace:
    """Weights that are updated, used, and in the way of an activation of the same size.

    Between their update and the activation's birth are 1.5 ms, and their way to the host takes 2.
    """
    return make_trace(
        {"w": (20 * BLOCK, "weights"), "a": (20 * BLOCK, "activations", False)},
        [
            (0.01 * MS, ["w"], ["w"]),
            (0.5 * MS, [], []),
            (1 * MS, ["w"], []),
            (0.1 * MS, [], ["a"]),
            (0.1 * MS, ["a"], []),
            (1.8 * MS, [], []),
            (1 * MS, ["w"], []),
        ],
    )


def every_schedule(trace: Trace) -> Iterator[Schedule]:
    """All ways of writing the weights back, letting them go and asking for them again."""
    phases = range(1, trace.phase_count)
    for back in (None, *phases):
        for leave, due in itertools.product(range(3, 7), range(4, 7)):
            hints = [(leave, HintOp.EVICT), (due, HintOp.PREFETCH)]
            if back is not None:
                hints.append((back, HintOp.WRITE_BACK))
            hints.sort(key=lambda hint: hint[0])
            yield Schedule(
                "by hand",
                np.array([ResidencyMode.DUPLICATE, ResidencyMode.MIGRATE], np.uint8),
                np.array([phase for phase, _ in hints], np.int32),
                np.array([op for _, op in hints], np.uint8),
                np.zeros(len(hints), np.int32),
            )


@pytest.mark.slow
def test_the_plan_is_the_best_of_all_schedules(plain: Hardware, updated_weights: Trace) -> None:
    policy = policy_of(plain, BUDGET)

    def step_s(schedule: Schedule) -> float:
        return run(updated_weights, schedule, plain, policy).step_s

    best = min(every_schedule(updated_weights), key=step_s)
    planned = plan(updated_weights, plain, policy)
    # 4.51 ms, and half a millisecond that the way to the host lacks.
    assert step_s(best) == pytest.approx(5.01 * MS)
    assert HintOp.WRITE_BACK in best.hint_op
    assert step_s(planned) == pytest.approx(step_s(best))
    # The bounds keep the block that fits beside the activation, and let a part of the weights
    # leave, and of the activation be written in place, while the phase runs that makes it.
    for bound_s in (lower_bound_s, fluid_bound_s):
        assert 4.51 * MS < bound_s(updated_weights, plain, BUDGET) <= 4.91 * MS
    assert fluid_bound_s(updated_weights, plain, BUDGET) == pytest.approx(4.8 * MS, rel=1e-4)


@pytest.mark.slow
def test_without_write_backs_the_way_out_counts(plain: Hardware, updated_weights: Trace) -> None:
    policy = policy_of(plain, BUDGET)
    moved = plan(updated_weights, plain, policy, may_write_back=False)
    assert not np.isin(moved.hint_op, (HintOp.WRITE_BACK, HintOp.COPY_BACK)).any()
    best_s = run(updated_weights, plan(updated_weights, plain, policy), plain, policy).step_s
    assert run(updated_weights, moved, plain, policy).step_s > best_s


def test_what_has_to_come_in_a_short_time_counts(machine: Hardware, make_trace: MakeTrace) -> None:
    """Four tensors of 20 blocks that are read in 0.3 ms, and room for two."""
    short: list[Any] = [(0.1 * MS, ["a", "b"], []), (0.1 * MS, [], []), (0.1 * MS, ["c", "d"], [])]
    trace = make_trace(
        dict.fromkeys("abcd", (20 * BLOCK, "weights")), [*short, *[(1 * MS, [], [])] * 9]
    )
    # 40 blocks come in meanwhile, 20 in a millisecond.
    expected_s = 9.3 * MS + 1.7 * MS
    assert lower_bound_s(trace, machine, 40 * BLOCK) == pytest.approx(expected_s)
    assert fluid_bound_s(trace, machine, 40 * BLOCK) == pytest.approx(expected_s, rel=1e-4)


def test_a_direction_has_its_full_rate_only_alone(plain: Hardware) -> None:
    """A link of 24 blocks a millisecond leaves 16 and 8 of them to directions of 20 and 10."""
    rate = 24e3 * BLOCK
    shared = dataclasses.replace(
        plain, link_bytes_per_s=rate, copy_link_bytes_per_s=rate, mapped_bytes_per_s=rate
    )
    least_s = fastest_moves(shared).least_s
    assert least_s(16 * BLOCK, 8 * BLOCK) == pytest.approx(1 * MS)
    assert least_s(20 * BLOCK, 0) == least_s(0, 10 * BLOCK) == pytest.approx(1 * MS)
    # While 14 blocks come in, at 16 a millisecond, seven leave, and the other three leave alone.
    assert least_s(14 * BLOCK, 10 * BLOCK) == pytest.approx((14 / 16 + 3 / 10) * MS)


# ------------------------------------------------------------------------- for every step


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(
    problem=problems(4 * BLOCK),
    checkpoints=st.integers(1, 12),
    slowdown=st.sampled_from([0.0, 1e-12, 1e-11]),
    links=st.tuples(*[st.sampled_from([40e3, 50e3, 60e3, 80e3])] * 3),
)
def test_no_plan_beats_a_bound(
    random_trace: MakeTrace,
    machine: Hardware,
    problem: Any,
    checkpoints: int,
    slowdown: float,
    links: tuple[float, float, float],
) -> None:
    made_of, spare = problem
    trace = random_trace(*made_of)
    machine = dataclasses.replace(
        machine,
        page_slowdown_s_per_byte=slowdown,
        copy_slowdown_s_per_byte=slowdown,
        mapped_slowdown_s_per_byte=slowdown / 2,
        link_bytes_per_s=links[0] * 2**20,
        copy_link_bytes_per_s=links[1] * 2**20,
        mapped_bytes_per_s=links[2] * 2**20,
    )
    budget = working_set(trace) + spare
    policy = policy_of(machine, budget)
    quick_s = lower_bound_s(trace, machine, budget)
    fluid_s = fluid_bound_s(trace, machine, budget, checkpoints=checkpoints)
    for planner in PLANNERS:
        outcome = run(trace, plan(trace, machine, policy, planner), machine, policy)
        if outcome.settled:
            assert quick_s <= outcome.step_s * (1 + 1e-9), planner
            assert fluid_s <= outcome.step_s * (1 + 1e-6), planner


def test_more_checkpoints_see_more(plain: Hardware, updated_weights: Trace) -> None:
    few = fluid_bound_s(updated_weights, plain, BUDGET, checkpoints=1)
    many = fluid_bound_s(updated_weights, plain, BUDGET, checkpoints=8)
    assert updated_weights.duration_s is not None
    assert updated_weights.duration_s.sum() * (1 - 1e-6) <= few < many
