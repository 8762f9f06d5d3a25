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

A unit may also be updated ahead of ``step()``, in the backward pass (``in_backward.py``).
Until ``step()`` nothing can use the unit then: the program would see the result of a step that it
has not called yet.

An error of umem does not end a step, nor does an interrupt leave half of it: what was not queued is
updated in place, and the training goes on without umem. An error of the optimizer's own step is
raised as without umem, and as without umem some parameters are updated then and others are not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any, Protocol

import torch
from torch.optim.optimizer import Optimizer

from umem.adapters.interface import GatheredParameters, GatheringGuard
from umem.core.errors import PlanError
from umem.runtime.aliases import has_alias, overlap
from umem.runtime.guard import Guard, are_plain, can_guard, settle
from umem.runtime.model_parts import optimizer_parameters
from umem.runtime.torch_hooks.passes import Pass, running_pass
from umem.streaming.gradients.clipped_gradients import ClippedGradients
from umem.streaming.stage.lanes import Lane, Lanes, Moment
from umem.streaming.stage.sharded_tensors import ShardedStep, ShardedUnit
from umem.streaming.stage.staged_state import StagedState
from umem.streaming.step.call import ParameterGroups, StepCall, parameters_of
from umem.streaming.step.host_units import HostUnits, HostUpdater
from umem.streaming.step.pieces import PieceUpdates, are_staged, need_whole
from umem.streaming.step.unit import (
    PendingUpdate,
    StreamedUnit,
    UnitGuards,
)
from umem.streaming.step.unit_names import is_outside
from umem.streaming.step.unit_uses import UnitUses
from umem.streaming.step.units import StreamedUnits, tensors_of
from umem.streaming.step.whole_steps import COMMON_MEMORY, COMMON_STATE

__all__ = ["StepCounts", "StepOwner", "StreamedStep"]


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
    by_host: int = 0
    """Units that the host has updated."""


@dataclass(slots=True)
class _UnitUpdate:
    """A unit's update that is about to be queued, and who can use what it changes."""

    unit: StreamedUnit
    state: StagedState
    part: ParameterGroups | None
    """The parameters that are updated, by group; None for all that are queued."""
    parameters: list[Any]
    """The same, without groups."""
    gradients: list[Any]
    """In the same order."""
    held: list[Any] = field(default_factory=list)
    """Parameters whose gradients are on the host."""
    free: list[Any] = field(default_factory=list)
    """The other gradients."""
    sharded: ShardedUnit | None = None
    """What is guarded of sharded parameters; None without any, or where a use of them would not be
    seen."""
    is_plain: bool = False
    """Whether all are plain tensors, which can be staged."""
    is_shared: bool = False
    """Whether something may use them that no guard would see: then the program's stream waits."""


class StepOwner(Protocol):
    """The training of a step: what the step tells it, and asks of it."""

    def gradient_was_used(self) -> None:
        """The program has used a gradient behind its step."""

    def state_was_loaded(self) -> None:
        """The state of model and optimizer was loaded as a whole."""

    def unit_has_settled(self, name: str, is_early: bool) -> None:
        """A unit's update was waited for, and whether a use came early."""

    def step_has_failed(self, error: Exception) -> None:
        """An error of umem has come up in a step, which was made whole behind it."""

    def host_updater(self) -> HostUpdater | None:
        """Make what updates on the host; None where no update can be the host's."""

    def gathered_parameters(self) -> GatheredParameters:
        """What a library gathers the parameters of the model from."""


