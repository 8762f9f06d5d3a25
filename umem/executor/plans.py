"""The plans of a managed training: one for each recorded shape of its batches."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch import nn
from torch.optim.optimizer import Optimizer

from umem.capture.live import CallShapes, StepRecording, StepSignature
from umem.core.errors import PlanError
from umem.core.units import format_bytes
from umem.executor.machine import Machine
from umem.executor.program import Program, build_program
from umem.executor.tensor_addresses import find_addresses, in_blocks
from umem.planning.plan_search import PlanCandidate, search_plan
from umem.policy import PolicyPlanner
from umem.trace import Trace

__all__ = ["Plans"]

_LOG = logging.getLogger("umem")


@dataclass(frozen=True, eq=False)
class _Recorded:
    """A recorded step, kept so that it can be planned again."""

    trace: Trace
    recording: StepRecording


class Plans:
    """Keeps recorded steps, and turns them into programs.

    Parameters
    ----------
    model, optimizer
        The model and its optimizer. Only weak references are kept.
    machine
        The device, its engine and the policy.
    planner
        Planner by name.
    forward_labels
        Label of the forward phase of each block.
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
        self._planner = planner
        self._forward_labels = forward_labels
        self._recorded: dict[CallShapes, _Recorded] = {}
        self._programs: dict[CallShapes, Program] = {}
        self._fallback: Program | None = None
        self._told: set[CallShapes] = set()
        """Shapes with a logged warning that they cannot be planned."""

    @property
    def shapes(self) -> frozenset[CallShapes]:
        """Recorded shapes."""
        return frozenset(self._recorded)

    @property
    def count(self) -> int:
        """Number of shapes that have a program."""
        return len(self._programs)

    @property
    def changes_nothing(self) -> bool:
        """Whether these programs move nothing."""
        candidates = (program.candidate for program in self._programs.values())
        return all(candidate.moves_nothing for candidate in candidates)

    def program(self, shapes: CallShapes) -> Program | None:
        """The program for batches of these shapes; None without one."""
        return self._programs.get(shapes)

    def lookahead(self) -> Program:
        """A lookahead program for unplanned shapes, from the last recording that has a plan.

        Raises
        ------
        PlanError
            If that recording has no lookahead plan.
        """
        if self._fallback is None:
            recorded = self._recorded[next(reversed(self._programs))]
            self._fallback = self._program(recorded, "lookahead")
        return self._fallback

    def add(self, recording: StepRecording) -> None:
        """Keep a finished recording for the next :meth:`make`.

        Raises
        ------
        TraceError
            If the recording failed.
        """
        trace, signature = recording.trace, recording.signature
        assert signature is not None
        if self._machine.allocator is not None:
            trace = in_blocks(trace)
        self._recorded[signature.calls[0]] = _Recorded(trace, recording)

    def make(self) -> None:
        """Plan all recorded steps.

        Shapes that cannot be planned are left to :meth:`lookahead`.

        Raises
        ------
        PlanError
            If none of them can be planned.
        """
        self._programs, self._fallback = {}, None
        errors: dict[CallShapes, PlanError] = {}
        for shapes, recorded in self._recorded.items():
            try:
                self._programs[shapes] = self._program(recorded, self._planner)
            except PlanError as error:
                errors[shapes] = error
        if not self._programs:
            raise next(iter(errors.values()))
        for shapes in errors.keys() - self._told:
            self._told.add(shapes)
            _LOG.warning(
                "umem: no plan for batches of %s, which run under a lookahead made for others: %s",
                StepSignature((shapes,)),
                errors[shapes],
            )
        self._tell(next(reversed(self._programs.values())).candidate)

    def find_again(self) -> None:
        """Rebuild the programs for the tensors' present addresses, as after a state was loaded."""
        for shapes, program in self._programs.items():
            self._programs[shapes] = self._build(self._recorded[shapes], program.candidate)
        self._fallback = None

    def _program(self, recorded: _Recorded, planner: PolicyPlanner) -> Program:
        trace = recorded.trace
        outside_bytes, budget_bytes = recorded.recording.outside_bytes, self._budget_bytes
        if outside_bytes >= budget_bytes:
            raise PlanError(
                f"trace {trace.name!r}: the device budget is {format_bytes(budget_bytes)}, and "
                f"{format_bytes(outside_bytes)} of other tensors of the process, which no plan "
                "moves, were on the device all the recorded step long: raise the budget"
            )
        try:
            candidate = search_plan(
                trace,
                self._machine.hardware,
                self._machine_beside(outside_bytes).policy,
                planner,
                saved={entry.tensor for entry in recorded.recording.saved_tensors},
            )
        except PlanError as error:
            if not outside_bytes:
                raise
            raise PlanError(
                f"{error} (that is the budget of {format_bytes(budget_bytes)} less "
                f"{format_bytes(outside_bytes)} that other tensors of the process held on the "
                "device all the recorded step long)"
            ) from error
        return self._build(recorded, candidate)

    def _machine_beside(self, outside_bytes: int) -> Machine:
        """The machine with the budget less the memory that no plan moves."""
        if not outside_bytes:
            return self._machine
        policy = replace(
            self._machine.policy, device_budget_bytes=self._budget_bytes - outside_bytes
        )
        return replace(self._machine, policy=policy)

    @property
    def _budget_bytes(self) -> int:
        return self._machine.policy.device_budget_bytes or self._machine.hardware.device_bytes

    def _build(self, recorded: _Recorded, candidate: PlanCandidate) -> Program:
        model, optimizer = self._model(), self._optimizer()
        assert model is not None
        assert optimizer is not None
        return build_program(
            candidate,
            find_addresses(candidate.trace, model, optimizer),
            recorded.recording.saved_tensors,
            recorded.recording.phases,
            self._forward_labels,
            self._machine_beside(recorded.recording.outside_bytes),
        )

    def _tell(self, candidate: PlanCandidate) -> None:
        budget_bytes = self._machine.policy.device_budget_bytes
        _LOG.info(
            "umem: %s under the budget of %s: predicted %.1f ms a step, %.1f with everything "
            "resident",
            candidate.schedule.planner,
            format_bytes(budget_bytes or self._machine.hardware.device_bytes),
            candidate.predicted.step_s * 1e3,
            candidate.predicted.ideal_s * 1e3,
        )
