"""The plans of a managed training: one for each recorded shape of its batches."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Mapping
from concurrent import futures
from concurrent.futures import Future
from dataclasses import dataclass, replace

from torch import nn
from torch.optim.optimizer import Optimizer

from umem.capture.live import CallShapes, StepRecording, StepSignature
from umem.core.errors import PlanError, UmemError
from umem.core.units import format_bytes
from umem.pages.plan.plan_search import search_plan
from umem.pages.run.machine import Machine
from umem.pages.run.program import Program, bind_program
from umem.pages.run.step_plan import StepPlan, plan_step
from umem.pages.run.tensor_addresses import find_addresses, in_blocks, training_signature
from umem.policy import PolicyPlanner

__all__ = ["Plans"]

_LOG = logging.getLogger("umem")

_LOOKAHEAD: PolicyPlanner = "lookahead"


@dataclass(frozen=True, eq=False)
class _Search:
    """All that a search needs; nothing of the training, so that it may outlive that."""

    planner: PolicyPlanner
    forward_labels: Mapping[str, str]
    machine: Machine

    def run(self, recording: StepRecording) -> _Found:
        """Plan a recorded step, and the lookahead for steps that have no plan."""
        try:
            plan = self._plan(recording, self.planner)
        except UmemError as error:
            return _Found(error, error)
        if self.planner == _LOOKAHEAD:
            return _Found(plan, plan)
        try:
            return _Found(plan, self._plan(recording, _LOOKAHEAD))
        except UmemError as error:
            return _Found(plan, error)

    def _plan(self, recording: StepRecording, planner: PolicyPlanner) -> StepPlan:
        trace, machine = recording.trace, self.machine
        if machine.allocator is not None:
            trace = in_blocks(trace)
        policy, outside_bytes = machine.policy, recording.outside_bytes
        whole_bytes = policy.device_budget_bytes or machine.hardware.device_bytes
        budget_bytes = whole_bytes - outside_bytes
        if budget_bytes <= 0:
            raise PlanError(
                f"trace {trace.name!r}: the device budget is {format_bytes(whole_bytes)}, and "
                f"{format_bytes(outside_bytes)} of other tensors of the process, which no plan "
                "moves, were on the device all the recorded step long: raise the budget"
            )
        if outside_bytes:
            policy = replace(policy, device_budget_bytes=budget_bytes)
        saved = recording.saved_tensors
        try:
            candidate = search_plan(
                trace, machine.hardware, policy, planner, saved={entry.tensor for entry in saved}
            )
        except PlanError as error:
            if not outside_bytes:
                raise
            raise PlanError(
                f"{error} (that is the budget of {format_bytes(whole_bytes)} less "
                f"{format_bytes(outside_bytes)} that other tensors of the process held on the "
                "device all the recorded step long)"
            ) from error
        return plan_step(
            candidate,
            saved,
            recording.phases,
            self.forward_labels,
            machine.hardware,
            budget_bytes,
        )


@dataclass(frozen=True, eq=False)
class _Found:
    """What a search has found for one recorded step: plans, or why there are none."""

    plan: StepPlan | UmemError
    lookahead: StepPlan | UmemError


class Plans:
    """Searches plans for recorded steps, and binds them to the tensors' addresses.

    Only weak references to model and optimizer are kept. `forward_labels` has the label of the
    forward phase of each block.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        machine: Machine,
        planner: PolicyPlanner,
        forward_labels: Mapping[str, str],
    ) -> None:
        self._model = weakref.ref(model)
        self._optimizer = weakref.ref(optimizer)
        self._machine = machine
        self._search = _Search(planner, forward_labels, machine)
        self._signature: tuple[object, ...] = ()
        self._found: dict[CallShapes, _Found | None] = {}
        """None for recorded steps whose search has not ended."""
        self._running: tuple[CallShapes | None, Future[_Found]] | None = None
        self._programs: dict[StepPlan, Program] = {}
        """The plans that have been bound to the tensors' present addresses."""
        self._known: dict[StepPlan, frozenset[int]] = {}
        """The tensors that were found when a plan was bound first."""

    # ------------------------------------------------------------------ recordings and search

    @property
    def shapes(self) -> frozenset[CallShapes]:
        """Recorded shapes."""
        return frozenset(self._found)

    def start_over(self) -> None:
        """Forget all recorded steps and their plans, and look at the training as it is now."""
        self._found.clear()
        self._programs.clear()
        self._known.clear()
        self._running = None
        optimizer = self._optimizer()
        self._signature = () if optimizer is None else training_signature(optimizer)

    def search(self, recording: StepRecording) -> None:
        """Start the search for plans of a recorded step, beside the training."""
        search, signature = self._search, recording.signature
        shapes = None if signature is None else signature.calls[0]
        if shapes is not None:
            self._found[shapes] = None
        self._running = shapes, self._machine.background(lambda: search.run(recording))

    def stop(self) -> None:
        """Drop what a search that is under way will find."""
        self._running = None

    @property
    def is_searching(self) -> bool:
        """Whether a search is under way."""
        return self._running is not None and not self._running[1].done()

    def wait(self, timeout_s: float) -> None:
        """Wait until a search that is under way has ended."""
        if self._running is not None:
            futures.wait([self._running[1]], timeout_s)

    def finish(self) -> None:
        """Take what the search has found. A shape without a plan is left to :meth:`lookahead`.

        Raises
        ------
        UmemError
            If there is no plan for any shape.
        """
        assert self._running is not None
        (shapes, future), self._running = self._running, None
        found = future.result()
        if shapes is not None:
            self._found[shapes] = found
        if isinstance(found.plan, StepPlan):
            self._tell(found.plan)
        elif not self.count:
            raise found.plan
        elif shapes is not None:
            _LOG.warning(
                "umem: no plan for batches of %s, which run under a lookahead made for others: %s",
                StepSignature((shapes,)),
                found.plan,
            )

    # ------------------------------------------------------------------ plans and programs

    @property
    def count(self) -> int:
        """Number of shapes that have a plan."""
        return len(self._plans())

    @property
    def move_nothing(self) -> bool:
        """Whether all plans leave everything where it is."""
        return all(plan.candidate.moves_nothing for plan in self._plans().values())

    def program(self, shapes: CallShapes) -> Program | None:
        """The program for batches of these shapes; None without one."""
        plan = self._plans().get(shapes)
        return None if plan is None else self._bound(plan)

    def lookahead(self) -> Program:
        """A lookahead program for shapes without a plan, from the last recording that has one.

        Raises
        ------
        UmemError
            If that recording has no lookahead plan.
        """
        found = self._found[next(reversed(self._plans()))]
        assert found is not None
        if isinstance(found.lookahead, UmemError):
            raise found.lookahead
        return self._bound(found.lookahead)

    def still_hold(self) -> bool:
        """Whether the plans are for the training as it is now.

        Tensors that have moved are found again. The plans do not hold if tensors are gone, or if
        the optimizer trains other parameters, or these as another type.
        """
        model, optimizer = self._model(), self._optimizer()
        if model is None or optimizer is None:
            return True
        if training_signature(optimizer) != self._signature:
            return False
        if all(program.addresses.are_current() for program in self._programs.values()):
            return True
        self._programs.clear()
        plan, known = next(iter(self._known.items()))
        return known == frozenset(find_addresses(plan.candidate.trace, model, optimizer).fixed)

    def find_again(self) -> None:
        """Look addresses up anew when a program is asked for, as after a state was loaded."""
        self._programs.clear()

    def _plans(self) -> dict[CallShapes, StepPlan]:
        return {
            shapes: found.plan
            for shapes, found in self._found.items()
            if found is not None and isinstance(found.plan, StepPlan)
        }

    def _bound(self, plan: StepPlan) -> Program:
        program = self._programs.get(plan)
        if program is None:
            model, optimizer = self._model(), self._optimizer()
            assert model is not None
            assert optimizer is not None
            addresses = find_addresses(plan.candidate.trace, model, optimizer)
            self._known.setdefault(plan, frozenset(addresses.fixed))
            program = self._programs[plan] = bind_program(plan, addresses, self._machine)
        return program

    def _tell(self, plan: StepPlan) -> None:
        predicted, machine = plan.candidate.predicted, self._machine
        _LOG.info(
            "umem: %s under the budget of %s: predicted %.1f ms a step, %.1f with everything "
            "resident",
            plan.candidate.schedule.planner,
            format_bytes(machine.policy.device_budget_bytes or machine.hardware.device_bytes),
            predicted.step_s * 1e3,
            predicted.ideal_s * 1e3,
        )
