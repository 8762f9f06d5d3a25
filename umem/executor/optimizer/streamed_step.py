"""An optimizer step with streamed state, deferred into the next forward pass.

``optimizer.step()`` only queues the updates of parameters whose state is in host memory. Units of
them (the blocks of a model) are updated in the order of the forward pass, each by the optimizer's
own function: the unit's state is copied from its home into a slot, updated there, and copied back,
on three lanes. The next forward pass waits before each block for that block's update alone.
Everything else that uses one of the tensors meanwhile is ordered behind its update by the access
guard. Parameters whose state is on the device are updated within ``step()``, all at once: nothing
is gained by deferring them, and a guard costs some microseconds a parameter.

The values are those of the step that the program would have run: the same functions run on the same
numbers, and hyperparameters count as they are when ``step()`` is called.

A unit may also be updated ahead of ``step()``, in the backward pass (``backward_updates.py``).
Until ``step()`` nothing can use the unit then: the program would see the result of a step that it
has not called yet.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim.optimizer import Optimizer

from umem.core.errors import PlanError
from umem.executor.optimizer.access_guard import (
    can_guard,
    guard_parameters,
    guard_tensors,
    has_alias,
    release,
)
from umem.executor.optimizer.lanes import Lane, Lanes, Moment
from umem.executor.optimizer.separable import is_elementwise
from umem.executor.optimizer.state_staging import (
    OptimizerState,
    Slot,
    StagedState,
    StateMemory,
    find_spans,
)
from umem.executor.optimizer.step_call import ParameterGroups, StepCall
from umem.executor.optimizer.unit_names import part_name
from umem.torch_compat import current_graph_task_id

__all__ = ["StepCounts", "StreamedStep", "StreamedUnit"]


_FIRST_SLOTS = 3
"""Buffers before there is a plan: for a copy in, an update and a copy out at the same time."""


@dataclass(slots=True)
class StepCounts:
    """What became of the optimizer's steps."""

    streamed: int = 0
    """Steps of which some updates were queued."""
    resident: int = 0
    """Steps that the optimizer ran itself, because all state is on the device."""
    in_line: int = 0
    """Steps that the optimizer ran itself, on state in host memory."""
    waited: int = 0
    """Units whose update the program's stream waited for within ``step()``."""
    early: int = 0
    """Units that something used before their block's forward pass."""
    ahead: int = 0
    """Units that were updated in the backward pass, before ``step()``."""


@dataclass(slots=True)
class _Pending:
    """An update that no forward pass has waited for yet."""

    asked: Moment
    """When the step was called, on the stream that owns the memory of the gradients."""
    tensors: list[torch.Tensor]
    """What is guarded until then: parameters, gradients, and state that is used where it is."""
    kept: list[torch.Tensor] = field(default_factory=list)
    """Gradients that the program has no more, and the update reads."""


class StreamedUnit:
    """Parameters that are updated together, and their state.

    Parameters
    ----------
    name
        The name of their block.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.groups: ParameterGroups = []
        """The unit's parameters."""
        self.queued: ParameterGroups = []
        """Those whose updates are queued: with state in host memory or, where units are updated in
        the backward pass, with any state."""
        self.state: StagedState | None = None
        """State of these parameters; None if there are none."""
        self.slot: Slot | None = None
        """Where the state is staged; None for a unit without state in host memory."""
        self.fetched: Moment | None = None
        """The moment after the copy into the slot, if the slot has the present state."""
        self.returned: Moment | None = None
        """The moment after the last copy to the homes."""
        self.updated: Moment | None = None
        """The moment after the last update."""
        self.pending: _Pending | None = None
        self.ahead: list[Any] = []
        """Parameters that were updated in the backward pass, whose ``step()`` is still to come."""
        self.next_behind: StreamedUnit | None = None
        """The unit that uses the slot next in a backward pass."""
        self.is_touched = False
        """Whether something has used a home since the state was laid out."""
        self.state_bytes = 0
        """Bytes of its state that can be streamed."""
        self.spans: list[tuple[int, int]] = []
        """Elements of its parameter that are staged at a time; none if all are."""
        self.divided: list[StreamedUnit] = []
        """A unit for each span of a streamed one, with a slot and moments of its own."""

    @property
    def pieces(self) -> list[StreamedUnit]:
        """What is staged at a time."""
        return self.divided or [self]

    def sizes(self) -> dict[str, int]:
        """Bytes of state that can be streamed, by the name of what is staged at a time."""
        if not self.spans:
            return {self.name: self.state_bytes}
        element_bytes = self.state_bytes // self.spans[-1][1]
        return {
            part_name(self.name, number): (end - begin) * element_bytes
            for number, (begin, end) in enumerate(self.spans)
        }


