"""The parts of the planner, each beside a version that is slow and plain, and cases by hand."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from random_steps import workloads

from umem.core.classes import TensorClass
from umem.core.errors import PlanError
from umem.core.schedule import HintOp, ResidencyMode, Schedule
from umem.hardware import Hardware
from umem.pages.plan.reservations import LinkUse, Reservations, reserve
from umem.pages.plan.residency_modes import TensorRules, apply_policy, open_classes
from umem.pages.plan.selection import NOT_NEEDED, PhaseClock
from umem.pages.plan.timing import earliest_issue, latest_starts, leave_times, phases_at
from umem.pages.simulate import engine as _engine
from umem.pages.simulate import unavoidable_bytes
from umem.pages.simulate.lower_bound import _STEPS
from umem.pages.simulate.run import build
from umem.policy import ResolvedPolicy, load_policy, resolve
from umem.trace import NEVER_MADE, NO_GAP, Access, Gaps, Trace, find_gaps

BLOCK = 2**21

MakeTrace = Callable[..., Trace]
RandomTrace = Callable[..., Trace]


def managed(machine: Hardware, budget_bytes: int | None = None) -> ResolvedPolicy:
    budget = None if budget_bytes is None else f"{budget_bytes} B"
    return resolve(load_policy({"name": "test", "device_budget": budget}), machine, environ={})


def uses(trace: Trace, phase: int) -> list[tuple[int, int]]:
    """Tensors and modes of a phase."""
    at = slice(trace.access_start[phase], trace.access_start[phase + 1])
    return list(zip(trace.access_tensor[at].tolist(), trace.access_mode[at].tolist(), strict=True))


# ------------------------------------------------------------------------- idle intervals


def test_idle_intervals_of_a_small_step(make_trace: MakeTrace) -> None:
    trace = make_trace(
        {
            "weights": (1, "weights"),
            "activations": (1, "activations", False),
            "gradients": (1, "gradients"),
        },
        [
            (1.0, ["weights"], ["activations"]),
            (1.0, ["activations", "weights"], ["gradients"]),
            (1.0, ["gradients"], ["weights"]),
        ],
    )
    gaps = find_gaps(trace)
    rows = zip(
        (trace.tensor_names[tensor] for tensor in gaps.tensor),
        gaps.last_use.tolist(),
        gaps.next_use.tolist(),
        gaps.is_dead.tolist(),
        strict=True,
    )
    assert list(rows) == [
        ("weights", 0, 1, False),
        ("weights", 1, 2, True),  # overwritten
        ("weights", 2, 3, False),  # in the next step
        ("activations", 0, 1, False),  # and none after: it dies
        ("gradients", 1, 2, False),
        ("gradients", 2, 4, True),
    ]


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(workload=workloads(7, 10))
def test_idle_intervals_are_those_of_a_walk(random_trace: RandomTrace, workload: Any) -> None:
    trace = random_trace(*workload)
    gaps = find_gaps(trace)
    assert found_by_walking(trace) == [
        None
        if gap == NO_GAP
        else (
            int(gaps.tensor[gap]),
            int(gaps.last_use[gap]),
            int(gaps.next_use[gap]),
            bool(gaps.is_dead[gap]),
        )
        for gap in gaps.after_access
    ]


def found_by_walking(trace: Trace) -> list[tuple[int, int, int, bool] | None]:
    """The interval after each access: tensor, last use, next use, whether its contents are dead."""
    found: list[tuple[int, int, int, bool] | None] = []
    for phase in range(trace.phase_count):
        for tensor, _ in uses(trace, phase):
            last = phase + trace.phase_count if trace.persistent[tensor] else trace.phase_count - 1
            found.append(None)
            for later in range(phase + 1, last + 1):
                mode = dict(uses(trace, later % trace.phase_count)).get(tensor)
                if mode is not None:
                    found[-1] = (tensor, phase, later, not mode & Access.READ)
                    break
    return found


# ------------------------------------------------------------------------- clocks


def test_phases_by_time() -> None:
    starts = np.array([0.0, 2.0, 2.0, 5.0])
    at = np.array([-1.0, 0.0, 1.0, 2.0, 3.0, 5.0, 7.9, 8.0, 10.0])
    # A step of 8: before 0 lies the step before.
    assert phases_at(starts, 8.0, at).tolist() == [-1, 0, 0, 2, 2, 3, 3, 4, 6]
    assert phases_at(starts, 8.0, at, up=True).tolist() == [0, 0, 1, 1, 3, 3, 4, 4, 5]


# ------------------------------------------------------------------------- the way back

Transfers = list[tuple[int, int]]


@st.composite
def returns_in_a_step(draw: st.DrawFn) -> tuple[Transfers, int]:
    """When each return is needed and how long it takes, in whole units, and the step's length."""
    step = draw(st.integers(4, 40))
    needed = draw(st.lists(st.integers(0, 2 * step - 1), min_size=1, max_size=8, unique=True))
    needed = [
        time
        for number, time in enumerate(needed)
        if time % step not in {other % step for other in needed[:number]}
    ]
    transfers = []
    left = step
    for time in needed:
        takes = draw(st.integers(0, left))
        left -= takes
        transfers.append((time, takes))
    return transfers, step


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(given_returns=returns_in_a_step())
def test_returns_start_as_late_as_they_can(given_returns: tuple[Transfers, int]) -> None:
    transfers, step = given_returns
    needed = np.array([time for time, _ in transfers], np.float64)
    takes = np.array([length for _, length in transfers], np.float64)
    starts = latest_starts(needed, takes, float(step))
    assert starts.tolist() == started_latest(transfers, step)
    # One after another, all in time, around the edge of the step too.
    busy = sorted(
        (int(start) % step, int(length))
        for start, length in zip(starts, takes, strict=True)
        if length
    )
    for (start, length), (following, _) in itertools.pairwise(
        [*busy, (busy[0][0] + step, 0)] if busy else []
    ):
        assert start + length <= following
    assert (starts + takes <= needed).all()


