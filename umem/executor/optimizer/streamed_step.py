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
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim.optimizer import Optimizer

from umem.executor.optimizer.access_guard import (
    can_guard,
    guard_parameters,
    guard_tensors,
    has_alias,
    release,
)
from umem.executor.optimizer.lanes import Lane, Lanes, Moment
from umem.executor.optimizer.separable import plain_step
from umem.executor.optimizer.state_staging import (
    OptimizerState,
    Slot,
    StagedState,
    StateMemory,
)

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


@dataclass(slots=True)
class _Pending:
    """An update that no forward pass has waited for yet."""

    asked: Moment
    """When the step was called, on the stream that owns the memory of the gradients."""
    tensors: list[torch.Tensor]
    """What is guarded until then: parameters, gradients, and state that is used where it is."""


_Groups = list[tuple[int, list[Any]]]
"""Parameters by the number of their group of the optimizer."""


class StreamedUnit:
    """Parameters that are updated together, and their state.

    Parameters
    ----------
    name
        The name of their block.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.groups: _Groups = []
        """The unit's parameters."""
        self.streamed: _Groups = []
        """Those that have state in host memory."""
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
        self.is_touched = False
        """Whether something has used a home since the state was laid out."""
        self.state_bytes = 0
        """Bytes of its state that can be streamed."""


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
    """

    def __init__(
        self,
        owner: Callable[[torch.Tensor], str],
        lanes: Lanes,
        memory: StateMemory,
    ) -> None:
        self.counts = StepCounts()
        self.may_defer = True
        """Whether a step may return before its updates; otherwise the stream waits for them."""
        self._resident: frozenset[str] = frozenset()
        self._owner = owner
        self._lanes = lanes
        self._memory = memory
        self._slot_count = _FIRST_SLOTS
        self._slots: list[Slot] = []
        self._units: dict[str, StreamedUnit] = {}
        self._members: list[tuple[int, ...]] = []
        self._in_line: _Groups = []
        """Parameters that are updated within the step."""
        self._seen: tuple[Any, int] | None = None
        """The optimizer's state, and the number of its parameters, when units were laid out; None
        to look at all of them again."""
        self._called: dict[str, None] = {}
        """Units in the order of their first call since the last step."""
        self._lock = threading.RLock()

    def set_plan(self, resident: frozenset[str], slots: int) -> None:
        """Set the units whose state stays on the device, and the number of buffers for the others.

        It counts from the next step on, which moves the state.
        """
        with self._lock:
            if resident != self._resident:
                self._seen = None
            self._resident, self._slot_count = resident, slots
            self._slots.clear()

    def sizes(self) -> dict[str, int]:
        """Bytes of state that can be streamed, by unit in the order of the forward pass."""
        return {name: unit.state_bytes for name, unit in self._units.items()}

    @property
    def slots_bytes(self) -> int:
        """Bytes of all buffers."""
        return sum(slot.memory.nbytes for slot in self._slots)

    # ------------------------------------------------------------------ the step

    def step(self, optimizer: Optimizer) -> Optimizer | None:
        """Queue a step.

        Returns
        -------
        torch.optim.Optimizer or None
            An optimizer that has the other parameters, for the program's own step. None if the
            optimizer has to run the step itself.
        """
        with self._lock:
            self.join()
            if any(group.get("differentiable") for group in optimizer.param_groups):
                self.counts.in_line += 1
                return None
            self._find_units(optimizer)
            self._lay_out(optimizer)
            streamed = [unit for unit in self._units.values() if unit.state is not None]
            if not streamed:
                self.counts.resident += 1
                return None
            call = _Call(optimizer, self._lanes)
            for moment in filter(None, [self._queue(unit, call) for unit in streamed]):
                self._lanes.wait(moment)
                self.counts.waited += 1
            deferred = [unit.updated for unit in streamed if unit.pending is not None]
            if deferred:
                self._lanes.count_behind(call.ready, deferred[-1])
            self.counts.streamed += 1
            return call.shadow(self._in_line, optimizer.state)

    def _find_units(self, optimizer: Optimizer) -> None:
        """Sort the optimizer's parameters by unit, in the order of the last forward pass."""
        members = [tuple(map(id, group["params"])) for group in optimizer.param_groups]
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

    def _queue(self, unit: StreamedUnit, call: _Call) -> Moment | None:
        """Queue a unit's update. Returns a moment that the program has to wait for, or None."""
        part = [(number, [p for p in some if p.grad is not None]) for number, some in unit.streamed]
        updated = [parameter for _, some in part for parameter in some]
        if not updated:
            return None
        state, slot = unit.state, unit.slot
        assert state is not None
        assert slot is not None
        shadow = call.shadow(part, state.views)
        gradients = [parameter.grad for parameter in updated]
        is_shared = (
            not all(map(can_guard, (*updated, *gradients, *state.tensors)))
            or any(map(has_alias, (*updated, *gradients)))
            or state.has_alias()
        )

        def update() -> None:
            plain_step(shadow)(shadow)
            state.keep(updated, call.optimizer.state)

        if unit.fetched is None:
            self._fetch(unit, call.ready)
        done = self._lanes.run(Lane.UPDATE, update, [call.ready, unit.fetched])
        last = self._lanes.run(Lane.COPY_OUT, lambda: state.copy_out(self._lanes), [done])
        unit.fetched, unit.returned, unit.updated = None, last, done
        slot.free = last
        if is_shared:
            return last
        if not self.may_defer:
            return done
        guarded = [*updated, *gradients, *state.others]
        unit.pending = _Pending(call.ready, guarded)
        guard_tensors(guarded[len(updated) :], lambda: self._settle_early(unit))
        guard_parameters(updated, lambda: self._settle_early(unit))
        return None

    # ------------------------------------------------------------------ state and slots

    def _lay_out(self, optimizer: Optimizer) -> None:
        """Lay out the state of units where the optimizer has other tensors now."""
        state = optimizer.state
        is_known = self._seen is not None and self._seen[0] is state and self._seen[1] == len(state)
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
            self._seen = (state, len(state))
            self._slots.clear()
            streams = {
                p for unit in self._units.values() for _, some in unit.streamed for p in some
            }
            self._in_line = [
                (number, [p for p in group["params"] if p not in streams])
                for number, group in enumerate(optimizer.param_groups)
            ]
        if not self._slots:
            self._give_out_slots()

    def _lay_out_unit(self, unit: StreamedUnit, state: OptimizerState) -> None:
        self._drop_state(unit)
        on_device = unit.name in self._resident
        streamed: dict[torch.Tensor, Any] = {}
        unit.state_bytes = 0
        for _, some in unit.groups:
            for parameter in some:
                values = state.get(parameter) or {}
                movable = [
                    value
                    for value in values.values()
                    if isinstance(value, torch.Tensor) and self._memory.is_movable(value)
                ]
                for value in movable:
                    unit.state_bytes += value.nbytes
                    self._memory.place(value, on_device=on_device)
                if movable and not on_device:
                    streamed[parameter] = values
        unit.streamed = [
            (number, [p for p in some if p in streamed]) for number, some in unit.groups
        ]
        if streamed:
            unit.state = StagedState(streamed, self._memory)
            guard_tensors(unit.state.homes, functools.partial(self._touch, unit))

    def _give_out_slots(self) -> None:
        streamed = [unit for unit in self._units.values() if unit.state is not None]
        for unit in self._units.values():
            self._drop_fetched(unit)
            for moment in filter(None, (unit.returned, unit.slot and unit.slot.free)):
                self._lanes.wait(moment)  # before the memory of a slot is used for anything else
            unit.slot = None
        sizes = [unit.state.size_bytes for unit in streamed if unit.state is not None]
        self._slots = [
            Slot(self._memory.buffer(max(sizes)))
            for _ in range(min(self._slot_count, len(streamed)))
        ]
        for number, unit in enumerate(streamed):
            unit.slot = self._slots[number % len(self._slots)]
        for unit in self._units.values():
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
        with self._lock:
            streamed = [unit for unit in self._units.values() if unit.state is not None]
            now = self._lanes.mark()
            for unit in streamed[: len(self._slots)]:
                state = unit.state
                assert state is not None
                if unit.fetched is None and not unit.is_touched and not state.has_alias():
                    self._fetch(unit, now)

    def _drop_fetched(self, unit: StreamedUnit) -> None:
        if unit.fetched is not None:
            self._lanes.wait(unit.fetched)  # it reads the homes
            unit.fetched = None

    def _drop_state(self, unit: StreamedUnit) -> None:
        self._drop_fetched(unit)
        if unit.returned is not None:
            self._lanes.wait(unit.returned)
        if unit.state is not None:
            release(unit.state.homes)
        unit.state, unit.is_touched = None, False

    # ------------------------------------------------------------------ waiting

    def wait(self, name: str) -> None:
        """Before a block's forward pass: wait for the update of its unit."""
        self._called.setdefault(name)
        unit = self._units.get(name)
        if unit is not None and unit.pending is not None:
            self._settle(unit)

    def join(self) -> None:
        """Let the current stream wait for all updates. State in host memory may still arrive."""
        for unit in self._units.values():
            self._settle(unit)

    def _settle(self, unit: StreamedUnit) -> None:
        with self._lock:
            pending, unit.pending = unit.pending, None
            if pending is None:
                return
            self._lanes.wait(unit.updated)
            self._lanes.wait_on_stream_of(pending.asked, unit.updated)
            release(pending.tensors)

    def _settle_early(self, unit: StreamedUnit) -> None:
        self.counts.early += unit.pending is not None
        self._settle(unit)
        if unit.updated is not None:  # another thread may have settled it just now, for its stream
            self._lanes.wait(unit.updated)

    def _touch(self, unit: StreamedUnit) -> None:
        """Before something uses a home: wait until its contents are there, and fetch them anew."""
        with self._lock:
            self._drop_fetched(unit)
            if unit.returned is not None:
                self._lanes.wait(unit.returned)
            unit.is_touched = True

    def forget(self) -> None:
        """Wait for all work, and give the optimizer's tensors free."""
        with self._lock:
            self.join()
            for unit in self._units.values():
                if unit.returned is not None:
                    self._lanes.finish(unit.returned)
                self._drop_state(unit)
            self._units.clear()
            self._slots.clear()
            self._members = []


class _Call:
    """One call of ``step()``: hyperparameters as they are now."""

    def __init__(self, optimizer: Optimizer, lanes: Lanes) -> None:
        self.optimizer = optimizer
        self._attributes = {
            name: _fixed(value)
            for name, value in vars(optimizer).items()
            if name not in ("param_groups", "state")
        }
        self._groups = [
            {name: _fixed(value) for name, value in group.items() if name != "params"}
            for group in optimizer.param_groups
        ]
        self.ready = lanes.mark()
        """The moment at which gradients and hyperparameters are complete."""

    def shadow(self, part: _Groups, state: Any) -> Any:
        """An optimizer of the same class for some parameters, with their state."""
        shadow: Any = object.__new__(type(self.optimizer))
        vars(shadow).update(self._attributes)
        shadow.param_groups = [
            {**self._groups[number], "params": some} for number, some in part if some
        ]
        shadow.state = state
        return shadow


def _fixed(value: Any) -> Any:
    """A hyperparameter that later changes in place do not reach."""
    if isinstance(value, torch.Tensor):
        return value.clone()
    if isinstance(value, tuple) and any(isinstance(item, torch.Tensor) for item in value):
        return tuple(map(_fixed, value))
    return value
