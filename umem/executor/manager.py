"""One model's training under a plan: recorded, planned, carried out, corrected."""

from __future__ import annotations

import logging
import weakref
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

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
from umem.executor.budget_lift import BudgetLift
from umem.executor.machine import Machine
from umem.executor.plans import Plans
from umem.executor.program import MappedBlocks, Program
from umem.executor.runner import Runner
from umem.executor.status import ManagerState, ManagerStatus
from umem.offload import ActivationStore
from umem.policy import PolicyPlanner
from umem.runtime.hints import HintEngine
from umem.runtime.torch_hooks.modules import Guard
from umem.torch_compat import current_graph_task_id
from umem.trace import Trace

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


class Manager:
    """Keeps a training within its device budget; made by :func:`umem.manage`.

    Parameters
    ----------
    model, optimizer
        The model and its optimizer. Only weak references are kept.
    machine
        The device, its engine and the policy.
    planner
        Planner to use in place of the policy's.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        machine: Machine,
        planner: PolicyPlanner,
    ) -> None:
        self._model = weakref.ref(model)
        self._optimizer = weakref.ref(optimizer)
        self._machine = machine
        self._planner = planner
        self._state = ManagerState.WARMING_UP
        self._reason = ""
        self._store = ActivationStore(machine.device, machine.mover)
        self._store.keep([*model.parameters(), *model.buffers()])
        self._guard = Guard(self._fail)
        root = Block(type(model).__name__, model)
        blocks = find_blocks(model, None)
        self._runner = Runner(machine, self._store, root)
        self._phase_tracker = PhaseTracker(root, blocks, self._guard, self._runner)
        labels = {block.name: block.forward for block in blocks}
        self._plans = Plans(model, optimizer, machine, planner, labels)
        self._recording: StepRecording | None = None
        self._unknown: Counter[CallShapes] = Counter()
        self._unplanned = 0
        self._steps_seen = 0
        self._recording_since = 0
        self._is_in_step = False
        self._have_moved = False
        self._unseen = 0
        self._mapped = MappedBlocks(machine, optimizer)
        self._undo = [
            # First, because FSDP's own hook replaces the optimizer's parameters by gathered ones.
            model.register_forward_pre_hook(
                self._guard(self._on_call), prepend=True, with_kwargs=True
            ).remove,
            # A compiled step calls these two hooks outside of the compiled code.
            optimizer.register_step_pre_hook(self._guard.uncompiled(self._optimizer_begins)).remove,
            optimizer.register_step_post_hook(self._guard.uncompiled(self._optimizer_ends)).remove,
            # Before loading: mapped state is brought back while its memory is still allocated.
            optimizer.register_load_state_dict_pre_hook(self._guard(self._memory_moves)).remove,
            model.register_load_state_dict_post_hook(self._guard(self._memory_moves)).remove,
        ]
        self._budget_lift = BudgetLift(machine)
        # Released even if nobody calls close(); not at exit, when the allocator goes too.
        weakref.finalize(self, self._budget_lift.release).atexit = False
        # Otherwise the allocator would map memory on the host and slow down the first steps.
        self._budget_lift.acquire()

    # ------------------------------------------------------------------ for the user

    def status(self) -> ManagerStatus:
        """Current state, as a :class:`ManagerStatus`."""
        program = self._runner.program
        counts = self._runner.counts
        return ManagerStatus(
            state=self._state,
            reason=self._reason,
            planner=self._planner,
            budget_bytes=self._machine.policy.device_budget_bytes,
            predicted=None
            if program is None
            else replace(program.candidate.predicted, timeline=None),
            plans=self._plans.count,
            steps=counts.steps,
            diverged_steps=counts.diverged_steps,
            unplanned=self._unplanned,
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
        return None if program is None else program.candidate.trace

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
        """Bytes by class that the plan keeps off the device now."""
        return self._runner.away_bytes()

    def watch(self, look: Callable[[], None] | None) -> None:
        """Call a function before and after the work at each phase's start; None ends it.

        The function may read :meth:`away_bytes`; it must not change the training step.
        """
        self._runner.watch = look

    @property
    def is_closed(self) -> bool:
        """Whether :meth:`close` was called."""
        return not self._undo

    def close(self) -> None:
        """Stop managing: mapped memory is brought back now, evicted pages when they are used.

        Do not call it from a hook of the model or the optimizer.
        """
        self._end(ManagerState.OFF, "closed")
        self._end_recording()
        for undo in self._undo:
            undo()
        self._undo.clear()
        self._store.close()

    # ------------------------------------------------------------------ hooks

    def _on_call(self, _model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if self._state is ManagerState.OFF:
            self._end_recording()  # not in `_fail`, which may run inside the optimizer's hooks
            return
        if (
            torch.compiler.is_compiling()
            or not torch.is_grad_enabled()
            or current_graph_task_id() != -1  # a checkpoint computes again
        ):
            return
        if self._is_in_step:
            return
        self._is_in_step = True
        self._before_step(call_shapes(args, kwargs))

    def _optimizer_begins(self, *_: object) -> None:
        self._phase_tracker.optimizer_begins()

    def _optimizer_ends(self, *_: object) -> None:
        self._unseen = 0 if self._is_in_step else self._unseen + 1
        self._is_in_step = False
        self._steps_seen += 1
        self._phase_tracker.optimizer_ends()
        if self._unseen == _MOST_UNSEEN and self._state is ManagerState.WARMING_UP:
            self._give_up(
                "the optimizer steps, but no call of the model is seen: all of it is compiled, "
                "or the program calls another module. Compile the layers one by one, or give "
                "umem.manage the module that the program calls"
            )

    def _memory_moves(self, *_: object) -> None:
        """Note that addresses in plans are out of date, as after loading a state dict."""
        self._have_moved = True
        self._load(None)

    def _fail(self, error: Exception) -> None:
        _LOG.warning("umem: the executor ends, training goes on: %r", error, exc_info=error)
        self._end(ManagerState.OFF, f"{type(error).__name__}: {error}")

    def _end(self, state: ManagerState, reason: str) -> None:
        self._phase_tracker.stop()
        self._load(None)
        self._state, self._reason = state, reason
        self._budget_lift.release()

    # ------------------------------------------------------------------ from step to step

    def _before_step(self, shapes: CallShapes) -> None:
        """Advance the state before a step's first forward pass, where hooks may be changed."""
        if self._state is ManagerState.WARMING_UP and self._steps_seen >= _WARM_UP:
            if self._machine.everything_fits():
                self._end(ManagerState.RESIDENT, "")
            else:
                self._start_recording()
        elif self._state is ManagerState.RECORDING:
            self._look_at_recording()
        if self._have_moved:
            self._have_moved = False
            self._plans.find_again()
        if self._state in (ManagerState.RUNNING, ManagerState.RESIDENT):
            self._choose_program(shapes)

    def _start_recording(self) -> None:
        model, optimizer = self._model(), self._optimizer()
        if model is None or optimizer is None:
            return
        self._load(None)
        self._phase_tracker.stop()
        # The recorded steps have to run with everything resident.
        self._budget_lift.acquire()
        self._recording = record(
            model,
            optimizer,
            steps=2,
            warmup=1,
            optimizer_parts=False,
            known=self._plans.shapes,
        )
        self._recording.__enter__()
        self._recording_since = self._steps_seen
        self._state = ManagerState.RECORDING

    def _end_recording(self) -> None:
        recording, self._recording = self._recording, None
        if recording is not None:
            recording.__exit__(None, None, None)

    def _look_at_recording(self) -> None:
        recording = self._recording
        assert recording is not None
        is_over = self._steps_seen - self._recording_since >= _LONGEST_RECORDING
        if not (recording.done or is_over or recording.failed):
            return
        self._end_recording()
        try:
            self._plans.add(recording)
        except UmemError as error:
            if not self._plans.count:
                self._give_up(error)
                return
        self._make_plans()

    def _give_up(self, reason: UmemError | str) -> None:
        _LOG.warning(
            "umem: no plan for %s, so past the budget new memory is mapped on the host: %s",
            type(self._model()).__name__,
            reason,
        )
        self._end(ManagerState.OFF, str(reason))

    def _make_plans(self) -> None:
        try:
            self._plans.make()
        except UmemError as error:
            self._give_up(error)
            return
        if self._plans.changes_nothing:
            self._end(ManagerState.RESIDENT, "")
        else:
            self._state = ManagerState.RUNNING
            self._budget_lift.leave_to_plans()
            self._phase_tracker.start()

    def _choose_program(self, shapes: CallShapes) -> None:
        """Run the plan for these batch shapes, or a lookahead made for other shapes."""
        program = self._plans.program(shapes)
        if self._state is ManagerState.RESIDENT and self._machine.everything_fits():
            return
        if program is None:
            self._unknown[shapes] += 1
            self._unplanned += 1
            if (
                shapes not in self._plans.shapes  # otherwise it cannot be planned
                and len(self._plans.shapes) < _MOST_PLANS
                and self._unknown[shapes] == _SEEN_BEFORE_RECORDING
            ):
                self._start_recording()
                return
            if self._state is ManagerState.RESIDENT:
                return
            try:
                program = self._plans.lookahead()
            except UmemError as error:
                self._give_up(error)
                return
        if self._state is ManagerState.RUNNING and program is not self._runner.program:
            self._load(program)

    def _load(self, program: Program | None) -> None:
        """Run another program, or none. Memory that both map on the host stays mapped."""
        self._runner.load(program)
        self._mapped.hold(() if program is None else program.mapped)