def started_latest(transfers: Transfers, step: int) -> list[float]:
    """Backwards through many steps; the first is the steady state."""
    copies = sorted(
        (
            (time % step + k * step, number)
            for k in range(6)
            for number, (time, _) in enumerate(transfers)
        ),
        reverse=True,
    )
    starts = [0.0] * len(transfers)
    free = float("inf")
    for needed, number in copies:
        free = min(free, needed) - transfers[number][1]
        starts[number] = free + transfers[number][0] // step * step
    return starts


def test_a_return_may_begin_in_the_step_before() -> None:
    # Needed at 1 and at 2 of a step of 10, 3 each: the first begins at -4, the second at -1.
    starts = latest_starts(np.array([1.0, 2.0]), np.array([3.0, 3.0]), 10.0)
    assert starts.tolist() == [-4.0, -1.0]
    # The same in the next step.
    starts = latest_starts(np.array([11.0, 12.0]), np.array([3.0, 3.0]), 10.0)
    assert starts.tolist() == [6.0, 9.0]


# ------------------------------------------------------------------------- the way out


@st.composite
def departures_in_a_step(draw: st.DrawFn) -> tuple[list[tuple[int, int, int]], int]:
    """When each may leave, when its memory is needed, how long it takes; the step's length."""
    step = draw(st.integers(4, 40))
    count = draw(st.integers(1, 8))
    left = step
    rows = []
    for _ in range(count):
        takes = draw(st.integers(1, max(left, 1)))
        left = max(left - takes, 0)
        rows.append((draw(st.integers(0, step - 1)), draw(st.integers(0, 2 * step)), takes))
    return rows, step


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(departures=departures_in_a_step())
def test_the_most_urgent_leaves_first_and_as_soon_as_it_can(
    departures: tuple[list[tuple[int, int, int]], int],
) -> None:
    rows, step = departures
    ready, needed, takes = (np.array(column, np.float64) for column in zip(*rows, strict=True))
    starts, ends = leave_times(ready, needed, takes, float(step))
    assert starts.tolist() == left_in_turn(rows, step)
    assert (ends - starts).tolist() == takes.tolist()
    assert (starts >= ready).all()


