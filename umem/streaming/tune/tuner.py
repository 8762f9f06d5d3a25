"""Decides what a training keeps on the device: measures its first steps, and plans from them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from torch import nn

from umem.capture.live import find_blocks
from umem.capture.live.timing import Clock
from umem.hardware import Hardware
from umem.offloading import ActivationStatistics, ActivationStore
from umem.runtime.torch_hooks.passes import running_pass
from umem.streaming.activations.copied_activations import CopiedActivations
from umem.streaming.plan.state_plan import StreamPlan
from umem.streaming.stage.device_room import DeviceRoom
from umem.streaming.stage.shared_budget import SharedBudget
from umem.streaming.tune.launches import Launches
from umem.streaming.tune.measured_steps import BETWEEN, MeasuredSteps
from umem.streaming.tune.measuring import Measuring, Round
from umem.streaming.tune.optimizers import TunedOptimizer, TunedOptimizers
from umem.streaming.tune.planning import Planning
from umem.streaming.tune.remaking import Remaking
from umem.streaming.tune.states import TRANSITIONS, TuningEvent, TuningState, TuningStatus
from umem.streaming.tune.watching import Watching
from umem.streaming.weights.model_weights import ModelWeights

if TYPE_CHECKING:
    from umem.streaming.activations import SlicedLosses

__all__ = ["StreamTuner"]

_LOG = logging.getLogger("umem")

_MEASURED_STEPS = 2
"""Steps to measure for a plan: one may be interrupted by a copy, or be shorter than the next."""

_SURELY_SHORTER = 0.9
"""Where steps under a plan take this part of what was measured of their passes, or less, that was
slowed: no step is shorter than its passes."""

_LONGEST_WAIT = 16
"""Measured steps after which there is a plan without that of another training."""

_MOST_CORRECTIONS = 2
"""How often plans are replaced because of that at once. Later, each has run for a while. And how
often because of other trainings' plans."""


