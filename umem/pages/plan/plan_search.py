"""Searches candidate plans of a running training by simulation, and picks the fastest that fits.

A running training leaves a planner less freedom than a trace does. Contents that live from step to
step have to be right whenever the program looks at them, gradients keep their memory until the
program frees them, and nothing but hints keeps the budget.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from umem.core.block_sizes import LARGE_BYTES
from umem.core.classes import TensorClass
from umem.core.errors import PlanError
from umem.core.report import MigrationReport
from umem.core.schedule import ResidencyMode, Schedule
from umem.hardware import Hardware
from umem.pages.plan.planners import page_out, plan
from umem.pages.plan.running_step import with_gradient_lifetimes, with_whole_optimizer_step
from umem.pages.simulate import simulate
from umem.policy import ClassRule, ResolvedPolicy
from umem.trace import Trace

__all__ = ["PlanCandidate", "search_plan"]

_BY_POLICY = -1


@dataclass(frozen=True, eq=False)
class PlanCandidate:
    """A plan of a running training, and its predicted cost."""

    trace: Trace
    """The step as the program carries it out; the plan is for this trace."""
    schedule: Schedule
    predicted: MigrationReport
    """With its timeline."""
    mapped: npt.NDArray[np.bool_]
    """Tensors that the planner placed on the host; those that the policy placed do not count."""

    @property
    def moves_nothing(self) -> bool:
        """Everything stays where it is."""
        return self.schedule.hint_count == 0 and not self.mapped.any()


def search_plan(
    trace: Trace,
    hardware: Hardware,
    policy: ResolvedPolicy,
    planner: str,
    *,
    saved: Collection[int] | None = None,
) -> PlanCandidate:
    """Plan a step that a training is going to carry out.

    The executor runs this plan, and ``umem simulate --runnable`` predicts it.

    Parameters
    ----------
    trace
        With durations.
    hardware, policy
        The machine and the rules.
    planner
        One of :data:`umem.pages.plan.PLANNERS`.
    saved
        Activations that autograd saves in a block's forward pass: hooks can move these only. None
        for all activations.

    Returns
    -------
    PlanCandidate
        For ``planned`` the fastest by simulation of plans that use more or less of the optimizer's
        state in place on the host, and migrate or keep the rest. Under each planner, state that
        does not fit beside the rest of the optimizer's step is used in place.

    Raises
    ------
    PlanError
        If a phase's working set does not fit the budget all the same, or the host lacks memory;
        and for an unknown planner.
    """
    trace = with_gradient_lifetimes(with_whole_optimizer_step(trace))
    best: PlanCandidate | None = None
    first_error: PlanError | None = None
    rules = _runnable_rules(policy)
    for mapped in _mapped_choices(trace, hardware, policy, planner):
        fixed = _fixed_modes(trace, saved, rules, mapped)
        try:
            if planner == "fault":
                schedule = page_out(trace, hardware, rules, fixed=fixed)
            else:
                schedule = plan(
                    trace,
                    hardware,
                    rules,
                    planner,
                    fixed=fixed,
                    may_fault=False,
                    may_write_back=False,
                )
            predicted = simulate(trace, schedule, hardware, rules, timeline=True)
        except PlanError as error:
            first_error = first_error or error
            continue
        if best is None or predicted.step_s < best.predicted.step_s:
            best = PlanCandidate(trace, schedule, predicted, mapped)
    if best is None:
        assert first_error is not None
        raise first_error
    return best


def _mapped_choices(
    trace: Trace, hardware: Hardware, policy: ResolvedPolicy, planner: str
) -> Iterator[npt.NDArray[np.bool_]]:
    """Which of the optimizer's state to use in place on the host: choices to try, bool[T] each."""
    rule = policy.rules[TensorClass.OPTIMIZER_STATE.number]
    if rule.kind != "managed" or rule.placement == "host" or rule.mechanism not in ("auto", "map"):
        yield np.zeros(trace.tensor_count, np.bool_)
        return
    # Others have no pages of their own.
    large = _of_class(trace, TensorClass.OPTIMIZER_STATE) & (trace.tensor_bytes >= LARGE_BYTES)
    if rule.mechanism == "map":
        yield large
        return
    overflow = _overflow(trace, large, policy.device_budget_bytes or hardware.device_bytes)
    yield overflow
    # In place it makes the optimizer's step longer; where it migrates it needs the link around it.
    if planner == "planned" and not overflow[large].all():
        yield overflow | large


def _overflow(
    trace: Trace, large: npt.NDArray[np.bool_], capacity_bytes: int
) -> npt.NDArray[np.bool_]:
    """Enough optimizer state, in the trace's order, that the optimizer's step fits the rest."""
    last = trace.phase_count - 1
    used = np.zeros(trace.tensor_count, np.bool_)
    used[trace.access_tensor[trace.access_start[last] :]] = True
    alive = (trace.first_phase <= last) & (trace.last_phase >= last)
    stays = alive & ((trace.tensor_bytes < LARGE_BYTES) | _of_class(trace, TensorClass.OTHER))
    over = int(trace.tensor_bytes[used | stays].sum()) - capacity_bytes
    candidates = np.flatnonzero(large & used)
    before = np.cumsum(trace.tensor_bytes[candidates]) - trace.tensor_bytes[candidates]
    mapped = np.zeros(trace.tensor_count, np.bool_)
    mapped[candidates[before < over]] = True
    return mapped


def _runnable_rules(policy: ResolvedPolicy) -> ResolvedPolicy:
    """The rules, less mechanisms that hints and hooks cannot carry out in a running program.

    Activations that move are copied. The program may look at all other tensors at any time, so they
    move as pages or are mapped.
    """

    def runnable(tensor_class: TensorClass, rule: ClassRule) -> ClassRule:
        if rule.kind != "managed" or rule.placement == "host":
            return rule
        if tensor_class is TensorClass.ACTIVATIONS:
            copies = rule.mechanism in ("auto", "map", "migrate", "duplicate")
            return rule.model_copy(update={"mechanism": "copy"}) if copies else rule
        if rule.mechanism in ("auto", "map", "copy"):
            return rule.model_copy(update={"mechanism": "migrate"})
        return rule

    rules = tuple(map(runnable, TensorClass, policy.rules))
    return replace(policy, rules=rules)


def _fixed_modes(
    trace: Trace,
    saved: Collection[int] | None,
    policy: ResolvedPolicy,
    mapped: npt.NDArray[np.bool_],
) -> npt.NDArray[np.int8]:
    """Tensors that no rule moves: small ones, and activations that no hook sees; int8[T]."""
    seen = np.full(trace.tensor_count, saved is None)
    seen[list(saved or ())] = True
    stays = (
        (trace.tensor_bytes < LARGE_BYTES)
        | (_of_class(trace, TensorClass.ACTIVATIONS) & ~seen)
        | _of_class(trace, TensorClass.OTHER)
    )
    fixed = np.full(trace.tensor_count, _BY_POLICY, np.int8)
    for tensor_class, rule in zip(TensorClass, policy.rules, strict=True):
        if rule.kind == "managed" and rule.placement != "host":
            fixed[stays & _of_class(trace, tensor_class)] = ResidencyMode.KEEP
    fixed[mapped] = ResidencyMode.MAP
    return fixed


def _of_class(trace: Trace, tensor_class: TensorClass) -> npt.NDArray[np.bool_]:
    of_class: npt.NDArray[np.bool_] = trace.tensor_class == tensor_class.number
    return of_class