def left_in_turn(rows: Sequence[tuple[int, int, int]], step: int) -> list[float]:
    """Unit by unit through two steps; what counts is the second, which has the first's backlog."""
    waiting = {
        (k, number): (ready + k * step, needed + k * step, takes)
        for k in range(2)
        for number, (ready, needed, takes) in enumerate(rows)
    }
    starts = [0.0] * len(rows)
    now = 0
    while waiting:
        can = [key for key, (ready, _, _) in waiting.items() if ready <= now]
        if not can:
            now += 1
            continue
        k, number = min(can, key=lambda key: (waiting[key][1], key[1], key[0]))
        starts[number] = float(now - k * step)
        now += waiting.pop((k, number))[2]
    return starts


# ------------------------------------------------------------------------- room


@st.composite
def returns_to_issue(draw: st.DrawFn) -> tuple[list[tuple[int, int, int]], list[int], int]:
    """(away from, back at, size) in the order of need; what is resident; the capacity."""
    phases = draw(st.integers(1, 9))
    resident = draw(st.lists(st.integers(0, 10), min_size=phases, max_size=phases))
    rows = []
    for _ in range(draw(st.integers(1, 6))):
        back = draw(st.integers(-phases, phases - 1))
        rows.append((draw(st.integers(back - phases, back)), back, draw(st.integers(1, 6))))
    return rows, resident, draw(st.integers(5, 16))


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(case=returns_to_issue())
def test_returns_are_brought_forward_while_there_is_room(
    case: tuple[list[tuple[int, int, int]], list[int], int],
) -> None:
    rows, resident, capacity = case
    away, back, size = (np.array(column, np.int64) for column in zip(*rows, strict=True))
    issue = earliest_issue(
        np.arange(len(rows)), away, back, size, np.array(resident, np.int64), capacity
    )
    level = list(resident)
    floor = -(10**6)
    for (away_from, back_at, bytes_), issued in zip(rows, issue, strict=True):
        phase = back_at
        while (
            phase > max(away_from, floor) and level[(phase - 1) % len(level)] + bytes_ <= capacity
        ):
            phase -= 1
            level[phase % len(level)] += bytes_
        floor = max(floor, phase)
        assert issued == phase


# ------------------------------------------------------------------------- the choice


NO_TIME = 1e-13
"""Seconds that a transfer takes where moving takes no time."""


def reserved(
    trace: Trace,
    capacity: int,
    first: Sequence[str] = (),
    costs: dict[str, float] | None = None,
    out_s: float = NO_TIME,
    keeps: bool = False,
) -> Reservations:
    """What is chosen where the way back takes no time, or next to none by `costs`.

    With `keeps` the host keeps what was copied there, which may happen while it is in use.
    """
    gaps = find_gaps(trace)
    names = [trace.tensor_names[tensor] for tensor in gaps.tensor]
    clock = clock_of(trace)
    made, version = versions_of(gaps, keeps)
    use = LinkUse(
        made=made + 1,
        ready=made + 1,
        version=version,
        out_s=np.where(keeps & (gaps.made == NEVER_MADE), 0.0, out_s),
        in_s=np.array([(costs or {}).get(name, 1.0) * NO_TIME for name in names]),
        shares=(0.5, 0.5),
    )
    return reserve(
        trace,
        gaps,
        clock,
        capacity,
        use,
        allowed=~gaps.is_dead & (gaps.next_use > gaps.last_use + 1),
        first=np.array([name in first for name in names], np.bool_),
        on_device=np.ones(trace.tensor_count, np.bool_),
        out_weight=0.0 if costs else 1.0,
    )