class StreamedStep:
    """Queues an optimizer's steps.

    Parameters
    ----------
    units
        The optimizer's units.
    lanes
        Where the work runs.
    clipped
        Holds gradients that are on the host.
    owner
        The training.
    may_defer
        Whether a step may return before its updates; otherwise the stream waits for them.
    """

    def __init__(
        self,
        units: StreamedUnits,
        lanes: Lanes,
        clipped: ClippedGradients,
        owner: StepOwner,
        *,
        may_defer: bool,
    ) -> None:
        self.counts = StepCounts()
        self.may_defer = may_defer
        self.waits = False
        """Whether the stream has waited for updates of the last step."""
        self.units = units
        self.lock = units.lock
        self._lanes = lanes
        self._clipped = clipped
        self._updates = PieceUpdates(units, lanes, clipped)
        self._uses = UnitUses()
        self._owner = owner
        self.hosts = HostUnits(
            lanes, units.memory, clipped, owner.step_has_failed, owner.host_updater
        )
        """Updates that the host makes."""
        self._defers_outside = True
        """Whether the present step defers units outside of blocks too."""
        self.is_begun = False
        """Whether the present step may have updated parameters."""
        self.obstacle = ""
        """Why the present step updates state where it is, as a whole; empty if it does not."""
        self._may_be_under_way = False
        """False if no update of a step is under way: a look at all units takes longer."""
        self._failure = ""
        """The error behind which the backward pass has updated some parameters and others not;
        empty if none has."""
        self._loaded: set[str] = set()
        """What was loaded since."""

    # ------------------------------------------------------------------ the step

    def step(
        self, optimizer: Optimizer, *, is_deferred: bool = True, defers_outside: bool = True
    ) -> Optimizer | None:
        """Queue a step.

        Parameters
        ----------
        optimizer
            The optimizer.
        is_deferred
            False to let the program's stream wait for all updates, as also where `may_defer` is.
        defers_outside
            False to let it wait for those of units outside of blocks.

        Returns
        -------
        torch.optim.Optimizer or None
            An optimizer without parameters, for the program's own step: all are updated. None
            if the optimizer has to run the step itself.
        """
        with self.lock:
            self.is_begun = False
            self._defers_outside = defers_outside
            self.check_known()
            self.join()
            is_deferred = is_deferred and self.may_defer
            if self._units_ahead():
                self.is_begun = True
                try:
                    return self._step(optimizer, self._end_ahead(is_deferred), is_deferred)
                except BaseException as error:
                    self._fail(error)
                    raise
            return self._step(optimizer, frozenset(), is_deferred)

    def _step(
        self, optimizer: Optimizer, done: frozenset[Any], is_deferred: bool
    ) -> Optimizer | None:
        """Queue a step but for the parameters that are updated already."""
        self._lay_out(optimizer)
        queued, self.obstacle = self.units.queued, ""
        if not queued and not done:
            self.counts.resident += 1
            return None
        if self.units.has_common_state:  # and so nothing was updated ahead
            self.obstacle = COMMON_STATE
            self.counts.in_line += 1
            return None
        left_out = done | self.units.absent
        sharded = self._find_sharded(optimizer, queued) if self.may_defer else None
        found = [self._find_update(unit, left_out, sharded) for unit in queued]
        updates, in_line = [it for it in found if it is not None], self.units.in_line
        if self._have_common_memory(updates, optimizer):
            self.obstacle, updates, in_line = COMMON_MEMORY, [], self.units.members
        call = StepCall(optimizer, self._lanes)
        shadow = call.shadow(_without(in_line, done), optimizer.state)
        self.waits = not self.may_defer
        self._updates.begin()
        self.hosts.begin()
        self.is_begun = self._may_be_under_way = True
        try:
            moments = [self._queue(update, call, is_deferred) for update in updates]
            for moment in filter(None, moments):
                self._lanes.wait(moment)
                self.counts.waited += 1
            if any(unit.pending is not None for unit in self.units):
                last = self.hosts.all_updated(self._updates.last, self.lock)
                self._lanes.count_behind(call.ready, last)
            # Not left to the program's own step, before which an interrupt may come.
            call.run(shadow, note=shadow.param_groups.clear)
        except BaseException as error:
            self._end_lanes()
            if call.has_failed:
                raise
            self._complete(call, [it.unit for it in updates], left_out)
            call.run(shadow, note=shadow.param_groups.clear)
            if not isinstance(error, Exception):
                raise
            self._owner.step_has_failed(error)
        self.counts.in_line += bool(self.obstacle)
        self.counts.streamed += not self.obstacle
        return shadow

    def _end_lanes(self) -> None:
        """Let the program's stream wait for all that is queued, behind an error amid a step."""
        for unit in self.units:
            if unit.host_work is not None:
                self._end_host(unit)
                self._lanes.wait(unit.updated)
        self._wait_for(Lane.COPY_IN, Lane.UPDATE)
        self._updates.end(self._lanes.mark())
        self._wait_for(Lane.COPY_OUT)

    def _wait_for(self, *lanes: Lane) -> None:
        for lane in lanes:
            self._lanes.wait(self._lanes.run(lane, lambda: None))

    def _complete(
        self, call: StepCall, queued: list[StreamedUnit], left_out: frozenset[Any]
    ) -> None:
        """Update in place what an error has kept from being queued."""
        self.join()
        self.units.ring.take_back()
        for unit in queued:
            part = _with_gradients(_without(unit.queued, left_out))
            for it in self._updates.of(unit, part):
                if it.piece in self._updates.queued:
                    continue
                for parameter in parameters_of(it.part):
                    if self._clipped.is_held(parameter.grad):
                        self._clipped.use(parameter.grad)
                it.piece.state.bind(None)
                call.update(it)()

    def _find_sharded(self, optimizer: Optimizer, queued: list[StreamedUnit]) -> ShardedStep | None:
        """Find what is on the memory of sharded tensors; None if no unit has any."""
        if all(unit.state is None or unit.state.sharded is None for unit in queued):
            return None
        gathered = self._owner.gathered_parameters()
        for stream in gathered.streams:
            self._lanes.leave_out(stream)
        return ShardedStep(optimizer_parameters(optimizer), gathered)

    # ------------------------------------------------------------------ errors in a step

    def _fail(self, error: BaseException) -> None:
        """An error has left some parameters updated in the backward pass, and others not."""
        self._failure = f"{type(error).__name__}: {error}"
        self._loaded.clear()
        self._end_lanes()

    def check_known(self) -> None:
        """Raise PlanError if an error has ended an update in the backward pass.

        Without umem, the weights would be the old ones.
        """
        if self._failure:
            raise PlanError(
                "step_in_backward: an earlier backward() has ended with an error when some "
                f"parameters were updated already ({self._failure}), so weights and optimizer "
                "state are no longer those of any step. Load the state of the model and of the "
                "optimizer, by load_state_dict() of both, before the training goes on"
            )

    def have_loaded(self, what: str) -> None:
        """Note that the state of the "model" or of the "optimizer" was loaded as a whole."""
        self._loaded.add(what)
        if len(self._loaded) == 2:
            self._failure = ""
            self._loaded.clear()
            self._owner.state_was_loaded()

    def _end_ahead(self, is_deferred: bool) -> frozenset[Any]:
        """The program's step has come: what was updated ahead of it may be used."""
        ahead = self._units_ahead()
        done = frozenset(parameter for unit in ahead for parameter in unit.ahead)
        for unit in ahead:
            unit.ahead = []
            if not is_deferred:
                self.settle(unit)
        return done

    def _units_ahead(self) -> list[StreamedUnit]:
        """Units that the backward pass has updated, whose ``step()`` is still to come."""
        return [unit for unit in self.units if unit.ahead]

    def can_split(self, optimizer: Optimizer) -> bool:
        """Whether the next step may be queued in parts. It is not if all state is on the device."""
        with self.lock:
            return bool(self.units.queued) or not self.units.knows(optimizer)

    def leave_to_optimizer(self, optimizer: Optimizer) -> None:
        """Leave a step to the optimizer for which :meth:`can_split` is false.

        No unit has state that is streamed. So no update is under way, and none was made ahead.
        """
        with self.lock:
            self._lay_out_known(optimizer)
            self.counts.resident += 1

    def lay_out(self, optimizer: Optimizer) -> None:
        """Find units and their state before a step, behind the updates of the one before."""
        with self.lock:
            self.join()
            self._lay_out(optimizer)

    def _lay_out(self, optimizer: Optimizer) -> None:
        self._find_units(optimizer)
        self._lay_out_known(optimizer)

    def _lay_out_known(self, optimizer: Optimizer) -> None:
        self.units.lay_out(optimizer, self._order())
        self._uses.begin()

    def _order(self) -> Iterable[str]:
        """Units in the order of their updates; in the backward pass, in the other one."""
        return self._uses.order(of_passes=self.units.runs_backward)

    def _find_units(self, optimizer: Optimizer) -> None:
        if not self.units.has_members_of(optimizer):
            self._end_ahead(is_deferred=False)
            self.units.find_units(optimizer)

    def find_state(self, optimizer: Optimizer) -> None:
        """Find state that the step has made, so that it counts from now on.

        While updates are under way, the next step finds it.
        """
        with self.lock:
            is_known = self.units.are_laid_out(optimizer.state)
            if not is_known and all(unit.pending is None for unit in self.units):
                self._find_units(optimizer)
                self.units.find_state(optimizer, self._order())

    def _queue(self, update: _UnitUpdate, call: StepCall, is_deferred: bool) -> Moment | None:
        """Queue a unit's update. Returns a moment that the program has to wait for, or None."""
        unit, ready = update.unit, self._launch(update, call)
        waits = update.is_shared or (is_outside(unit.name) and not self._defers_outside)
        self.waits |= waits
        if waits or not is_deferred:
            self._guard_gathering(update)
            return self._end_of(update)
        self._guard(update, ready)
        self._uses.defer(unit.name)
        return None

    def _find_update(
        self, unit: StreamedUnit, left_out: frozenset[Any], sharded_step: ShardedStep | None
    ) -> _UnitUpdate | None:
        """What is updated of a unit, by its gradients, and who can use it; None if nothing is."""
        part: ParameterGroups | None = None
        updated = unit.parameters
        gradients = [gradient for it in updated if (gradient := it.grad) is not None]
        if left_out or len(gradients) < len(updated):
            part = _with_gradients(_without(unit.queued, left_out))
            updated = parameters_of(part)
            gradients = [it.grad for it in updated]
        assert unit.state is not None
        if not updated:
            return None
        if unit.pending is not None:
            self.settle(unit)  # what the backward pass has updated of it
        update = _UnitUpdate(unit, unit.state, part, updated, gradients)
        self._find_users(update, sharded_step)
        return update

    def _find_users(self, update: _UnitUpdate, sharded_step: ShardedStep | None) -> None:
        """Who can use what is updated: the host, a library, or something that no guard sees."""
        gradients, updated, state = update.gradients, update.parameters, update.state
        if update.unit.is_hosts:
            self.hosts.hold_again(gradients)
        update.free = gradients
        if not are_plain(gradients):
            is_held = self._clipped.is_held
            update.held = [it for it, of in zip(updated, gradients, strict=True) if is_held(of)]
            update.free = [it for it in gradients if not is_held(it)]
        every = (*update.free, *updated)
        update.is_plain = are_plain(every)
        if not update.is_plain:
            settle(every)  # the lanes go past guards, such as another optimizer's
            update.is_plain = are_plain(every)
        if state.sharded is not None and sharded_step is not None and not update.held:
            update.sharded = sharded_step.unit(updated)
        has_unseen = update.sharded is None and (
            not update.is_plain or has_alias(updated) or has_alias(gradients)
        )
        update.is_shared = state.is_shared or has_unseen

    def _have_common_memory(self, updates: list[_UnitUpdate], optimizer: Optimizer) -> bool:
        """Whether an update uses what another one changes: the optimizer's order counts then."""
        parameters = list(optimizer_parameters(optimizer))
        gradients = [gradient for it in parameters if (gradient := it.grad) is not None]
        keys = set(map(id, chain(parameters, gradients)))
        if len(keys) < len(parameters) + len(gradients):
            return True
        if not self.units.state_keys.isdisjoint(keys):
            return True
        if not any(update.is_shared for update in updates):
            return False
        changed = list(filter(can_guard, (*parameters, *tensors_of(optimizer.state))))
        return has_alias(changed) and overlap([*changed, *filter(can_guard, gradients)])

    def _launch(self, update: _UnitUpdate, call: StepCall) -> Moment:
        """Queue copies and updates. Returns the moment behind which gradients may be used."""
        if update.unit.is_hosts:
            if self._launch_on_host(update, call):
                return call.ready
            self.units.ring.lend(update.unit.pieces)
        pieces = self._updates.of(update.unit, update.part)
        if update.is_plain:
            are_alone = update.sharded is None and not update.is_shared
            self._updates.stage_operands(
                pieces, are_alone=are_alone, writes_gradients=call.unscales
            )
        ready = call.ready
        if update.held and not are_staged(update.held, pieces):
            for it in update.held:
                self._clipped.use(it.grad)
            for piece in pieces:
                piece.beside = None
            update.held, update.free, ready = [], update.gradients, self._lanes.mark()
        self._updates.launch(update.unit, call, pieces, ready)
        if update.sharded is not None and need_whole(pieces):
            update.sharded, update.is_shared = None, True
        return ready

    def _launch_on_host(self, update: _UnitUpdate, call: StepCall) -> bool:
        """Have the host make an update, if it can."""
        unit, are_home = update.unit, len(update.held) == len(update.parameters)
        self.hosts.asked += 1
        if not (update.is_plain and are_home and update.sharded is None and not update.is_shared):
            return False
        for piece in unit.pieces:  # a step before may have lent them slots
            self.units.ring.send_home(piece)
            piece.bind(None)
        part = unit.queued if update.part is None else update.part
        note = partial(self._updates.queued.update, unit.pieces)
        is_begun = self.hosts.launch(unit, [it for it in part if it[1]], call, note)
        self.counts.by_host += is_begun
        return is_begun

    def _end_host(self, unit: StreamedUnit) -> None:
        """Wait until the host has updated a unit, if it is about to."""
        if unit.host_work is not None:
            unit.host_work.end()

    def _end_of(self, update: _UnitUpdate) -> Moment:
        """The moment behind an update that the program's stream waits for."""
        self._end_host(update.unit)
        if not update.state.is_shared:
            return update.unit.updated
        # Behind all copies back, and the last update: a piece without an alias copies nothing.
        return self._lanes.run(Lane.COPY_OUT, lambda: None, [update.unit.updated])

    def _guard_gathering(self, update: _UnitUpdate) -> None:
        """Guard what a library gathers, also in a measured step: the order is told by it."""
        flats = self._guards(update.unit).flats
        flats.release()
        if update.sharded is not None:
            flats.hold(update.sharded.flats, self._lanes.events_of(update.unit.updated))

    def _guard(self, update: _UnitUpdate, ready: Moment) -> None:
        """Have whatever uses the unit wait for its update."""
        self._guard_gathering(update)
        unit, sharded = update.unit, update.sharded
        guards, is_hosts = self._guards(unit), unit.host_work is not None
        events = None if is_hosts else self._lanes.events_of(unit.updated)
        kept = [it.grad for it in update.held]
        if kept:
            self._clipped.update_begins(kept, lambda: self._use_gradient(unit))
        unit.pending = PendingUpdate(ready, (guards.gradients, guards.parameters), kept)
        if sharded is None:
            guards.gradients.hold(update.free, events)
            guards.parameters.hold(update.parameters, events, is_on_host=is_hosts)
            return
        # Sharded gradients have memory of a stream of the library's. It may be used anew as soon as
        # it is given back, after the program's stream: that stream waits for this one before it
        # reduces gradients. So it may go when the program's stream has waited.
        guards.gradients.hold(sharded.gradients, events)
        guards.parameters.hold(sharded.parameters, events)

    def _gather(self, unit: StreamedUnit) -> None:
        """A library reads parameters of a unit: on a stream that has not waited for it yet.

        It may do so before the blocks' hooks, as for a head with the model's first gathering.
        Units are updated in the order in which they are needed.
        """
        if not running_pass().is_second:
            self._uses.in_pass(unit.name)
        self.settle(unit)
        if unit.updated is not None:
            self._lanes.wait(unit.updated)

    def _guards(self, unit: StreamedUnit) -> UnitGuards:
        if unit.guards is None:
            unit.guards = UnitGuards(
                Guard(lambda: self._use_gradient(unit)),
                Guard(lambda: self._settle_early(unit)),
                GatheringGuard(lambda: self._settle_early(unit), lambda: self._gather(unit)),
            )
        return unit.guards

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
        self.check_known()
        try:
            self._update_ahead(unit, call, freed)
        except BaseException as error:
            self._fail(error)
            raise

    def _update_ahead(
        self, unit: StreamedUnit, call: StepCall, freed: Callable[[Any], torch.Tensor]
    ) -> None:
        part = _with_gradients(unit.queued)
        updated = parameters_of(part)
        ready = self._lanes.mark()
        self._updates.launch(unit, call, self._updates.of(unit, part), ready)
        # Fused kernels do not count: a graph that has saved a parameter must notice.
        torch.autograd.graph.increment_version(updated)
        gradients = [parameter.grad for parameter in updated]
        guard = self._guards(unit).parameters
        unit.pending = PendingUpdate(ready, (guard,), gradients)
        unit.ahead = updated
        for parameter in updated:
            parameter.grad = freed(parameter)
        guard.hold(updated)
        self.counts.ahead += 1
        for piece in reversed(unit.pieces):
            following = piece.before
            if following is not None and following.may_come:
                self.units.ring.fetch(following, [ready])

    def free_gradients(self, unit: StreamedUnit) -> None:
        """Free what an update in the backward pass reads, behind the update."""
        pending = unit.pending
        if pending is not None and pending.kept:
            self._lanes.wait(unit.updated)
            self._lanes.wait_on_stream_of(pending.asked, unit.updated)
            pending.kept.clear()

    # ------------------------------------------------------------------ waiting

    @property
    def is_used_early(self) -> bool:
        """Whether the program uses what is updated last before the next forward pass, each time.

        So it does for an average of weights. That pass begins behind all updates then.
        """
        return self._uses.are_all_early

    def enter(self, name: str, now: Pass) -> None:
        """Send state home and wait for a block's update, before a pass through it."""
        if self.units.ring.here:
            self.units.ring.write_back()
        with self.lock:
            self.hosts.fetch()
        self.wait(name, now)

    def wait(self, name: str, now: Pass) -> None:
        """Wait for the update of a unit, before a pass that uses it."""
        if not now.is_second:  # which is in the other order
            self._uses.in_pass(name)
        unit = self.units.get(name)
        if unit is not None and unit.pending is not None:
            unit.check_not_ahead()
            self.settle(unit)

    @property
    def is_under_way(self) -> bool:
        """Whether there are updates of a step that nothing has waited for yet."""
        if not self._may_be_under_way:
            return False
        with self.lock:
            under_way = (unit.pending is not None and not unit.ahead for unit in self.units)
            self._may_be_under_way = any(under_way)
            return self._may_be_under_way

    def join(self, *, is_early: bool = False) -> None:
        """Let the current stream wait for all updates. State in host memory may still arrive.

        Early, if what comes may use any parameter, and change it.
        """
        # What is waited for may hold the last reference to the optimizer, whose end clears units.
        for unit in list(self.units):
            if unit.pending is not None and not unit.ahead:
                self.counts.early += is_early
                self.settle(unit, is_early=is_early)

    def settle(self, unit: StreamedUnit, *, is_early: bool = False) -> None:
        """Let the current stream wait for a unit's update, and guard the unit no more."""
        with self.lock:
            pending = unit.pending
            if pending is None:
                return
            if is_early:
                self._uses.early(unit.name)
            self._end_host(unit)
            self._lanes.wait(unit.updated)
            self._lanes.wait_on_stream_of(pending.asked, unit.updated)
            if pending.kept:
                self._clipped.update_begins(pending.kept, None)
            for guard in pending.guards:
                guard.release()
            unit.pending = None  # not before: what an interrupt cuts short is done again
            self._owner.unit_has_settled(unit.name, is_early)

    def update_of(self, name: str) -> Moment:
        """The moment after a unit's update that nothing has waited for yet, or None."""
        unit = self.units.get(name)
        if unit is None or unit.pending is None:
            return None
        with self.lock:
            self._end_host(unit)
        return unit.updated

    def _use_gradient(self, unit: StreamedUnit) -> None:
        if unit.pending is not None:
            self._owner.gradient_was_used()
        self._settle_early(unit)

    def _settle_early(self, unit: StreamedUnit) -> None:
        unit.check_not_ahead()
        self.counts.early += unit.pending is not None
        self.settle(unit, is_early=True)
        if unit.updated is not None:  # another thread may have settled it just now, for its stream
            self._lanes.wait(unit.updated)

    def let_go(self) -> bool:
        """Hold no memory until the next layout; False where updates are ahead of their step."""
        with self.lock:
            if self._units_ahead():
                return False
            self.join()
            self.units.let_go()
            self._updates.begin()  # which forgets the pieces of the last step
            self.hosts.fetch()
            return True

    def forget(self) -> None:
        """Wait for all work, and give the optimizer's tensors free."""
        with self.lock:
            self._end_ahead(is_deferred=False)
            self.join()
            self.units.clear()
            self.units.ring.leave(self.units.staged, is_over=True)
            self._updates.begin()  # which forgets the pieces of the last step
            self.hosts.close()


def _without(groups: ParameterGroups, left_out: frozenset[Any]) -> ParameterGroups:
    if not left_out:
        return groups
    return [(number, [p for p in some if p not in left_out]) for number, some in groups]


def _with_gradients(groups: ParameterGroups) -> ParameterGroups:
    return [(number, [p for p in some if p.grad is not None]) for number, some in groups]
