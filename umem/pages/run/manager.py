"""One model's training under a plan: recorded, planned, carried out."""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from umem.capture.live import (
    Block,
    CallShapes,
    PhaseTracker,
    StepRecording,
    call_shapes,
    find_blocks,
    record,
)
from umem.core.classes import TensorClass
from umem.core.errors import UmemError
from umem.offloading import ActivationStore
from umem.pages.run.machine import Machine
from umem.pages.run.mapped_blocks import MappedBlocks, bring_back_spilled
from umem.pages.run.plans import Plans
from umem.pages.run.program import Program
from umem.pages.run.runner import Runner
from umem.pages.run.states import TRANSITIONS, Event, Progress
from umem.pages.run.status import ManagerState, ManagerStatus
from umem.policy import PolicyPlanner
from umem.runtime.hints import HintEngine
from umem.runtime.managed_runs import new_run
from umem.runtime.model_parts import buffers_of, memory_bytes, optimizer_parameters
from umem.runtime.torch_hooks.clock import Hearing, Listener, Order
from umem.runtime.torch_hooks.hidden import hide
from umem.runtime.torch_hooks.modules import HookErrors
from umem.runtime.torch_hooks.passes import Pass
from umem.trace import Trace, live_bytes

__all__ = ["Manager"]

_LOG = logging.getLogger("umem")

_WARM_UP = 2
"""Steps before the first decision: the optimizer makes its state in the first one."""

_MOST_PLANS = 4
"""Largest number of batch shapes that get plans."""

_SEEN_BEFORE_RECORDING = 2
"""Steps with the same unknown shapes after which they are recorded: one-time shapes get no plan."""

_MOST_UNSEEN = 8
"""Optimizer steps without a call of the model, after which the manager gives up."""

_LONGEST_RECORDING = 64
"""Steps after which a recording without enough equal steps is given up."""