def versions_of(gaps: Gaps, keeps: bool) -> tuple[NDArray[Any], NDArray[Any]]:
    """Phase that made the contents of each interval, or the last before it; number of contents."""
    made = np.where(keeps & (gaps.made != NEVER_MADE), gaps.made, gaps.last_use)
    return made, np.unique(np.stack([gaps.tensor, made]), axis=1, return_inverse=True)[1]


def clock_of(trace: Trace) -> PhaseClock:
    duration_s = trace.duration_s
    assert duration_s is not None
    return PhaseClock(np.cumsum(duration_s) - duration_s, float(duration_s.sum()))


def away(trace: Trace, found: Reservations) -> set[tuple[str, int]]:
    """Names and last uses of the intervals spent on the host."""
    gaps = find_gaps(trace)
    return {
        (trace.tensor_names[gaps.tensor[gap]], int(gaps.last_use[gap]))
        for gap in np.flatnonzero(found.needed_by != NOT_NEEDED)
    }


def chosen(trace: Trace, capacity: int, **how: Any) -> set[tuple[str, int]]:
    return away(trace, reserved(trace, capacity, **how))


@pytest.fixture
def in_and_out(make_trace: MakeTrace) -> Trace:
    """Forward, three activations of 2 bytes; backward, the same from the last to the first."""
    return make_trace(
        dict.fromkeys("abc", (2, "activations", False)),
        [
            (1.0, [], ["a"]),
            (1.0, [], ["b"]),
            (1.0, [], ["c"]),
            (1.0, ["c"], []),
            (1.0, ["b"], []),
            (1.0, ["a"], []),
        ],
    )


def test_what_is_needed_last_goes(in_and_out: Trace) -> None:
    assert chosen(in_and_out, 6) == set()
    assert chosen(in_and_out, 4) == {("a", 0)}
    assert chosen(in_and_out, 2) == {("a", 0), ("b", 1)}


def test_the_policy_can_name_what_goes_first(in_and_out: Trace) -> None:
    assert chosen(in_and_out, 4, first=["b"]) == {("b", 1)}


def test_what_is_cheap_to_move_goes(in_and_out: Trace) -> None:
    # When c is made, a is needed again in three units of time, and b in two.
    assert chosen(in_and_out, 4, costs={"b": 0.6}) == {("b", 1)}
    assert chosen(in_and_out, 4, costs={"b": 0.7}) == {("a", 0)}


def test_the_edge_of_the_step_counts(make_trace: MakeTrace) -> None:
    """Weights that are used in the middle wait around the edge, where another tensor is used."""
    trace = make_trace(
        {"w": (3, "weights"), "x": (3, "weights")},
        [(1.0, ["x"], []), (1.0, [], []), (1.0, ["w"], []), (1.0, [], []), (1.0, ["x"], [])],
    )
    assert chosen(trace, 6) == set()
    assert chosen(trace, 3) == {("x", 0), ("w", 2)}


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(workload=workloads(7, 10), spare=st.integers(0, 6 * BLOCK))
def test_what_is_left_fits(random_trace: RandomTrace, workload: Any, spare: int) -> None:
    trace = random_trace(*workload)
    gaps = find_gaps(trace)
    capacity = working_set(trace) + spare
    found = chosen(trace, capacity)
    resident = np.zeros(trace.phase_count, np.int64)
    for gap, tensor in enumerate(gaps.tensor):
        between = range(gaps.last_use[gap] + 1, gaps.next_use[gap])
        is_away = (trace.tensor_names[tensor], int(gaps.last_use[gap])) in found
        if not gaps.is_dead[gap] and not is_away:
            resident[[phase % trace.phase_count for phase in between]] += trace.tensor_bytes[tensor]
    for phase in range(trace.phase_count):
        resident[phase] += sum(trace.tensor_bytes[tensor] for tensor, _ in uses(trace, phase))
    # A tensor that no phase uses stays where it is, outside of what is chosen from.
    assert resident.max() <= capacity


