"""Plans what a training keeps on the device, from the steps that were measured."""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from umem.core.errors import PlanError
from umem.core.units import format_bytes
from umem.hardware import Hardware
from umem.streaming.activations.repeatable import CallProof
from umem.streaming.plan.host_updates import plan_with_host_updates
from umem.streaming.plan.recomputation import (
    plan_with_recomputation,
    with_recomputed,
    without_checkpoints,
)
from umem.streaming.plan.state_plan import StreamPlan, least_slack_bytes
from umem.streaming.plan.step_timing import StreamUnit
from umem.streaming.plan.training_plan import TrainingPlan, plan_training, with_weights
from umem.streaming.stage.device_room import DeviceRoom
from umem.streaming.stage.shared_budget import BudgetPart, SharedBudget
from umem.streaming.tune.launches import Launches
from umem.streaming.tune.measured_steps import BETWEEN, MeasuredStep, MeasuredSteps
from umem.streaming.tune.named_plan import NamedPlan
from umem.streaming.tune.optimizers import TunedOptimizer, TunedOptimizers
from umem.streaming.tune.remaking import Remaking
from umem.streaming.tune.states import TuningEvent

if TYPE_CHECKING:
    from umem.streaming.activations import SlicedLosses

__all__ = ["Planning"]

_LOG = logging.getLogger("umem")

_MOST_PLANS = 8
"""Plans for a training."""

_SLACK_SHARES = (1.0, 0.5, 0.25)
"""Of the usual slack, in the order of trying: a plan with little to spare is faster than none."""

_LEAST_GAIN = 128
"""Part of the budget that a training has to gain for a new plan when others leave it more."""

_LEAST_GAIN_S = 0.03
"""Part of a measured step by which another plan has to be faster: predictions are not exact to
less, nor do measurements repeat to less."""

_WITHOUT_STEP_IN_BACKWARD = (
    ". Without step_in_backward, trained weights can be streamed and gradients copied, too"
)


class _KeptResults(NamedTuple):
    """What is known of steps in which all results were kept."""

    steps: MeasuredSteps
    fastest: TrainingPlan | None
    fastest_s: float
    circumstances: tuple[object, ...]
    """Those of the fastest plan."""


