"""One model's training under a plan: recorded, planned, carried out, corrected."""

from __future__ import annotations

import logging
import weakref
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from umem.activations import ActivationStore
from umem.classes import TensorClass
from umem.errors import UmemError
from umem.executor._backward_step import BackwardStep
from umem.executor._machine import Machine
from umem.executor._mapped import MappedBlocks
from umem.executor._plans import Plans
from umem.executor._program import Program
from umem.executor._runner import Runner
from umem.executor._slices import OptimizerSlices, can_slice
from umem.executor._status import ManagerState, ManagerStatus
from umem.hints import HintEngine
from umem.policy import PolicyPlanner
from umem.recorder import (
    Block,
    CallShapes,
    Follower,
    Guard,
    StepRecording,
    call_shapes,
    find_blocks,
    record,
)
from umem.trace import Trace

__all__ = ["Manager"]

_LOG = logging.getLogger("umem")

_WARM_UP = 2
"""Steps before anything is decided: the first one makes the optimizer's state."""

_MOST_PLANS = 4
"""Shapes of batches that have a plan of their own."""

_SEEN_BEFORE_RECORDING = 2
"""Steps of unknown shapes after which they are recorded: what comes once needs no plan."""

_MOST_UNSEEN = 8
"""Steps of the optimizer without a call of the model, after which there will be none."""

_LONGEST_RECORDING = 64
"""Steps after which a recording that has not found enough equal ones is given up."""


