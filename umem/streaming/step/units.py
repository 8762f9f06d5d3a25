"""Units of parameters: where their optimizer state lies, and what of it comes ahead of a step."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Iterator
from itertools import chain
from operator import is_
from typing import Any

import torch
from torch.optim.optimizer import Optimizer

from umem.core.classes import TensorClass
from umem.runtime.guard import Guard
from umem.runtime.held_memory import note_export
from umem.runtime.model_parts import optimizer_parameters
from umem.streaming.stage.homes import StateMemory, rehome
from umem.streaming.stage.lanes import Lanes
from umem.streaming.stage.placement import StatePlacement
from umem.streaming.stage.ring import Ring
from umem.streaming.stage.staged_state import KnownValues, OptimizerState, StagedState
from umem.streaming.stage.state_views import StateViews
from umem.streaming.step.call import ParameterGroups, parameters_of
from umem.streaming.step.known_optimizers import is_elementwise, replaces_state
from umem.streaming.step.unit import Piece, StreamedUnit

__all__ = ["StreamedUnits", "tensors_of"]


class StreamedUnits:
    """The units of one optimizer, in the order of the forward pass.

    Parameters
    ----------
    owner
        Returns the name of a parameter's unit.
    lanes
        Where copies run.
    memory
        Homes and buffers.
    piece_bytes
        A parameter of more bytes is staged in spans of this size, and also one of much state; None
        for an optimizer that has to have parameters whole.
    ring
        The slots, which other optimizers of the model may share; None for slots of its own.
    """

    def __init__(
        self,
        owner: Callable[[torch.Tensor], str],
        lanes: Lanes,
        memory: StateMemory,
        piece_bytes: int | None,
        ring: Ring | None = None,
    ) -> None:
        self.ring = ring or Ring(memory, lanes)
        self.lock = self.ring.lock
        self.memory = memory
        self.layouts = 0
        """How often units were laid out anew."""
        self.absent: frozenset[Any] = frozenset()
        """Parameters of earlier steps that have state still, and are in no group at the present
        one. Libraries put their partitions into the groups by turns, each for a call of ``step()``.
        """
        self.has_common_state = False
        """Whether several parameters have one tensor in their state, which each update changes for
        all of them: such a step runs as a whole."""
        self.state_keys: frozenset[int] = frozenset()
        """The state's tensors by ``id``, as of the last layout."""
        self.runs_backward = False
        """Whether units are updated in the backward pass."""
        self._owner = owner
        self._lanes = lanes
        self._piece_bytes = piece_bytes
        self._resident: frozenset[str] | None = None
        """Units whose state is to stay on the device; None to leave all state where it is."""
        self._hosts: frozenset[str] = frozenset()
        """Units that the host updates."""
        self.stages_operands = True
        """Whether the plan has weights and gradients at home come beside the slots."""
        self._units: dict[str, StreamedUnit] = {}
        self._members: list[list[Any]] = []
        """The optimizer's parameters at its last step."""
        self._in_line: ParameterGroups | None = None
        self._seen: tuple[Any, int] | None = None
        """The optimizer's state, and the number of its parameters, when units were laid out; None
        to look at all of them again."""
        self._values: KnownValues | None = None
        """The state of all units, to look at all of it together, which takes less time; None to
        look at each unit's."""
        self.ring.add(self.staged)

    def __iter__(self) -> Iterator[StreamedUnit]:
        return iter(self._units.values())

    def get(self, name: str) -> StreamedUnit | None:
        """The unit of a name, if there is one."""
        return self._units.get(name)

    def set_plan(
        self,
        resident: frozenset[str],
        slots: int,
        *,
        stages_operands: bool = True,
        temporary: int = 0,
        hosts: frozenset[str] = frozenset(),
    ) -> None:
        """Set the units whose state stays on the device, and the number of buffers for the others.

        It counts from the next step on, which moves the state. With 0 buffers, state is updated in
        host memory. With `stages_operands` the buffers
        are for weights and gradients at home, too. Behind the pieces that have the buffers first,
        so many have `temporary` ones, where these are made. The state of `hosts` stays in host
        memory, where the host updates it.
        """
        with self.lock:
            if (resident, hosts) != (self._resident, self._hosts):
                self._seen = None
            self._resident, self.stages_operands, self._hosts = resident, stages_operands, hosts
            self.ring.set_capacity(slots, temporary)

    def move_into_backward(self, moves: bool) -> None:
        """Say whether units are updated in the backward pass from the next one on.

        Then updates of resident state are queued too, so that they can be, and the last units are
        fetched first.
        """
        with self.lock:
            if moves != self.runs_backward:
                self._seen = None
            self.runs_backward = moves

    def sizes(self) -> dict[str, tuple[int, ...]]:
        """Bytes of state that can be streamed, by unit in the order of the forward pass.

        Those of a unit are of what is staged at a time.
        """
        return {name: unit.sizes for name, unit in self._units.items()}

    def parameters(self) -> dict[str, list[Any]]:
        """The optimizer's parameters by unit, in the order of the forward pass."""
        return {name: parameters_of(unit.groups) for name, unit in self._units.items()}

    def move_to_host(self, held: Collection[int]) -> int:
        """Move parameters to host memory, but those of these ``id``; returns their bytes.

        Updates of streamed units stage them beside the state. No update is under way.
        """
        moved_bytes = 0
        with self.lock:
            for unit in self:
                for parameter in parameters_of(unit.groups):
                    if (
                        id(parameter) in held
                        or not self.memory.is_movable(parameter)
                        or self.memory.is_home(parameter)
                    ):
                        continue
                    if not rehome(parameter, self.memory, TensorClass.WEIGHTS, on_device=False):
                        return moved_bytes  # the host has no more
                    unit.home_bytes += parameter.nbytes
                    moved_bytes += parameter.nbytes
        return moved_bytes

    def home_bytes(self) -> dict[str, int]:
        """Bytes of parameters that :meth:`move_to_host` has moved, by unit."""
        return {name: unit.home_bytes for name, unit in self._units.items()}

    @property
    def queued(self) -> list[StreamedUnit]:
        """The units whose updates are queued, in the order of the forward pass."""
        return [unit for unit in self._units.values() if unit.state is not None]

    @property
    def members(self) -> ParameterGroups:
        """Parameters of the present step, in the optimizer's order."""
        return list(enumerate(self._members))

    @property
    def in_line(self) -> ParameterGroups:
        """Parameters of the present step that are updated within it."""
        if self._in_line is None:
            queued = {parameter for unit in self for parameter in unit.parameters}
            self._in_line = [
                (number, [p for p in some if p not in queued]) for number, some in self.members
            ]
        return self._in_line

    def knows(self, optimizer: Optimizer) -> bool:
        """Whether the optimizer has the parameters and the state that it had at its last step."""
        return self.are_laid_out(optimizer.state) and self.has_members_of(optimizer)

    def has_members_of(self, optimizer: Optimizer) -> bool:
        """Whether the optimizer has the parameters that it had at its last step."""
        groups = optimizer.param_groups
        if len(groups) != len(self._members):
            return False
        for group, known in zip(groups, self._members, strict=True):
            some = group["params"]
            if len(some) != len(known) or not all(map(is_, some, known)):
                return False
        return not self.absent or all(parameter in optimizer.state for parameter in self.absent)

    def are_laid_out(self, state: OptimizerState) -> bool:
        """Whether the last layout was for as much state, and under the present plan."""
        return self._seen is not None and self._seen[0] is state and self._seen[1] == len(state)

    @property
    def slots_bytes(self) -> int:
        """Bytes of all buffers for state, also of other optimizers of the model."""
        return self.ring.slots_bytes

    @property
    def resident_bytes(self) -> int:
        """Bytes of state that is on the device for good."""
        return sum(unit.device_bytes for unit in self._units.values())

    @property
    def device_bytes(self) -> int:
        """Bytes on the device: of that state, and of all buffers."""
        return self.resident_bytes + self.ring.device_bytes

    @property
    def may_have_temporary(self) -> bool:
        """Whether pieces may have temporary slots: nothing unseen uses their state meanwhile."""
        return self.ring.users == [self.staged] and not any(
            unit.state is not None and unit.state.is_shared for unit in self
        )

    # ------------------------------------------------------------------ what the program moves

    def have_moved(self, state: OptimizerState) -> bool:
        """Whether the program has moved something of what is streamed elsewhere, or replaced it."""
        with self.lock:
            staged = [(unit, unit.state) for unit in self if unit.state is not None]
            return any(not of.is_current(state) for _, of in staged) or not all(
                self.memory.is_of_device(it)
                for unit, of in staged
                for it in (*unit.parameters, *of.homes)
            )

    def are_here(self, optimizer: Optimizer) -> bool:
        """Whether all of an optimizer's parameters and state are the device's, but for numbers."""
        every = chain(optimizer_parameters(optimizer), tensors_of(optimizer.state))
        return all(self.memory.is_of_device(it) or it.numel() == 1 for it in every)

    def let_go(self) -> None:
        """Have no slots, and know no state, until the next layout. No update is under way."""
        with self.lock:
            self._seen = self._values = None  # first: behind an interrupt all is laid out anew
            self.ring.take_back()
            self._drop_all()
            for unit in self:
                unit.device_bytes = 0

    # ------------------------------------------------------------------ before a step

    @property
    def fixed_bytes(self) -> int:
        """State that has to be streamed."""
        return sum(unit.fixed_bytes for unit in self._units.values())

    def lay_out(self, optimizer: Optimizer, called: Iterable[str]) -> None:
        """Find the units' state before a step, and slots for it.

        Parameters
        ----------
        optimizer, called
            As for :meth:`find_state`.
        """
        self.find_state(optimizer, called)
        if not self.ring.is_current:
            self.ring.take_turns()

    def find_state(self, optimizer: Optimizer, called: Iterable[str]) -> None:
        """Find the units' state where the optimizer has other tensors now.

        Parameters
        ----------
        optimizer
            The optimizer, after :meth:`find_units`. No update of its parameters is under way.
        called
            Names of units in the order of the last forward pass.
        """
        self._order(called)
        state = optimizer.state
        is_known = self.are_laid_out(state)
        touched = {unit for unit in self if unit.is_touched or unit.is_turned}
        if is_known and not touched and self._values is not None and self._values.are_in(state):
            return
        self._values = None
        changed = [
            unit
            for unit in self._units.values()
            if not is_known
            or unit in touched
            or (unit.state is not None and not unit.state.is_current(state))
        ]
        if changed:
            self._seen, self._in_line = None, None  # all of it again, should this one fail
            every = tensors_of(state)
            self.state_keys = frozenset(map(id, every))
            self.has_common_state = len(self.state_keys) < len(every)
            # What leaves the device makes room for what comes.
            self.ring.take_back()
            changed.sort(key=lambda unit: unit.name in (self._resident or ()))
            in_pieces = is_elementwise(optimizer)
            piece_bytes = self._piece_bytes if in_pieces else None
            on_parts = in_pieces and not replaces_state(optimizer)
            for unit in changed:
                self._drop_state(unit)  # with all views of umem's own
            views = StateViews(every)
            for unit in changed:
                self._lay_out_unit(unit, state, piece_bytes, views, on_parts=on_parts)
            self.layouts += 1
            self._seen = (state, len(state))
            self._values = None if replaces_state(optimizer) else self._all_values()

    def _all_values(self) -> KnownValues | None:
        """The state of all units; None if some of it changes, or is shared, with the same values.

        A number that an update replaces may be what the program sets later.
        """
        staged = [it.state for it in self._units.values() if it.state is not None]
        every = {parameter: values for it in staged for parameter, values in it.known.items()}
        are_tensors = all(
            torch.is_tensor(it) for values in every.values() for it in values.values()
        )
        if any(it.is_shared for it in staged) or not are_tensors:
            return None
        return KnownValues(every)

    def find_units(self, optimizer: Optimizer) -> None:
        """Sort the parameters of an optimizer by unit, which has others than before.

        Units stay as they are where the groups have some of the known parameters, and all others of
        these have state still.
        """
        members = [list(group["params"]) for group in optimizer.param_groups]
        present = {p: number for number, some in enumerate(members) for p in some}
        known = {p: number for unit in self for number, some in unit.groups for p in some}
        absent = frozenset(p for p in known if p not in present and p in optimizer.state)
        staying = {p: number for p, number in known.items() if p in present or p in absent}
        every = staying | present  # in the order in which they were seen first
        if every != known:
            self.clear()
            for parameter, number in every.items():
                name = self._owner(parameter)
                unit = self._units.setdefault(name, StreamedUnit(name))
                if not unit.groups or unit.groups[-1][0] != number:
                    unit.groups.append((number, []))
                unit.groups[-1][1].append(parameter)
        self._members, self._in_line, self.absent = members, None, absent

    def _order(self, called: Iterable[str]) -> None:
        """Put units into the order of the last forward pass."""
        order = [name for name in called if name in self._units]
        if order and order != list(self._units)[: len(order)]:
            others = [name for name in self._units if name not in order]
            self._units = {name: self._units[name] for name in (*order, *others)}
            self.ring.is_current = False

    def _lay_out_unit(
        self,
        unit: StreamedUnit,
        state: OptimizerState,
        piece_bytes: int | None,
        views: StateViews,
        *,
        on_parts: bool,
    ) -> None:
        every = {p: state.get(p) or {} for p in parameters_of(unit.groups)}
        placement = StatePlacement(every, self.memory)
        is_resident = None if self._resident is None else unit.name in self._resident
        on_device = placement.place(on_device=is_resident)
        pieces = placement.divide(piece_bytes)
        unit.sizes = tuple(it.size_bytes for it in pieces if it.size_bytes) or (0,)
        unit.device_bytes = sum(unit.sizes) if on_device else 0
        unit.fixed_bytes = 0
        queued = {
            parameter: values
            for parameter, values in every.items()
            if (placement.movable[parameter] and not on_device) or (values and self.runs_backward)
        }
        unit.queue(queued)
        unit.is_hosts = unit.name in self._hosts and not on_device and not self.runs_backward
        if queued:
            unit.state = StagedState(queued, self.memory, views=views, on_parts=on_parts)
            if not all(map(self.memory.is_movable, unit.state.homes)):
                unit.fixed_bytes = sum(it.nbytes for it in unit.state.homes)
            for piece in pieces if unit.state.homes and len(pieces) > 1 else ():
                some = {p: queued[p] for p in piece.parameters if p in queued}
                if some:
                    staged = StagedState(
                        some, self.memory, piece.span, unit.state, on_parts=on_parts
                    )
                    unit.pieces.append(Piece(unit, some, staged))
            if not unit.pieces:
                unit.pieces.append(Piece(unit, queued, unit.state))
            unit.state_guard = Guard(functools.partial(self._touch, unit))
            unit.state_guard.hold(unit.state.guarded)
            unit.state_guard.watch(unit.state.views)

    def _touch(self, unit: StreamedUnit) -> None:
        """Before something uses a home: wait until its contents are there, and fetch them anew."""
        with self.lock:
            unit.check_not_ahead()
            if unit.host_work is not None:
                unit.host_work.end()
            if self._lanes.is_capturing() and unit.state is not None:
                note_export([*unit.state.homes, *unit.state.others])  # replays use these addresses
            for piece in unit.pieces:
                self.ring.send_home(piece)
                piece.is_touched = True
            unit.is_touched = True

    # ------------------------------------------------------------------ slots

    def _pieces(self) -> list[Piece]:
        return [piece for unit in self._units.values() for piece in unit.pieces]

    def staged(self) -> list[Piece]:
        """The pieces of state that have slots, in the order of a step."""
        return [it for it in self._pieces() if it.state.homes and not it.unit.is_hosts]

    def fetch_ahead(self) -> None:
        """Fill the slots for the next step: the state is not used before it.

        They are for the first pieces of all optimizers of the model together.
        """
        with self.lock:
            streamed = [it for it in self.staged() if it.slot]
            if not streamed:
                return  # and records no event, as every step does whose state is on the device
            count = len(self.ring.slots) - self.ring.place_of(self.staged)
            if count <= 0:
                return
            if self.runs_backward:
                streamed.reverse()
            now = self._lanes.mark()
            for piece in streamed[:count]:
                if piece.may_come:
                    self.ring.fetch(piece, [now])

    def write_back_and_wait(self) -> None:
        """Let the current stream wait until all state is at home, where the program may change it.

        Copies that were fetched ahead are dropped.
        """
        with self.lock:
            self.ring.write_back()
            for piece in self._pieces():
                self.ring.send_home(piece)

    def lay_out_anew(self) -> None:
        """Look at the next step where all state is and may be, because memory is held now."""
        with self.lock:
            self._seen = None

    def _drop_state(self, unit: StreamedUnit) -> None:
        for piece in unit.pieces:
            self.ring.send_home(piece)
            piece.state.unbind()
            if piece.slot is not None and piece.slot.holder is piece:
                piece.slot.holder = None  # which would keep the state
        if unit.state_guard is not None:
            unit.state_guard.release()
        unit.state, unit.state_guard, unit.is_touched = None, None, False
        unit.pieces = []
        unit.host_homes.clear()

    def _drop_all(self) -> None:
        for piece in self._pieces():
            self.ring.send_home(piece)  # and with it what was fetched into its slot before
            if piece.returned is not None:
                self._lanes.finish(piece.returned)
        for unit in list(self._units.values()):  # a collection of garbage may end here, too
            if unit.guards is not None:
                # Not before: streams that gather wait for updates by this guard alone.
                unit.guards.flats.release()
            self._drop_state(unit)

    def clear(self) -> None:
        """Wait for the last copies, and give the optimizer's tensors free."""
        self.ring.write_back()
        self._drop_all()
        self._units.clear()
        self.ring.leave(self.staged)
        self._members, self._in_line, self.absent, self._seen = [], None, frozenset(), None
        self._values = None


def tensors_of(state: OptimizerState) -> list[torch.Tensor]:
    """All tensors of an optimizer's state."""
    return [it for values in state.values() for it in values.values() if torch.is_tensor(it)]