def working_set(trace: Trace) -> int:
    return max(
        sum(int(trace.tensor_bytes[tensor]) for tensor, _ in uses(trace, phase))
        for phase in range(trace.phase_count)
    )


def test_phases_wait_for_what_has_no_time_to_leave(in_and_out: Trace) -> None:
    """One unit of time to the host, and room for one of three."""
    found = reserved(in_and_out, 2, out_s=1.0)
    assert away(in_and_out, found) == {("a", 0), ("b", 1)}
    # Neither has time to leave between its own phase and the next, which waits.
    assert found.clock.step_s == pytest.approx(6.0 + 2.0)
    assert found.is_late.sum() == 2


def test_one_copy_serves_all_departures_until_the_next_write(make_trace: MakeTrace) -> None:
    """Written at 0, and away twice: written back once, before the first departure, while read."""
    quiet: list[Any] = [(1.0, [], [])] * 2
    full: Any = (1.0, ["x"], [])
    trace = make_trace(
        {"w": (3, "weights"), "x": (3, "weights")},
        [(1.0, ["w"], ["w"]), *quiet, (1.0, ["w"], []), full, (1.0, ["w"], []), full, *quiet],
    )
    found = reserved(trace, 3, out_s=2.0, keeps=True)
    gaps = find_gaps(trace)
    mine = [("w", 3), ("w", 5)]
    assert set(mine) <= away(trace, found)
    _, number = versions_of(gaps, keeps=True)
    (version,) = set(number[(gaps.tensor == 0) & np.isin(gaps.last_use, (3, 5))])
    assert (found.sent[version], found.there[version]) == (0, 2)  # from phase 1 on
    assert found.clock.step_s == pytest.approx(trace.phase_count, rel=1e-6)


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(
    workload=workloads(7, 10),
    spare=st.integers(0, 6 * BLOCK),
    out_s=st.floats(0.1, 5.0),
    keeps=st.booleans(),
)
def test_the_link_carries_no_more_than_its_time(
    random_trace: RandomTrace, workload: Any, spare: int, out_s: float, keeps: bool
) -> None:
    trace = random_trace(*workload)
    gaps = find_gaps(trace)
    found = reserved(trace, working_set(trace) + spare, out_s=out_s, keeps=keeps)
    leaves = np.flatnonzero(found.needed_by != NOT_NEEDED)
    _, version = versions_of(gaps, keeps)
    moved = leaves[(gaps.made[leaves] != NEVER_MADE) | (not keeps)]
    assert out_s * len(set(version[moved])) <= found.clock.step_s * (1 + 1e-6)
    assert found.clock.step_s >= clock_of(trace).step_s * (1 - 1e-9)
    assert (found.needed_by[leaves] > gaps.last_use[leaves]).all()
    assert (found.returns[leaves] <= gaps.next_use[leaves]).all()


# ------------------------------------------------------------------------- residencies

RULES: dict[str, dict[str, Any]] = {
    "auto": {},
    "migrate": {"mechanism": "migrate"},
    "copy": {"mechanism": "copy"},
    "map": {"mechanism": "map", "placement": "host"},
    "host": {"placement": "host"},
    "keep": {"mechanism": "keep"},
    "never": {"eviction": "never"},
    "device": {"kind": "device"},
    "pinned": {"kind": "pinned"},
    "system": {"kind": "system"},
    "duplicate": {"mechanism": "duplicate", "read_mostly": True},
    "read-mostly": {"read_mostly": True},
    "fault": {"mechanism": "fault"},
    "lru": {"eviction": "lru"},
    "first": {"eviction": "first"},
    "small": {"min_bytes": 2 * BLOCK},
    "small mapped": {"min_bytes": 2 * BLOCK, "mechanism": "map", "placement": "host"},
}


