"""Which plan a recorded step is run by."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from umem.core.classes import TensorClass
from umem.core.errors import PlanError
from umem.core.report import MigrationReport
from umem.core.schedule import Home, Schedule
from umem.executor.machine import SMALLEST_BYTES
from umem.executor.optimizer.overlapped_step import with_parts_beside
from umem.hardware import Hardware
from umem.planning import page_out, plan
from umem.policy import ClassRule, PolicyPlanner, ResolvedPolicy
from umem.simulation import simulate
from umem.trace import Trace

__all__ = ["Choice", "choose", "places_state_on_host"]

_BY_POLICY = -1

_MAPPED_SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
"""Of the optimizer's state: what is used in place costs time in its step, what migrates costs the
link's time around it."""

_IN_PLACE_SLOWDOWN = 0.4
"""What a byte that is used in place costs the computation beside it, of what one of a page that
moves does: on one H200 1.8 to 2.4 ms a GiB, against 5 (benchmarks/results/h200-step-beside.txt)."""


@dataclass(frozen=True, eq=False)
class Choice:
    """A plan, what it is for and what is expected of it."""

    trace: Trace
    schedule: Schedule
    predicted: MigrationReport
    """With its timeline."""
    mapped: npt.NDArray[np.bool_]
    """Tensors that live on the host by choice of the planner and not by the policy's advice."""
    beside: Mapping[str, int]
    """Parts of the optimizer's step that run beside the backward pass, each with the last phase
    that it runs beside."""

    @property
    def moves_nothing(self) -> bool:
        """Everything stays where it is."""
        return self.schedule.hint_count == 0 and not self.mapped.any()


def choose(
    trace: Trace,
    saved: Collection[int],
    hardware: Hardware,
    policy: ResolvedPolicy,
    planner: PolicyPlanner,
    *,
    runs_beside: bool = False,
) -> Choice:
    """Plan a recorded step.

    Parameters
    ----------
    trace
        With durations.
    saved
        Tensors that autograd saves in a block's forward pass: the activations that can move.
    hardware, policy
        The machine and the rules.
    planner
        ``planned``, ``lookahead`` or ``fault``.
    runs_beside
        Whether parts of the optimizer's step, which are in the backward pass, run beside it where
        they use their state in place on the host.

    Returns
    -------
    Choice
        For ``planned`` the fastest by simulation of plans that use more or less of the optimizer's
        state in place on the host, and migrate or keep the rest. Under each planner as much of it
        as does not fit beside the rest of the optimizer's step is used in place.

    Raises
    ------
    PlanError
        If a phase's working set does not fit the budget all the same, or the host lacks memory.
    """
    found: list[Choice] = []
    first_error: PlanError | None = None
    placed = _placed_on_host(trace, policy)
    ways = (
        (rules, mapped, *step)
        for rules, mapped in _ways(trace, hardware, policy, planner)
        for step in _steps(trace, placed | mapped, hardware, runs_beside=runs_beside)
    )
    for rules, mapped, step, beside in ways:
        fixed = _fixed_homes(step, saved, rules, mapped)
        try:
            if planner == "fault":
                schedule = page_out(step, hardware, rules, fixed=fixed)
            else:
                schedule = plan(step, hardware, rules, planner, fixed=fixed, may_fault=False)
            predicted = simulate(step, schedule, hardware, rules, timeline=True)
        except PlanError as error:
            first_error = first_error or error
            continue
        if planner != "fault":  # which waits for what it moves
            predicted = _slowed_by_pages(predicted, hardware)
        found.append(Choice(step, schedule, predicted, mapped, beside))
    if not found:
        assert first_error is not None
        raise first_error
    return min(found, key=lambda choice: choice.predicted.step_s)


def _steps(
    trace: Trace, in_place: npt.NDArray[np.bool_], hardware: Hardware, *, runs_beside: bool
) -> Iterator[tuple[Trace, dict[str, int]]]:
    """The step with parts beside others, where there are any; and as it is, which needs less."""
    if runs_beside:
        slowdown_s_per_byte = _IN_PLACE_SLOWDOWN * hardware.page_slowdown_s_per_byte
        step, beside = with_parts_beside(trace, in_place, slowdown_s_per_byte)
        if beside:
            yield step, beside
    yield trace, {}


def _slowed_by_pages(predicted: MigrationReport, hardware: Hardware) -> MigrationReport:
    """The prediction with what pages cost the computation that they move beside.

    A simulation reckons with the link alone.
    """
    slowed_s = predicted.moved_bytes(cause="hint") * hardware.page_slowdown_s_per_byte
    stall_s = {**predicted.stall_s, "copy": predicted.stall_s["copy"] + slowed_s}
    return replace(predicted, step_s=predicted.step_s + slowed_s, stall_s=stall_s)


def places_state_on_host(policy: ResolvedPolicy) -> bool:
    """Whether a policy has the optimizer's state on the host, by advice to its allocator."""
    rule = policy.rules[TensorClass.OPTIMIZER_STATE.number]
    return rule.kind == "managed" and rule.placement == "host"