class Manager(Listener):
    """Keeps a training within its device budget; made by :func:`umem.manage`.

    It is a state machine: :data:`umem.pages.run.states.TRANSITIONS` says which event leads from
    which state to which, and a method of the manager does what begins with each state. Only weak
    references to model and optimizer are kept.
    """

    def __init__(
        self, model: nn.Module, optimizer: Optimizer, machine: Machine, planner: PolicyPlanner
    ) -> None:
        self._model = weakref.ref(model)
        self._optimizer = weakref.ref(optimizer)
        self._machine = machine
        self._planner = planner
        self._managed_run = new_run(model, "step", functools.partial(_late, weakref.ref(self)))
        self._state = ManagerState.WARMING_UP
        self._reason = ""
        self._progress = Progress()
        self._recording: StepRecording | None = None
        self._store = ActivationStore(machine.device, machine.mover)
        self._store.keep([*model.parameters(), *buffers_of(model)])
        self._guard = HookErrors(self._fail)
        root = Block(type(model).__name__, model)
        blocks = find_blocks(model)
        self._runner = Runner(machine, self._store, root)
        self._phase_tracker = PhaseTracker(root, blocks, self._guard, self._runner)
        labels = {block.name: block.forward for block in blocks}
        self._plans = Plans(model, optimizer, machine, planner, labels)
        self._mapped = MappedBlocks(machine, optimizer)
        # Released even if nobody calls close(); not at exit, when the allocator goes too.
        weakref.finalize(self, self._mapped.release).atexit = False
        self._undo = [
            Hearing(self, Order.STEP, self._fail, model).close,
            # A compiled step calls these two hooks outside of the compiled code.
            hide(optimizer.register_step_pre_hook(self._guard.uncompiled(self._optimizer_begins))),
            hide(optimizer.register_step_post_hook(self._guard.uncompiled(self._optimizer_ends))),
            # Before loading: mapped state is brought back while its memory is still allocated.
            hide(optimizer.register_load_state_dict_pre_hook(self._guard(self._memory_moves))),
            hide(model.register_load_state_dict_post_hook(self._guard(self._memory_moves))),
        ]

    # ------------------------------------------------------------------ for the user

    def status(self) -> ManagerStatus:
        """Current state, as a :class:`ManagerStatus`."""
        program, counts = self._runner.program, self._runner.counts
        return ManagerStatus(
            state=self._state,
            reason=self._reason,
            planner=self._planner,
            budget_bytes=self._machine.policy.device_budget_bytes,
            predicted=None
            if program is None
            else replace(program.plan.candidate.predicted, timeline=None),
            plans=self._plans.count,
            steps=counts.steps,
            diverged_steps=counts.diverged_steps,
            unplanned=self._progress.unplanned,
            wait_s=counts.wait_s,
            wait_timeouts=counts.wait_timeouts,
        )

    @property
    def model(self) -> nn.Module | None:
        """The model; None once it was collected."""
        return self._model()

    @property
    def trace(self) -> Trace | None:
        """The recorded step from which the present plan was made; None without a plan."""
        program = self._runner.program
        return None if program is None else program.plan.candidate.trace

    @property
    def store(self) -> ActivationStore:
        """The store that copies activations to the host and back."""
        return self._store

    @property
    def engine(self) -> HintEngine:
        """The hint engine that moves pages."""
        return self._machine.engine

    @property
    def device(self) -> torch.device:
        """The device that its model is on."""
        return self._machine.device

    def away_bytes(self) -> dict[TensorClass, int]:
        """Bytes by class that the manager keeps off the device now."""
        if self._runner.program is not None:
            return self._runner.away_bytes()
        return self._mapped.held_bytes()

    def promised_host_bytes(self) -> int:
        """Host memory that its plan keeps tensors in, less what is there now; 0 without a plan."""
        trace = self.trace
        if trace is None:
            return 0
        budget_bytes = self._machine.policy.device_budget_bytes
        capacity_bytes = budget_bytes or self._machine.hardware.device_bytes
        most_bytes = int(live_bytes(trace, trace.tensor_bytes).max()) - capacity_bytes
        return max(most_bytes - sum(self.away_bytes().values()), 0)

    def wait_for_search(self, timeout_s: float) -> None:
        """Wait until a search for a plan, if one is under way, has ended; for benchmarks and tests.

        The plan runs from the next step on, or the one after it.
        """
        self._plans.wait(timeout_s)

    @property
    def updated_bytes(self) -> int:
        """The parameters of its optimizer; 0 once that was collected."""
        optimizer = self._optimizer()
        return 0 if optimizer is None else sum(map(memory_bytes, optimizer_parameters(optimizer)))

    def stand_back(self, reason: str) -> None:
        """Plan nothing any more, and leave the training to itself; safe in any hook."""
        self._handle(Event.ENDED, reason)

    @property
    def is_closed(self) -> bool:
        """Whether :meth:`close` was called."""
        return not self._undo

    def close(self) -> None:
        """Stop managing: mapped memory is brought back now, evicted pages when they are used.

        A search that is under way is not waited for. Do not call it from a hook of the model or the
        optimizer.
        """
        self._handle(Event.ENDED, "closed")
        self._end_recording()
        for undo in self._undo:
            undo()
        self._undo.clear()
        self._store.close()

    # ------------------------------------------------------------------ hooks

    def pass_begins(self, now: Pass, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Begin a step with the first pass of a training."""
        if self._state is ManagerState.OFF:
            self._end_recording()  # not in `_fail`, which may run inside the optimizer's hooks
            return
        if not now.has_gradients or now.is_second or self._progress.is_in_step:
            return
        self._progress.is_in_step = True
        if not self._machine.is_capturing():  # a captured step runs without the plan
            self._before_step(call_shapes(args, kwargs))

    def _optimizer_begins(self, *_: object) -> None:
        self._phase_tracker.optimizer_begins()

    def _optimizer_ends(self, *_: object) -> None:
        progress = self._progress
        progress.unseen = 0 if progress.is_in_step else progress.unseen + 1
        progress.is_in_step = False
        progress.steps += 1
        self._phase_tracker.optimizer_ends()
        program = self._runner.program
        predicted_s = None if program is None else program.plan.candidate.predicted.step_s
        self._managed_run.ends(predicted_s, is_planned=program is not None)
        if progress.unseen == _MOST_UNSEEN and self._state is ManagerState.WARMING_UP:
            self._give_up(
                "the optimizer steps, but no call of the model is seen: all of it is compiled, "
                "or the program calls another module. Compile the layers one by one, or give "
                "umem.manage the module that the program calls"
            )

    def _memory_moves(self, *_: object) -> None:
        """Tensors get other memory, as after loading a state dict."""
        self._runner.load(None)
        self._mapped.hold()
        self._plans.find_again()

    def _fail(self, error: Exception) -> None:
        _LOG.warning("umem: the executor ends, training goes on: %r", error, exc_info=error)
        self._handle(Event.ENDED, f"{type(error).__name__}: {error}")

    def _give_up(self, reason: UmemError | str) -> None:
        _LOG.warning(
            "umem: no plan for %s, so past the budget new memory is mapped on the host: %s",
            type(self._model()).__name__,
            reason,
        )
        self._handle(Event.NO_PLAN, str(reason))

    # ------------------------------------------------------------------ events

    def _handle(self, event: Event, reason: str = "") -> None:
        """Go to the state that follows this event, and do what begins with it."""
        state = TRANSITIONS.get((self._state, event))
        if state is not None:
            self._state, self._reason = state, reason
            self._BEGIN[state](self)

    def _before_step(self, shapes: CallShapes) -> None:
        """Handle what is due before a step's first forward pass, where hooks may be changed."""
        while event := self._due():
            if event is Event.CHANGED:
                _LOG.info("umem: the training is no longer the recorded one: recording anew")
                self._plans.start_over()
            self._handle(event)
        if (
            self._state is ManagerState.RESIDENT
            and shapes not in self._plans.shapes
            and not self._machine.everything_fits()
        ):
            self._meet(shapes)
        if self._plans.count and self._state in (ManagerState.PLANNING, ManagerState.RUNNING):
            self._choose_program(shapes)

    def _due(self) -> Event | None:
        """The event that the steps so far have led to."""
        progress = self._progress
        if self._state is ManagerState.WARMING_UP and progress.steps >= _WARM_UP:
            return Event.FITS if self._machine.everything_fits() else Event.DOES_NOT_FIT
        if self._state is ManagerState.RECORDING or self._plans.shapes:
            diverged = self._runner.counts.diverged_in_a_row >= progress.most_diverged
            if diverged or not self._plans.still_hold():
                progress.most_diverged *= 1 + diverged
                return Event.CHANGED
        if self._state is ManagerState.RECORDING:
            assert self._recording is not None
            is_over = progress.steps - progress.recording_since >= _LONGEST_RECORDING
            if self._recording.done or self._recording.failed or is_over:
                return Event.RECORDED
        if self._state is ManagerState.PLANNING and not self._plans.is_searching:
            try:
                self._plans.finish()
            except UmemError as error:
                self._give_up(error)
                return None
            return Event.NOTHING_TO_MOVE if self._plans.move_nothing else Event.PLANNED
        return None

    def _meet(self, shapes: CallShapes) -> None:
        """Count a step of shapes that have no plan, and record the next one if they come again."""
        progress = self._progress
        progress.unplanned += 1
        if self._state is ManagerState.PLANNING:
            return
        progress.unknown[shapes] += 1
        if (
            shapes not in self._plans.shapes  # otherwise it cannot be planned
            and len(self._plans.shapes) < _MOST_PLANS
            and progress.unknown[shapes] == _SEEN_BEFORE_RECORDING
        ):
            self._handle(Event.NEW_SHAPES)

    def _choose_program(self, shapes: CallShapes) -> None:
        """Run the plan for these batch shapes, or a lookahead made for other shapes."""
        program = self._plans.program(shapes)
        if program is None:
            self._meet(shapes)
            if self._state is ManagerState.RECORDING:
                return
            try:
                program = self._plans.lookahead()
            except UmemError as error:
                self._give_up(error)
                return
        if program is not self._runner.program:
            self._load(program)

    # ------------------------------------------------------------------ what begins with a state

    def _record(self) -> None:
        """Record steps without a plan. What is off the device stays there, and is used in place."""
        model, optimizer = self._model(), self._optimizer()
        if model is None or optimizer is None:
            return
        self._end_recording()
        self._phase_tracker.stop()
        self._mapped.hold(self._runner.away_blocks() or self._mapped.held)
        self._runner.load(None)
        self._runner.counts.diverged_in_a_row = 0
        if not self._plans.shapes:
            self._plans.start_over()
            self._progress.unknown.clear()
        known = self._plans.shapes
        self._recording = record(
            model, optimizer, steps=2, warmup=1, optimizer_parts=False, known=known
        )
        self._recording.__enter__()
        self._progress.recording_since = self._progress.steps

    def _plan(self) -> None:
        """Search for plans, beside the training."""
        recording = self._recording
        assert recording is not None
        self._end_recording()
        self._plans.search(recording)
        if self._plans.count:
            self._phase_tracker.start()

    def _run(self) -> None:
        """Follow the plans from this step on."""
        self._phase_tracker.start()

    def _rest(self) -> None:
        """Everything fits: let it be on the device, and do nothing."""
        self._unload()
        bring_back_spilled(self._machine)

    def _stop(self) -> None:
        """Leave the training to itself. The allocator keeps the budget."""
        self._plans.stop()
        self._unload()

    _BEGIN: ClassVar[Mapping[ManagerState, Callable[[Manager], None]]] = {
        ManagerState.RECORDING: _record,
        ManagerState.PLANNING: _plan,
        ManagerState.RUNNING: _run,
        ManagerState.RESIDENT: _rest,
        ManagerState.OFF: _stop,
    }

    def _end_recording(self) -> None:
        recording, self._recording = self._recording, None
        if recording is not None:
            recording.__exit__(None, None, None)

    def _load(self, program: Program) -> None:
        """Run another program. Memory that both map on the host stays mapped."""
        away = {address for address, _, _ in program.away_at_start}
        if self._runner.program is None:
            bring_back_spilled(self._machine, away | {it[0] for it in program.mapped})
        self._runner.load(program)
        self._mapped.hold(program.mapped, away, plan_runs=True)

    def _unload(self) -> None:
        self._phase_tracker.stop()
        self._runner.load(None)
        self._mapped.hold()


def _late(reference: weakref.ref[Manager]) -> int | None:
    """Hints that were done after the phase that needs them began; None if the manager is gone."""
    manager = reference()
    if manager is None:
        return None
    return sum(it.late for it in manager.engine.statistics().counts.values())