class StreamedStep:
    """Queues an optimizer's steps.

    Parameters
    ----------
    owner
        Returns the name of a parameter's unit.
    lanes
        Where the work runs.
    memory
        Homes and buffers.
    piece_bytes
        A flat parameter of more bytes is updated piece by piece where that is exact; None for no
        limit.
    """

    def __init__(
        self,
        owner: Callable[[torch.Tensor], str],
        lanes: Lanes,
        memory: StateMemory,
        piece_bytes: int | None = None,
    ) -> None:
        self.counts = StepCounts()
        self.may_defer = True
        """Whether a step may return before its updates; otherwise the stream waits for them."""
        self.gradient_used: Callable[[], None] | None = None
        """Called when the program uses a gradient behind its step."""
        self.lock = threading.RLock()
        self.layouts = 0
        """How often units were laid out anew."""
        self._resident: frozenset[str] = frozenset()
        self._runs_backward = False
        self._owner = owner
        self._lanes = lanes
        self._memory = memory
        self._piece_bytes = piece_bytes
        self._is_elementwise = False
        self._slot_count = _FIRST_SLOTS
        self._slots: list[Slot] = []
        self._units: dict[str, StreamedUnit] = {}
        self._members: list[tuple[int, ...]] = []
        self.in_line: ParameterGroups = []
        """Parameters that are updated within the step."""
        self._seen: tuple[Any, int] | None = None
        """The optimizer's state, and the number of its parameters, when units were laid out; None
        to look at all of them again."""
        self._called: dict[str, None] = {}
        """Units in the order of their first call since the last step."""
        self._last: Moment = None
        """The moment after the update that was queued last."""

    def set_plan(self, resident: frozenset[str], slots: int) -> None:
        """Set the units whose state stays on the device, and the number of buffers for the others.

        It counts from the next step on, which moves the state.
        """
        with self.lock:
            if resident != self._resident:
                self._seen = None
            self._resident, self._slot_count = resident, slots
            self._slots.clear()

    def move_into_backward(self, moves: bool) -> None:
        """Say whether units are updated in the backward pass from the next one on.

        Then updates of resident state are queued too, so that they can be, and the last units are
        fetched first.
        """
        with self.lock:
            if moves != self._runs_backward:
                self._seen = None
            self._runs_backward = moves

    def sizes(self) -> dict[str, int]:
        """Bytes of state that can be streamed, by unit in the order of the forward pass."""
        found: dict[str, int] = {}
        for unit in self._units.values():
            found |= unit.sizes()
        return found

    @property
    def queued_units(self) -> list[StreamedUnit]:
        """The units whose updates are queued, in the order of the forward pass."""
        return [unit for unit in self._units.values() if unit.state is not None]

    def knows(self, optimizer: Optimizer) -> bool:
        """Whether the optimizer has the parameters and the state that it had at its last step."""
        return self._is_same(optimizer.state) and _members(optimizer) == self._members

    def _is_same(self, state: OptimizerState) -> bool:
        return self._seen is not None and self._seen[0] is state and self._seen[1] == len(state)

    @property
    def slots_bytes(self) -> int:
        """Bytes of all buffers."""
        return sum(slot.memory.nbytes for slot in self._slots)

    # ------------------------------------------------------------------ the step

    def step(self, optimizer: Optimizer, *, is_deferred: bool = True) -> Optimizer | None:
        """Queue a step.

        Parameters
        ----------
        optimizer
            The optimizer.
        is_deferred
            False to let the program's stream wait for all updates, as also where `may_defer` is.

        Returns
        -------
        torch.optim.Optimizer or None
            An optimizer that has the other parameters, for the program's own step. None if the
            optimizer has to run the step itself.
        """
        with self.lock:
            self.join()
            if any(group.get("differentiable") for group in optimizer.param_groups):
                self.counts.in_line += 1
                return None
            is_deferred = is_deferred and self.may_defer
            done = self._end_ahead(is_deferred)
            self._find_units(optimizer)
            self._lay_out(optimizer)
            queued = self.queued_units
            if not queued and not done:
                self.counts.resident += 1
                return None
            call = StepCall(optimizer, self._lanes)
            updates = [self._queue(unit, call, done, is_deferred) for unit in queued]
            for moment in filter(None, updates):
                self._lanes.wait(moment)
                self.counts.waited += 1
            if any(unit.pending is not None for unit in self._units.values()):
                self._lanes.count_behind(call.ready, self._last)
            self.counts.streamed += 1
            return call.shadow(_without(self.in_line, done), optimizer.state)

    def _end_ahead(self, is_deferred: bool) -> frozenset[Any]:
        """The program's step has come: what was updated ahead of it may be used."""
        ahead = [unit for unit in self._units.values() if unit.ahead]
        done = frozenset(parameter for unit in ahead for parameter in unit.ahead)
        for unit in ahead:
            unit.ahead = []
            if not is_deferred:
                self._settle(unit)
        return done

    def lay_out(self, optimizer: Optimizer) -> None:
        """Find units and their state before a step, behind the updates of the one before."""
        with self.lock:
            self.join()
            self._find_units(optimizer)
            self._lay_out(optimizer)

    def _find_units(self, optimizer: Optimizer) -> None:
        """Sort the optimizer's parameters by unit, in the order of the last forward pass."""
        members = _members(optimizer)
        if members != self._members:
            self.forget()
            self._members = members
            for number, group in enumerate(optimizer.param_groups):
                for parameter in group["params"]:
                    name = self._owner(parameter)
                    unit = self._units.setdefault(name, StreamedUnit(name))
                    if not unit.groups or unit.groups[-1][0] != number:
                        unit.groups.append((number, []))
                    unit.groups[-1][1].append(parameter)
        order = [name for name in self._called if name in self._units]
        self._called.clear()
        if order and order != list(self._units)[: len(order)]:
            others = [name for name in self._units if name not in order]
            self._units = {name: self._units[name] for name in (*order, *others)}
            self._slots.clear()  # they are given out anew

    def _queue(
        self, unit: StreamedUnit, call: StepCall, done: frozenset[Any], is_deferred: bool
    ) -> Moment | None:
        """Queue a unit's update. Returns a moment that the program has to wait for, or None."""
        part = [
            (number, [p for p in some if p.grad is not None])
            for number, some in _without(unit.queued, done)
        ]
        updated = [parameter for _, some in part for parameter in some]
        if not updated:
            return None
        self._settle(unit)  # what the backward pass has updated of it
        state = unit.state
        assert state is not None
        gradients = [parameter.grad for parameter in updated]
        is_shared = (
            not all(map(can_guard, (*updated, *gradients, *state.tensors)))
            or any(map(has_alias, (*updated, *gradients)))
            or state.has_alias()
        )
        self._launch(unit, call, part, call.ready)
        if is_shared:
            return unit.returned
        if not is_deferred:
            return unit.updated
        unit.pending = _Pending(call.ready, [*updated, *gradients, *state.others])
        guard_tensors(gradients, lambda: self._use_gradient(unit))
        guard_tensors(state.others, lambda: self._settle_early(unit))
        guard_parameters(updated, lambda: self._settle_early(unit))
        return None

    def _launch(
        self, unit: StreamedUnit, call: StepCall, part: ParameterGroups, ready: Moment
    ) -> None:
        """Queue the copies and the update of some parameters, whose gradients are `ready`."""
        pieces = unit.pieces[::-1] if self._runs_backward else unit.pieces
        for piece in pieces:
            self._launch_piece(piece, call, part, ready, is_last=piece is pieces[-1])
        unit.fetched, unit.returned, unit.updated = None, pieces[-1].returned, pieces[-1].updated
        self._last = unit.updated

    def _launch_piece(
        self,
        piece: StreamedUnit,
        call: StepCall,
        part: ParameterGroups,
        ready: Moment,
        *,
        is_last: bool,
    ) -> None:
        state, slot = piece.state, piece.slot
        assert state is not None
        update = call.update(state, part, is_last=is_last)
        if slot is None:
            done = last = self._lanes.run(Lane.UPDATE, update, [ready])
        else:
            if piece.fetched is None:
                self._fetch(piece, ready)
            done = self._lanes.run(Lane.UPDATE, update, [ready, piece.fetched])
            last = self._lanes.run(Lane.COPY_OUT, lambda: state.copy_out(self._lanes), [done])
            slot.free = last
        piece.fetched, piece.returned, piece.updated = None, last, done

    def update_ahead(
        self, unit: StreamedUnit, call: StepCall, freed: Callable[[Any], torch.Tensor]
    ) -> None:
        """Queue a unit's update in the backward pass, and take its gradients away.

        Parameters
        ----------
        unit
            A unit whose gradients are complete. Nothing else has the memory of its parameters,
            gradients and state.
        call
            The hyperparameters.
        freed
            Returns what a parameter gets in the place of its gradient.
        """
        part = [(number, [p for p in some if p.grad is not None]) for number, some in unit.queued]
        updated = [parameter for _, some in part for parameter in some]
        state, ready = unit.state, self._lanes.mark()
        assert state is not None
        self._launch(unit, call, part, ready)
        # Fused kernels do not count: a graph that has saved a parameter must notice.
        torch.autograd.graph.increment_version(updated)
        gradients = [parameter.grad for parameter in updated]
        unit.pending = _Pending(ready, [*updated, *state.others], gradients)
        unit.ahead = updated
        for parameter in updated:
            parameter.grad = freed(parameter)
        guard_tensors(state.others, lambda: self._settle_early(unit))
        guard_parameters(
            updated, lambda: self._settle_early(unit), lambda: self._check_not_ahead(unit)
        )
        self.counts.ahead += 1
        for piece in reversed(unit.pieces):
            following = piece.next_behind
            if following is not None and self._may_fetch(following):
                self._fetch(following, ready)

    def free_gradients(self, unit: StreamedUnit) -> None:
        """Free what an update in the backward pass reads, behind the update."""
        pending = unit.pending
        if pending is not None and pending.kept:
            self._lanes.wait(unit.updated)
            self._lanes.wait_on_stream_of(pending.asked, unit.updated)
            pending.kept.clear()

    def settle_ahead(self, unit: StreamedUnit) -> None:
        """Let the program load the parameters of a unit that was updated in the backward pass."""
        self._settle(unit)

    # ------------------------------------------------------------------ state and slots

    def _lay_out(self, optimizer: Optimizer) -> None:
        """Lay out the state of units where the optimizer has other tensors now."""
        state = optimizer.state
        self._is_elementwise = is_elementwise(optimizer)
        is_known = self._is_same(state)
        changed = [
            unit
            for unit in self._units.values()
            if not is_known
            or unit.is_touched
            or (unit.state is not None and not unit.state.is_current(state))
        ]
        for unit in changed:
            self._lay_out_unit(unit, state)
        if changed:
            self.layouts += 1
            self._seen = (state, len(state))
            self._slots.clear()
            queued = {p for unit in self._units.values() for _, some in unit.queued for p in some}
            self.in_line = [
                (number, [p for p in group["params"] if p not in queued])
                for number, group in enumerate(optimizer.param_groups)
            ]
        if not self._slots:
            self._give_out_slots()

    def _lay_out_unit(self, unit: StreamedUnit, state: OptimizerState) -> None:
        self._drop_state(unit)
        every = {p: state.get(p) or {} for _, some in unit.groups for p in some}
        movable = {
            parameter: [
                value
                for value in values.values()
                if isinstance(value, torch.Tensor) and self._memory.is_movable(value)
            ]
            for parameter, values in every.items()
        }
        unit.state_bytes = sum(value.nbytes for values in movable.values() for value in values)
        unit.spans = []
        if self._piece_bytes is not None and self._is_elementwise and len(every) == 1:
            ((parameter, values),) = every.items()
            unit.spans = find_spans(parameter, values, movable[parameter], self._piece_bytes)
        on_device = self._resident.issuperset(unit.sizes())
        queued: dict[torch.Tensor, Any] = {}
        for parameter, values in every.items():
            for value in movable[parameter]:
                self._memory.place(value, on_device=on_device)
            if (values and self._runs_backward) or (movable[parameter] and not on_device):
                queued[parameter] = values
        unit.queued = [(number, [p for p in some if p in queued]) for number, some in unit.groups]
        if queued:
            unit.state = StagedState(queued, self._memory)
            for span in unit.spans if unit.state.homes else ():
                piece = StreamedUnit(unit.name)
                piece.state = StagedState(queued, self._memory, span)
                unit.divided.append(piece)
            guard_tensors(unit.state.homes, functools.partial(self._touch, unit))

    def _give_out_slots(self) -> None:
        every = [piece for unit in self._units.values() for piece in unit.pieces]
        streamed = [unit for unit in every if unit.state and unit.state.homes]
        for unit in every:
            self._drop_fetched(unit)
            for moment in filter(None, (unit.returned, unit.slot and unit.slot.free)):
                self._lanes.wait(moment)  # before the memory of a slot is used for anything else
            unit.slot = None
            if unit.state is not None:
                unit.state.unbind()
        sizes = [unit.state.size_bytes for unit in streamed if unit.state is not None]
        self._slots = [
            Slot(self._memory.buffer(max(sizes)))
            for _ in range(min(self._slot_count, len(streamed)))
        ]
        count = len(self._slots)
        for number, unit in enumerate(streamed):
            unit.slot = self._slots[number % count]
            unit.next_behind = streamed[number - count] if number >= count else None
        for unit in every:
            if unit.state is not None:
                unit.state.bind(unit.slot)

    def _fetch(self, unit: StreamedUnit, after: Moment) -> None:
        """Copy a unit's state into its slot, after what the program has done with either so far."""
        state, slot = unit.state, unit.slot
        assert state is not None
        assert slot is not None
        if slot.holder is not None:
            slot.holder.fetched = None
        slot.holder = unit
        moments = [after, *filter(None, (slot.free, unit.returned))]
        unit.fetched = self._lanes.run(Lane.COPY_IN, lambda: state.copy_in(self._lanes), moments)

    def fetch_ahead(self) -> None:
        """Fill the slots for the next step: the state is not used before it."""
        with self.lock:
            streamed = [it for unit in self.queued_units for it in unit.pieces if it.slot]
            if self._runs_backward:
                streamed.reverse()
            now = self._lanes.mark()
            for unit in streamed[: len(self._slots)]:
                if self._may_fetch(unit):
                    self._fetch(unit, now)

    def _may_fetch(self, unit: StreamedUnit) -> bool:
        """Whether a unit's state is to be fetched, and stays as it is until its update."""
        state = unit.state
        return (
            state is not None
            and unit.slot is not None
            and unit.fetched is None
            and not unit.is_touched
            and not state.has_alias()
        )

    def _drop_fetched(self, unit: StreamedUnit) -> None:
        if unit.fetched is not None:
            self._lanes.wait(unit.fetched)  # it reads the homes
            unit.fetched = None

    def _drop_state(self, unit: StreamedUnit) -> None:
        for piece in unit.pieces:
            self._drop_fetched(piece)
        if unit.returned is not None:
            self._lanes.wait(unit.returned)
        if unit.state is not None:
            release(unit.state.homes)
        unit.state, unit.is_touched = None, False
        unit.divided.clear()

    # ------------------------------------------------------------------ waiting

    def wait(self, name: str) -> None:
        """Before a block's forward pass: wait for the update of its unit."""
        if current_graph_task_id() == -1:  # a checkpoint's second pass is in the other order
            self._called.setdefault(name)
        unit = self._units.get(name)
        if unit is not None and unit.pending is not None:
            self._check_not_ahead(unit)
            self._settle(unit)

    def join(self) -> None:
        """Let the current stream wait for all updates. State in host memory may still arrive."""
        for unit in self._units.values():
            if not unit.ahead:
                self._settle(unit)

    def _settle(self, unit: StreamedUnit) -> None:
        with self.lock:
            pending, unit.pending = unit.pending, None
            if pending is None:
                return
            self._lanes.wait(unit.updated)
            self._lanes.wait_on_stream_of(pending.asked, unit.updated)
            release(pending.tensors)

    def _check_not_ahead(self, unit: StreamedUnit) -> None:
        if unit.ahead:
            name = unit.name or "the parameters outside of blocks"
            raise PlanError(
                f"step_in_backward: the backward pass has updated {name} already, and "
                "optimizer.step() was not called since. Without umem it would have its old weights "
                "and its gradients still. Call optimizer.step() right behind backward(), and "
                "umem.manage without step_in_backward for clipping, accumulation, skipped steps or "
                "any other use in between. After an error in a backward pass, load the state of "
                "the model and of the optimizer"
            )

    def _use_gradient(self, unit: StreamedUnit) -> None:
        if self.gradient_used is not None and unit.pending is not None:
            self.gradient_used()
        self._settle_early(unit)

    def _settle_early(self, unit: StreamedUnit) -> None:
        self._check_not_ahead(unit)
        self.counts.early += unit.pending is not None
        self._settle(unit)
        if unit.updated is not None:  # another thread may have settled it just now, for its stream
            self._lanes.wait(unit.updated)

    def _touch(self, unit: StreamedUnit) -> None:
        """Before something uses a home: wait until its contents are there, and fetch them anew."""
        with self.lock:
            self._check_not_ahead(unit)
            for piece in unit.pieces:
                self._drop_fetched(piece)
                piece.is_touched = True
            if unit.returned is not None:
                self._lanes.wait(unit.returned)
            unit.is_touched = True

    def forget(self) -> None:
        """Wait for all work, and give the optimizer's tensors free."""
        with self.lock:
            self._end_ahead(is_deferred=False)
            self.join()
            for unit in self._units.values():
                if unit.returned is not None:
                    self._lanes.finish(unit.returned)
                self._drop_state(unit)
            self._units.clear()
            self._slots.clear()
            self._members, self._seen = [], None


def _members(optimizer: Optimizer) -> list[tuple[int, ...]]:
    return [tuple(map(id, group["params"])) for group in optimizer.param_groups]


def _without(groups: ParameterGroups, done: frozenset[Any]) -> ParameterGroups:
    if not done:
        return groups
    return [(number, [p for p in some if p not in done]) for number, some in groups]