def _placed_on_host(trace: Trace, policy: ResolvedPolicy) -> npt.NDArray[np.bool_]:
    """The optimizer's state, where the policy has it on the host."""
    if places_state_on_host(policy):
        return _of_class(trace, TensorClass.OPTIMIZER_STATE) & (
            trace.tensor_bytes >= SMALLEST_BYTES
        )
    return np.zeros(trace.tensor_count, np.bool_)


def _ways(
    trace: Trace, hardware: Hardware, policy: ResolvedPolicy, planner: PolicyPlanner
) -> Iterator[tuple[ResolvedPolicy, npt.NDArray[np.bool_]]]:
    """Rules, and the optimizer state that is used in place on the host."""
    state = trace.tensor_class == TensorClass.OPTIMIZER_STATE.number
    rules = _runnable_rules(policy, planner)
    rule = policy.rules[TensorClass.OPTIMIZER_STATE.number]
    if rule.kind != "managed" or rule.placement == "host" or rule.mechanism not in ("auto", "map"):
        yield rules, np.zeros(trace.tensor_count, np.bool_)
        return
    large = state & (trace.tensor_bytes >= SMALLEST_BYTES)
    capacity = policy.device_budget_bytes or hardware.device_bytes
    overflow = _overflow(trace, large, capacity)
    if rule.mechanism == "map":
        yield rules, large
        return
    shares = _MAPPED_SHARES if planner == "planned" else (0.0,)
    tried: set[int] = set()
    for share in shares:
        mapped = overflow | _first_bytes(trace, large, share)
        if int(mapped.sum()) not in tried:
            tried.add(int(mapped.sum()))
            yield rules, mapped


def _first_bytes(
    trace: Trace, tensors: npt.NDArray[np.bool_], share: float
) -> npt.NDArray[np.bool_]:
    """The first of these tensors, up to a share of their bytes."""
    size = np.where(tensors, trace.tensor_bytes, 0)
    return tensors & (np.cumsum(size) - size < share * size.sum())


def _overflow(
    trace: Trace, large: npt.NDArray[np.bool_], capacity_bytes: int
) -> npt.NDArray[np.bool_]:
    """The first tensors of optimizer state that do not fit beside the optimizer's other tensors."""
    last = trace.phase_count - 1
    used = np.zeros(trace.tensor_count, np.bool_)
    used[trace.access_tensor[trace.access_start[last] :]] = True
    alive = (trace.first_phase <= last) & (trace.last_phase >= last)
    stays = alive & ((trace.tensor_bytes < SMALLEST_BYTES) | _of_class(trace, TensorClass.OTHER))
    over = int(trace.tensor_bytes[used | stays].sum()) - capacity_bytes
    candidates = np.flatnonzero(large & used)
    before = np.cumsum(trace.tensor_bytes[candidates]) - trace.tensor_bytes[candidates]
    mapped = np.zeros(trace.tensor_count, np.bool_)
    mapped[candidates[before < over]] = True
    return mapped


def _runnable_rules(policy: ResolvedPolicy, planner: PolicyPlanner) -> ResolvedPolicy:
    """Leave to the planner only what hints and hooks can do in a running program.

    What lives from step to step must be right whenever the program looks at it, so it moves as
    pages or is mapped, and is never copied away.
    """

    def runnable(tensor_class: TensorClass, rule: ClassRule) -> ClassRule:
        if rule.kind != "managed" or rule.placement == "host":
            return rule
        if rule.mechanism == "copy" and tensor_class is not TensorClass.ACTIVATIONS:
            return rule.model_copy(update={"mechanism": "migrate"})
        if rule.mechanism not in ("auto", "map"):
            return rule
        copies = tensor_class is TensorClass.ACTIVATIONS and planner == "planned"
        return rule.model_copy(update={"mechanism": "copy" if copies else "migrate"})

    rules = tuple(map(runnable, TensorClass, policy.rules))
    return replace(policy, rules=rules)


def _fixed_homes(
    trace: Trace,
    saved: Collection[int],
    policy: ResolvedPolicy,
    mapped: npt.NDArray[np.bool_],
) -> npt.NDArray[np.int8]:
    """What stays whatever the rules say: small tensors, and activations that no hook sees."""
    seen = np.zeros(trace.tensor_count, np.bool_)
    seen[list(saved)] = True
    stays = (
        (trace.tensor_bytes < SMALLEST_BYTES)
        | (_of_class(trace, TensorClass.ACTIVATIONS) & ~seen)
        | _of_class(trace, TensorClass.OTHER)
    )
    fixed = np.full(trace.tensor_count, _BY_POLICY, np.int8)
    for tensor_class, rule in zip(TensorClass, policy.rules, strict=True):
        if rule.kind == "managed" and rule.placement != "host":
            fixed[stays & _of_class(trace, tensor_class)] = Home.KEEP
    fixed[mapped] = Home.MAP
    return fixed


def _of_class(trace: Trace, tensor_class: TensorClass) -> npt.NDArray[np.bool_]:
    of_class: npt.NDArray[np.bool_] = trace.tensor_class == tensor_class.number
    return of_class