class StreamTuner:
    """Has a model's steps measured, planned and watched; anew when memory runs short.

    A step may have several calls of ``step()``, of one optimizer or of several: it ends with the
    first of them, and later ones count by the memory that they need. Calls within the backward pass
    are over when the model is called next.

    Parameters
    ----------
    model
        The module that the training loop calls. Only a weak reference is kept.
    hardware
        The machine's figures.
    clock
        Marks moments on the device.
    room
        The device's memory.
    store
        Copies activations; None for a training whose activations stay.
    weights
        Streams weights; None for a training whose weights stay where they are.
    state_share
        The most of the optimizer state that may be on the device, as a share of its bytes.
    shared
        The device's budget, where other trainings and models divide it with this one.
    may_recompute
        Whether blocks may run forward again in the backward pass.
    losses
        Losses that can be computed in slices; None to leave losses as they are.
    """

    def __init__(
        self,
        model: nn.Module,
        hardware: Hardware,
        clock: Clock,
        room: DeviceRoom,
        store: ActivationStore | None = None,
        *,
        weights: ModelWeights | None = None,
        state_share: float = 1.0,
        shared: SharedBudget | None = None,
        may_recompute: bool = False,
        losses: SlicedLosses | None = None,
    ) -> None:
        self._shared = shared = shared or SharedBudget()
        self._known_plans = 0
        """Those of other trainings that this one's plan, or its measured steps, are under."""
        self._answers = 0
        """How often this one was planned anew because of such plans."""
        blocks = find_blocks(model)
        self._state = TuningState.OFF
        self._room = room
        self._weights = weights
        self._activations = activations = (
            None
            if store is None
            else CopiedActivations(model, blocks, store, self._fail, may_recompute=may_recompute)
        )
        self._steps = steps = MeasuredSteps()
        self._optimizers = TunedOptimizers(model, weights, steps)
        self._measuring = Measuring(
            model, blocks, steps, clock, room, activations, shared, self._fail
        )
        proofs = {} if activations is None else activations.proofs
        self.launches = Launches(clock)
        """Of updates, in each step."""
        remade = None if activations is None else activations.remade
        self._remaking = Remaking(remade, room.budget_bytes)
        self._planning = Planning(
            self._optimizers,
            *(steps, hardware, room, shared, state_share, proofs, self._remaking, losses),
            self.launches,
        )
        self._watching = Watching(room, clock, 0 if weights is None else weights.spilled_bytes)
        self._corrections = 0
        """Plans that were replaced because of that, since measurements began."""
        self._is_stale = False
        """Whether the optimizers are other ones than when measurements began."""
        self._ending: TunedOptimizer | None = None
        """The optimizer whose call of ``step()`` ends now."""
        self._seen_first: set[int] = set()
        """The first parameter, by ``id``, of each call of ``step()`` in this training step."""
        self._is_later_call = False
        """Whether the present call of ``step()`` belongs to the training step of the one before."""
        self._is_open = False
        """Whether the backward pass has updated parameters, so that the step ends after it."""

    # ------------------------------------------------------------------ optimizers

    def attach(self, optimizer: TunedOptimizer) -> None:
        """Begin with an optimizer of the model, which others may follow, until :meth:`detach`."""
        self._optimizers.add(optimizer)
        if len(self._optimizers) > 1:
            self._is_stale = True
            return
        self._planning.join_budget()
        self._measure(TuningEvent.BEGINS)

    def detach(self, optimizer: TunedOptimizer) -> None:
        """Go on without an optimizer; close after the last one."""
        self._optimizers.remove(optimizer)
        self._is_stale = True
        if not self._optimizers:
            self.close()

    def expect_backward(self, optimizer: TunedOptimizer) -> None:
        """Make no plan until :meth:`move_into_backward`, whose plan needs less memory."""
        optimizer.expects_backward = True

    def move_into_backward(self, optimizer: TunedOptimizer) -> None:
        """Measure and plan anew: from now on, parameters are updated in the backward pass.

        It frees their gradients there, so that more state has room.
        """
        optimizer.in_backward, optimizer.expects_backward = True, False
        self._try(self._measure_in_backward)

    def _measure_in_backward(self) -> None:
        self._steps.move_into_backward()
        self._planning.begin_anew(of_other_steps=False)
        self._watching.begin_anew()
        self._corrections = 0
        self._measure(TuningEvent.MOVED_INTO_BACKWARD)

    # ------------------------------------------------------------------ steps

    def forward_begins(self) -> None:
        """The model is called: a step whose updates were made in the backward pass is over."""
        self._shared.calls += 1
        if self._is_open:
            self._is_open = False
            self._seen_first.clear()
            self._step_begins()
            self._try(self._step_ends)

    def step_begins(self, first: int) -> None:
        """A call of ``step()`` begins.

        Parameters
        ----------
        first
            ``id`` of its first parameter. Calls for other parameters, one after another, are one
            training step: those of several optimizers, or of one whose groups have some of its
            parameters by turns, as DeepSpeed has them.
        """
        in_backward = running_pass().is_second
        if not in_backward:  # where a unit is updated, nothing of it is to come
            self._try(self._update_begins)
        is_later = bool(self._seen_first) and first not in self._seen_first
        self._is_later_call = in_backward or is_later
        if in_backward:
            self._is_open = True
        elif is_later:
            self._seen_first.add(first)
        else:
            self._seen_first, self._is_open = {first}, False
            self._step_begins()
            return
        self._measuring.later_call_begins(counts=self.is_measuring and not in_backward)

    def step_ends(self, optimizer: TunedOptimizer) -> None:
        """The call is over, or under way beside what follows: plan for the next step."""
        self._ending = optimizer
        if self._is_later_call:
            self._measuring.later_call_ends()
        else:
            self._try(self._step_ends)
        self._ending = None
        try:
            optimizer.set_plan(self._planning.named)
        except Exception as error:
            self._fail(error)

    def _try(self, function: Callable[[], None]) -> None:
        """Do something while the tuner is at work; an error ends that, and not the training."""
        if self._state is not TuningState.OFF:
            try:
                function()
            except Exception as error:
                self._fail(error)

    def _update_begins(self) -> None:
        if self._activations is not None:
            self._is_stale |= self._activations.update_begins()

    def _step_begins(self) -> None:
        if self.is_measuring:
            self._try(self._measuring.step_begins)

    def _step_ends(self) -> None:
        figures = self._measuring.step_ends() if self.is_measuring else None
        # While steps under a plan are measured, others' plans wait for an answer.
        is_again = self.is_measuring and not self._is_unplanned
        if figures is not None and BETWEEN in figures.blocks:
            self._shared.surrounding.add(self._optimizers)
        if self._is_stale or self._planning.has_other_members:
            self._answers = 0
            self._start_over()
        elif self._known_plans != self._others_plans and self._depends_on_others:
            self._answers += not self.is_measuring
            self._start_over()
        elif not self.is_measuring:
            self._watch()
        elif self._measuring.add(figures) and not self._waits():
            self._measuring.stop()
            self._plan_measured(self._measuring.round)
        if not is_again:
            self._known_plans = self._others_plans

    @property
    def _is_unplanned(self) -> bool:
        return self._optimizers in self._shared.unplanned

    @property
    def _others_plans(self) -> int:
        return self._shared.plans - self._planning.in_force

    @property
    def _depends_on_others(self) -> bool:
        """Whether steps are to be measured anew under another training's plan.

        Where no plan has fitted that has the others within this one's passes as they are, too.
        """
        if self._is_unplanned:
            return bool(self._shared.surrounding)
        is_over = self._state is TuningState.NO_PLAN_FITS and self._answers < _MOST_CORRECTIONS
        return is_over and self._optimizers in self._shared.surrounding

    def _waits(self) -> bool:
        """Whether there is to be another plan before this training's."""
        if self._optimizers.expects_backward:
            return True
        return self._measuring.round.tried < _LONGEST_WAIT and self._shared.waits(self._optimizers)

    # ------------------------------------------------------------------ from state to state

    def _enter(self, event: TuningEvent) -> None:
        self._state = TRANSITIONS[self._state, event]
        if event in (TuningEvent.BEGINS, TuningEvent.CHANGED):
            self._shared.unplanned.add(self._optimizers)
        elif not self.is_measuring:
            self._shared.unplanned.discard(self._optimizers)

    def _measure(
        self, event: TuningEvent, steps: int = _MEASURED_STEPS, peak_bytes: int = 0
    ) -> None:
        """Measure the next steps, or search for one with as many live bytes."""
        # A deferred update would take memory and time of the next forward pass.
        self._optimizers.join()
        self._enter(event)
        self._measuring.round = Round(event, steps, peak_bytes, self._watching.spilled_bytes)
        self._copy_activations()
        self._measuring.begin()

    def _start_over(self) -> None:
        """Measure and plan anew: optimizers, or what else is on the device, have changed."""
        self._is_stale = False
        self._steps.forget()
        self._planning.begin_anew(of_other_steps=True)
        self._watching.begin_anew()
        self._corrections = 0
        self._measure(TuningEvent.CHANGED)

    def _plan_measured(self, measured: Round) -> None:
        """Plan from a round that is complete."""
        ran_out = measured.occasion is TuningEvent.MEMORY_RAN_OUT
        planning, measured_s = self._planning, self._watching.measured_s
        if ran_out and planning.is_fastest:
            planning.forget_fastest()
        if measured.occasion is TuningEvent.TIMES_DISTURBED and measured_s is not None:
            self._steps.limit(measured_s, planning.recomputed, planning.left_out)
        # What is used in host memory is slow: under a plan that has room for it, measure again.
        figures = self._steps.figures
        is_slow = figures is not None and figures.is_disturbed
        again = is_slow and measured.occasion is not TuningEvent.TIMES_DISTURBED
        self._plan(
            more_slack_for=self._watching.lacking_bytes
            if ran_out and not measured.has_grown
            else None,
            measures_again=again and not ran_out,
        )

    def _plan(self, *, more_slack_for: int | None = None, measures_again: bool = False) -> None:
        plans = self._planning.plans
        event = self._planning.make(self._ending, more_slack_for, are_slowed=measures_again)
        stays = self._planning.plans == plans and event is not TuningEvent.CHANGED
        self._follow(event, stays=stays, measures_again=measures_again)

    def _follow(
        self, event: TuningEvent, *, stays: bool = False, measures_again: bool = False
    ) -> None:
        """Have the next steps run by the plan, and watch them unless it was in force before."""
        if not stays:
            self._watching.plan_begins(
                None if self._weights is None else self._weights.spilled_bytes,
                measures_again=measures_again,
                overflows=event is TuningEvent.NO_PLAN_FITS,
            )
        if event is TuningEvent.CHANGED:
            self._start_over()
        else:
            self._enter(event)
            self._copy_activations()

    def _watch(self) -> None:
        """Look at a step that has run under the plan."""
        watching, planning = self._watching, self._planning
        watching.step_ends()
        if watching.is_settling:
            return
        if watching.measures_again or self._was_slowed():
            self._steps.distrust_times()
            # There are few corrections, and one step may be interrupted.
            steps = 1 if watching.measures_again else _MEASURED_STEPS
            self._measure(TuningEvent.TIMES_DISTURBED, steps)
        elif planning.is_outdated():
            self._plan()
        elif planning.is_outdone:
            self._follow(planning.put_back(self._ending))
        elif planning.remakes_otherwise():
            self._follow(planning.follow_remaking(self._ending))
        elif watching.runs_short and not planning.may_plan:
            watching.give_up(planning.plans)
        elif watching.runs_short:
            watching.plan_fails()
            # Measured steps have no temporary slots.
            more_bytes = 0 if planning.stream is None else planning.stream.temporary_bytes()
            self._measure(TuningEvent.MEMORY_RAN_OUT, peak_bytes=watching.peak_bytes - more_bytes)

    def _was_slowed(self) -> bool:
        """Whether steps under the plan show that those that it is made from were slowed."""
        plan, measured_s = self.plan, self._watching.take_measured_s()
        figures = self._steps.figures
        if plan is None or figures is None or not measured_s:
            return False
        _LOG.info(
            "umem: plan %d: %.3f s a step measured, %.3f s predicted",
            self._planning.plans,
            measured_s,
            plan.predicted.step_s,
        )
        self._planning.add_time(measured_s)
        # In the backward pass, the times before updates moved there may be the shorter ones.
        passes_s = self._steps.passes_s(self._planning.recomputed, self._planning.left_out)
        least_s = min(passes_s, plan.predicted.compute_s)
        was_slowed = measured_s <= _SURELY_SHORTER * least_s
        # Where nothing moves, no other plan is better.
        was_slowed &= any(plan.predicted.to_host_bytes.values())
        is_late = self._watching.is_timed_again
        was_slowed &= self._planning.may_plan
        was_slowed &= is_late or self._corrections < _MOST_CORRECTIONS
        self._corrections += was_slowed and not is_late
        return was_slowed

    def _copy_activations(self) -> None:
        if self._activations is not None:
            planning, measured = self._planning, self._measuring.round
            copied, recomputed, named = planning.copied, planning.recomputed, planning.named
            # Only copies show how much memory a block takes that runs twice. Times are measured
            # without: the copies would have host memory locked amid the passes.
            if self.is_measuring and measured.occasion is not TuningEvent.TIMES_DISTURBED:
                copied, recomputed = {**recomputed, **copied}, {}
            self._activations.set_plan(
                copied,
                1 if named is None else named.fetch_ahead,
                is_measuring=self.is_measuring and self._measuring.sees_saved,
                recomputed=recomputed,
                left_out=() if self.is_measuring else planning.left_out,
            )

    def let_go(self) -> None:
        """Hold no host memory for activations until the next pass."""
        if self._activations is not None:
            self._activations.let_go()

    def take_up(self) -> None:
        """What the program had moved is placed again: what that took is no sign of short memory."""
        self._watching.settle()
        self._room.take_peak_bytes()

    def close(self) -> None:
        """Remove all hooks."""
        self._enter(TuningEvent.ENDED)
        self._planning.leave_budget()
        self._measuring.stop()
        if self._activations is not None:
            self._activations.close()

    def _fail(self, error: Exception) -> None:
        """An error must not end the training, which goes on as it is."""
        _LOG.warning(
            "umem: this training is not measured any more, and activations stay on the device: "
            "%s: %s",
            type(error).__name__,
            str(error),
            exc_info=_LOG.isEnabledFor(logging.DEBUG),
        )
        self._enter(TuningEvent.ENDED)
        self._planning.stop_copying()
        self._measuring.stop()
        self._copy_activations()

    # ------------------------------------------------------------------ what is asked

    @property
    def plan(self) -> StreamPlan | None:
        """The present plan; None before the first one."""
        return self._planning.stream

    @property
    def is_measuring(self) -> bool:
        """Whether the next step is measured."""
        return self._state is TuningState.MEASURING

    @property
    def is_settled(self) -> bool:
        """Whether neither the next step nor one soon after it is measured."""
        watching, is_off = self._watching, self._state is TuningState.OFF
        is_watched = watching.measures_again or not watching.is_timed
        return is_off or not (self.is_measuring or is_watched)

    @property
    def is_idle(self) -> bool:
        """Whether a step under the plan has nothing to do: all is on the device, and stays there.

        Steps may then leave out all calls but :meth:`still_idle`.
        """
        return (
            self._state is TuningState.PLANNED
            and self._planning.keeps_all
            and self._planning.part.most_bytes is None
            and self._watching.has_been_patient
            and not (self._is_stale or self._planning.has_other_members)
        )

    def still_idle(self) -> bool:
        """Whether the step after an idle one may be idle too, by the memory that it has used."""
        if self._watching.has_room:
            return True
        self._room.take_peak_bytes()  # the next step's is to be known
        return False

    def away_bytes(self) -> int:
        """Bytes of activations that are on the host only."""
        return self._measuring.away_bytes()

    @property
    def late_fetches(self) -> int:
        """Copied activations that were fetched when they were needed, and not before."""
        return 0 if self._activations is None else self._activations.statistics.late_fetches

    def status(self) -> TuningStatus:
        """The state now."""
        planning, optimizers = self._planning, self._optimizers
        born_bytes = 0 if self._weights is None else self._weights.spilled_bytes
        return TuningStatus(
            state=self._state,
            budget_bytes=self._room.budget_bytes,
            share_bytes=self._planning.part.most_bytes,
            plan=self.plan,
            plans=planning.plans,
            resident_bytes=planning.resident_bytes,
            copied_bytes=planning.copied_bytes,
            copied_blocks=len(planning.copied),
            recomputed_blocks=len(planning.recomputed),
            remakes_results=self._remaking.is_on,
            left_out_checkpoints=len(planning.left_out),
            slices_losses=planning.slices_losses,
            copied_gradients_bytes=planning.gradient_bytes(optimizers.copied_gradients),
            returning_gradients_bytes=planning.gradient_bytes(optimizers.returning_gradients),
            overflow_bytes=planning.overflow_bytes,
            predicted_s=None if self.plan is None else self.plan.predicted.step_s,
            measured_s=self._watching.measured_s,
            spilled_bytes=max(0, self._room.spilled_bytes() - born_bytes),
            activations=ActivationStatistics()
            if self._activations is None
            else self._activations.statistics,
        )
