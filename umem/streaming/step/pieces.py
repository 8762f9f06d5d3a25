"""Updates of a unit's pieces: each is copied into a slot, updated there, and copied back.

An update reads gradients, and reads and writes weights. Over the link its kernels take longer than
copies would, and hold up the copies beside them. So what is at home of both, the operands, comes
beside the state, and weights go back with it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from umem.core.classes import TensorClass
from umem.runtime.unguarded import Unguarded
from umem.streaming.gradients.clipped_gradients import ClippedGradients, multiply
from umem.streaming.plan.weight_plan import staged_bytes
from umem.streaming.stage.homes import StateMemory
from umem.streaming.stage.lanes import Copy, Lane, Lanes, Moment
from umem.streaming.stage.ring import BundleState, Slot
from umem.streaming.step.call import ParameterGroups, StepCall, parameters_of
from umem.streaming.step.unit import Piece, StreamedUnit
from umem.streaming.step.units import StreamedUnits

__all__ = ["PieceUpdate", "PieceUpdates", "are_staged", "need_whole"]


_VECTOR_BYTES = 16
"""The longest vector that torch's kernels load at a time."""


class _Operand(NamedTuple):
    """A tensor at home, or a span of it."""

    tensor: torch.Tensor
    """Kept until its copies have run."""
    address: int
    size_bytes: int
    offset: int
    """Place beside the slot."""
    factors: tuple[Any, ...] = ()
    """By what the copy is multiplied, one after the other."""


@dataclass(eq=False, slots=True)
class PieceUpdate:
    """An update that is about to be queued."""

    piece: Piece
    part: ParameterGroups
    """The parameters that are updated."""
    is_last: bool
    """Whether it counts the step of a parameter that is divided."""
    beside: Slot | None = None
    """Where operands are staged; None to use them where they are."""
    operand_bytes: int = 0
    """What they need there."""
    _weights: dict[int, _Operand] = field(default_factory=dict)
    """By ``id`` of the parameter, as the next."""
    _gradients: dict[int, _Operand] = field(default_factory=dict)

    def find_operands(
        self,
        memory: StateMemory,
        factors: Callable[[torch.Tensor], tuple[Any, ...]],
        *,
        are_alone: bool,
        writes_gradients: bool,
    ) -> None:
        """Find weights and gradients at home. Nothing but the update changes them from now on.

        What has an alias, or was saved by a graph, which would not notice the change, is not among
        them: it is used where it is.

        Parameters
        ----------
        memory
            Tells homes.
        factors
            Returns by what a gradient is still to be multiplied, one after the other.
        are_alone
            Whether parameters and gradients are known to have no alias.
        writes_gradients
            Whether the update changes gradients, which it then has to find where they are.
        """
        may_stage = memory.may_stage if are_alone else memory.is_movable
        span = self.piece.state.span

        with Unguarded():
            for parameter in parameters_of(self.part):
                gradient = parameter.grad
                operands = [(self._weights, parameter, ())]
                if not writes_gradients:
                    operands.append((self._gradients, gradient, factors(gradient)))
                for found, tensor, own in operands:
                    is_home = may_stage(tensor) and memory.is_home(tensor)
                    if is_home and (span is None or tensor.is_contiguous()):
                        begin, end = span or (0, tensor.numel())
                        size_bytes = (end - begin) * tensor.itemsize
                        address = tensor.data_ptr() + begin * tensor.itemsize
                        # A kernel takes another loop, which rounds differently, for what is not
                        # aligned to its vectors: a copy is aligned as its tensor.
                        skipped_bytes = address % _VECTOR_BYTES
                        offset = self.operand_bytes + skipped_bytes
                        found[id(parameter)] = _Operand(tensor, address, size_bytes, offset, own)
                        self.operand_bytes += staged_bytes([skipped_bytes + size_bytes])

    @property
    def stages_weights(self) -> bool:
        """Whether weights go back to their homes behind the update."""
        return self.beside is not None and bool(self._weights)

    def stages_gradient_of(self, parameter: torch.Tensor) -> bool:
        """Whether the update has a copy of a parameter's gradient."""
        return self.beside is not None and id(parameter) in self._gradients

    def copy_in(self, lanes: Lanes, beside: Slot) -> None:
        """Copy operands beside the slot, from within work of a lane."""
        first = beside.memory.data_ptr()
        for some, tensor_class in (
            (self._weights, TensorClass.WEIGHTS),
            (self._gradients, TensorClass.GRADIENTS),
        ):
            copies = [
                Copy(first + operand.offset, operand.address, operand.size_bytes)
                for operand in some.values()
            ]
            if copies:
                lanes.copy(Lane.COPY_IN, copies, tensor_class)

    def copy_out(self, lanes: Lanes, beside: Slot) -> None:
        """Copy the weights back to their homes, from within work of a lane."""
        first, some = beside.memory.data_ptr(), self._weights.values()
        copies = [
            Copy(operand.address, first + operand.offset, operand.size_bytes) for operand in some
        ]
        if copies:
            lanes.copy(Lane.COPY_OUT, copies, TensorClass.WEIGHTS)

    def multiply(self, beside: Slot) -> None:
        """Multiply the gradients' copies as is due, before any other use of them."""
        alike: dict[Any, list[_Operand]] = {}
        for operand in self._gradients.values():
            if operand.factors:
                kind = operand.tensor.dtype, *map(id, operand.factors)
                alike.setdefault(kind, []).append(operand)
        for some in alike.values():
            multiply([_elements(operand, beside) for operand in some], some[0].factors)

    def stand_in(
        self, parameter: torch.Tensor, gradient: torch.Tensor, beside: Slot | None
    ) -> torch.Tensor:
        """What an optimizer updates in the place of a parameter, with the gradient to use.

        Only for the time of an update, as it may share the parameter's memory. With a span, both
        are of its elements alone.
        """
        made = self._copy_of(self._weights.get(id(parameter)), parameter.detach(), beside)
        made.grad = self._copy_of(self._gradients.get(id(parameter)), gradient, beside)
        return made

    def _copy_of(
        self, operand: _Operand | None, tensor: torch.Tensor, beside: Slot | None
    ) -> torch.Tensor:
        span = self.piece.state.span
        if operand is None or beside is None:
            return tensor if span is None else tensor.reshape(-1)[slice(*span)]
        return beside.view(tensor, operand.offset) if span is None else _elements(operand, beside)