class Planning:
    """Makes plans for what there is of a model, from `steps`, and puts them in force."""

    def __init__(
        self,
        tuned: TunedOptimizers,
        steps: MeasuredSteps,
        hardware: Hardware,
        room: DeviceRoom,
        shared: SharedBudget,
        state_share: float,
        proofs: Mapping[str, CallProof],
        remaking: Remaking,
        losses: SlicedLosses | None,
        launches: Launches,
    ) -> None:
        self.stream: StreamPlan | None = None
        """The present plan; None before the first one."""
        self.overflow_bytes = 0
        """What has no room under it, and is used in host memory."""
        self.named: NamedPlan | None = None
        """What is followed. An optimizer begins to after its own next step: amid that nothing of it
        may move."""
        self.copied: Mapping[str, str | None] = {}
        """As in it; empty when activations are copied no more."""
        self.recomputed: Mapping[str, str | None] = {}
        """The same."""
        self.left_out: frozenset[str] = frozenset()
        """The same."""
        self.units: Sequence[StreamUnit] = []
        """Those of the plan."""
        self._made_for: Sequence[StreamUnit] = []
        """The same, before some were to run twice."""
        self.plans = 0
        self.in_force = 0
        """How often a plan was put in force, those before plans were counted anew included."""
        self._whole: TrainingPlan | None = None
        """The plan in force."""
        self._whole_s: float | None = None
        """A step under it; None until it is measured."""
        self._fastest: TrainingPlan | None = None
        """The plan with the shortest measured step, as long as the steps are such and it fits."""
        self._fastest_s = math.inf
        self.part = BudgetPart(None, 0)
        """Of the budget, that the plan is made for."""
        self._tuned, self._steps = tuned, steps
        self._weights = tuned.weights
        self._hardware = hardware
        self._room = room
        self._shared = shared
        self._changes = 0
        """Of the budget's members, when measurements began."""
        self._state_share = state_share
        self._proofs, self._remaking, self._losses = proofs, remaking, losses
        self._launches = launches
        self._kept: _KeptResults | None = None
        """What is known of the steps before the present ones, in which results are made again."""
        self._next_kept: _KeptResults | None = None
        """The same of the steps that are to be measured next."""
        self._sizes: dict[str, tuple[int, ...]] = {}
        """Of the state that the plan is made for."""
        self._are_used_early = False
        """Whether the plan is for updates that are waited for before the next forward pass."""
        self._are_slowed = False
        """Whether the plan is made of times that are too long."""
        self._slack = 1
        self._has_warned = False

    def join_budget(self) -> None:
        """Divide the budget from now on, also for the weights."""
        if self._weights is not None:
            self._weights.is_driven = True
            self._shared.leave(self._weights)
        self._shared.join(self._tuned)
        self._changes = self._shared.changes

    def leave_budget(self) -> None:
        """Leave the part to the others, and losses to torch; weights have a part of their own."""
        if self._losses is not None:
            self._losses.end()
        self._shared.leave(self._tuned)
        if self._weights is not None:
            self._shared.join(self._weights)

    @property
    def has_other_members(self) -> bool:
        """Whether members of the budget have come or gone since measurements began."""
        return self._changes != self._shared.changes

    def begin_anew(self, *, of_other_steps: bool) -> None:
        """Count plans anew; of steps that have changed, with as little slack as at first."""
        self.plans = 0
        self.forget_fastest()
        self._kept, self._next_kept = self._next_kept, None
        if of_other_steps:
            self._slack, self._changes = 1, self._shared.changes

    @property
    def is_first(self) -> bool:
        """Whether trainings have no plan yet that are to have one beside this one's."""
        shared, own = self._shared, self._tuned
        return own in shared.surrounding and bool(set(shared.unplanned) - {own})

    @property
    def _circumstances(self) -> tuple[object, ...]:
        """What a plan is made for, beside measured steps."""
        return self._sizes, self._are_used_early, self.part

    @property
    def may_plan(self) -> bool:
        """Whether there may be another plan."""
        return self.plans < _MOST_PLANS

    def stop_copying(self) -> None:
        """Copy activations no more, run no block forward again, and leave no checkpoint out."""
        self.copied = self.recomputed = {}
        self.left_out = frozenset()

    # ------------------------------------------------------------------ measured plans

    def add_time(self, measured_s: float) -> None:
        """Count a step under the plan in force."""
        self._whole_s = measured_s
        if measured_s < self._fastest_s:
            self._fastest, self._fastest_s = self._whole, measured_s

    def forget_fastest(self) -> None:
        """Compare no plan with those so far: steps are other ones, or have no room under them."""
        self._fastest, self._fastest_s = None, math.inf

    @property
    def is_fastest(self) -> bool:
        """Whether no plan has a shorter measured step than the one in force."""
        return self._whole is self._fastest

    @property
    def is_outdone(self) -> bool:
        """Whether steps under the plan take longer than they did under an earlier one."""
        limit_s = self._fastest_s / (1.0 - _LEAST_GAIN_S)
        return not self.is_fastest and self._whole_s is not None and self._whole_s > limit_s

    def remakes_otherwise(self) -> bool:
        """Begin or end to make results again, by the time that steps take under the plan.

        Whether steps are other ones now: then :meth:`follow_remaking` says what follows.
        """
        return self._whole_s is not None and self._changes_remaking(self._whole, self._fastest_s)

    def follow_remaking(self, ending: TunedOptimizer | None) -> TuningEvent:
        """Put a plan for other results in force, or have other steps measured.

        The parameters and the result are those of :meth:`make`.
        """
        if self._remaking.is_on or not self._take_kept():
            return TuningEvent.CHANGED
        return self.make(ending) if self._fastest is None else self.put_back(ending)

    def put_back(self, ending: TunedOptimizer | None) -> TuningEvent:
        """Put the plan with the shortest measured step in force again.

        The parameters and the result are those of :meth:`make`.
        """
        assert self._fastest is not None
        _LOG.info("umem: a step took %.3f s under an earlier plan, which follows", self._fastest_s)
        return self._put_in_force(self._fastest, "", ending)

    # ------------------------------------------------------------------ a plan

    def make(
        self,
        ending: TunedOptimizer | None,
        more_slack_for: int | None = None,
        *,
        are_slowed: bool = False,
    ) -> TuningEvent:
        """Plan anew, while a call of ``step()`` of the optimizer `ending` ends.

        If the plan so far has too little slack, `more_slack_for` are the bytes that were lacking.
        If times `are_slowed`, others are measured next.
        The plan in force stays where it takes less time than a new one promises.
        Returns `PLAN_FITS`, `NO_PLAN_FITS`, or `CHANGED` if parameters had to move to the host:
        then steps are other ones now.
        """
        figures = self._steps.figures
        assert figures is not None
        before = self._circumstances
        self._sizes = self._tuned.state_sizes()
        self._are_used_early = self._tuned.are_used_early
        self.part, self._are_slowed = self._find_part(), are_slowed
        if before != self._circumstances:
            self.forget_fastest()
        units = self._made_for = self._steps.units(
            self._sizes,
            # A step in the backward pass frees them.
            {} if self._tuned.in_backward else self._tuned.gradient_sizes(),
            self._tuned.parameters_at_home(),
            self._hardware.memory_bytes_per_s,
        )
        whole, error = self._plan(units, figures, more_slack_for)
        if whole.stream.hosts and not self._tuned.prepare_host():
            whole, error = self._plan(units, figures, None)
        if error and (self._slice_losses(units) or self._move_parameters_to_host()):
            return TuningEvent.CHANGED
        if self._changes_remaking(whole, None):
            return self.follow_remaking(ending)
        fastest, stays = self._fastest, self.is_fastest
        if fastest is None or not self._is_for(fastest, units):
            self.forget_fastest()
        elif whole.step_s > (1.0 - _LEAST_GAIN_S) * self._fastest_s:
            fastest = self._fastest = self._predict_again(fastest, units, figures)
            if not stays:
                return self.put_back(ending)
            self._whole, self.stream, self.units = fastest, fastest.stream, fastest.units
            _LOG.info(
                "umem: plan %d stays: a step takes %.3f s, and %.3f s by another one's prediction",
                self.plans,
                self._fastest_s,
                whole.step_s,
            )
            return _fits(fastest)
        return self._put_in_force(whole, error, ending)

    def _put_in_force(
        self, whole: TrainingPlan, error: str, ending: TunedOptimizer | None
    ) -> TuningEvent:
        figures = self._steps.figures
        assert figures is not None
        self.plans += 1
        self._whole, self._whole_s = whole, None
        self.stream, self.units = whole.stream, whole.units
        self.overflow_bytes = whole.overflow_bytes
        self.named = NamedPlan.of(whole, figures.batches)
        self.copied, self.recomputed = self.named.copied, self.named.recomputed
        self.left_out = self.named.left_out
        self._place_weights(whole)
        self._shared.plans += 1
        self.in_force += 1
        if ending is not None:
            ending.set_plan(self.named)
        self._room.trim()
        self._room.lock_ahead(self._host_bytes() - self.copied_bytes)
        if whole.overflow_bytes and not self.is_first:
            self._warn(error, whole)
        self._log(whole)
        return _fits(whole)

    def _is_for(self, whole: TrainingPlan, units: Sequence[StreamUnit]) -> bool:
        """Whether a plan is for these units, too."""
        names, others = ([it.name for it in some] for some in (whole.units, units))
        return names == others and (self._tuned.may_use_host or not whole.stream.hosts)

    def _predict_again(
        self, whole: TrainingPlan, units: Sequence[StreamUnit], figures: MeasuredStep
    ) -> TrainingPlan:
        """The same plan, with what newer figures say of it."""
        if whole.overflow_bytes:
            return whole  # of units that were made to fit
        freed_bytes, saved_bytes, more_bytes = self._proved_bytes(units)
        changed = with_recomputed(units, freed_bytes, whole.recomputed, more_bytes)
        changed = without_checkpoints(changed, saved_bytes, whole.left_out)
        if whole.weights is not None and self._weights is not None:
            changed = with_weights(changed, self._weights.units, whole.weights)
        timing = whole.predict_again(
            changed,
            self._hardware,
            other_s=figures.other_s,
            is_deferred=not self._tuned.waits,
            in_backward=self._tuned.in_backward,
            batches=figures.batches,
            launch_s=self._launches.waited_s,
        )
        return replace(whole, units=changed, stream=replace(whole.stream, predicted=timing))

    def _proved_bytes(
        self, units: Sequence[StreamUnit]
    ) -> tuple[Mapping[str, int], Mapping[str, int], Mapping[str, int]]:
        """Bytes by name of each unit that may run twice.

        What that frees, what leaving out its checkpoint takes, and what its second pass takes more.
        """
        proved = {name: proof.freed_bytes for name, proof in self._proofs.items()}
        freed_bytes, more_bytes = self._remaking.second_passes(units, proved)
        saved_bytes = {name: proof.checkpointed_bytes for name, proof in self._proofs.items()}
        return freed_bytes, saved_bytes, more_bytes

    def _changes_remaking(self, whole: TrainingPlan | None, measured_s: float | None) -> bool:
        """Begin or end to make results again, by a plan for the units that were measured."""
        # The times of steps before updates moved into the backward pass are of kept results, and
        # of times that are too long nothing follows.
        figures = self._steps.figures
        if whole is None or figures is None or self._tuned.in_backward or self._are_slowed:
            return False
        if self._remaking.is_on:
            return self._remaking.ends(whole.overflow_bytes, measured_s)
        stock_s = figures.computed_s + sum(unit.update_s for unit in self._made_for)
        if not self._remaking.begins(self._made_for, stock_s, whole, measured_s):
            return False
        self._next_kept = _KeptResults(
            self._steps.copy(), self._fastest, self._fastest_s, self._circumstances
        )
        return True

    def _take_kept(self) -> bool:
        """Have the figures of steps before results were made again, if they tell all."""
        kept, now = self._kept, self._steps.figures
        if kept is None or kept.steps.figures is None or now is None:
            return False
        known = kept.steps.figures
        if known.is_disturbed or known.blocks.keys() != now.blocks.keys():
            return False
        self._steps.take(kept.steps)
        self._fastest, self._fastest_s = kept.fastest, kept.fastest_s
        if kept.circumstances != self._circumstances:
            self.forget_fastest()
        return True

    def _plan(
        self, units: Sequence[StreamUnit], figures: MeasuredStep, more_slack_for: int | None
    ) -> tuple[TrainingPlan, str]:
        """A plan, and the error of usual plans where none of them has room; empty if one has."""
        if more_slack_for is not None:
            whole, error = self._plan_with_slack(units, figures, 2 * self._slack)
            little_bytes = int(_SLACK_SHARES[-1] * least_slack_bytes(self._room.budget_bytes))
            # To use so little in host memory takes less time than to copy all that could leave.
            self._slack *= 1 if whole is None and more_slack_for <= little_bytes else 2
            if whole is not None:
                return whole, error
        whole, error = self._plan_with_slack(units, figures, self._slack)
        if whole is None:
            whole, refusal = self._plan_with_slack(units, figures, self._slack, may_overflow=True)
        if whole is None:
            raise PlanError(refusal + self._remedy(units))
        return whole, error

    def _plan_with_slack(
        self,
        units: Sequence[StreamUnit],
        figures: MeasuredStep,
        slack: int,
        *,
        may_overflow: bool = False,
    ) -> tuple[TrainingPlan | None, str]:
        """A plan with the usual slack or, in a small budget, with less; or why none fits."""
        budget_bytes = self._room.budget_bytes
        freed_bytes, saved_bytes, more_bytes = self._proved_bytes(units)
        found, errors = None, []
        for share in _SLACK_SHARES:
            slack_bytes = int(share * slack * least_slack_bytes(budget_bytes))
            plan = partial(
                self._plan_training,
                figures=figures,
                budget_bytes=budget_bytes - slack_bytes,
                may_overflow=may_overflow,
            )
            try:
                found = plan_with_recomputation(
                    units,
                    freed_bytes,
                    self._hardware,
                    plan,
                    saved_bytes,
                    more_bytes,
                    are_slowed=self._are_slowed,
                )
            except PlanError as error:
                errors.append(str(error))
            else:
                if not found.overflow_bytes:
                    break
        return found, "" if found is not None else errors[0]

    def _plan_training(
        self,
        units: Sequence[StreamUnit],
        figures: MeasuredStep,
        budget_bytes: int,
        may_overflow: bool,
        *,
        is_trial: bool = False,
        longest_s: float = math.inf,
    ) -> TrainingPlan:
        weights, fixed_bytes = self._weights, 0
        most_bytes = self.part.most_bytes
        budget_bytes -= self.part.others_bytes
        if weights is not None and weights.may_place:
            fixed_bytes = weights.fixed_bytes
        elif weights is not None:
            budget_bytes -= weights.device_bytes
            most_bytes = None if most_bytes is None else most_bytes - weights.device_bytes
            weights = None
        plan = plan_with_host_updates if self._tuned.may_use_host else plan_training
        return plan(
            units,
            None if weights is None else weights.units,
            budget_bytes=budget_bytes,
            hardware=self._hardware,
            fixed_bytes=fixed_bytes,
            weight_share=1.0 if weights is None else weights.share,
            most_placed_bytes=most_bytes,
            is_trial=is_trial,
            longest_s=longest_s,
            may_overflow=may_overflow,
            state_share=min(self._state_share, self._tuned.movable_share),
            other_s=figures.other_s,
            step_peak_bytes=figures.step_peak_bytes,
            update_peak_bytes=figures.update_peak_bytes,
            is_deferred=not self._tuned.waits,
            in_backward=self._tuned.in_backward,
            batches=figures.batches,
            may_have_temporary=self._tuned.may_have_temporary,
            launch_s=self._launches.waited_s,
        )

    def _slice_losses(self, units: Sequence[StreamUnit]) -> bool:
        """Make room by losses in slices, where the device is fullest at a loss."""
        losses = self._losses
        if losses is None or not losses.could_slice or not _is_fullest_at_loss(units):
            return False
        losses.slice()
        return True

    def _remedy(self, units: Sequence[StreamUnit]) -> str:
        """What to change in a program whose loss has no room."""
        is_at_loss = self._losses is not None and _is_fullest_at_loss(units)
        return self._losses.remedy if self._losses is not None and is_at_loss else ""

    def _move_parameters_to_host(self) -> bool:
        """Make room by the parameters that no module holds, such as float32 copies of weights."""
        self._tuned.join()
        moved_bytes = self._tuned.move_to_host()
        if moved_bytes:
            self._room.find_homes()
            self._room.trim()
            _LOG.info(
                "umem: %s of parameters that no module holds are streamed beside their state",
                format_bytes(moved_bytes),
            )
        return moved_bytes > 0

    def _place_weights(self, whole: TrainingPlan) -> None:
        weights, plan = self._weights, whole.weights
        if weights is None or not weights.may_place or plan is None:
            return
        # Updates that are under way read and write weights where they are now.
        self._tuned.join()
        weights.apply(plan, self._room.budget_bytes - plan.device_bytes, whole.extra)

    def is_outdated(self) -> bool:
        """Whether the plan is for other state, other uses or another part of the budget."""
        if self._has_other_part():
            return True
        is_planned = self.stream is not None  # if none fits, all is streamed in either case
        has_other_uses = is_planned and self._tuned.are_used_early != self._are_used_early
        has_other_uses |= bool(self._hosts) and not self._tuned.may_use_host
        return self.may_plan and (has_other_uses or self._tuned.state_sizes() != self._sizes)

    def _find_part(self) -> BudgetPart:
        budget_bytes = self._room.budget_bytes
        return self._shared.part_of(self._tuned, budget_bytes - least_slack_bytes(budget_bytes))

    def _has_other_part(self) -> bool:
        known = self.part
        if known.most_bytes is None and not self.has_other_members:
            return False  # it was alone on the device, and is still
        now = self._find_part()
        if known.most_bytes is None or now.most_bytes is None:
            return known != now
        gain_bytes = now.most_bytes - known.most_bytes, known.others_bytes - now.others_bytes
        worth_bytes = self._room.budget_bytes // _LEAST_GAIN
        return min(gain_bytes) < 0 or max(gain_bytes) >= worth_bytes

    # ------------------------------------------------------------------ what is where

    @property
    def keeps_all(self) -> bool:
        """Whether the plan copies no activations and gradients, and makes no slots in passes."""
        plan = self.named
        return plan is not None and not (
            self.copied or self.recomputed or plan.copied_gradients or plan.temporary.made_in
        )

    @property
    def slices_losses(self) -> bool:
        """Whether losses are computed in slices."""
        return self._losses is not None and self._losses.is_on

    @property
    def resident_bytes(self) -> int:
        """Optimizer state that the plan keeps on the device."""
        resident = () if self.named is None else self.named.resident
        sizes = self._tuned.state_sizes()
        return sum(sum(sizes.get(name, ())) for name in resident)

    @property
    def copied_bytes(self) -> int:
        """Activations that the plan copies out in each forward pass."""
        return sum(unit.saved_bytes for unit in self.units if unit.name in self.copied)

    @property
    def _hosts(self) -> frozenset[str]:
        return frozenset() if self.named is None else self.named.hosts

    def gradient_bytes(self, names: Collection[str]) -> int:
        """Gradients of these units."""
        return sum(unit.gradient_bytes for unit in self.units if unit.name in names)

    def _host_bytes(self) -> int:
        """Host memory by plan: homes of state and weights, and what is copied out at the most."""
        state_bytes = self._tuned.state_bytes - self.resident_bytes
        weights = 0 if self._weights is None else self._weights.away_bytes
        weights += sum(self._tuned.parameters_at_home().values())
        gradients = self.gradient_bytes(self._tuned.copied_gradients)
        gradients += self.gradient_bytes(self._hosts)  # and as many bytes of weights beside them
        return state_bytes + self.copied_bytes + gradients + weights

    def _warn(self, error: str, whole: TrainingPlan) -> None:
        if not self._has_warned:
            self._has_warned = True
            _LOG.warning(
                "umem: all that can leave the device does, and %s of tensors are used in host "
                "memory, by prediction in %.3f s a step: %s%s%s",
                format_bytes(whole.overflow_bytes),
                whole.step_s,
                error,
                self._remedy(self.units),
                _WITHOUT_STEP_IN_BACKWARD if self._tuned.in_backward else "",
            )

    def _log(self, whole: TrainingPlan) -> None:
        plan, part, room_bytes = whole.stream, self.part, self._room.budget_bytes
        copied = self._tuned.copied_gradients
        returning = self._tuned.returning_gradients
        peak_bytes = whole.device_bytes
        if self._weights is not None and whole.weights is None:  # they were not to be placed
            peak_bytes += self._weights.device_bytes
        _LOG.info(
            "umem: plan %d: state of %d of %d blocks on the device (%s), %d slots of %s and %d "
            "temporary ones, %d updated by the host, %d blocks computed twice, checkpoints of %d "
            "left out, activations of %d (%s) and gradients of %d (%s, and %s back) copied, %s of "
            "host memory, %.3f s a step predicted, %s of %s spare",
            self.plans,
            sum(whole.units[number].state_bytes > 0 for number in plan.resident),
            sum(unit.state_bytes > 0 for unit in whole.units),
            format_bytes(self.resident_bytes),
            plan.slots,
            format_bytes(plan.slot_bytes),
            len(plan.temporary),
            len(plan.hosts),
            len(self.recomputed),
            len(self.left_out),
            len(self.copied),
            format_bytes(self.copied_bytes),
            len(copied),
            format_bytes(self.gradient_bytes(copied)),
            format_bytes(self.gradient_bytes(returning)),
            format_bytes(self._host_bytes()),
            plan.predicted.step_s,
            format_bytes(max(0, room_bytes - part.others_bytes - peak_bytes)),
            format_bytes(room_bytes),
        )
        if part.most_bytes is not None:
            _LOG.info(
                "umem: of these, %s are the share of this training, and %s are left for %d others",
                format_bytes(part.most_bytes),
                format_bytes(part.others_bytes),
                len(self._shared.members) - 1,
            )


def _fits(whole: TrainingPlan) -> TuningEvent:
    return TuningEvent.NO_PLAN_FITS if whole.overflow_bytes else TuningEvent.PLAN_FITS


def _is_fullest_at_loss(units: Sequence[StreamUnit]) -> bool:
    """Whether that is in the last unit's passes, which the loss counts for."""
    peaks = [max(unit.forward_peak_bytes, unit.backward_peak_bytes) for unit in units]
    return bool(peaks) and peaks[-1] == max(peaks) and units[-1].name != BETWEEN