@pytest.mark.parametrize(
    ("rule", "residency", "flags"),
    [
        ("auto", ResidencyMode.MIGRATE, {"movable"}),
        ("migrate", ResidencyMode.MIGRATE, {"movable"}),
        ("copy", ResidencyMode.MIGRATE, {"movable", "copied", "kept_copy"}),
        ("map", ResidencyMode.MAP, set()),
        ("host", ResidencyMode.MAP, set()),
        ("keep", ResidencyMode.KEEP, set()),
        ("never", ResidencyMode.KEEP, set()),
        ("device", ResidencyMode.KEEP, set()),
        ("pinned", ResidencyMode.MAP, set()),
        ("system", ResidencyMode.SYSTEM, set()),
        ("duplicate", ResidencyMode.DUPLICATE, {"movable", "kept_copy"}),
        ("read-mostly", ResidencyMode.DUPLICATE, {"movable", "kept_copy"}),
        ("fault", ResidencyMode.MIGRATE, set()),
        ("lru", ResidencyMode.MIGRATE, set()),
        ("first", ResidencyMode.MIGRATE, {"movable", "first"}),
        ("small", ResidencyMode.KEEP, set()),
        ("small mapped", ResidencyMode.KEEP, set()),
    ],
)
def test_a_rule_says_how_a_class_is_held(
    machine: Hardware, make_trace: MakeTrace, rule: str, residency: ResidencyMode, flags: set[str]
) -> None:
    trace = make_trace(
        {"ours": (BLOCK, "weights"), "other": (BLOCK, "other")},
        [(1.0, ["ours"], ["ours", "other"])],
    )
    held = held_by(machine, trace, {"weights": RULES[rule]})
    assert held.residency.tolist() == [residency, ResidencyMode.MIGRATE]
    for name in ("movable", "copied", "kept_copy", "first"):
        assert getattr(held, name).tolist() == [name in flags, name == "movable"], name


