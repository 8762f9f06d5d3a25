"""Decides what a training keeps on the device: measures its first steps, and plans from them."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence

from torch import nn

from umem.capture.live import NO_BLOCK, Block, PhaseTracker
from umem.capture.live.timing import Clock
from umem.core.errors import PlanError
from umem.core.units import format_bytes
from umem.hardware import Hardware
from umem.offloading import ActivationStatistics, ActivationStore
from umem.runtime.torch_hooks.modules import HookErrors
from umem.streaming.activations.copied_activations import CopiedActivations
from umem.streaming.plan.state_plan import StreamPlan, least_slack_bytes
from umem.streaming.plan.step_timing import StreamUnit
from umem.streaming.plan.training_plan import WEIGHT_SLOTS, TrainingPlan, plan_training
from umem.streaming.plan.weight_plan import plan_weights
from umem.streaming.stage.device_room import DeviceRoom
from umem.streaming.stage.shared_budget import BudgetPart, SharedBudget
from umem.streaming.tune.measure import StepFigures, StepMeter
from umem.streaming.tune.measured_steps import MeasuredSteps
from umem.streaming.tune.named_plan import FEWEST_SLOTS, by_names, everything_leaves
from umem.streaming.tune.optimizers import (
    OptimizerPlan,
    TunedOptimizer,
    TunedOptimizers,
)
from umem.streaming.tune.states import (
    TRANSITIONS,
    TuningEvent,
    TuningState,
    TuningStatus,
)
from umem.streaming.weights.model_weights import ModelWeights
from umem.torch_compat import current_graph_task_id

__all__ = ["StreamTuner"]

_LOG = logging.getLogger("umem")

_MEASURED_STEPS = 2
"""Steps to measure for a plan: one may be interrupted by a copy, or be shorter than the next."""

_SETTLING_STEPS = 2
"""Steps until a plan is in force: the first one moves state."""

_MOST_PLANS = 8
"""Plans for a training."""

_PATIENCE_STEPS = 4
"""Steps before the first plan because of short memory; before each later one, twice as many."""

_SLACK_SHARES = (1.0, 0.5, 0.25)
"""Of the usual slack, in the order of trying: a plan with little to spare is faster than none."""

_LEAST_GAIN = 128
"""Part of the budget that a training has to gain for a new plan when others leave it more."""

_WITHOUT_STEP_IN_BACKWARD = (
    ". Without step_in_backward, trained weights can be streamed and gradients copied, too"
)


class StreamTuner:
    """Measures a model's steps and plans; anew when memory runs short.

    A step may have several calls of ``step()``, of one optimizer or of several: it ends with the
    first of them, and later ones count by the memory that they need. Calls within the backward pass
    are over when the model is called next.

    Parameters
    ----------
    hardware
        The machine's figures.
    clock
        Marks moments on the device.
    room
        The device's memory.
    store
        Copies activations; None for a training whose activations stay.
    state_share
        The most of the optimizer state that may be on the device, as a share of its bytes.
    shared
        The device's budget, where other trainings and models divide it with this one.
    """

    def __init__(
        self,
        hardware: Hardware,
        clock: Clock,
        room: DeviceRoom,
        store: ActivationStore | None = None,
        *,
        state_share: float = 1.0,
        shared: SharedBudget | None = None,
    ) -> None:
        self.plan: StreamPlan | None = None
        """The present plan; None before the first one."""
        self._hardware = hardware
        self._clock = clock
        self._room = room
        self._store = store
        self._state_share = state_share
        self._shared = shared or SharedBudget()
        self._changes = 0
        """Of the members of the budget, when measurements began."""
        self._part = BudgetPart(None, 0)
        """Of the budget, that the plan is made for."""
        self._optimizers = TunedOptimizers()
        self._optimizer_plan: OptimizerPlan | None = None
        """Each gets it behind its own next step: amid that nothing of it may move."""
        self._ending: TunedOptimizer | None = None
        """The one whose call of ``step()`` ends now."""
        self._is_stale = False
        """Whether the optimizers are other ones than when measurements began."""
        self._seen_first: set[int] = set()
        """The first parameter, by ``id``, of each call of ``step()`` in this training step."""
        self._is_later_call = False
        """Whether the present call of ``step()`` belongs to the training step of the one before."""
        self._is_open = False
        """Whether the backward pass has updated parameters, so that the step ends behind it."""
        self._later_bytes = 0
        """The most that later calls have needed."""
        self._takes_peak = False
        """Whether the present one counts for it."""
        self._state = TuningState.OFF
        self._activations: CopiedActivations | None = None
        self._tracker: PhaseTracker | None = None
        self._weights: ModelWeights | None = None
        self._units: Sequence[StreamUnit] = []
        """Those of the plan."""
        self._copied: dict[str, str | None] = {}
        self._fetch_ahead = 1
        self._sizes: dict[str, tuple[int, ...]] = {}
        self._measured = MeasuredSteps()
        self._measures_again = False
        """Whether steps are to be measured once more, now that host memory is not in use."""
        self._plans = self._shortages = self._steps = 0
        self._slack = 1
        self._spilled_bytes = 0
        """Host memory that the budget had given when the plan was in force."""
        self._lacking_bytes = 0
        """What came to that when memory ran short."""
        self._has_warned = self._has_given_up = False

    # ------------------------------------------------------------------ for the training

    def attach(
        self,
        model: nn.Module,
        blocks: Sequence[Block],
        optimizer: TunedOptimizer,
        weights: ModelWeights | None = None,
    ) -> None:
        """Begin with an optimizer of the model, which others may follow.

        Parameters
        ----------
        model
            The module that the training loop calls.
        blocks
            Its blocks.
        optimizer
            The optimizer, until :meth:`detach`.
        weights
            Streams weights; None for a training whose weights stay where they are.
        """
        self._optimizers.add(optimizer)
        if len(self._optimizers) > 1:
            self._is_stale = True
            return
        if weights is not None:
            self._weights = weights
            weights.is_driven = True
            self._shared.leave(weights)
            self._spilled_bytes = weights.spilled_bytes
        self._shared.join(self)
        self._changes = self._shared.changes
        if self._store is not None:
            self._activations = CopiedActivations(model, blocks, self._store, self._fail)
        root = Block(NO_BLOCK, model)
        self._meter = StepMeter(
            self._clock,
            self._room,
            root,
            blocks,
            lambda: self._shared.placed_bytes,
            self.away_bytes,
        )
        self._tracker = PhaseTracker(root, blocks, HookErrors(self._fail), self._meter)
        self._measure(TuningEvent.BEGINS, _MEASURED_STEPS)

    def detach(self, optimizer: TunedOptimizer) -> None:
        """Go on without an optimizer; close behind the last one."""
        self._optimizers.remove(optimizer)
        self._is_stale = True
        if not self._optimizers:
            self.close()

    def forward_begins(self) -> None:
        """The model is called: a step whose updates were made in the backward pass is over."""
        if self._is_open:
            self._is_open = False
            self._seen_first.clear()
            self._step_begins()
            self._step_ends()

    def step_begins(self, first: int) -> None:
        """A call of ``step()`` begins.

        Parameters
        ----------
        first
            ``id`` of its first parameter. Calls for other parameters, one after another, are one
            training step: those of several optimizers, or of one whose groups have some of its
            parameters by turns, as DeepSpeed has them.
        """
        if current_graph_task_id() != -1:
            self._is_open = self._is_later_call = True
            self._takes_peak = False
            return
        self._is_later_call = bool(self._seen_first) and first not in self._seen_first
        if self._is_later_call:
            self._seen_first.add(first)
            # Amid a measured step, its phases have the peak.
            self._takes_peak = self.is_measuring and not self._meter.is_in_step
            if self._takes_peak:
                self._room.take_peak_bytes()
            return
        self._seen_first, self._is_open = {first}, False
        self._step_begins()

    def step_ends(self, optimizer: TunedOptimizer) -> None:
        """The call is over, or under way beside what follows: plan for the next step."""
        self._ending = optimizer
        if not self._is_later_call:
            self._step_ends()
        elif self._takes_peak:
            later_bytes = self._room.take_peak_bytes() - self._shared.placed_bytes
            self._later_bytes = max(self._later_bytes, later_bytes)
        self._ending = None
        try:
            optimizer.set_plan(self._optimizer_plan)
        except Exception as error:
            self._fail(error)

    def _step_begins(self) -> None:
        if self._tracker is None or self._state == TuningState.OFF:
            return
        try:
            if self._state == TuningState.MEASURING:
                self._tracker.optimizer_begins()
        except Exception as error:
            self._fail(error)

    def _step_ends(self) -> None:
        if self._tracker is None or self._state == TuningState.OFF:
            return
        try:
            figures = None
            if self._state == TuningState.MEASURING:
                self._tracker.optimizer_ends()
                figures = self._meter.take()
            if self._is_stale or self._changes != self._shared.changes:
                self._start_over()
            elif self._state == TuningState.MEASURING:
                self._look_at(figures)
            else:
                self._watch()
        except Exception as error:
            self._fail(error)

    def _start_over(self) -> None:
        """Measure and plan anew: optimizers, or what else is on the device, have changed."""
        self._is_stale, self._changes = False, self._shared.changes
        self._measured = MeasuredSteps()
        self._plans = self._shortages = self._later_bytes = 0
        self._slack = 1
        self._has_given_up = False
        self._measure(TuningEvent.CHANGED, _MEASURED_STEPS)

    def expect_backward(self, optimizer: TunedOptimizer) -> None:
        """Make no plan until :meth:`move_into_backward`, whose plan needs less memory."""
        optimizer.expects_backward = True

    def move_into_backward(self, optimizer: TunedOptimizer) -> None:
        """Measure and plan anew: from now on, parameters are updated in the backward pass.

        It frees their gradients there, so that more state has room.
        """
        optimizer.in_backward, optimizer.expects_backward = True, False
        if self._tracker is None or self._state == TuningState.OFF:
            return
        self._measured.move_into_backward()
        self._plans = self._shortages = 0
        try:
            if self._state == TuningState.MEASURING:
                self._measured.begin(TuningEvent.MOVED_INTO_BACKWARD, _MEASURED_STEPS)
            else:
                self._measure(TuningEvent.MOVED_INTO_BACKWARD, _MEASURED_STEPS)
        except Exception as error:
            self._fail(error)

    @property
    def is_measuring(self) -> bool:
        """Whether the next step is measured."""
        return self._state == TuningState.MEASURING

    @property
    def is_settled(self) -> bool:
        """Whether neither the next step nor one soon behind it is measured."""
        return not self.is_measuring and (
            self._state == TuningState.OFF or not self._measures_again
        )

    @property
    def is_idle(self) -> bool:
        """Whether a step under the plan has nothing to do: all is on the device, and stays there.

        Steps may then leave out all calls but :meth:`still_idle`.
        """
        plan = self._optimizer_plan
        return (
            self._state == TuningState.PLANNED
            and plan is not None
            and not (self._copied or plan.copied_gradients or plan.temporary.made_in)
            and self._part.most_bytes is None
            and self._steps > max(_SETTLING_STEPS, self._patience)
            and not (self._is_stale or self._measures_again)
            and self._changes == self._shared.changes
        )

    def still_idle(self) -> bool:
        """Whether the step behind an idle one may be idle too, by the memory that it has used."""
        if self._room.spilled_bytes() <= self._spilled_bytes:
            return True
        self._room.take_peak_bytes()  # the next step's is to be known
        return False

    @property
    def _patience(self) -> int:
        """Steps before memory that runs short leads to another plan."""
        return int(_PATIENCE_STEPS * 2**self._shortages)

    @property
    def late_fetches(self) -> int:
        """Copied activations that were fetched when they were needed, and not before."""
        return 0 if self._activations is None else self._activations.statistics.late_fetches

    def status(self) -> TuningStatus:
        """The state now."""
        at_home_bytes = 0 if self._weights is None else self._weights.spilled_bytes
        return TuningStatus(
            state=self._state,
            budget_bytes=self._room.budget_bytes,
            share_bytes=self._part.most_bytes,
            plan=self.plan,
            plans=self._plans,
            resident_bytes=self._resident_bytes(),
            copied_bytes=self._copied_bytes(),
            copied_blocks=len(self._copied),
            copied_gradients_bytes=self._gradient_bytes(self._optimizers.copied_gradients),
            returning_gradients_bytes=self._gradient_bytes(self._optimizers.returning_gradients),
            predicted_s=None if self.plan is None else self.plan.predicted.step_s,
            spilled_bytes=max(0, self._room.spilled_bytes() - at_home_bytes),
            activations=ActivationStatistics()
            if self._activations is None
            else self._activations.statistics,
        )

    def close(self) -> None:
        """Remove all hooks."""
        self._enter(TuningEvent.ENDED)
        self._shared.leave(self)
        if self._weights is not None:
            self._shared.join(self._weights)
        tracker, self._tracker = self._tracker, None
        if tracker is not None:
            tracker.stop()
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
        self._copied = {}
        if self._tracker is not None:
            self._tracker.stop()
        if self._activations is not None:
            self._activations.set_plan({}, 1, is_measuring=False)

    # ------------------------------------------------------------------ measuring

    def _enter(self, event: TuningEvent) -> None:
        self._state = TRANSITIONS[self._state, event]

    def _measure(self, event: TuningEvent, steps: int, peak_bytes: int = 0) -> None:
        """Measure the next steps, or search for one with as many live bytes."""
        assert self._tracker is not None
        # A deferred update would take memory and time of the next forward pass.
        self._optimizers.join()
        self._enter(event)
        self._measured.begin(event, steps, peak_bytes=peak_bytes, spilled_bytes=self._spilled_bytes)
        # Before the tracker's hooks: the stream waits for copies outside of the blocks' times.
        self._set_activations()
        if self._activations is not None:
            self._activations.begin_step()
        self._tracker.start()

    def _set_activations(self) -> None:
        if self._activations is not None:
            is_measuring = self._state == TuningState.MEASURING
            self._activations.set_plan(self._copied, self._fetch_ahead, is_measuring=is_measuring)

    # ------------------------------------------------------------------ what the budget is for

    @property
    def placed_bytes(self) -> int:
        """What plans have placed: resident state, slots, and weights wherever they are."""
        weights = 0 if self._weights is None else self._weights.placed_bytes
        at_home = sum(self._optimizers.parameters_at_home().values())
        return self._optimizers.device_bytes + weights + at_home

    @property
    def device_bytes(self) -> int:
        """The part of it that is on the device."""
        weights = self._weights
        return self._optimizers.device_bytes + (0 if weights is None else weights.device_bytes)

    @property
    def least_bytes(self) -> int:
        """The fewest slots, and weights that cannot leave, with their buffers."""
        pieces = [it for pieces in self._optimizers.state_sizes().values() for it in pieces]
        state_bytes = min(sum(pieces), FEWEST_SLOTS * max(pieces, default=0))
        return state_bytes + (0 if self._weights is None else self._weights.least_bytes)

    @property
    def most_bytes(self) -> int:
        """All state and weights."""
        state_bytes = self._optimizers.state_bytes
        return state_bytes + (0 if self._weights is None else self._weights.most_bytes)

    @property
    def need_bytes(self) -> int:
        """The most live tensors of the measured steps that nobody has placed."""
        figures = self._measured.figures
        return 0 if figures is None else figures.need_bytes()

    def _resident_bytes(self) -> int:
        plan, sizes = self._optimizer_plan, self._optimizers.state_sizes()
        return 0 if plan is None else sum(sum(sizes.get(name, ())) for name in plan.resident)

    def _copied_bytes(self) -> int:
        return sum(unit.saved_bytes for unit in self._units if unit.name in self._copied)

    def _host_bytes(self) -> int:
        """Host memory by plan: homes of state and weights, and what is copied out at the most."""
        state_bytes = self._optimizers.state_bytes
        weights = 0 if self._weights is None else self._weights.away_bytes
        weights += sum(self._optimizers.parameters_at_home().values())
        copied = self._copied_bytes() + self._gradient_bytes(self._optimizers.copied_gradients)
        return state_bytes - self._resident_bytes() + copied + weights

    def _gradient_bytes(self, names: Collection[str]) -> int:
        return sum(it.gradient_bytes for it in self._units if it.name in names)

    def away_bytes(self) -> int:
        """Bytes of activations that are on the host only."""
        return 0 if self._activations is None else self._activations.away_bytes()

    def _look_at(self, figures: StepFigures | None) -> None:
        """A step was measured, or could not be."""
        if self._activations is not None:
            self._activations.begin_step()
        if figures is None:
            return
        measured = self._measured
        saved_bytes = {} if self._activations is None else self._activations.saved_bytes
        figures.step_peak_bytes = max(figures.step_peak_bytes, self._later_bytes)
        figures.update_peak_bytes = max(figures.update_peak_bytes, self._later_bytes)
        measured.add(figures, saved_bytes)
        is_expected = self._optimizers.expects_backward
        if is_expected or not measured.is_complete:
            return
        assert self._tracker is not None
        self._tracker.stop()
        is_short = measured.occasion is TuningEvent.MEMORY_RAN_OUT and not measured.has_grown
        # What is used in host memory is slow: under a plan that has room for it, measure again.
        again = (TuningEvent.HOST_MEMORY_USED, TuningEvent.MEMORY_RAN_OUT)
        self._measures_again = measured.is_slow and measured.occasion not in again
        self._make_plan(with_more_slack=is_short)

    # ------------------------------------------------------------------ planning

    def _make_plan(self, *, with_more_slack: bool = False) -> None:
        figures = self._measured.figures
        assert figures is not None
        self._plans += 1
        self._steps = 0
        self._sizes = self._optimizers.state_sizes()
        self._part = self._own_part()
        in_backward = self._optimizers.in_backward  # which frees gradients
        units = self._measured.units(
            self._sizes,
            {} if in_backward else self._optimizers.gradient_sizes(),
            self._optimizers.parameters_at_home(),
            self._hardware.memory_bytes_per_s,
        )
        budget_bytes = self._room.budget_bytes
        slack = self._slack
        if with_more_slack:
            self._slack *= 2
        whole, error = self._plan_with_slack(units, figures)
        little_bytes = int(_SLACK_SHARES[-1] * least_slack_bytes(budget_bytes))
        if whole is None and with_more_slack and self._lacking_bytes <= little_bytes:
            # To use so little in host memory takes less time than to copy all that could leave.
            self._slack = slack
            whole, error = self._plan_with_slack(units, figures)
        if whole is None and self._send_parameters_home():
            self._start_over()
            return
        if whole is None:
            self._warn(error)
            self._enter(TuningEvent.NO_PLAN_FITS)
            self.plan, self._units = None, units
            named = everything_leaves(units, figures.batches)
            weight_plan, extra = None, None
            if self._weights is not None:
                weight_plan = plan_weights(list(self._weights.units.values()), 0, WEIGHT_SLOTS)
        else:
            self._enter(TuningEvent.PLAN_FITS)
            self.plan, self._units = whole.stream, whole.units
            named = by_names(whole.stream, whole.units, figures.batches)
            weight_plan, extra = whole.weights, whole.extra
        self._copied, self._fetch_ahead = named.copied, named.fetch_ahead
        if self._weights is not None and weight_plan is not None and self._weights.may_place:
            # Updates that are under way read and write weights where they are now.
            self._optimizers.join()
            self._weights.apply(weight_plan, budget_bytes - weight_plan.device_bytes, extra)
            self._spilled_bytes = self._weights.spilled_bytes
        self._set_activations()
        self._optimizer_plan = named.optimizers
        if self._ending is not None:
            self._ending.set_plan(self._optimizer_plan)
        self._room.trim()
        if whole is not None:
            self._log(whole)

    def _send_parameters_home(self) -> bool:
        """Make room by the parameters that no module holds, such as float32 copies of weights."""
        self._optimizers.join()
        moved_bytes = self._optimizers.move_to_host()
        if moved_bytes:
            self._room.find_homes()
            self._room.trim()
            _LOG.info(
                "umem: %s of parameters that no module holds are streamed beside their state",
                format_bytes(moved_bytes),
            )
        return moved_bytes > 0

    def _own_part(self) -> BudgetPart:
        budget_bytes = self._room.budget_bytes
        return self._shared.part_of(self, budget_bytes - least_slack_bytes(budget_bytes))

    def _has_other_part(self) -> bool:
        """Whether the plan is for another part of the budget than this training has now."""
        known = self._part
        if known.most_bytes is None and self._changes == self._shared.changes:
            return False  # it was alone on the device, and is still
        now = self._own_part()
        if known.most_bytes is None or now.most_bytes is None:
            return known != now
        gain_bytes = now.most_bytes - known.most_bytes, known.others_bytes - now.others_bytes
        worth_bytes = self._room.budget_bytes // _LEAST_GAIN
        return min(gain_bytes) < 0 or max(gain_bytes) >= worth_bytes

    def _plan_with_slack(
        self, units: Sequence[StreamUnit], figures: StepFigures
    ) -> tuple[TrainingPlan | None, str]:
        """A plan with the usual slack or, in a small budget, with less; or why none fits."""
        budget_bytes = self._room.budget_bytes
        usual_bytes = self._slack * least_slack_bytes(budget_bytes)
        errors = []
        for share in _SLACK_SHARES:
            try:
                room_bytes = budget_bytes - int(share * usual_bytes)
                return self._plan_training(units, figures, room_bytes), ""
            except PlanError as error:
                errors.append(str(error))
        return None, errors[0]

    def _plan_training(
        self, units: Sequence[StreamUnit], figures: StepFigures, budget_bytes: int
    ) -> TrainingPlan:
        weights, fixed_bytes = self._weights, 0
        most_bytes = self._part.most_bytes
        budget_bytes -= self._part.others_bytes
        if weights is not None and weights.may_place:
            fixed_bytes = weights.fixed_bytes
        elif weights is not None:
            budget_bytes -= weights.device_bytes
            most_bytes = None if most_bytes is None else most_bytes - weights.device_bytes
            weights = None
        return plan_training(
            units,
            None if weights is None else weights.units,
            budget_bytes=budget_bytes,
            hardware=self._hardware,
            fixed_bytes=fixed_bytes,
            weight_share=1.0 if weights is None else weights.share,
            most_placed_bytes=most_bytes,
            state_share=min(self._state_share, self._optimizers.movable_share),
            other_s=figures.other_s,
            step_peak_bytes=figures.step_peak_bytes,
            update_peak_bytes=figures.update_peak_bytes,
            is_deferred=not self._optimizers.waits(),
            in_backward=self._optimizers.in_backward,
            batches=figures.batches,
            may_have_temporary=self._optimizers.may_have_temporary,
        )

    def _warn(self, error: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            remedy = "" if not self._optimizers.in_backward else _WITHOUT_STEP_IN_BACKWARD
            _LOG.warning(
                "umem: all optimizer state is streamed, activations and gradients are copied: %s%s",
                error,
                remedy,
            )

    def _log(self, whole: TrainingPlan) -> None:
        plan = whole.stream
        with_state = [unit for unit in self._units if unit.state_bytes]
        resident = [it for it in plan.resident if whole.units[it].state_bytes]
        peak_bytes = whole.device_bytes
        if self._weights is not None and whole.weights is None:  # they were not to be placed
            peak_bytes += self._weights.device_bytes
        _LOG.info(
            "umem: plan %d: state of %d of %d blocks on the device (%s), %d slots of %s and %d "
            "temporary ones, activations of %d blocks (%s) and gradients of %d (%s, and %s back) "
            "copied, %s of host memory, %.3f s a step predicted, %s of %s spare",
            self._plans,
            len(resident),
            len(with_state),
            format_bytes(self._resident_bytes()),
            plan.slots,
            format_bytes(plan.slot_bytes),
            len(plan.temporary),
            len(self._copied),
            format_bytes(self._copied_bytes()),
            len(self._optimizers.copied_gradients),
            format_bytes(self._gradient_bytes(self._optimizers.copied_gradients)),
            format_bytes(self._gradient_bytes(self._optimizers.returning_gradients)),
            format_bytes(self._host_bytes()),
            plan.predicted.step_s,
            format_bytes(max(0, self._room.budget_bytes - self._part.others_bytes - peak_bytes)),
            format_bytes(self._room.budget_bytes),
        )
        if self._part.most_bytes is not None:
            _LOG.info(
                "umem: of these, %s are the share of this training, and %s are left for %d others",
                format_bytes(self._part.most_bytes),
                format_bytes(self._part.others_bytes),
                len(self._shared.members) - 1,
            )

    # ------------------------------------------------------------------ under a plan

    def _watch(self) -> None:
        """Look at a step that has run under the plan."""
        self._steps += 1
        peak_bytes = self._room.take_peak_bytes()
        if self._steps <= _SETTLING_STEPS:
            self._room.find_homes()
            self._room.trim()
            self._spilled_bytes = self._room.spilled_bytes()
            return
        if self._measures_again:
            self._measures_again = False
            self._measure(TuningEvent.HOST_MEMORY_USED, 1)
            return
        if self._has_other_part() or (
            self._plans < _MOST_PLANS and self._optimizers.state_sizes() != self._sizes
        ):
            self._make_plan()
            return
        spilled_bytes = self._room.spilled_bytes()
        if spilled_bytes <= self._spilled_bytes or self._steps < self._patience:
            return
        if self._plans >= _MOST_PLANS:
            if self._has_given_up:
                return
            self._has_given_up = True
            _LOG.warning(
                "umem: %s of tensors are in host memory and slow, after %d plans: steps of this "
                "training differ too much for its device_budget of %s",
                format_bytes(spilled_bytes),
                self._plans,
                format_bytes(self._room.budget_bytes),
            )
            return
        if self.plan is not None:  # measured steps have no temporary slots
            peak_bytes -= self.plan.temporary_bytes()
        self._shortages += 1
        self._lacking_bytes = spilled_bytes - self._spilled_bytes
        self._measure(TuningEvent.MEMORY_RAN_OUT, _MEASURED_STEPS, peak_bytes)
