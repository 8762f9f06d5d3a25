"""The planners: what holds for every plan, what a policy's words do to one, and errors."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Callable
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from random_steps import BLOCK, problems, working_set
from simulation_audit import find_errors

from umem.core.classes import TensorClass
from umem.core.errors import PlanError, PolicyError
from umem.core.report import MigrationReport
from umem.core.schedule import HintOp, ResidencyMode, Schedule
from umem.hardware import Hardware
from umem.pages.plan import PLANNERS, Reason, plan
from umem.pages.plan.planners import explained_plan, ideal_clock, pose_problem
from umem.pages.plan.problem import Manner, explain, plan_step
from umem.pages.simulate import report, run, simulate
from umem.policy import (
    ClassRule,
    Eviction,
    Mechanism,
    MemoryKind,
    Placement,
    ResolvedPolicy,
    load_policy,
    resolve,
)
from umem.trace import Trace, find_gaps

LAYERS = 6

MakeTrace = Callable[..., Trace]


def policy_of(
    machine: Hardware, budget_bytes: int | None = None, **classes: dict[str, Any]
) -> ResolvedPolicy:
    """All classes in managed memory, but for what is said of some."""
    budget = None if budget_bytes is None else f"{budget_bytes} B"
    policy = load_policy({"name": "test", "device_budget": budget, "classes": classes})
    return resolve(policy, machine, environ={})


def hints_of(schedule: Schedule) -> list[tuple[int, HintOp, int]]:
    return [
        (int(phase), HintOp(op), int(tensor))
        for phase, op, tensor in zip(
            schedule.hint_phase, schedule.hint_op, schedule.hint_tensor, strict=True
        )
    ]


def ops_by_class(trace: Trace, schedule: Schedule) -> dict[TensorClass, set[HintOp]]:
    classes = list(TensorClass)
    ops: dict[TensorClass, set[HintOp]] = {}
    for _, op, tensor in hints_of(schedule):
        ops.setdefault(classes[trace.tensor_class[tensor]], set()).add(op)
    return ops


def moved(answer: MigrationReport, tensor_class: TensorClass) -> dict[tuple[str, str], int]:
    """Bytes of a class by direction and cause."""
    return {
        (entry.direction, entry.cause): entry.bytes
        for entry in answer.traffic
        if entry.tensor_class is tensor_class
    }


@pytest.fixture(scope="module")
def training(make_trace: MakeTrace) -> Trace:
    """A small training step."""
    return training_step(make_trace, LAYERS)


def training_step(make_trace: MakeTrace, count: int) -> Trace:
    """Forward, backward, and an optimizer with its state."""
    layers = range(count)
    tensors: dict[str, tuple[Any, ...]] = {}
    for layer in layers:
        tensors[f"weights {layer}"] = (4 * BLOCK, "weights")
        tensors[f"frozen {layer}"] = (4 * BLOCK, "frozen_weights")
        tensors[f"state {layer}"] = (8 * BLOCK, "optimizer_state")
        tensors[f"activations {layer}"] = (6 * BLOCK, "activations", False)
        tensors[f"gradients {layer}"] = (4 * BLOCK, "gradients", False)
    forward = [
        (
            2e-3,
            [
                f"weights {layer}",
                f"frozen {layer}",
                *([f"activations {layer - 1}"] if layer else []),
            ],
            [f"activations {layer}"],
        )
        for layer in layers
    ]
    backward = [
        (
            4e-3,
            [f"weights {layer}", f"frozen {layer}", f"activations {layer}"],
            [f"gradients {layer}"],
        )
        for layer in reversed(layers)
    ]
    update = [
        (
            1e-3,
            [f"gradients {layer}", f"state {layer}", f"weights {layer}"],
            [f"state {layer}", f"weights {layer}"],
        )
        for layer in layers
    ]
    return make_trace(tensors, [*forward, *backward, *update])


TIGHT = 50 * BLOCK
"""96 blocks live from step to step; with activations and gradients there are up to 136 at once."""


# ------------------------------------------------------------------------- for every plan


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(problem=problems(8 * BLOCK), order=st.sampled_from(["access", "migration"]))
def test_every_plan_keeps_the_budget_and_none_beats_the_bound(
    random_trace: MakeTrace, machine: Hardware, problem: Any, order: Any
) -> None:
    made_of, spare = problem
    trace = random_trace(*made_of)
    machine = dataclasses.replace(machine, eviction_order=order)
    budget = working_set(trace) + spare
    policy = policy_of(machine, budget)
    step_s = {}
    for planner in PLANNERS:
        schedule = plan(trace, machine, policy, planner)
        assert schedule.planner == planner
        check_form(schedule, trace)
        outcome = run(trace, schedule, machine, policy)
        assert find_errors(outcome.sim) == []
        answer = report(outcome, trace, schedule, machine, policy, timeline=True)
        assert answer.timeline is not None
        assert answer.timeline.resident_bytes.sum(axis=1).max() <= budget
        assert answer.step_s >= answer.lower_bound_s * (1 - 1e-9)
        step_s[planner] = answer.step_s
    assert step_s["planned"] <= 1.01 * step_s["fault"]


def check_form(schedule: Schedule, trace: Trace) -> None:
    assert schedule.residency.dtype == np.uint8
    assert len(schedule.residency) == trace.tensor_count
    assert (np.diff(schedule.hint_phase) >= 0).all()
    for column, size in (
        (schedule.hint_phase, trace.phase_count),
        (schedule.hint_op, len(HintOp)),
        (schedule.hint_tensor, trace.tensor_count),
    ):
        assert len(column) == schedule.hint_count
        assert ((column >= 0) & (column < size)).all()


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(
    problem=problems(8 * BLOCK),
    slowness=st.sampled_from([1, 4, 16]),
    manner=st.builds(Manner, ahead=st.booleans(), reserved=st.booleans()),
)
def test_a_plan_moves_what_is_alive_and_discards_what_is_dead(
    random_trace: MakeTrace, machine: Hardware, problem: Any, slowness: int, manner: Manner
) -> None:
    made_of, spare = problem
    trace = random_trace(*made_of)
    # A slow link lets some tensors go too late.
    machine = dataclasses.replace(
        machine, to_host_bytes_per_s=machine.to_host_bytes_per_s / slowness
    )
    policy = policy_of(machine, working_set(trace) + spare)
    check_moves(trace, plan(trace, machine, policy))
    # A candidate, too, which need not be what is fastest in the end.
    for may_write_back in (False, True):
        posed = pose_problem(trace, machine, policy, {}, may_write_back=may_write_back)
        candidate = plan_step(posed, ideal_clock(trace), name="candidate", manner=manner)
        check_moves(trace, candidate.schedule)
        written_back = np.isin(candidate.schedule.hint_op, WRITE_BACKS).any()
        assert may_write_back or not written_back


WRITE_BACKS = (HintOp.WRITE_BACK, HintOp.COPY_BACK)


def check_moves(trace: Trace, schedule: Schedule) -> None:
    intervals: dict[HintOp, list[int | None]] = {op: [] for op in HintOp}
    for phase, op, tensor in hints_of(schedule):
        interval = waits_in(trace, tensor, phase)
        assert (interval is None) == (op == HintOp.DISCARD), (phase, op, tensor)
        intervals[op].append(interval)
    # What is sent away for an interval comes back in it.
    for away, back in ((HintOp.EVICT, HintOp.PREFETCH), (HintOp.COPY_OUT, HintOp.COPY_IN)):
        assert Counter(intervals[away]) == Counter(intervals[back])


def waits_in(trace: Trace, tensor: int, phase: int) -> int | None:
    """Interval in which contents wait for a use in this phase, before it runs, or a later one."""
    gaps = find_gaps(trace)
    for gap in np.flatnonzero((gaps.tensor == tensor) & ~gaps.is_dead):
        for now in (phase, phase + trace.phase_count):
            if gaps.last_use[gap] < now <= gaps.next_use[gap]:
                return int(gap)
    return None


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(problem=problems(8 * BLOCK))
def test_a_window_looks_at_what_has_memory(
    random_trace: MakeTrace, machine: Hardware, problem: Any
) -> None:
    """It knows when tensors are born and die; that contents are overwritten it does not know."""
    made_of, spare = problem
    trace = random_trace(*made_of)
    policy = policy_of(machine, working_set(trace) + spare)
    schedule = plan(trace, machine, policy, "lookahead")
    assert not schedule.waits
    for phase, op, tensor in hints_of(schedule):
        assert op in (HintOp.PREFETCH, HintOp.EVICT)
        if not trace.persistent[tensor]:
            assert trace.first_phase[tensor] < phase <= trace.last_phase[tensor]


@pytest.mark.slow
@settings(max_examples=50, deadline=None)
@given(problem=problems(8 * BLOCK))
def test_planning_repeats(random_trace: MakeTrace, machine: Hardware, problem: Any) -> None:
    made_of, spare = problem
    policy = policy_of(machine, working_set(random_trace(*made_of)) + spare)
    for planner in PLANNERS:
        one, two = (plan(random_trace(*made_of), machine, policy, planner) for _ in range(2))
        for field in dataclasses.fields(Schedule):
            left, right = (getattr(schedule, field.name) for schedule in (one, two))
            assert np.array_equal(left, right), field.name


@pytest.mark.parametrize("planner", PLANNERS)
def test_what_fits_gets_no_hints(machine: Hardware, training: Trace, planner: str) -> None:
    schedule = plan(training, machine, policy_of(machine), planner)
    assert schedule.hint_count == 0
    assert simulate(training, schedule, machine, policy_of(machine)).traffic == ()


def test_planned_is_ahead_of_the_yardsticks(machine: Hardware, training: Trace) -> None:
    policy = policy_of(machine, TIGHT)
    step_s = {
        planner: simulate(
            training, plan(training, machine, policy, planner), machine, policy
        ).step_s
        for planner in PLANNERS
    }
    assert step_s["planned"] < step_s["lookahead"] < step_s["fault"]


# ------------------------------------------------------------------------- reasons


LEAVING = (Reason.PRESSURE, Reason.PRESSURE_LATE, Reason.PRESSURE_FREE)


@pytest.mark.slow
def test_a_plan_says_why_a_tensor_leaves_or_stays(machine: Hardware, training: Trace) -> None:
    kept = {"mechanism": "keep"}
    moved = {"mechanism": "migrate"}
    others = dict.fromkeys(("weights", "gradients", "optimizer_state", "activations"), moved)
    policy = policy_of(machine, TIGHT, frozen_weights=kept, **others)
    made = explained_plan(training, machine, policy)
    leaves = np.isin(made.schedule.hint_op, (HintOp.EVICT, HintOp.COPY_OUT))
    evicted = made.schedule.hint_tensor[leaves]
    assert len(evicted)
    for tensor in set(evicted.tolist()):
        decisions = explain(made, training, training.tensor_names[tensor])
        why = [it for it in decisions if it.leaves]
        assert len(why) == (evicted == tensor).sum()
        for it in why:
            assert it.reason in LEAVING
            assert it.short_in is not None
            assert it.last_use < it.short_in <= it.next_use
    assert {it.reason for it in explain(made, training, "frozen *")} == {Reason.HELD}
    of_class = explain(made, training, "frozen_weights")
    assert of_class == explain(made, training, "frozen *")
    # Who leaves for a phase is said where a plan lets anything leave for it.
    every = explain(made, training, "*")
    short_in = {it.short_in for it in every if it.short_in is not None}
    for phase in short_in:
        name = training.phase_names[phase % training.phase_count]
        found = explain(made, training, name)
        assert {it for it in every if it.short_in == phase} <= set(found)
        assert all(it.leaves for it in found)
    with pytest.raises(PlanError, match=r"'gradient 1'.* 'gradients 1'"):
        explain(made, training, "gradient 1")


def test_everything_stays_where_there_is_room(machine: Hardware, training: Trace) -> None:
    made = explained_plan(training, machine, policy_of(machine))
    assert {it.reason for it in explain(made, training, "*")} == {Reason.ROOM}


def test_a_slow_link_keeps_tensors_on_the_device(machine: Hardware, make_trace: MakeTrace) -> None:
    """a is idle for 1 ms, which is too short, and then for two seconds."""
    trace = make_trace(
        {"a": (8 * BLOCK, "weights"), "b": (8 * BLOCK, "weights")},
        [
            (1e-3, ["a"], ["a"]),
            (1e-3, [], []),
            (1e-3, ["a"], ["a"]),
            (1.0, [], []),
            (1e-3, ["b"], ["b"]),
            (1.0, [], []),
        ],
    )
    slow = dataclasses.replace(
        machine, to_device_bytes_per_s=8e3 * BLOCK, to_host_bytes_per_s=8e3 * BLOCK
    )
    problem = pose_problem(trace, slow, policy_of(slow, 12 * BLOCK), {})
    found = plan_step(problem, ideal_clock(trace), name="candidate", manner=Manner(slack=1.0))
    short, long = explain(found, trace, "a")
    assert (short.last_use, short.reason, short.leaves) == (0, Reason.TOO_SHORT, False)
    assert (long.last_use, long.leaves) == (2, True)


# ------------------------------------------------------------------------- words of a policy


def rules() -> list[ClassRule]:
    """Every rule that the schema allows, but for sizes."""
    found = []
    for kind, placement, mechanism, eviction, accessed, mostly in itertools.product(
        get_args(MemoryKind),
        get_args(Placement),
        get_args(Mechanism),
        get_args(Eviction),
        (False, True),
        (False, True),
    ):
        try:
            rule = ClassRule.model_validate(
                {
                    "kind": kind,
                    "placement": placement,
                    "mechanism": mechanism,
                    "eviction": eviction,
                    "accessed_by_device": accessed,
                    "read_mostly": mostly,
                }
            )
        except ValidationError:
            continue
        found.append(rule)
    return found


@pytest.mark.slow
def test_every_rule_is_planned_or_refused_by_name(machine: Hardware, make_trace: MakeTrace) -> None:
    trace = training_step(make_trace, 2)
    combinations = rules()
    assert len(combinations) > 100
    without = dataclasses.replace(machine, ats=False)
    for rule in combinations:
        tensor_class = "activations"
        if rule.mechanism == "stream":
            tensor_class = "optimizer_state" if rule.kind == "pinned" else "weights"
        policy = policy_of(machine, 24 * BLOCK, **{tensor_class: rule.model_dump()})
        schedule = plan(trace, machine, policy)
        check_form(schedule, trace)
        assert find_errors(run(trace, schedule, machine, policy).sim) == []
        if rule.kind == "system":
            with pytest.raises(PlanError, match=r"classes\.activations\.kind: system memory needs"):
                plan(trace, without, policy)


def test_map_stays_on_the_host(machine: Hardware, training: Trace) -> None:
    mapped = {"mechanism": "map", "placement": "host"}
    policy = policy_of(machine, TIGHT, optimizer_state=mapped)
    schedule = plan(training, machine, policy)
    state = TensorClass.OPTIMIZER_STATE
    assert (schedule.residency[training.tensor_class == state.number] == ResidencyMode.MAP).all()
    assert state not in ops_by_class(training, schedule)
    answer = simulate(training, schedule, machine, policy)
    size = 8 * LAYERS * BLOCK
    assert moved(answer, state) == {("to_device", "mapped"): size, ("to_host", "mapped"): size}


@pytest.mark.parametrize("rule", [{"mechanism": "keep"}, {"eviction": "never"}, {"kind": "device"}])
def test_what_is_kept_stays(machine: Hardware, training: Trace, rule: dict[str, Any]) -> None:
    policy = policy_of(machine, TIGHT, weights=rule)
    for planner in PLANNERS:
        schedule = plan(training, machine, policy, planner)
        assert TensorClass.WEIGHTS not in ops_by_class(training, schedule)
        answer = simulate(training, schedule, machine, policy)
        assert moved(answer, TensorClass.WEIGHTS) == {}
        assert answer.moved_bytes() > 0


def test_duplicates_leave_for_nothing(machine: Hardware, training: Trace) -> None:
    rule = {"mechanism": "duplicate", "read_mostly": True, "eviction": "first"}
    policy = policy_of(machine, TIGHT, frozen_weights=rule)
    schedule = plan(training, machine, policy)
    frozen = TensorClass.FROZEN_WEIGHTS
    assert ops_by_class(training, schedule)[frozen] == {HintOp.PREFETCH, HintOp.EVICT}
    causes = moved(simulate(training, schedule, machine, policy), frozen)
    assert causes.keys() == {("to_device", "hint")}


def test_copies_go_through_the_kernel(machine: Hardware, training: Trace) -> None:
    policy = policy_of(machine, TIGHT, optimizer_state={"mechanism": "copy"})
    for planner in ("lookahead", "planned"):
        schedule = plan(training, machine, policy, planner)
        ops = ops_by_class(training, schedule)[TensorClass.OPTIMIZER_STATE]
        assert ops == {HintOp.COPY_IN, HintOp.COPY_OUT}
        causes = moved(simulate(training, schedule, machine, policy), TensorClass.OPTIMIZER_STATE)
        assert ("to_host", "copy") in causes
        assert ("to_host", "hint") not in causes


def test_first_goes_before_others(machine: Hardware, training: Trace) -> None:
    # Eight of 136 blocks have to leave for a while, and each of these classes can make the room.
    for name in ("weights", "optimizer_state", "activations"):
        classes: dict[str, dict[str, Any]] = {
            str(tensor_class): {"mechanism": "migrate"} for tensor_class in TensorClass
        }
        classes[name]["eviction"] = "first"
        policy = policy_of(machine, 128 * BLOCK, **classes)
        ops = ops_by_class(training, plan(training, machine, policy))
        assert ops == {TensorClass(name): {HintOp.PREFETCH, HintOp.EVICT}}


@pytest.mark.parametrize("rule", [{"eviction": "lru"}, {"mechanism": "fault"}])
def test_what_is_left_to_the_driver_gets_no_hints(
    machine: Hardware, training: Trace, rule: dict[str, Any]
) -> None:
    policy = policy_of(machine, TIGHT, weights=rule, optimizer_state=rule)
    for planner in PLANNERS:
        ops = ops_by_class(training, plan(training, machine, policy, planner))
        assert not ops.keys() & {TensorClass.WEIGHTS, TensorClass.OPTIMIZER_STATE}


def test_discarded_classes_are_dropped_and_never_moved_by_hint(
    machine: Hardware, make_trace: MakeTrace
) -> None:
    trace = make_trace(
        {
            "gradients": (8 * BLOCK, "gradients"),
            "activations": (8 * BLOCK, "activations"),
            "weights": (4 * BLOCK, "weights"),
        },
        [
            (0.01, ["weights"], ["activations"]),
            (0.01, ["activations"], ["gradients"]),
            (0.01, ["gradients"], ["weights"]),
            (0.01, ["weights"], []),
        ],
    )
    rule = {"mechanism": "discard"}
    policy = policy_of(machine, 16 * BLOCK, gradients=rule, activations=rule)
    schedule = plan(trace, machine, policy)
    ops = ops_by_class(trace, schedule)
    assert ops[TensorClass.GRADIENTS] == ops[TensorClass.ACTIVATIONS] == {HintOp.DISCARD}
    # They are dead when the other needs room, so that nothing has to cross the link.
    assert simulate(trace, schedule, machine, policy).moved_bytes() == 0


def test_small_tensors_stay(machine: Hardware, training: Trace) -> None:
    policy = policy_of(machine, TIGHT, weights={"min_bytes": 4 * BLOCK + 1})
    schedule = plan(training, machine, policy)
    weights = training.tensor_class == TensorClass.WEIGHTS.number
    assert (schedule.residency[weights] == ResidencyMode.KEEP).all()
    assert TensorClass.WEIGHTS not in ops_by_class(training, schedule)


def test_the_mechanism_that_is_fastest_is_chosen(machine: Hardware, training: Trace) -> None:
    """Where the driver is slow to the host, a copy, which is not, is taken."""
    slow = dataclasses.replace(machine, to_host_bytes_per_s=machine.to_host_bytes_per_s / 8)
    policy = policy_of(slow, TIGHT)
    schedule = plan(training, slow, policy)
    used = set().union(*ops_by_class(training, schedule).values())
    assert used & {HintOp.COPY_OUT} or (schedule.residency == ResidencyMode.MAP).any()
    fixed = policy_of(
        slow, TIGHT, **{name: {"mechanism": "migrate"} for name in map(str, TensorClass)}
    )
    by_migration = simulate(training, plan(training, slow, fixed), slow, fixed).step_s
    assert simulate(training, schedule, slow, policy).step_s < 0.9 * by_migration


@pytest.mark.slow
@settings(max_examples=6, deadline=None)
@given(
    layers=st.integers(3, 8),
    blocks=st.sampled_from([40, 50, 60, 80]),
    rates=st.tuples(*[st.sampled_from([0.125, 0.25, 0.5, 1.0, 2.0])] * 6),
    slowdowns=st.tuples(*[st.sampled_from([0.0, 1e-12, 1e-11])] * 3),
)
# The search of mechanisms alone ends with a plan that is slower by 3.6 % than copying everything.
@example(
    layers=6, blocks=80, rates=(0.125, 1.0, 0.25, 1.0, 1.0, 0.5), slowdowns=(1e-11, 1e-12, 1e-11)
)
# The search without write-backs needs trials that the one with them has left.
@example(
    layers=4, blocks=50, rates=(0.125, 0.125, 0.5, 1.0, 0.125, 0.125), slowdowns=(0.0, 0.0, 1e-12)
)
# A search that maps nothing.
@example(
    layers=7, blocks=40, rates=(0.125, 0.25, 1.0, 0.25, 0.5, 1.0), slowdowns=(1e-11, 1e-11, 0.0)
)
def test_no_mechanism_for_all_classes_is_faster_than_the_choice(
    machine: Hardware,
    make_trace: MakeTrace,
    layers: int,
    blocks: int,
    rates: tuple[float, ...],
    slowdowns: tuple[float, ...],
) -> None:
    page_in, page_out, copy_in, copy_out, mapped_in, mapped_out = rates
    some = dataclasses.replace(
        machine,
        to_device_bytes_per_s=machine.to_device_bytes_per_s * page_in,
        to_host_bytes_per_s=machine.to_host_bytes_per_s * page_out,
        copy_to_device_bytes_per_s=machine.copy_to_device_bytes_per_s * copy_in,
        copy_to_host_bytes_per_s=machine.copy_to_host_bytes_per_s * copy_out,
        mapped_read_bytes_per_s=machine.mapped_read_bytes_per_s * mapped_in,
        mapped_write_bytes_per_s=machine.mapped_write_bytes_per_s * mapped_out,
        page_slowdown_s_per_byte=slowdowns[0],
        copy_slowdown_s_per_byte=slowdowns[1],
        mapped_slowdown_s_per_byte=slowdowns[2],
    )
    trace = training_step(make_trace, layers)

    def step_s(**rule: str) -> float:
        policy = policy_of(some, blocks * BLOCK, **{str(it): dict(rule) for it in TensorClass})
        return run(trace, plan(trace, some, policy), some, policy).slower_s

    chosen_s = step_s()
    for rule in (
        {"mechanism": "migrate"},
        {"mechanism": "copy"},
        {"mechanism": "map", "placement": "host"},
    ):
        # A search ends within 0.2 % of the lower bound.
        assert chosen_s <= step_s(**rule) * 1.002, rule


# ------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("plannd", "no planner is called 'plannd', did you mean 'planned'?"),
        ("belady", r"no planner is called 'belady'\. Planners: fault, lookahead, planned"),
    ],
)
def test_an_unknown_planner_names_the_nearest(
    machine: Hardware, training: Trace, name: str, message: str
) -> None:
    with pytest.raises(PlanError, match=message.replace("?", r"\?")):
        plan(training, machine, policy_of(machine), name)


def test_a_policy_that_was_not_resolved_is_refused(machine: Hardware, training: Trace) -> None:
    policy: Any = load_policy("sft")
    schedule = plan(training, machine, policy_of(machine))
    for wants_numbers in (
        lambda: plan(training, machine, policy),
        lambda: simulate(training, schedule, machine, policy),
    ):
        with pytest.raises(PolicyError, match=r"pass umem\.policy\.resolve\(policy, hardware"):
            wants_numbers()


@pytest.mark.parametrize("planner", PLANNERS)
def test_a_budget_below_a_working_set_names_the_phase(
    machine: Hardware, training: Trace, planner: str
) -> None:
    # The first forward phase has no activations to read.
    message = (
        r"trace 'by hand': phases\[1\] \(phase 1\) uses 40 MiB at once, and the device budget is "
        r"38 MiB: raise the budget, .* or let a class be mapped"
    )
    with pytest.raises(PlanError, match=message):
        plan(training, machine, policy_of(machine, 19 * BLOCK), planner)
    plan(training, machine, policy_of(machine, 20 * BLOCK), planner)


@pytest.mark.parametrize("planner", PLANNERS)
def test_kept_memory_counts_beside_working_sets(
    machine: Hardware, training: Trace, planner: str
) -> None:
    message = (
        r"phases\[1\] \(phase 1\) uses 40 MiB at once, and the device budget is 134 MiB, less "
        r"96 MiB that the policy keeps there: raise the budget"
    )
    kept = {"mechanism": "keep"}
    with pytest.raises(PlanError, match=message):
        plan(training, machine, policy_of(machine, 67 * BLOCK, optimizer_state=kept), planner)
    policy = policy_of(machine, 68 * BLOCK, optimizer_state=kept)
    assert simulate(training, plan(training, machine, policy, planner), machine, policy).step_s > 0


def test_system_memory_needs_the_machine_for_it(machine: Hardware, training: Trace) -> None:
    without = dataclasses.replace(machine, ats=False)
    with pytest.raises(PlanError, match=r"classes\.weights\.kind: system memory needs a device"):
        plan(training, without, policy_of(without, weights={"kind": "system"}))


@pytest.mark.parametrize("planner", PLANNERS)
def test_more_than_the_host_is_refused(machine: Hardware, training: Trace, planner: str) -> None:
    # 96 blocks live on, and at the end of the forward pass 36 of activations are there too.
    needed = (96 + 36 + 4) * BLOCK
    policy = policy_of(machine, TIGHT)
    enough = dataclasses.replace(machine, host_bytes=needed - TIGHT)
    plan(training, enough, policy, planner)
    small = dataclasses.replace(enough, host_bytes=enough.host_bytes - 1)
    message = (
        r"trace 'by hand': phases\[6\] \(phase 6\) has 172 MiB off the device, and round has "
        r"host_bytes of 172 MiB: raise the budget, let less be mapped"
    )
    with pytest.raises(PlanError, match=message):
        plan(training, small, policy, planner)


def test_what_is_mapped_takes_host_memory_where_the_device_has_room(
    machine: Hardware, training: Trace
) -> None:
    mapped = {"mechanism": "map", "placement": "host"}
    small = dataclasses.replace(machine, host_bytes=47 * BLOCK)
    with pytest.raises(PlanError, match="has 96 MiB off the device, and round has host_bytes of"):
        plan(training, small, policy_of(small, optimizer_state=mapped))
    plan(training, small, policy_of(small))