def test_streamed_state_is_host_memory_to_a_planner_of_pages(
    machine: Hardware, make_trace: MakeTrace
) -> None:
    sizes = {"small": BLOCK // 2, "large": 2 * BLOCK}
    trace = make_trace(
        {name: (size, "optimizer_state") for name, size in sizes.items()},
        [(1.0, list(sizes), list(sizes))],
    )
    rule = {"kind": "pinned", "mechanism": "stream", "min_bytes": BLOCK}
    held = held_by(machine, trace, {"optimizer_state": rule})
    assert held.residency.tolist() == [ResidencyMode.KEEP, ResidencyMode.MAP]
    assert not held.movable.any()


def held_by(machine: Hardware, trace: Trace, classes: dict[str, Any]) -> TensorRules:
    policy = resolve(load_policy({"classes": classes}), machine, environ={})
    return apply_policy(trace, machine, policy, {})


def test_what_is_only_read_keeps_its_host_copy(machine: Hardware, make_trace: MakeTrace) -> None:
    trace = make_trace(
        {"read": (BLOCK, "weights"), "written": (BLOCK, "weights")},
        [(1.0, ["read", "written"], ["written"])],
    )
    assert held_by(machine, trace, {}).residency.tolist() == [
        ResidencyMode.DUPLICATE,
        ResidencyMode.MIGRATE,
    ]
    # Without advice and hints there is nothing that would make a copy.
    paging = held_by(machine, trace, {"weights": {"mechanism": "fault"}})
    assert paging.residency.tolist() == [ResidencyMode.MIGRATE, ResidencyMode.MIGRATE]


def test_the_planner_may_choose_for_classes_that_are_left_to_it(
    machine: Hardware, make_trace: MakeTrace
) -> None:
    trace = make_trace(
        {"w": (BLOCK, "weights"), "g": (BLOCK, "gradients")}, [(1.0, ["w", "g"], ["w", "g"])]
    )
    policy = resolve(
        load_policy(
            {
                "classes": {
                    "gradients": {"mechanism": "migrate"},
                    "optimizer_state": {"placement": "host"},
                    "activations": {"kind": "pinned"},
                }
            }
        ),
        machine,
        environ={},
    )
    assert open_classes(policy) == (
        TensorClass.WEIGHTS,
        TensorClass.FROZEN_WEIGHTS,
        TensorClass.OTHER,
    )
    both = {TensorClass.WEIGHTS: "map", TensorClass.GRADIENTS: "map"}
    assert apply_policy(trace, machine, policy, both).residency.tolist() == [
        ResidencyMode.MAP,
        ResidencyMode.MIGRATE,
    ]


def test_system_memory_needs_a_machine_with_it(machine: Hardware, make_trace: MakeTrace) -> None:
    trace = make_trace({"w": (BLOCK, "weights")}, [(1.0, ["w"], [])])
    without = dataclasses.replace(machine, ats=False)
    with pytest.raises(PlanError, match=r"classes\.weights\.kind: .* and round does not: use kind"):
        held_by(without, trace, {"weights": {"kind": "system"}})
    # A class that the trace does not have may say what it likes.
    assert held_by(without, trace, {"other": {"kind": "system"}}).residency.tolist() == [
        ResidencyMode.DUPLICATE
    ]


# ------------------------------------------------------------------------- the lower bound


def test_the_bound_of_a_circle(make_trace: MakeTrace) -> None:
    """Three tensors in turn, room for two: each step one of three waits on the host."""
    trace = make_trace(
        dict.fromkeys("abc", (6, "weights")), [(1.0, [name], [name]) for name in "abc"]
    )
    in_bytes, out_bytes = unavoidable_bytes(trace, 12)
    # Between two phases 18 bytes wait and 12 stay. An interval spans three of the places between
    # phases, so one interval a step has to be left out; the edges of the steps that the bound looks
    # at hide one of eight.
    assert 6 * (1 - 1 / _STEPS) <= in_bytes <= 6
    assert out_bytes == in_bytes


def test_the_bound_of_a_step_that_uses_each_tensor_once(make_trace: MakeTrace) -> None:
    trace = make_trace(
        dict.fromkeys("ab", (5, "activations", False)), [(1.0, [], ["a"]), (1.0, [], ["b"])]
    )
    assert unavoidable_bytes(trace, 5) == (0, 0)


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(
    workload=workloads(7, 10),
    spare=st.integers(0, 4 * BLOCK),
    hints=st.lists(
        st.tuples(
            st.integers(0, 9),
            st.sampled_from([op for op in HintOp if op != HintOp.DISCARD]),
            st.integers(0, 6),
        )
    ),
    residencies=st.lists(
        st.sampled_from([ResidencyMode.MIGRATE, ResidencyMode.MAP, ResidencyMode.DUPLICATE]),
        min_size=7,
        max_size=7,
    ),
    waits=st.booleans(),
)
def test_every_schedule_moves_at_least_the_unavoidable(
    random_trace: RandomTrace,
    machine: Hardware,
    workload: Any,
    spare: int,
    hints: list[tuple[int, HintOp, int]],
    residencies: list[ResidencyMode],
    waits: bool,
) -> None:
    trace = random_trace(*workload)
    capacity = working_set(trace) + spare + 1
    valid = sorted(
        hint for hint in hints if hint[0] < trace.phase_count and hint[2] < trace.tensor_count
    )
    schedule = Schedule(
        "by chance",
        np.array(residencies[: trace.tensor_count], np.uint8),
        np.array([phase for phase, _, _ in valid], np.int32),
        np.array([op for _, op, _ in valid], np.uint8),
        np.array([tensor for _, _, tensor in valid], np.int32),
        waits,
    )
    in_bytes, out_bytes = unavoidable_bytes(trace, capacity)
    sim = build(trace, schedule, machine, managed(machine, capacity))
    rows = _STEPS * (schedule.hint_count + 1)  # `build` makes queues for fewer steps
    sim = sim._replace(queue=np.zeros((2, rows, 2), np.int64))
    for _ in range(_STEPS):
        assert _engine.run_step(sim)
    moved = sim.traffic_bytes.sum(axis=(1, 2))
    assert moved[0] >= _STEPS * in_bytes
    assert moved[1] >= _STEPS * out_bytes
