"""Admission plans: a budget holds however slow evictions are."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from umem.core.schedule import HintOp, ResidencyMode, Schedule
from umem.hardware import Hardware
from umem.pages.plan.plan_search import PlanCandidate
from umem.pages.run.admission import AdmissionPlan, Eviction, HintRow, plan_admission, used_tensors
from umem.pages.simulate import simulate
from umem.policy import load_policy, resolve
from umem.trace import Trace

MIB = 1 << 20
Moves = Mapping[int, Sequence[str]]


@pytest.fixture(scope="session")
def candidate_of(machine: Hardware) -> Callable[..., PlanCandidate]:
    """A plan without hints for a trace; `plan_admission` gets the moves separately."""

    def build(trace: Trace, *, waits: bool = True) -> PlanCandidate:
        rules = resolve(load_policy("managed"), machine, {})
        none = np.zeros(0, np.int32)
        schedule = Schedule(
            "by hand",
            np.full(trace.tensor_count, ResidencyMode.MIGRATE, np.uint8),
            none,
            none.astype(np.uint8),
            none,
            waits,
        )
        predicted = simulate(trace, schedule, machine, rules)
        return PlanCandidate(trace, schedule, predicted, np.zeros(trace.tensor_count, np.bool_))

    return build


def rows(trace: Trace, moves: Moves, op: HintOp) -> list[list[HintRow]]:
    """The hints of each phase."""
    number = {name: tensor for tensor, name in enumerate(trace.tensor_names)}
    return [
        [(op, number[name]) for name in moves.get(phase, ())] for phase in range(trace.phase_count)
    ]


def admission_of(
    candidate: PlanCandidate,
    budget_bytes: int,
    leaving: Moves,
    coming: Moves,
    fetched: Moves | None = None,
) -> AdmissionPlan:
    trace = candidate.trace
    fetches = rows(trace, fetched or {}, HintOp.COPY_IN)
    return plan_admission(
        candidate,
        budget_bytes,
        rows(trace, leaving, HintOp.EVICT),
        rows(trace, coming, HintOp.PREFETCH),
        {},
        [[tensor for _, tensor in row] for row in fetches],
    )


@pytest.fixture
def two_layers(make_trace: Callable[..., Trace]) -> Trace:
    """Two weights of 8 MiB, used one after the other, and 4 MiB that a later phase allocates."""
    return make_trace(
        {
            "a": (8 * MIB, "weights"),
            "b": (8 * MIB, "weights"),
            "made": (4 * MIB, "activations", False),
        },
        [(1e-3, ["a"], []), (1e-3, [], []), (1e-3, [], ["made"]), (1e-3, ["b"], [])],
    )


def test_a_prefetch_comes_after_the_eviction_that_makes_room(
    two_layers: Trace, candidate_of: Callable[..., PlanCandidate]
) -> None:
    leaving, coming = {1: ["a"], 0: ["b"]}, {1: ["b"], 0: ["a"]}
    tight = admission_of(candidate_of(two_layers), 12 * MIB, leaving, coming)
    assert tight.after[1] == (Eviction(1, 0),)
    assert tight.waits == (Eviction(0, 0), None, None, None)  # the phase uses its prefetch at once
    wide = admission_of(candidate_of(two_layers), 48 * MIB, leaving, coming)
    assert wide.after[1] == (None,)


def test_allocations_of_a_phase_come_before_prefetches(
    two_layers: Trace, candidate_of: Callable[..., PlanCandidate]
) -> None:
    """Both weights fit, but not beside the allocation of phase 2: b comes after a has left."""
    leaving, coming = {1: ["a"], 0: ["b"]}, {1: ["b"], 0: ["a"]}
    plan = admission_of(candidate_of(two_layers), 16 * MIB, leaving, coming)
    assert plan.after[1] == (Eviction(1, 0),)
    assert plan.waits[2] == Eviction(0, 0)  # b may still be there from the step before


def test_the_thread_waits_where_no_prefetch_can_come_later(
    two_layers: Trace, candidate_of: Callable[..., PlanCandidate]
) -> None:
    """The eviction is submitted after the prefetch."""
    leaving, coming = {2: ["a"], 0: ["b"]}, {1: ["b"], 0: ["a"]}
    plan = admission_of(candidate_of(two_layers), 16 * MIB, leaving, coming)
    assert plan.after[1] == (Eviction(0, 0),)
    assert plan.waits[2] == Eviction(2, 0)


def test_the_thread_waits_for_the_room_of_a_copy(
    two_layers: Trace, candidate_of: Callable[..., PlanCandidate]
) -> None:
    leaving, coming = {1: ["a"], 0: ["b"]}, {0: ["a"]}
    plan = admission_of(candidate_of(two_layers), 12 * MIB, leaving, coming, {1: ["b"]})
    assert plan.fetches[1] == (1,)
    assert plan.waits[1] == Eviction(1, 0)


def test_a_wait_for_pages_includes_the_wait_for_their_room(
    candidate_of: Callable[..., PlanCandidate], make_trace: Callable[..., Trace]
) -> None:
    trace = make_trace(
        {
            "a": (8 * MIB, "weights"),
            "b": (6 * MIB, "weights"),
            "made": (6 * MIB, "activations", False),
        },
        [(1e-3, ["a"], []), *[(1e-3, [], [])] * 2, (1e-3, ["b"], []), (1e-3, [], ["made"])],
    )
    leaving, coming = {1: ["a"], 0: ["b"]}, {2: ["b"], 0: ["a"]}
    waiting = admission_of(candidate_of(trace), 12 * MIB, leaving, coming)
    faulting = admission_of(candidate_of(trace, waits=False), 12 * MIB, leaving, coming)
    assert waiting.after[2] == faulting.after[2] == (Eviction(1, 0),)
    assert waiting.waits == (Eviction(0, 0), None, None, None, None)
    assert faulting.waits == (Eviction(0, 0), None, None, Eviction(1, 0), None)  # b comes by fault


@st.composite
def plans(draw: st.DrawFn) -> tuple[list[int], list[tuple[int, list[str]]], int, int]:
    """Sizes of weights, MiB made and weights used per phase, spare MiB, prefetch distance."""
    sizes = draw(st.lists(st.integers(1, 8), min_size=2, max_size=6))
    names = st.sampled_from([f"w{number}" for number in range(len(sizes))])
    phases = draw(
        st.lists(
            st.tuples(st.integers(0, 6), st.lists(names, max_size=2, unique=True)),
            min_size=2,
            max_size=8,
        )
    )
    return sizes, phases, draw(st.integers(0, 12)), draw(st.integers(1, 4))


@pytest.mark.slow
@given(plans(), st.booleans())
# The step that the plan repeats is neither the first nor the second.
@example(([2, 1], [(3, []), (4, ["w1"]), (4, []), (0, ["w0"]), (0, [])], 0, 1), True)
@example(
    ([1, 1, 1], [(0, []), (0, ["w0", "w1"]), (1, []), (0, []), (0, ["w2"]), (0, [])], 0, 1), True
)
# Weights of different sizes take the room of each other in turns.
@example(
    (
        [4, 4, 7, 2, 3, 1, 5],
        [
            (0, ["w2"]),
            (4, ["w0"]),
            (1, ["w2"]),
            (2, ["w4", "w5"]),
            (4, []),
            (2, ["w6"]),
            (4, ["w1", "w3", "w6"]),
        ],
        0,
        6,
    ),
    True,
)
@settings(max_examples=300, deadline=None)
def test_the_budget_holds_however_late_evictions_end(
    make_trace: Callable[..., Trace],
    candidate_of: Callable[..., PlanCandidate],
    plan: tuple[list[int], list[tuple[int, list[str]]], int, int],
    waits: bool,
) -> None:
    """Each weight is evicted after its use, and prefetched some phases before the next use.

    A phase waits for its prefetches, or else what has not come by then comes by page fault.
    """
    sizes, phases, spare, ahead = plan
    made = {f"made{number}": size for number, (size, _) in enumerate(phases) if size}
    trace = make_trace(
        {f"w{number}": (size * MIB, "weights") for number, size in enumerate(sizes)}
        | {name: (size * MIB, "activations", False) for name, size in made.items()},
        [
            (1e-3, uses, [f"made{number}"] if size else [])
            for number, (size, uses) in enumerate(phases)
        ],
    )
    leaving: dict[int, list[str]] = {}
    coming: dict[int, list[str]] = {}
    for name in trace.tensor_names:
        used = [phase for phase, (_, uses) in enumerate(phases) if name in uses]
        for phase, following in zip(used, [*used[1:], *used[:1]], strict=True):
            if (following - phase - 1) % len(phases) >= ahead:  # else it has no time to leave
                leaving.setdefault((phase + 1) % len(phases), []).append(name)
                coming.setdefault((following - ahead) % len(phases), []).append(name)
    candidate = candidate_of(trace, waits=waits)
    used_bytes = [
        int(trace.tensor_bytes[used_tensors(trace, phase)].sum()) for phase in range(len(phases))
    ]
    unused = set(trace.tensor_names) - made.keys() - {it for _, uses in phases for it in uses}
    stays = sum(sizes[int(name[1:])] for name in unused) * MIB
    budget_bytes = stays + max(used_bytes) + spare * MIB
    admission = admission_of(candidate, budget_bytes, leaving, coming)

    def most(over: int) -> int:
        """Resident bytes when so many evictions are over, by sets where the plan has sums."""
        there = set(begun)
        for kind, tensor, number in log:
            if kind == "leaves" and number < over:
                there.discard(tensor)
            if kind == "comes" and number <= over:
                there.add(tensor)
            if kind == "dies":
                there.discard(tensor)
        return int(trace.tensor_bytes[sorted(there)].sum())

    begun = {it for it, lives in enumerate(trace.persistent.tolist()) if lives}
    log: list[tuple[str, int, int]] = []
    count, known = 0, 0
    places: dict[Eviction, int] = {}
    behind: dict[int, int] = {}
    for step in range(3):
        for phase in range(len(phases)):
            for number, (_, tensor) in enumerate(rows(trace, leaving, HintOp.EVICT)[phase]):
                log.append(("leaves", tensor, count))
                count += 1
                places[Eviction(phase, number)] = count
            wait = admission.waits[phase]
            if wait is not None:
                known = max(known, places.get(wait, 0))
            for (_, tensor), after in zip(
                admission.coming[phase], admission.after[phase], strict=True
            ):
                behind[tensor] = places.get(after, 0) if after is not None else 0
                log.append(("comes", tensor, behind[tensor]))
            used = used_tensors(trace, phase)
            if waits:
                known = max([known, *(behind.pop(it) for it in used if it in behind)])
            log += [("comes", tensor, 0) for tensor in used]
            if step == 2 and known < count:
                assert max(most(over) for over in range(known, count + 1)) <= budget_bytes
            log += [("dies", tensor, 0) for tensor in used if not trace.persistent[tensor]]


def test_prefetches_of_the_step_before_are_not_delayed(
    candidate_of: Callable[..., PlanCandidate], make_trace: Callable[..., Trace]
) -> None:
    """The last phase prefetches b without a wait, so b may be there in the first phase."""
    trace = make_trace(
        {
            "a": (8 * MIB, "weights"),
            "b": (8 * MIB, "weights"),
            "made": (8 * MIB, "activations", False),
        },
        [(1e-3, [], ["made"]), (1e-3, ["b"], []), (1e-3, ["a"], []), (1e-3, [], [])],
    )
    plan = admission_of(candidate_of(trace), 20 * MIB, {3: ["a"], 2: ["b"]}, {3: ["b"], 1: ["a"]})
    assert plan.waits[0] == Eviction(3, 0)