def _elements(operand: _Operand, beside: Slot) -> torch.Tensor:
    """The copy of an operand, as it lies in memory."""
    typed, first = beside.elements(operand.tensor.dtype, operand.offset)
    return typed[first : first + operand.size_bytes // typed.itemsize]


class PieceUpdates:
    """Queues the copies and updates of pieces.

    Parameters
    ----------
    units
        The optimizer's units.
    lanes
        Where the work runs.
    clipped
        Holds gradients that are on the host.
    """

    def __init__(self, units: StreamedUnits, lanes: Lanes, clipped: ClippedGradients) -> None:
        self.last: Moment = None
        """The moment after the update that was queued last."""
        self.queued: set[Piece] = set()
        """The pieces whose updates were queued in this step, or have run."""
        self._staying: list[PieceUpdate] = []
        """Updates with weights that are not on their way home."""
        self._units = units
        self._ring = units.ring
        self._lanes = lanes
        self._clipped = clipped

    def of(self, unit: StreamedUnit, part: ParameterGroups | None) -> list[PieceUpdate]:
        """What is updated of a unit, one behind the other: `part`, or all that is queued."""
        pieces = unit.pieces[::-1] if self._units.runs_backward else unit.pieces
        if pieces[0].state is unit.state:
            return [PieceUpdate(pieces[0], unit.queued if part is None else part, is_last=True)]
        last = {piece.state.divided: piece for piece in pieces}
        updates = []
        for piece in pieces:
            some = piece.queued if part is None else _of_piece(part, piece)
            if some:
                updates.append(PieceUpdate(piece, some, is_last=piece in last.values()))
        return updates

    def stage_operands(
        self, updates: Sequence[PieceUpdate], *, are_alone: bool, writes_gradients: bool
    ) -> None:
        """Stage weights and gradients at home beside the state, where slots have room for them.

        Parameters
        ----------
        updates
            They get their operands.
        are_alone, writes_gradients
            As of :meth:`PieceUpdate.find_operands`.
        """
        if not self._units.stages_operands:
            return
        by_slot: dict[Slot, list[PieceUpdate]] = {}
        for update in updates:
            if update.piece.slot is not None:
                update.find_operands(
                    self._units.memory,
                    self._clipped.factors,
                    are_alone=are_alone,
                    writes_gradients=writes_gradients,
                )
                if update.operand_bytes:
                    by_slot.setdefault(update.piece.slot, []).append(update)
        for slot, some in by_slot.items():
            largest = max(some, key=lambda update: update.operand_bytes)
            # Pieces have about as much beside as much state, and the same slot serves many.
            share = slot.memory.nbytes / max(1, largest.piece.size_bytes)
            beside = self._ring.room_beside(slot, largest.operand_bytes, share)
            for update in some:
                update.beside = beside

    def launch(
        self, unit: StreamedUnit, call: StepCall, updates: Sequence[PieceUpdate], ready: Moment
    ) -> None:
        """Queue copies and updates.

        Parameters
        ----------
        unit
            The unit of all pieces.
        call
            The hyperparameters.
        updates
            In their order.
        ready
            The moment behind which gradients may be used.
        """
        for update in updates:
            unit.updated = self._launch_piece(update, call, ready)
        if any(update.stages_weights for update in updates):
            # Weights are updated when all of them are back.
            unit.updated = self._lanes.run(Lane.COPY_OUT, lambda: None, [unit.updated])
        self.last = unit.updated

    def _launch_piece(self, updated: PieceUpdate, call: StepCall, ready: Moment) -> Moment:
        """The use of a bundle. Returns the moment after the update."""
        piece, slot, beside = updated.piece, updated.piece.slot, updated.beside
        piece.state.bind(slot)
        update = call.update(updated, note=functools.partial(self.queued.add, piece))
        lanes = self._lanes
        if slot is None:
            done = lanes.run(Lane.UPDATE, update, [ready], call.tensors)
            self.queued.add(piece)
            # Behind the copies of other pieces, too.
            piece.returned = lanes.run(Lane.COPY_OUT, lambda: None, [done])
            return done
        if piece.where is not BundleState.COMING:
            self._ring.fetch(piece, [ready])
        arrived = piece.arrived
        if beside is not None:
            come = functools.partial(updated.copy_in, lanes, beside)
            arrived = lanes.run(Lane.COPY_IN, come, [ready, *beside.used, arrived])
            self._staying.append(updated)
        # Before it runs: behind an error, what the update has changed goes home all the same.
        self._ring.use(piece, piece.copy_out(lanes))
        done = lanes.run(Lane.UPDATE, update, [ready, arrived], call.tensors)
        slot.used = [done]
        self.queued.add(piece)
        if beside is not None:
            beside.used = [done]
            self._send_weights([updated], done)
        if piece.state.is_shared:
            self._ring.write_back(slot)
        return done

    def begin(self) -> None:
        """Begin a step."""
        self.queued.clear()
        self._staying.clear()

    def end(self, now: Moment) -> None:
        """Send home what an error amid a step has kept from it, behind all updates."""
        for piece in self._ring.here:
            if piece.slot is not None:
                piece.slot.used = [now]
        self._send_weights([update for update in self._staying if update.piece in self.queued], now)

    def _send_weights(self, updates: Iterable[PieceUpdate], after: Moment) -> None:
        for update in updates:
            if update.beside is not None:
                leave = functools.partial(update.copy_out, self._lanes, update.beside)
                update.beside.used = [self._lanes.run(Lane.COPY_OUT, leave, [after])]
            self._staying.remove(update)  # not before: what an error cuts short is done again


def need_whole(updates: Sequence[PieceUpdate]) -> bool:
    """Whether an update does not take this rank's parts, and so is a use of sharded tensors."""
    states = (it.piece.state.sharded for it in updates)
    return any(it is not None and it.is_wrapped for it in states)


def are_staged(parameters: Sequence[Any], updates: Sequence[PieceUpdate]) -> bool:
    """Whether each update has copies of the gradients of these parameters."""
    keys = set(map(id, parameters))
    return all(
        update.stages_gradient_of(parameter)
        for update in updates
        for parameter in parameters_of(update.part)
        if id(parameter) in keys
    )


def _of_piece(groups: ParameterGroups, piece: Piece) -> ParameterGroups:
    owned = ((number, [p for p in some if piece.state.has(p)]) for number, some in groups)
    return [(number, some) for number, some in owned if some]