class Manager:
    """Keeps a training within its device budget; made by :func:`umem.manage`.

    Parameters
    ----------
    model, optimizer
        What is trained. Only weak references are kept.
    machine
        The device, its engine and the policy.
    planner
        In place of the policy's.
    step_in_backward
        Do the optimizer's step in the backward pass, if :func:`can_slice` holds for it.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        machine: Machine,
        planner: PolicyPlanner,
        *,
        step_in_backward: bool = False,
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
        self._follower = Follower(root, blocks, self._guard, self._runner)
        self._slices = OptimizerSlices(optimizer, blocks) if can_slice(optimizer) else None
        self._backward_step: BackwardStep | None = None
        if step_in_backward and self._slices is not None:
            begin = self._guard(self._runner.part_begins)
            self._backward_step = BackwardStep(self._slices, begin)
        labels = {block.name: block.forward for block in blocks}
        self._plans = Plans(model, optimizer, machine, planner, labels, self._backward_step)
        self._recording: StepRecording | None = None
        self._unknown: Counter[CallShapes] = Counter()
        self._unplanned = 0
        self._steps_seen = 0
        self._recording_since = 0
        self._is_in_step = False
        self._unseen = 0
        self._mapped = MappedBlocks(machine, optimizer)
        self._undo = [
            model.register_forward_pre_hook(self._guard(self._on_call), with_kwargs=True).remove,
            optimizer.register_step_post_hook(self._guard(self._optimizer_ends)).remove,
        ]
        # What the allocator would map on the host for the budget would make the first steps slow.
        machine.lift_allocator_budget()
        begins = optimizer.register_step_pre_hook(self._guard(self._optimizer_begins))
        self._pre_hook_id: int = begins.id
        self._undo.append(begins.remove)

    # ------------------------------------------------------------------ for the user

    def status(self) -> ManagerStatus:
        """What it is at."""
        program = self._runner.program
        counts = self._runner.counts
        return ManagerStatus(
            state=self._state,
            reason=self._reason,
            planner=self._planner,
            budget_bytes=self._machine.policy.device_budget_bytes,
            predicted=None if program is None else replace(program.choice.predicted, timeline=None),
            plans=self._plans.count,
            steps=counts.steps,
            strays=counts.strays,
            unplanned=self._unplanned,
            wait_s=counts.wait_s,
            gave_up=counts.gave_up,
            corrections=self._plans.corrections,
            step_in_backward=self._backward_step is not None and self._backward_step.is_active,
        )

    @property
    def wants_step_in_backward(self) -> bool:
        """Whether it was asked to do the optimizer's step in the backward pass."""
        return self._backward_step is not None

    @property
    def trace(self) -> Trace | None:
        """The recorded step that the present plan was made from."""
        program = self._runner.program
        return None if program is None else program.choice.trace

    @property
    def store(self) -> ActivationStore:
        """What takes activations away and brings them back."""
        return self._store

    @property
    def engine(self) -> HintEngine:
        """What moves the pages."""
        return self._machine.engine

    def away_bytes(self) -> dict[TensorClass, int]:
        """Bytes by class that were asked to live off the device now."""
        return self._runner.away_bytes()

    @property
    def is_closed(self) -> bool:
        """Whether :meth:`close` was called."""
        return not self._undo

    def close(self) -> None:
        """Stop; what is away comes back when it is used, and mapped memory is brought back now.

        Not from inside a hook of the model or the optimizer.
        """
        self._end(ManagerState.OFF, "closed")
        self._end_recording()
        for undo in self._undo:
            undo()
        self._undo.clear()
        if self._backward_step is not None:
            self._backward_step.close()
        self._store.close()

    # ------------------------------------------------------------------ hooks

    def _on_call(self, _model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self._restore_optimizer()  # an error has ended the step before
        if self._state is ManagerState.OFF:
            self._end_recording()  # not in `_fail`, which may run inside the optimizer's hooks
            return
        if (
            self._is_in_step
            or torch.compiler.is_compiling()
            or not torch.is_grad_enabled()
            or torch._C._current_graph_task_id() != -1  # a checkpoint computes again
        ):
            return
        self._is_in_step = True
        self._before_step(call_shapes(args, kwargs))
        if self._backward_step is not None and self._state is not ManagerState.RESIDENT:
            self._backward_step.step_begins()

    def _optimizer_begins(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        self._restore_optimizer()
        self._follower.optimizer_begins()
        if (
            self._slices is not None
            and self._runner.needs_slices()
            and len(args) == 1  # the optimizer itself
            and not any(value is not None for value in kwargs.values())  # no closure
            # What hooks after this one do to gradients would come too late.
            and next(reversed(optimizer._optimizer_step_pre_hooks)) == self._pre_hook_id
        ):
            self._slices.run(self._runner.part_begins)

    def _restore_optimizer(self) -> None:
        if self._slices is not None:
            self._slices.restore()

    def _optimizer_ends(self, optimizer: Optimizer, *_: object) -> None:
        self._restore_optimizer()
        if self._backward_step is not None:
            self._backward_step.step_ends(optimizer)
        self._unseen = 0 if self._is_in_step else self._unseen + 1
        self._is_in_step = False
        self._steps_seen += 1
        self._follower.optimizer_ends()
        if self._unseen == _MOST_UNSEEN and self._state is ManagerState.WARMING_UP:
            self._give_up(
                "the optimizer steps, and no call of the model is seen: a compiler has it whole, "
                "or another module is called. Compile its layers one by one, or give umem.manage "
                "the module that the program calls"
            )

    def _fail(self, error: Exception) -> None:
        _LOG.warning("umem: the executor ends, training goes on: %r", error, exc_info=error)
        self._end(ManagerState.OFF, f"{type(error).__name__}: {error}")

    def _end(self, state: ManagerState, reason: str) -> None:
        self._follower.stop()
        self._load(None)
        self._state, self._reason = state, reason
        self._machine.restore_allocator_budget()

    # ------------------------------------------------------------------ from step to step

    def _before_step(self, shapes: CallShapes) -> None:
        """Before a step's first forward pass: hooks may come and go here."""
        if self._state is ManagerState.WARMING_UP and self._steps_seen >= _WARM_UP:
            if self._machine.everything_fits():
                self._end(ManagerState.RESIDENT, "")
            else:
                self._start_recording()
        elif self._state is ManagerState.RECORDING:
            self._look_at_recording()
        if self._state in (ManagerState.RUNNING, ManagerState.RESIDENT):
            self._choose_program(shapes)

    def _start_recording(self) -> None:
        model, optimizer = self._model(), self._optimizer()
        if model is None or optimizer is None:
            return
        self._load(None)
        self._follower.stop()
        # The recorded steps are to be as they are with everything resident.
        self._machine.lift_allocator_budget()
        self._recording = record(
            model,
            optimizer,
            steps=2,
            warmup=1,
            optimizer_parts=self._slices is not None,
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
        elif self._state is not ManagerState.RUNNING:  # otherwise this is a correction
            self._state = ManagerState.RUNNING
            self._machine.lift_allocator_budget()
            self._follower.start()

    def _choose_program(self, shapes: CallShapes) -> None:
        """Run the plan for a batch's shapes, or a lookahead made for others."""
        program = self._plans.program(shapes)
        if self._state is ManagerState.RESIDENT and self._machine.everything_fits():
            return
        if program is None:
            self._unknown[shapes] += 1
            self._unplanned += 1
            if self._plans.count < _MOST_PLANS and self._unknown[shapes] == _SEEN_BEFORE_RECORDING:
                self._start_recording()
                return
            if self._state is ManagerState.RESIDENT:
                return
            program = self._plans.lookahead()
        elif self._state is ManagerState.RUNNING and self._plans.is_correction_due(
            self._runner.counts.steps
        ):
            self._make_plans()
            program = self._plans.program(shapes)
        if self._state is ManagerState.RUNNING and program is not self._runner.program:
            self._load(program)

    def _load(self, program: Program | None) -> None:
        """Run another program, or none. What both use in place stays where it is."""
        self._runner.load(program)
        self._mapped.hold(() if program is None else program.mapped)
        if self._backward_step is not None:
            if program is not None and self._plans.moves_step:
                self._backward_step.start()
            else:
                self._backward_step.stop()
